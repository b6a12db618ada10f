"""Whatever is changed in a folder without the key, a check fails."""

import json
import os
import shutil

import pytest
from audited_runs import Place, failed, made, play, warned

from dpftrl.errors import UnsafeState
from dpftrl.verify.journal import read_journal


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Place:
    root = tmp_path_factory.mktemp("original")
    place = made(root, 3)
    with place.open() as server:
        play(server, abandon=True)
        play(server)
    assert failed(place.audit()) == {}
    return place


@pytest.fixture
def place(original, tmp_path) -> Place:
    return original.copy_to(tmp_path)


def test_no_byte_of_the_journal_can_change(tmp_path):
    place = made(tmp_path, 1)
    key = (place.folder / "private" / "noise.key").read_bytes()
    content = place.journal.read_bytes()
    missed = []
    with place.journal.open("r+b", buffering=0) as file:
        for at, byte in enumerate(content[:-1]):
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
            try:
                read_journal(place.journal, key)
                missed.append(at)
            except UnsafeState:
                pass
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert missed == []
    assert len(read_journal(place.journal, key).commits) == 1


def test_a_changed_line_fails_the_audit(place):
    lines = place.journal.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        changed = line.replace(b'"', b"'", 1)
        place.journal.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
        found = place.audit()
        assert f"line {number + 1} was changed" in failed(found)["journal"]
        assert found.epsilon is None
        assert "everything else" in warned(found)


def test_lines_cannot_go_move_or_come(place):
    lines = place.journal.read_bytes().splitlines(keepends=True)
    for edited in (
        lines[:2] + lines[3:],
        [lines[0], lines[2], lines[1], *lines[3:]],
        [*lines, lines[-1]],
        [*lines, b"\n"],
        lines[1:],
        [],
    ):
        place.journal.write_bytes(b"".join(edited))
        assert "journal" in failed(place.audit())


def test_a_journal_cut_short_is_what_the_witness_is_for(place):
    lines = place.journal.read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        place.journal.write_bytes(b"".join(lines[:kept]))
        assert "rolled back" in failed(place.audit())["witness"]
    place.journal.write_bytes(b"".join(lines)[:-1])
    assert "witness" in failed(place.audit())


def test_a_folder_rolled_back_to_a_copy(tmp_path):
    place = made(tmp_path, 2)
    shutil.copytree(place.folder, tmp_path / "copy")
    with place.open() as server:
        play(server)
    old = Place(tmp_path / "copy", place.state)
    assert "rolled back" in failed(old.audit())["witness"]
    assert failed(old.audit(witness=False)) == {}
    assert "older copy" in warned(old.audit(witness=False))["witness"]


def test_a_missing_and_a_foreign_witness(place, tmp_path_factory):
    other = made(tmp_path_factory.mktemp("other"), 4)
    name = place.witness.name
    place.witness.unlink()
    assert "no witness" in failed(place.audit())["witness"]
    shutil.copy(other.witness, place.state / name)
    assert "another run" in failed(place.audit())["witness"]
    foreign = json.loads(other.witness.read_text()) | {"run": name.removesuffix(".json")}
    (place.state / name).write_text(json.dumps(foreign))
    assert "witness" in failed(place.audit())


def test_a_foreign_journal_or_key(place, tmp_path_factory):
    other = made(tmp_path_factory.mktemp("other"), 4)
    shutil.copy(other.journal, place.journal)
    assert "journal" in failed(place.audit())
    shutil.copy(other.folder / "private" / "noise.key", place.folder / "private" / "noise.key")
    assert {"witness", "settings and plan", "checkpoints", "ledger"} <= set(failed(place.audit()))


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
def test_no_row_of_the_ledger_can_change(place, edit):
    rows = place.ledger.read_bytes().splitlines(keepends=True)
    place.ledger.write_bytes(b"".join(edit(rows)))
    assert "ledger" in failed(place.audit())


def test_the_ledger_cannot_go(place):
    place.ledger.unlink()
    assert "ledger" in failed(place.audit())


@pytest.mark.parametrize("name", ["plan.json", "run.json"])
def test_plan_and_settings_cannot_change(place, name):
    path = place.folder / name
    edits = {
        "plan.json": ('"noise_multiplier": 3.0', '"noise_multiplier": 9.0'),
        "run.json": ('"budget": null', '"budget": 1e99'),
    }
    content = path.read_text()
    assert edits[name][0] in content
    path.write_text(content.replace(*edits[name]))
    assert name in failed(place.audit())["settings and plan"]
    path.write_text(content + " ")
    assert name in failed(place.audit())["settings and plan"]
    path.unlink()
    assert name in failed(place.audit())["settings and plan"]


def test_checkpoints_cannot_change(place):
    folder = place.folder / "private" / "checkpoints"
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert path.name in failed(place.audit())["checkpoints"]
        path.write_bytes(content)
    shutil.copy(folder / "00000004.safetensors", folder / "00000005.safetensors")
    assert "no round" in failed(place.audit())["checkpoints"]
    (folder / "00000005.safetensors").unlink()
    (folder / "00000004.safetensors").unlink()
    assert "missing" in failed(place.audit())["checkpoints"]


def test_the_first_checkpoint_while_it_is_kept(tmp_path):
    place = made(tmp_path, 1)
    (place.folder / "private" / "checkpoints" / "00000000.safetensors").write_bytes(b"")
    assert "began" in failed(place.audit())["checkpoints"]


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
        {"unit": "2 devices of one person"},
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
def test_the_guarantee_cannot_claim_anything_else(place, edit):
    path = place.folder / "guarantee.json"
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
    found = place.audit()
    assert "guarantee.json" in failed(found)
    assert found.epsilon is not None  # from the journal and the plan


def test_a_guarantee_that_is_smaller_throughout(place):
    """Sensitivity, mu, rho and epsilon fit each other, and not the strategy."""
    path = place.folder / "guarantee.json"
    content = json.loads(path.read_text())
    for name, scale in (("mu", 0.5), ("rho", 0.25), ("epsilon", 0.45)):
        content[name] *= scale
    for name in ("sensitivity", "rounding"):
        content["runs"][0][name] *= 0.5
    path.write_text(json.dumps(content))
    assert "one client can reach" in failed(place.audit())["guarantee.json"]


def test_private_files_are_private(place):
    private = place.folder / "private"
    for path, mode in (
        (private / "noise.key", 0o644),
        (private, 0o755),
        (private / "checkpoints", 0o750),
        (private / "checkpoints" / "00000004.safetensors", 0o640),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        assert f"{mode:04o}" in failed(place.audit())["file modes"]
        path.chmod(before)
    assert failed(place.audit()) == {}


def test_an_archive_may_be_read_only(place):
    private = place.folder / "private"
    paths = [private, *private.rglob("*")]
    modes = [path.stat().st_mode for path in paths]
    try:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode & ~0o222)
        assert failed(place.audit()) == {}
    finally:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)
