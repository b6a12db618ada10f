"""A check fails if anything in a run folder is changed without the noise key."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import (
    PLAN,
    RunFolders,
    failed,
    keep_a_ledger,
    record_run,
    run_attempt,
    warned,
)

from dpftrl import Server, Settings
from dpftrl.errors import UnsafeState
from dpftrl.federated import write_ledger
from dpftrl.verify import verify_run
from dpftrl.verify.journal import read_journal


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> RunFolders:
    root = tmp_path_factory.mktemp("original")
    run = record_run(root, 3)
    with run.open() as server:
        run_attempt(server, abandon=True)
        run_attempt(server)
    assert failed(run.verify()) == {}
    return run


@pytest.fixture
def run(original, tmp_path) -> RunFolders:
    return original.copy_to(tmp_path)


def test_a_change_of_any_journal_byte_is_refused(tmp_path):
    run = record_run(tmp_path, 1)
    key = (run.folder / "private" / "noise.key").read_bytes()
    content = run.journal.read_bytes()
    missed = []
    with run.journal.open("r+b", buffering=0) as file:
        for at, byte in enumerate(content[:-1]):
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
            try:
                read_journal(run.journal, key)
                missed.append(at)
            except UnsafeState:
                pass
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert missed == []
    assert len(read_journal(run.journal, key).commits) == 1


def test_a_changed_journal_line_fails(run):
    lines = run.journal.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        changed = line.replace(b'"', b"'", 1)
        run.journal.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
        verdict = run.verify()
        assert f"line {number + 1} was changed" in failed(verdict)["journal"]
        assert verdict.epsilon is None
        assert "everything else" in warned(verdict)


def test_removed_moved_or_added_journal_lines_fail(run):
    lines = run.journal.read_bytes().splitlines(keepends=True)
    for edited in (
        lines[:2] + lines[3:],
        [lines[0], lines[2], lines[1], *lines[3:]],
        [*lines, lines[-1]],
        [*lines, b"\n"],
        lines[1:],
        [],
    ):
        run.journal.write_bytes(b"".join(edited))
        assert "journal" in failed(run.verify())


def test_a_truncated_journal_fails_against_the_witness(run):
    lines = run.journal.read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        run.journal.write_bytes(b"".join(lines[:kept]))
        assert "rolled back" in failed(run.verify())["witness"]
    run.journal.write_bytes(b"".join(lines)[:-1])
    assert "witness" in failed(run.verify())


def test_an_older_copy_of_the_folder_fails_against_the_witness(tmp_path):
    run = record_run(tmp_path, 2)
    shutil.copytree(run.folder, tmp_path / "copy")
    with run.open() as server:
        run_attempt(server)
    old = RunFolders(tmp_path / "copy", run.state)
    assert "rolled back" in failed(old.verify())["witness"]
    assert failed(old.verify(witness=False)) == {}
    assert "older copy" in warned(old.verify(witness=False))["witness"]


def test_a_missing_witness_or_one_of_another_run_fails(run, tmp_path_factory):
    other = record_run(tmp_path_factory.mktemp("other"), 4)
    name = run.witness.name
    run.witness.unlink()
    assert "no witness" in failed(run.verify())["witness"]
    shutil.copy(other.witness, run.state / name)
    assert "another run" in failed(run.verify())["witness"]
    foreign = json.loads(other.witness.read_text()) | {"run": name.removesuffix(".json")}
    (run.state / name).write_text(json.dumps(foreign))
    assert "witness" in failed(run.verify())


def test_the_journal_or_key_of_another_run_fails(run, tmp_path_factory):
    other = record_run(tmp_path_factory.mktemp("other"), 4)
    shutil.copy(other.journal, run.journal)
    assert "journal" in failed(run.verify())
    shutil.copy(other.folder / "private" / "noise.key", run.folder / "private" / "noise.key")
    assert {"witness", "settings and plan", "checkpoints"} <= set(failed(run.verify()))


def removed(rows: list[bytes]) -> list[bytes]:
    return rows[:3] + rows[4:]


def added(rows: list[bytes]) -> list[bytes]:
    return [*rows, b"3,c0123456789abcdef,counted\n"]


def inserted(rows: list[bytes]) -> list[bytes]:
    return [*rows[:3], b"0,c0123456789abcdef,contacted\n", *rows[3:]]


def changed(rows: list[bytes]) -> list[bytes]:
    return [row.replace(b"contacted", b"counted") for row in rows]


def moved(rows: list[bytes]) -> list[bytes]:
    return [rows[0], rows[2], rows[1], *rows[3:]]


def another_round(rows: list[bytes]) -> list[bytes]:
    return [*rows[:-1], rows[-1].replace(b"3,", b"2,", 1)]


def without_header(rows: list[bytes]) -> list[bytes]:
    return rows[1:]


@pytest.mark.parametrize(
    "edit", [removed, added, inserted, changed, moved, another_round, without_header]
)
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "written on demand"])
def test_an_edited_ledger_fails(run, edit, is_kept):
    if is_kept:
        keep_a_ledger(run)
    else:
        write_ledger(run.folder, run.ledger)
    assert failed(run.verify()) == {}
    rows = run.ledger.read_bytes().splitlines(keepends=True)
    run.ledger.write_bytes(b"".join(edit(rows)))
    assert "ledger" in failed(run.verify())


def test_a_missing_ledger_fails_if_the_run_keeps_one(run):
    keep_a_ledger(run)
    run.ledger.unlink()
    assert "ledger" in failed(run.verify())


@pytest.mark.parametrize("hashed", [True, False])
def test_a_ledger_that_was_written_before_later_rounds_is_a_warning(tmp_path, hashed):
    run = record_run(tmp_path, 2, hash_clients=hashed)
    write_ledger(run.folder, run.ledger)
    (text,) = (check.text for check in run.verify().checks if check.name == "ledger")
    assert "is a copy of it" in text
    with run.open() as server:
        run_attempt(server)
    assert failed(run.verify()) == {}
    assert "older than the journal" in warned(run.verify())["ledger"]
    run.ledger.write_bytes(run.ledger.read_bytes()[:-3])
    assert "ledger" in failed(run.verify())


@pytest.mark.parametrize("name", ["plan.json", "run.json"])
def test_edited_or_missing_plan_and_settings_fail(run, name):
    path = run.folder / name
    edits = {
        "plan.json": ('"noise_multiplier": 3.0', '"noise_multiplier": 9.0'),
        "run.json": ('"budget": null', '"budget": 1e99'),
    }
    content = path.read_text()
    assert edits[name][0] in content
    path.write_text(content.replace(*edits[name]))
    assert name in failed(run.verify())["settings and plan"]
    path.write_text(content + " ")
    assert name in failed(run.verify())["settings and plan"]
    path.unlink()
    assert name in failed(run.verify())["settings and plan"]


def test_edited_added_or_missing_checkpoints_fail(run):
    folder = run.folder / "private" / "checkpoints"
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert path.name in failed(run.verify())["checkpoints"]
        path.write_bytes(content)
    shutil.copy(folder / "00000004.safetensors", folder / "00000005.safetensors")
    assert "no round" in failed(run.verify())["checkpoints"]
    (folder / "00000005.safetensors").unlink()
    (folder / "00000004.safetensors").unlink()
    assert "missing" in failed(run.verify())["checkpoints"]


def test_an_edited_first_checkpoint_fails(tmp_path):
    run = record_run(tmp_path, 1)
    (run.folder / "private" / "checkpoints" / "00000000.safetensors").write_bytes(b"")
    assert "was created" in failed(run.verify())["checkpoints"]


@pytest.mark.parametrize(
    "edit",
    [
        {"epsilon": 0.5},
        {"epsilon": 500.0},
        {"delta": 1e-5},
        {"mu": 1e-3},
        {"mu": 1e200},
        {"rho": 1e-3},
        {"sampler_delta": 0.0},
        {"kind": "upper bound"},
        {"unit": "2 clients (devices) of one person"},
        {"devices": 2},
        {"common_cap": 1},
        {"adjacency": "add or remove"},
        {"hypotheses": []},
        {"runs": []},
        {"runs.noise_multiplier": 30.0},
        {"runs.noise_multiplier": 0.0},
        {"runs.sensitivity": 1.0},
        {"runs.participation.min_sep": 5},
        {"runs.participation.min_sep": 1},
        {"runs.participation.max_participations": 2},
        {"runs.participation.rounds": 3},
        {"runs.participation.rounds": 2},
        {"runs.participation.rounds": 5},
        {"runs.mechanism.family": "independent"},
        {"runs.mechanism.parameters": {"theta": [0.1], "omega": [0.1]}},
    ],
    ids=str,
)
def test_an_edited_guarantee_fails(run, edit):
    path = run.folder / "guarantee.json"
    content = json.loads(path.read_text())
    ((names, value),) = edit.items()
    target, *rest = names.split(".")
    where = content
    for name in rest:
        where = where[target][0] if target == "runs" else where[target]
        target = name
    assert where[target] != value
    where[target] = value
    path.write_text(json.dumps(content))
    verdict = run.verify()
    assert "guarantee.json" in failed(verdict)
    assert verdict.epsilon is not None  # from the journal and the plan


def test_a_consistently_scaled_down_guarantee_fails(run):
    """Sensitivity, mu, rho and epsilon fit each other, and not the strategy."""
    path = run.folder / "guarantee.json"
    content = json.loads(path.read_text())
    for name, scale in (("mu", 0.5), ("rho", 0.25), ("epsilon", 0.45)):
        content[name] *= scale
    for name in ("sensitivity", "rounding"):
        content["runs"][0][name] *= 0.5
    path.write_text(json.dumps(content))
    assert "one client can reach" in failed(run.verify())["guarantee.json"]


def test_private_files_open_to_others_fail(run):
    private = run.folder / "private"
    for path, mode in (
        (private / "noise.key", 0o644),
        (private, 0o755),
        (private / "checkpoints", 0o750),
        (private / "checkpoints" / "00000004.safetensors", 0o640),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        assert f"{mode:04o}" in failed(run.verify())["file modes"]
        path.chmod(before)
    assert failed(run.verify()) == {}


def test_a_read_only_archive_passes(run):
    private = run.folder / "private"
    paths = [private, *private.rglob("*")]
    modes = [path.stat().st_mode for path in paths]
    try:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode & ~0o222)
        assert failed(run.verify()) == {}
    finally:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)


def test_a_sealed_configuration_that_was_edited_fails(tmp_path):
    folder, state = tmp_path / "run", tmp_path / "state"
    files = {"config.toml": b"seed = 1\n"}
    model = {"w": np.zeros(5)}
    Server.create(
        folder, PLAN, Settings(clip_norm=1.0), model, state_folder=state, files=files
    ).close()
    checks = {check.name: check for check in verify_run(folder, state).checks}
    assert checks["settings and plan"].outcome == "passed"
    assert "config.toml" in checks["settings and plan"].text
    (folder / "config.toml").write_bytes(b"seed = 2\n")
    checks = {check.name: check for check in verify_run(folder, state).checks}
    assert checks["settings and plan"].outcome == "failed"
    assert "config.toml was changed" in checks["settings and plan"].text


def test_a_configuration_of_version_0_1_is_reported_as_not_sealed(tmp_path):
    golden = Path(__file__).parent.parent / "golden" / "v1" / "train" / "finished"
    shutil.copytree(golden, tmp_path / "run")
    (tmp_path / "run" / "private").chmod(0o700)
    checks = {check.name: check for check in verify_run(tmp_path / "run", witness=False).checks}
    assert checks["settings and plan"].outcome == "warning"
    assert "config.toml is not sealed" in checks["settings and plan"].text


@pytest.mark.parametrize("field", ["rounding", "kind"])
def test_a_guarantee_with_a_smaller_mu_fails(tmp_path, field):
    run = record_run(tmp_path, 3)
    path = run.folder / "guarantee.json"
    content = json.loads(path.read_text())
    if field == "rounding":  # mu and rho follow from the edited rounding
        content["runs"][-1]["rounding"] -= content["mu"] * 0.9
        content["mu"] *= 0.1
        content["rho"] = content["mu"] * (content["mu"] / 2)
    else:
        content["runs"][-1]["sensitivity_kind"] = content["kind"] = "estimated"
    path.write_text(json.dumps(content))
    assert "guarantee.json" in failed(run.verify())


def test_a_witness_in_the_folder_of_the_run_fails(tmp_path):
    """An older copy of such a folder would bring its own older witness along."""
    run = record_run(tmp_path, 2)
    shutil.copytree(run.state, run.folder / "state")
    checks = {check.name: check for check in verify_run(run.folder, run.folder / "state").checks}
    assert checks["witness"].outcome == "failed"
    assert "lies in the folder of the run" in checks["witness"].text


@pytest.mark.parametrize("name", ["plan.json", "ledger.csv", "private/journal.jsonl"])
def test_a_pipe_in_place_of_a_file_fails_and_does_not_wait(tmp_path, name):
    run = record_run(tmp_path, 2)
    (run.folder / name).unlink(missing_ok=True)
    os.mkfifo(run.folder / name)
    assert failed(run.verify())


def test_a_journal_line_in_another_spelling_is_refused_by_resume_and_verify(tmp_path):
    run = record_run(tmp_path, 2)
    lines = run.journal.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"mac":', b'"mac": ', 1)
    run.journal.write_bytes(b"".join(lines))
    assert "journal" in failed(run.verify())
    with pytest.raises(UnsafeState, match="line 2 was changed"):
        run.open()
