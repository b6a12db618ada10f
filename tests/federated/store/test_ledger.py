"""Ledgers that are written on demand, and those that older runs keep."""

import csv
import shutil
from pathlib import Path

import pytest
from small_runs import PEOPLE, create, fill, ledger, one_round, small_plan

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated import Server, write_ledger
from dpftrl.federated.store.ledger import ledger_file

GOLDEN = Path(__file__).parents[2] / "golden" / "v2"
NAMES = [f'a "quoted", name {i}\u00e9' for i in range(40)]


@pytest.mark.parametrize("hashed", [True, False])
def test_a_ledger_says_what_the_journal_says(tmp_path, hashed):
    plan = small_plan(goal=2, over_selection=2.0)
    with create(tmp_path, plan, hash_clients=hashed) as server:
        one_round(server, NAMES)
        server.abandon(server.begin(NAMES), "test")
        attempt = server.begin(NAMES)
        fill(attempt)
        server.commit(attempt)
        server.begin(NAMES)  # in flight: nothing is known about it yet
        write_ledger(server.folder.root, tmp_path / "ledger.csv")
        with (tmp_path / "ledger.csv").open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        assert header == ["round", "client", "status"]
        assert [(int(row), who, status) for row, who, status in rows] == ledger(server)
        assert [row[2] for row in rows].count("abandoned") == 4
        assert len(rows) == 12
    assert (tmp_path / "ledger.csv").stat().st_mode & 0o077 == 0


def test_a_temporary_ledger_is_removed(tmp_path):
    with create(tmp_path) as server:
        one_round(server, PEOPLE)
        with ledger_file(server.folder.root) as path:
            assert path.read_text().count("\n") == 4
            assert path.parent.stat().st_mode & 0o077 == 0
        assert not path.parent.exists()
        assert not server.folder.ledger.exists()


def test_a_changed_journal_gives_no_ledger(tmp_path):
    with create(tmp_path) as server:
        one_round(server, PEOPLE)
        one_round(server, PEOPLE)
    content = server.folder.journal.read_bytes()
    server.folder.journal.write_bytes(content.replace(b'"row":0', b'"row":1', 1))
    with pytest.raises(UnsafeState, match="line 2 was changed"):
        write_ledger(server.folder.root, tmp_path / "ledger.csv")
    assert not (tmp_path / "ledger.csv").exists()
    with pytest.raises(InvalidInput, match="holds no run"):
        write_ledger(tmp_path, tmp_path / "ledger.csv")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run that keeps a ledger beside its journal."""
    run = shutil.copytree(GOLDEN / "stopped", tmp_path / "run")
    shutil.copytree(GOLDEN / "stopped-witness", tmp_path / "state")
    for path in (run / "private", *(run / "private").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return run


def test_a_kept_ledger_is_what_is_written(kept, tmp_path):
    write_ledger(kept, tmp_path / "copy.csv")
    assert (tmp_path / "copy.csv").read_bytes() == (kept / "ledger.csv").read_bytes()
    with (kept / "ledger.csv").open("ab") as file:
        file.write(b"5,c0,cou")  # of the round in flight
    write_ledger(kept, tmp_path / "copy.csv")
    assert b"5,c0" not in (tmp_path / "copy.csv").read_bytes()


def flipped(content: bytes) -> bytes:
    return content[:50] + bytes([content[50] ^ 1]) + content[51:]


def cut(content: bytes) -> bytes:
    return content[:-1]


def emptied(_: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("change", [flipped, cut, emptied])
def test_a_kept_ledger_that_was_changed_stops_a_resumption(kept, tmp_path, change):
    content = (kept / "ledger.csv").read_bytes()
    (kept / "ledger.csv").write_bytes(change(content))
    with pytest.raises(UnsafeState, match=r"ledger\.csv is not what the journal says"):
        Server.resume(kept, state_folder=tmp_path / "state")
    with pytest.raises(UnsafeState, match=r"ledger\.csv is not what the journal says"):
        write_ledger(kept, tmp_path / "copy.csv")
    assert not (tmp_path / "copy.csv").exists()
    (kept / "ledger.csv").write_bytes(content)
    Server.resume(kept, state_folder=tmp_path / "state").close()


def test_a_missing_or_linked_ledger_stops_a_resumption(kept, tmp_path):
    shutil.move(kept / "ledger.csv", tmp_path / "moved.csv")
    with pytest.raises(InvalidInput, match=r"ledger\.csv cannot be read"):
        Server.resume(kept, state_folder=tmp_path / "state")
    (kept / "ledger.csv").symlink_to(tmp_path / "moved.csv")
    with pytest.raises(UnsafeState, match="link"):
        Server.resume(kept, state_folder=tmp_path / "state")
