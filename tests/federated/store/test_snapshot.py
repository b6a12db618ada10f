"""Snapshots: what is restored is what a full replay gives, and nothing else is ever used."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import PEOPLE, create, fill, one_round, reopen, small_plan

from dpftrl.errors import TooFewClients
from dpftrl.federated import Server
from dpftrl.federated.store import run_store
from dpftrl.federated.store.snapshot import load_snapshot


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def state_of(server: Server) -> dict[str, Any]:
    """All that a server knows from its journal."""
    store = server._store
    history = store.eligibility.history()
    state = {name: value for name, value in vars(store.state).items() if name != "digests"}
    return {
        **state,
        "digests": [bytes(digest) for digest in store.state.digests],
        "history": [column.tolist() for column in history[:4]] + [history.exposure],
        "latest": store.eligibility._rules._latest,
        "exposure": store.exposure,
        "line": (store._decisions.chain.journal.lines, store._decisions.chain.journal.mac),
        "model": server.model.tobytes(),
    }


def replayed(server: Server) -> dict[str, Any]:
    """The state of a copy of a run that is opened without its snapshot."""
    root = server.folder.root
    place = root.parent / "copy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(root, place / "run")
    shutil.copytree(root.parent / "state", place / "state")
    (place / "run" / "private" / "snapshot.bin").unlink(missing_ok=True)
    with Server.resume(place / "run", state_folder=place / "state") as copy:
        return state_of(copy)


@pytest.mark.parametrize("every", [1, 350, 900])
@pytest.mark.parametrize(
    "more",
    [{}, {"timer_hours": 2.0}, {"hash_clients": False}, {"clip_norm": "adaptive"}],
    ids=["rounds", "hours", "names", "adaptive"],
)
def test_resuming_from_a_snapshot_is_resuming_from_all_lines(tmp_path, monkeypatch, every, more):
    """At random places of a run with abandoned attempts and attempts in flight."""
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", every)
    dice, used = random.Random(every), 0
    server = create(tmp_path, small_plan(30, 3, 9, goal=3, over_selection=1.5), **more)
    now = 0.0
    while not server.ended():
        now += 0.7 * dice.random()
        try:
            attempt = server.begin(PEOPLE, now if "timer_hours" in more else None)
        except TooFewClients:
            now += 5.0
            continue
        if dice.random() < 0.25:  # in flight
            server = reopen(server)
            assert state_of(server) == replayed(server)
            attempt = server.begin(PEOPLE, now if "timer_hours" in more else None)
        if dice.random() < 0.25:
            server.abandon(attempt, "test")
        else:
            fill(attempt)
            server.commit(attempt)
        if dice.random() < 0.4:
            before = state_of(server)
            used += server.folder.snapshot.exists()
            server = reopen(server)
            assert state_of(server) == replayed(server)
            assert {**state_of(server), "clock": 0} == {**before, "clock": 0}
    assert used > 3
    server.close()


def test_a_snapshot_keeps_the_failed_attempts_before_an_empty_round(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 1)
    server = create(tmp_path)
    one_round(server)
    for failed in (1, 2):
        server.abandon(server.begin(PEOPLE), "too few reports")
        server.close_empty_round(PEOPLE[:1], "nobody is left")
        server = reopen(server)
        assert server.failed_attempts == failed
        assert state_of(server) == replayed(server)
    one_round(server)
    assert server.failed_attempts == 0
    server.close()


def test_a_snapshot_is_used(tmp_path, monkeypatch):
    """The control of the test above: with wrong timers in it, another state comes out."""
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 1)
    with create(tmp_path) as server:
        one_round(server)
        one_round(server)
    load = load_snapshot

    def careless(*arguments: Any) -> Any:
        snapshot = load(*arguments)
        arguments[-1].timers._old.last[:] = 0
        return snapshot

    monkeypatch.setattr(run_store, "load_snapshot", careless)
    server = reopen(server)
    assert state_of(server) != replayed(server)
    server.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A run with rounds before and after its snapshot."""
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 1)
    with create(tmp_path) as server:
        one_round(server)
        one_round(server)
        monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 10**9)
        one_round(server)
    return server


def is_used(server: Server) -> bool:
    store = server._store
    fresh = run_store.eligibility_of(store.plan, store.settings, store._key)
    snapshot = load_snapshot(
        server.folder.snapshot, store._key, server.run_id, run_store.RunState(), fresh
    )
    return snapshot is not None


def test_a_snapshot_that_is_torn_at_any_byte_is_ignored(run):
    server = reopen(run)
    content = server.folder.snapshot.read_bytes()
    assert is_used(server)
    for length in range(len(content)):
        server.folder.snapshot.write_bytes(content[:length])
        assert not is_used(server)
    server.folder.snapshot.write_bytes(content + b"\0")
    assert not is_used(server)
    wanted = replayed(server)
    for length in (0, 64, 65, 66, len(content) // 2, len(content) - 1):
        server.folder.snapshot.write_bytes(content[:length])
        server = reopen(server)
        assert state_of(server) == wanted
    server.close()


def test_a_snapshot_with_any_flipped_bit_is_ignored(run):
    server = reopen(run)
    content = server.folder.snapshot.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        server.folder.snapshot.write_bytes(flipped)
        assert not is_used(server)
    server.close()


def test_an_older_snapshot_leads_to_the_same_state(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 1)
    server = create(tmp_path)
    older = []
    for _ in range(5):
        one_round(server)
        older.append(server.folder.snapshot.read_bytes())
    for content in older:
        server.folder.snapshot.write_bytes(content)
        assert is_used(server)
        server = reopen(server)
        assert state_of(server) == replayed(server)
    server.close()


def test_the_snapshot_of_another_run_with_the_same_key_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 1)
    with create(tmp_path / "a") as one, create(tmp_path / "b") as other:
        one_round(one)
        one_round(other)
        shutil.copy(other.folder.snapshot, one.folder.snapshot)
        assert not is_used(one)
    server = reopen(one)
    assert state_of(server) == replayed(server)
    server.close()


def test_only_the_owner_can_read_a_snapshot_and_it_has_no_names(run):
    assert run.folder.snapshot.stat().st_mode & 0o077 == 0
    assert b"person" not in run.folder.snapshot.read_bytes()


def test_snapshots_are_seldom_while_runs_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 100_000)  # other tests set it lower
    with create(tmp_path) as server:
        for _ in range(5):
            one_round(server)
        assert not server.folder.snapshot.exists()
