"""The power fails, and with it goes what was written but not flushed: released rounds stay."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_run import PLAN, ROUNDS, Place, fast_places, go_on, result, unharmed

from dpftrl import MinSep, account, mechanism
from dpftrl.plan import Plan

CACHES = ("lock", "log.jsonl", "guarantee", "noise.safetensors", "snapshot.bin")


class Platter:
    """What of a folder is on the disk: of a file what it held, of a folder whom, when flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._folders: set[int] = set()
        self._fsync, self._fdatasync = os.fsync, os.fdatasync
        self.flushes = 0
        self.on_flush: Any = lambda: None
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def fsync(self, handle: int) -> None:
        self._fsync(handle)
        self._keep(handle)

    def fdatasync(self, handle: int) -> None:
        self._fdatasync(handle)
        self._keep(handle)

    def _keep(self, handle: int) -> None:
        path, number = Path(os.readlink(f"/proc/self/fd/{handle}")), os.fstat(handle).st_ino
        if path.is_dir():
            inside = {entry.name: entry.inode() for entry in os.scandir(path)}
            self._folders |= {e.inode() for e in os.scandir(path) if e.is_dir()}
            self._entries[number] = inside
        else:
            self._contents[number] = path.read_bytes()
        self.flushes += 1
        self.on_flush()

    def after_loss(self, folder: Path, names_stay: bool) -> dict[str, bytes]:
        """What is left of a folder; names may be on the disk before what they stand for."""
        found: dict[str, bytes] = {}
        live = {entry.name: entry.inode() for entry in os.scandir(folder)}
        known = live if names_stay else self._entries.get(folder.stat().st_ino, {})
        self._gather(folder, known, "", names_stay, found)
        return found

    def _gather(
        self,
        at: Path,
        known: dict[str, int],
        prefix: str,
        names_stay: bool,
        found: dict[str, bytes],
    ) -> None:
        for name, number in known.items():
            if number in self._folders or (at / name).is_dir():
                inside = self._entries.get(number, {})
                if names_stay and (at / name).is_dir():
                    inside = {entry.name: entry.inode() for entry in os.scandir(at / name)}
                self._gather(at / name, inside, f"{prefix}{name}/", names_stay, found)
            else:
                found[prefix + name] = self._contents.get(number, b"")


def put(folder: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def places() -> Iterator[Iterator[Place]]:
    with fast_places() as found:
        yield found


@pytest.fixture
def platter(monkeypatch: pytest.MonkeyPatch) -> Platter:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell what is flushed")
    return Platter(monkeypatch)


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    return unharmed()


@pytest.mark.parametrize("names_stay", [False, True])
def test_after_a_power_loss_at_any_flush_the_run_goes_on(
    platter: Platter, places: Iterator[Place], wanted: dict[str, str], names_stay: bool
) -> None:
    place = next(places)
    left: list[tuple[int, dict[str, bytes], dict[str, bytes]]] = []
    released = 0

    def lose_power() -> None:
        if platter.flushes % 2 == 0 and released:
            kept = platter.after_loss(place.folder, names_stay)
            left.append((released, kept, platter.after_loss(place.state, names_stay)))

    platter.on_flush = lose_power
    with place.create() as server:
        for rounds in range(1, ROUNDS):
            go_on(server, rounds=rounds)
            released = rounds
    platter.on_flush = lambda: None
    assert len(left) > 15
    for had, folder, state in left:
        again = next(places)
        put(again.folder, folder)
        put(again.state, state)
        with again.open() as server:
            assert server.rounds >= had
            go_on(server)
        assert result(again) == wanted


@pytest.mark.parametrize("name", ["blt-b400", "banded:3"])
def test_all_that_a_run_needs_is_flushed(
    platter: Platter, places: Iterator[Place], name: str
) -> None:
    place, clients = next(places), MinSep(ROUNDS, 3)
    promised = account(mechanism(name, clients), clients, noise_multiplier=1.0, delta=1e-6)
    with place.create(plan=Plan(PLAN.fleet, promised)) as server:
        for rounds in range(3):
            go_on(server, rounds=rounds)
            kept = platter.after_loss(place.folder, names_stay=False)
            for path in place.folder.rglob("*"):
                if path.is_file() and not path.name.startswith(CACHES):
                    assert kept[str(path.relative_to(place.folder))] == path.read_bytes()
