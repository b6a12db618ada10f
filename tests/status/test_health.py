"""What the system says about a run: who holds its lock, and how its files may be accessed."""

import os

from small_runs import create, one_round

from dpftrl.status import health
from dpftrl.status.health import disk_of, process_of


def test_the_process_that_holds_the_lock_is_found_without_touching_it(tmp_path):
    with create(tmp_path) as server:
        paths = server.folder.lock, server.folder.journal
        process = process_of(*paths)
        assert (process.running, process.pid) == (True, os.getpid())
        assert process.last_change == server.folder.journal.stat().st_mtime
    assert process_of(*paths).running is False
    assert server.folder.lock.read_text() == str(os.getpid())  # a number that nobody holds
    server.folder.lock.unlink()
    assert process_of(*paths).running is False


def test_the_lock_of_another_run_is_not_taken_for_this_one(tmp_path):
    with create(tmp_path / "one") as one, create(tmp_path / "other") as other:
        other.close()
        assert process_of(one.folder.lock, one.folder.journal).running
        assert process_of(other.folder.lock, other.folder.journal).running is False


def test_a_system_that_does_not_list_locks_is_not_guessed_about(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "LOCKS", tmp_path / "missing")
    with create(tmp_path) as server:
        process = process_of(server.folder.lock, server.folder.journal)
    assert (process.running, process.pid) == (None, None)


def test_checkpoints_do_not_count_as_growth(tmp_path):
    with create(tmp_path) as server:
        one_round(server)
        root = server.folder.root
        before = disk_of(root, 1, 10, 0, 10**9)
        (root / "private" / "checkpoints" / "00000009.safetensors").write_bytes(bytes(10**6))
        after = disk_of(root, 1, 10, 0, 10**9)
        assert after.bytes_per_round == before.bytes_per_round
        assert after.run_bytes - before.run_bytes == 10**6
        assert 2 * 10**6 <= after.bytes_needed < 2 * 10**6 + before.bytes_needed
        (root / "private" / "more.bin").write_bytes(bytes(1000))
        assert disk_of(root, 1, 10, 0, 10**9).bytes_needed == after.bytes_needed + 10_000
        assert disk_of(root, 1, None, 0, 10**9).bytes_needed == 0


def test_every_private_file_is_looked_at(tmp_path):
    with create(tmp_path) as server:
        one_round(server)
        root = server.folder.root
        assert disk_of(root, 1, 10, 0, None).problems == ()
        for path in (server.folder.key, server.folder.checkpoint(1), server.folder.journal):
            path.chmod(0o640)
        problems = disk_of(root, 1, 10, 0, None).problems
        assert len(problems) == 3
        root.chmod(0o777)
        assert len(disk_of(root, 1, 10, 0, None).problems) == 4
