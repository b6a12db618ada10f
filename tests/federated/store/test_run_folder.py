"""What somebody put into the folder of a run before it began, or between two sessions."""

import os
import shutil

import numpy as np
import pytest
from small_runs import PEOPLE, create, one_round, reopen, small_plan

from dpftrl import Server, Settings, journal
from dpftrl._internal import storage
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState
from dpftrl.federated.store.run_folder import HEADER


def test_a_ledger_that_was_there_before_gets_nothing(tmp_path):
    """Whoever made it could have kept it open, and would read who takes part."""
    (tmp_path / "run").mkdir()
    ledger = tmp_path / "run" / "ledger.csv"
    ledger.write_text(HEADER)
    with create(tmp_path) as server:
        one_round(server, PEOPLE)
    assert ledger.read_text() == HEADER


def test_a_folder_with_a_ledger_and_no_journal_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.csv").write_text(HEADER + "0,ann,counted\n")
    with pytest.raises(UnsafeState, match=r"journal\.jsonl is gone"):
        create(tmp_path)


@pytest.mark.parametrize("name", ["private", "private/checkpoints"])
def test_a_linked_folder_is_not_filled(tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises(UnsafeState, match="is a link"):
        create(tmp_path)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "noise.key", "journal.jsonl"])
def test_linked_files_are_not_followed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_bytes(b"old")
    (tmp_path / "run" / "private").mkdir(parents=True)
    (tmp_path / "run" / "private").chmod(0o700)
    (tmp_path / "run" / "private" / name).symlink_to(victim)
    try:
        create(tmp_path).close()
    except InvalidInput:
        assert name != "noise.key"  # which is replaced
    assert victim.read_bytes() == b"old"


@pytest.mark.parametrize(
    "name", ["private/journal.jsonl", "private/noise.key", "run.json", "plan.json"]
)
def test_a_file_that_became_a_link_stops_a_resumption(tmp_path, name):
    with create(tmp_path) as server:
        one_round(server, PEOPLE)
    path = tmp_path / "run" / name
    shutil.move(path, tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    with pytest.raises(UnsafeState, match="link"):
        reopen(server)
    assert (tmp_path / "moved").read_bytes() == before


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    someone = os.geteuid() + 1
    monkeypatch.setattr(storage.os, "geteuid", lambda: someone)
    with pytest.raises(UnsafeState, match="belongs to another user"):
        create(tmp_path)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(UnsafeState, match="everybody may write"):
        create(tmp_path)


def test_drafts_of_killed_processes_are_removed_with_those_of_the_witness(tmp_path):
    with create(tmp_path) as server:
        one_round(server, PEOPLE)
        run_id = server.run_id
    draft = "0123456789abcdef"
    left = [
        tmp_path / "run" / f".guarantee.json.{draft}",
        tmp_path / "run" / ".guarantee.json.1234",
        tmp_path / "run" / "private" / f".journal.jsonl.{draft}",
        tmp_path / "run" / "private" / "checkpoints" / f".00000001.safetensors.{draft}",
        tmp_path / "state" / f".{run_id}.json.{draft}",
    ]
    others = [tmp_path / "run" / ".gitignore", tmp_path / "state" / ".another.json.0123"]
    for path in (*left, *others):
        path.write_bytes(b"half")
    reopen(server).close()
    assert [path for path in left if path.exists()] == []
    assert all(path.exists() for path in others)


def test_a_file_system_without_locks_is_named_as_such(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(journal.fcntl, "flock", no_locks)
    with pytest.raises(InvalidInput, match="cannot be locked: No locks available") as error:
        create(tmp_path)
    assert not isinstance(error.value, RunInUse)


def test_further_files_are_sealed(tmp_path):
    run, state = tmp_path / "run", tmp_path / "state"
    files = {"config.toml": b"seed = 1\n"}
    model = {"w": np.zeros(5)}
    Server.create(
        run, small_plan(), Settings(clip_norm=1.0), model, state_folder=state, files=files
    ).close()
    assert (run / "config.toml").read_bytes() == b"seed = 1\n"
    Server.resume(run, state_folder=state).close()
    (run / "config.toml").write_bytes(b"seed = 2\n")
    with pytest.raises(UnsafeState, match=r"config\.toml is not what it was"):
        Server.resume(run, state_folder=state)
    (run / "config.toml").unlink()
    with pytest.raises(InvalidInput, match=r"config\.toml cannot be read"):
        Server.resume(run, state_folder=state)


@pytest.mark.parametrize("kind", ["pipe", "file of another"])
def test_a_log_that_somebody_prepared_gets_nothing(tmp_path, kind, monkeypatch):
    with create(tmp_path) as server:
        one_round(server, PEOPLE)
        log = server.folder.log
        log.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(log)
        else:
            log.write_text("")
            someone = os.geteuid() + 1
            monkeypatch.setattr("dpftrl.federated.store.run_folder.os.geteuid", lambda: someone)
        server.folder.note({"client": "c1"})
        monkeypatch.undo()
        if kind != "pipe":
            assert log.read_text() == ""


def test_a_pipe_in_place_of_the_noise_does_not_stop_a_resumption(tmp_path):
    with create(tmp_path, snapshot_every=1) as server:
        one_round(server, PEOPLE)
        path = server.folder.noise
    path.unlink()
    os.mkfifo(path)
    reopen(server).close()
