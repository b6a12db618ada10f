"""The command line, given a centralized run: `statement`, `verify`, and all that cannot use it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import command_line
import pytest
from small_training_runs import Place, Trainer, fast_places

ENDINGS = ("md", "html", "json")


def trained(place: Place, until: int | None = None, key: int | None = None) -> Place:
    with Trainer.create(place, insecure_test_key=key) as trainer:
        trainer.train(until)
    return place


@pytest.fixture(scope="module")
def finished() -> Iterator[Place]:
    """A finished run, into which no test may write."""
    with fast_places() as found:
        yield trained(next(found))


@pytest.fixture
def place() -> Iterator[Place]:
    with fast_places() as found:
        yield next(found)


@pytest.fixture
def copy(finished, tmp_path) -> Place:
    shutil.copytree(finished.folder, tmp_path / "run")
    return Place(tmp_path / "run", finished.state)


def statement(place: Place, *arguments) -> tuple[int, str, str]:
    return command_line.run("statement", place.folder, "--state-folder", place.state, *arguments)


# --- dpftrl statement ----------------------------------------------------------------------------


def test_a_run_becomes_three_files_in_its_folder(copy):
    code, out, err = statement(copy)
    assert (code, err) == (0, "")
    assert out.startswith("All 12 noisy steps of the training")
    assert "the files of the run verify" in out
    for ending in ENDINGS:
        path = copy.folder / f"statement.{ending}"
        assert str(path) in out
        assert path.stat().st_size > 3000
    assert command_line.run("verify", copy.folder, "--state-folder", copy.state)[0] == 0


def test_json_output_equals_the_json_file_and_options_are_printed(finished, tmp_path):
    options = ["--date", "2026-01-31", "--organisation", "Ours <b>", "--model-name", "m1"]
    options += ["--contact", "a@b.c", "--public-data", "none", "--shipped-checkpoint", "step 12"]
    code, out, err = statement(finished, "--json", "--out", tmp_path / "own", *options)
    assert (code, err) == (0, "")
    assert out.encode() == (tmp_path / "own.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {f"own.{one}" for one in ENDINGS}
    written = json.loads(out)
    assert written["date"] == "2026-01-31"
    assert set(written["publisher"].values()) == {"Ours <b>", "m1", "a@b.c", "none", "step 12"}
    guarantee = json.loads((finished.folder / "guarantee.json").read_bytes())
    assert written["epsilon"] == guarantee["epsilon"]
    text = (tmp_path / "own.html").read_text(encoding="utf-8")
    assert "Ours &lt;b&gt;" in text
    assert "2026-01-31" in text
    assert not (finished.folder / "statement.md").exists()


def test_the_same_run_gives_the_same_bytes(finished, tmp_path):
    for name in ("one", "two"):
        assert statement(finished, "--out", tmp_path / name)[0] == 0
    for ending in ENDINGS:
        one, two = ((tmp_path / f"{name}.{ending}").read_bytes() for name in ("one", "two"))
        assert one == two


def test_a_statement_can_be_written_again(finished, tmp_path):
    assert statement(finished, "--out", tmp_path / "own")[0] == 0
    code, _, err = statement(finished, "--out", tmp_path / "own")
    assert (code, err) == (0, "")


def test_a_file_of_somebody_else_is_kept(finished, tmp_path):
    path = tmp_path / "own.md"
    path.write_text("my notes")
    code, out, err = statement(finished, "--out", tmp_path / "own")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert path.read_text() == "my notes"
    assert statement(finished, "--out", tmp_path / "own", "--force")[0] == 0


@pytest.mark.parametrize("name", ["guarantee", "plan", "run"])
def test_the_files_of_the_run_are_not_overwritten(copy, name):
    before = (copy.folder / f"{name}.json").read_bytes()
    code, _, err = statement(copy, "--out", copy.folder / name)
    assert (code, err.count("\n")) == (2, 1)
    assert (copy.folder / f"{name}.json").read_bytes() == before


@pytest.mark.parametrize("name", ["guarantee", "plan", "run"])
def test_the_files_of_the_run_are_not_overwritten_by_force(copy, name):
    before = (copy.folder / f"{name}.json").read_bytes()
    assert statement(copy, "--force", "--out", copy.folder / name)[0] == 2
    assert (copy.folder / f"{name}.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "here"], "leave out --run and --devices"),
        (["--devices", "2"], "leave out --run and --devices"),
        (["--devices", "0"], "devices"),
        (["--date", "yesterday"], "2026-01-31"),
        (["--date", "2026-02-30"], "2026-01-31"),
        (["--out", "nowhere/own"], "no folder"),
        (["--out"], "--out"),
        (["--unknown"], "--unknown"),
    ],
)
def test_wrong_options_are_refused_in_one_line(finished, options, message):
    error = command_line.refused_in_one_line("statement", finished.folder, *options)
    assert message in error
    assert not (finished.folder / "statement.md").exists()


@pytest.mark.parametrize("file", ["plan.json", "guarantee.json", "run.json"])
def test_a_single_file_of_the_run_is_refused(finished, file):
    error = command_line.refused_in_one_line("statement", finished.folder / file)
    assert "give its folder" in error


def test_a_changed_checkpoint_gives_exit_code_1(copy):
    path = copy.folder / "private" / "checkpoints" / "00000012.safetensors"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    code, out, err = statement(copy)
    assert (code, err) == (1, "")
    assert out.startswith("The verification of the run failed: checkpoints.")
    written = json.loads((copy.folder / "statement.json").read_bytes())
    assert {one["basis"] for one in written["hypotheses"]} == {"claimed", "assumed"}
    code, out, _ = command_line.run("verify", copy.folder, "--state-folder", copy.state)
    assert code == 1
    assert "FAILED: 1 of" in out


def test_a_missing_witness_fails_unless_it_is_left_out(finished, tmp_path):
    options = ["--state-folder", tmp_path / "empty", "--out", tmp_path / "own"]
    code, out, _ = command_line.run("statement", finished.folder, *options)
    assert code == 1
    assert "failed: witness" in out
    options[-1] = tmp_path / "other"
    code, out, err = command_line.run("statement", finished.folder, *options, "--no-witness")
    assert (code, err) == (0, "")


def test_a_test_key_is_warned_about_first(place):
    trained(place, key=5)
    code, out, _ = statement(place)
    assert code == 1
    assert out.startswith("The noise key is a test key that anybody can guess")


def test_an_unfinished_run_is_stated_and_one_without_a_checkpoint_refused(place):
    trained(place, 0)
    error = command_line.refused_in_one_line(
        "statement", place.folder, "--state-folder", place.state
    )
    assert "no guarantee.json" in error
    with Trainer.resume(place) as trainer:
        trainer.train(6)
    code, out, _ = statement(place)
    assert code == 0
    assert out.startswith("The first 6 of 12 planned noisy steps")


@pytest.mark.parametrize("file", ["guarantee.json", "run.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 3}', "\xff"])
def test_a_corrupt_file_is_refused_in_one_line(copy, file, content):
    (copy.folder / file).write_bytes(content.encode("latin-1"))
    error = command_line.refused_in_one_line("statement", copy.folder)
    assert file in error


# --- dpftrl verify -------------------------------------------------------------------------------


def test_verify_tells_steps_and_epsilon(finished):
    code, out, err = command_line.run("verify", finished.folder, "--state-folder", finished.state)
    assert (code, err) == (0, "")
    assert "passed: 12 steps, epsilon 10.60 at delta 1e-06, recomputed" in out
    assert "rounds, epsilon" not in out


def test_verify_gives_json(finished):
    verdict = command_line.answer("verify", finished.folder, "--state-folder", finished.state)
    guarantee = json.loads((finished.folder / "guarantee.json").read_bytes())
    assert (verdict["passed"], verdict["rounds"]) == (True, 12)
    assert verdict["run"] == guarantee["run"]
    assert verdict["delta"] == guarantee["delta"]
    assert verdict["epsilon"] == pytest.approx(guarantee["epsilon"], rel=1e-6)
    assert verdict["epsilon"] <= guarantee["epsilon"]
    assert {check["outcome"] for check in verdict["checks"]} == {"passed"}


def test_verify_of_an_unfinished_run_counts_the_steps_after_its_checkpoint(place):
    trained(place, 5)
    code, out, _ = command_line.run("verify", place.folder, "--state-folder", place.state)
    assert code == 0
    shown = float(out.split(" steps, epsilon ")[1].split()[0])
    with Trainer.resume(place) as trainer:
        assert trainer.run.released == 5
        assert shown >= trainer.run.epsilon


def test_verify_of_a_test_key_fails(place):
    trained(place, key=5)
    code, out, _ = command_line.run("verify", place.folder, "--state-folder", place.state)
    assert code == 1
    assert "NOT PRIVATE" in out


# --- Commands for other kinds of runs ------------------------------------------------------------

OTHER = {
    "account": lambda run: ["account", run],
    "account with options": lambda run: ["account", run, "--delta", "1e-6"],
    "show": lambda run: ["show", run],
    "show plan": lambda run: ["show", run / "plan.json"],
    "export": lambda run: ["export", run, run.parent / "model.safetensors"],
    "ledger": lambda run: ["ledger", run, "--out", run.parent / "ledger.csv"],
    "train": lambda run: ["train", "--resume", "--out", run],
    "train without --out": lambda run: ["train", "--resume", run],
    "observe": lambda run: ["observe", run],
    "observe journal": lambda run: ["observe", run / "private" / "journal.jsonl"],
    "compare": lambda run: ["compare", run],
    "loss": lambda run: ["loss", run],
    "calibrate": lambda run: ["calibrate", run, "--epsilon", "3", "--delta", "1e-6"],
}


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", list(OTHER))
def test_other_commands_refuse_the_run_in_one_line_and_leave_it_alone(finished, command):
    before = content_of(finished.folder)
    error = command_line.refused_in_one_line(*OTHER[command](finished.folder))
    assert "Traceback" not in error
    assert "unexpected" not in error
    assert content_of(finished.folder) == before


def test_compose_refuses_the_run_in_one_line(finished):
    command_line.refused_in_one_line("compose", finished.folder, finished.folder, "--delta", "1e-6")


@pytest.mark.parametrize(
    "command", ["account", "show", "export", "ledger", "observe", "train", "compare"]
)
def test_other_commands_say_that_the_run_is_centralized(finished, command):
    """`guarantee.json is not a guarantee file` helps nobody."""
    error = command_line.refused_in_one_line(*OTHER[command](finished.folder))
    assert "dpftrl verify" in error
