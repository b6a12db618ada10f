"""The witness of a journal: overwritten in place, and never trusted if somebody else touched it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpftrl.errors import UnsafeState
from dpftrl.journal import WITNESS_BYTES, Witness

RUN = "ab" * 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def witness(folder: Path) -> Iterator[Witness]:
    witness = Witness(folder, RUN)
    witness.remember(0, "0" * 64)
    yield witness
    witness.close()


def path_of(folder: Path) -> Path:
    return folder / f"{RUN}.json"


def test_a_witness_is_overwritten_in_place_within_one_sector(witness: Witness, folder: Path):
    inode = path_of(folder).stat().st_ino
    for lines in (1, 9, 10, 10**9):
        witness.remember(lines, f"{lines:064x}")
        witness.check()
        content = path_of(folder).read_bytes()
        assert len(content) == WITNESS_BYTES <= 512
        assert json.loads(content)["lines"] == lines
    assert path_of(folder).stat().st_ino == inode


def test_a_new_process_replaces_the_file_and_reads_the_same(witness: Witness, folder: Path):
    witness.remember(3, "c" * 64)
    witness.close()
    again = Witness(folder, RUN)
    seen = again.seen()
    assert seen is not None
    assert (seen.lines, seen.mac) == (3, "c" * 64)
    again.close()


@pytest.mark.parametrize("how", ["removed", "replaced", "edited", "emptied"])
def test_a_file_that_somebody_else_touched_is_refused(witness: Witness, folder: Path, how: str):
    witness.remember(3, "c" * 64)
    path = path_of(folder)
    content = path.read_bytes()
    if how == "edited":
        path.write_bytes(content.replace(b'"lines":3', b'"lines":2'))
    else:
        path.unlink()
    if how in ("replaced", "emptied"):
        path.write_bytes(content[:100] if how == "replaced" else b"")
    with pytest.raises(UnsafeState, match="somebody else"):
        witness.check()


def test_a_copy_with_the_same_content_is_replaced_and_not_left_behind(
    witness: Witness, folder: Path
):
    """The open file may no longer be the one at the path; then writing to it would be lost."""
    witness.remember(3, "c" * 64)
    path = path_of(folder)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    witness.check()
    witness.remember(4, "d" * 64)
    assert json.loads(path.read_bytes())["lines"] == 4
    witness.check()
