"""Thousands of wrong command lines: each ends with an exit code and at most a line of text."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import run

from dpftrl import Server, Settings, make_plan, save_guarantee, save_mechanism, save_plan

CALLS = 3_200
# Commands that train or recompute the whole paper are called with what they refuse at once.
COMMANDS = {
    "account": "MECH --rounds --min-sep --noise-multiplier --delta --epsilon --log --devices --out "
    "--max-participations --rounds-between --first-round",
    "calibrate": "MECH --rounds --min-sep --epsilon --delta --rho --devices",
    "compare": "MECH MECH --rounds --min-sep --sort --plot",
    "compose": "MECH MECH --delta --max-participations --devices --out",
    "export": "MECH MECH --state-folder",
    "ledger": "MECH --out",
    "loss": "MECH --rounds --min-sep",
    "mechanisms": "--rounds --min-sep",
    "observe": "MECH --rounds --min-sep --max-participations --first-round",
    "optimize": "FAMILY --rounds --min-sep --bands --buffers --objective --out",
    "predict": "MECH MECH --top",
    "plan": "--population --report-goal --rounds --delta --epsilon --availability --timer-days "
    "--rounds-per-day --plot --out --choose --noise-multiplier",
    "reproduce": "MECH --out",
    "show": "MECH --rounds --plot",
    "statement": "MECH --run --out --devices --date --state-folder",
    "status": "MECH --state-folder",
    "train": "--set --show-config MECH",
    "verify": "MECH --state-folder --no-witness",
}
FLAGS = {"--json", "--force", "--no-witness", "--show-config", "--fixed-epochs", "--repeated-rows"}
TEXTS = [
    *("", " ", "-", "--", "nan", "inf", "-inf", "0", "-1", "1", "2", "3", "7", "20", "1e-6", "0.5"),
    *("1e400", "1e308", "9" * 400, "1_0", "6.5K", "60%", "½", "٣", "a,b", "\x1b[31m", "\udcff"),
    *("rms", "max", "blt", "blt-b400", "tree", "sqrt", "banded", "banded:3", "band-sqrt:2"),
    *("toeplitz:1,0.5", "toeplitz:1e308,1e308", "toeplitz:", "toeplitz:nan", "inv-sqrt:0"),
    *("smooth-tree", "tree-full", "blt:", "lambda:0.5", "2026-13-45", "2026-01-31", "10..20"),
    *("seed=1", "seed=", 'task="x"', "privacy.rounds=nan", "a.b.c=1", "[", "📈.png", "../..", "."),
    *("5..1", "x" * 5000),
]
# What each option takes. Most options get one of these, so that commands get far before they fail.
PLAUSIBLE = {
    "--rounds": ["8", "20"],
    "--min-sep": ["2", "4"],
    "--noise-multiplier": ["1", "5.5"],
    "--delta": ["1e-6", "1e-4"],
    "--epsilon": ["1", "8"],
    "--rho": ["0.1"],
    "--devices": ["1", "3"],
    "--bands": ["2", "3"],
    "--buffers": ["1", "2"],
    "--objective": ["rms", "max"],
    "--population": ["100", "6.5K"],
    "--report-goal": ["5"],
    "--availability": ["0.5", "60%"],
    "--timer-days": ["1"],
    "--rounds-per-day": ["2"],
    "--sort": ["rms"],
    "--date": ["2026-01-31"],
    "--set": ["seed=1", 'task="jsonl"'],
}
NAMES = ["sqrt", "tree", "blt-b400", "banded:2", "independent", "toeplitz:1,0.5", "inv-sqrt:2"]
FAMILIES = ["blt", "bandmf", "band-toeplitz", "gblt", "band-inverse", "x", ""]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """Good files of every kind, and bad ones with the same endings."""
    folder = tmp_path_factory.mktemp("fuzz")
    plan = make_plan(
        population=60, report_goal=3, rounds=8, epsilon=5, delta=1e-4, mechanism="tree"
    )
    save_plan(plan, folder / "plan.json")
    save_guarantee(plan.guarantee, folder / "guarantee.json")
    save_mechanism(plan.mechanism, folder / "mechanism.json")
    with Server.create(
        folder / "run",
        plan,
        Settings(clip_norm=1.0),
        {"w": np.zeros(2)},
        state_folder=folder / "state",
    ) as server:
        people = [f"c{i}" for i in range(60)]
        current = server.begin(people)
        for client in current.clients:
            current.report(client, np.ones(2), current.attempt)
        server.commit(current)
    (folder / "log.csv").write_text("round,client\n0,a\n3,b\n5,a\n")
    (folder / "log.jsonl").write_text('{"round": 0, "client": "a"}\n')
    (folder / "bad.json").write_text('{"format": "dpftrl plan"')
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "bad.csv").write_bytes(b"\xff\xfe\x00round;client\n")
    (folder / "bad.toml").write_text("a = [")
    (folder / "empty.csv").write_text("")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "folder").mkdir()
    names = [str(path) for path in folder.iterdir() if path.name != "state"]
    return [*names, str(folder / "missing.json"), str(folder / "missing" / "x.json")]


def arguments(generator: random.Random, files: list[str], folder: Path) -> Iterator[str]:
    command = generator.choice(sorted(COMMANDS))
    yield command
    for part in COMMANDS[command].split():
        if generator.random() < 0.25 and part not in ("MECH", "FAMILY"):
            continue
        if part == "MECH":
            yield generator.choice(generator.choice([NAMES, files, files, TEXTS]))
        elif part == "FAMILY":
            yield generator.choice(FAMILIES)
        else:
            yield part
            if part in FLAGS:
                continue
            if part in ("--out", "--plot") and generator.random() < 0.7:
                ending = generator.choice([".json", ".png", ".svg", "", ".txt"])
                yield str(folder / f"new{generator.randrange(5)}{ending}")
            elif part in PLAUSIBLE and generator.random() < 0.85:
                yield generator.choice(PLAUSIBLE[part])
            else:
                yield generator.choice([*TEXTS, *files])
    yield from generator.sample(sorted(FLAGS), generator.randrange(2))
    if command == "train":
        yield "--show-config"
    if command == "reproduce":
        yield "--list"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:matplotlib")
@pytest.mark.parametrize("seed", range(8))
def test_wrong_command_lines_end_with_an_exit_code(files, tmp_path, monkeypatch, seed):
    monkeypatch.setenv("DPFTRL_STATE", str(Path(files[0]).parent / "state"))
    monkeypatch.setenv("DPFTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    generator = random.Random(seed)
    codes = dict[int, int]()
    before = {path: Path(path).read_bytes() for path in files if Path(path).is_file()}
    for _ in range(CALLS // 8):
        line = list(arguments(generator, files, tmp_path))
        code, _, err = run(*line)  # raises for anything but an exit code
        assert code in (0, 1, 2), (line, err)
        assert "Traceback" not in err, line
        assert len(err) < 20_000, line
        codes[code] = codes.get(code, 0) + 1
    assert codes[0] > 5  # some of it is right
    assert codes[2] > CALLS // 16
    if seed == 0:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    unchanged = [path for path, content in before.items() if Path(path).read_bytes() == content]
    assert len(unchanged) == len(before)  # nothing was overwritten, except by --force
