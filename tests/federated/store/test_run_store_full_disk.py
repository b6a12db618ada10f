"""A disk that is full, at every write: a clear error, nothing lost, and on it goes with space."""

import builtins
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from killed_run import (
    ABANDONED,
    NAMES,
    ROUNDS,
    Place,
    fast_places,
    go_on,
    result,
    take_reports,
    unharmed,
)

from dpftrl.accounting import load_guarantee
from dpftrl.errors import InvalidInput
from dpftrl.journal import WITNESS_BYTES

NEVER = 10**9


class Disk:
    """Takes so many writes, and then none until there is space again."""

    def __init__(self) -> None:
        self.space = NEVER
        self.writes = 0
        self.name = ""

    def write(self, name: str) -> None:
        self.writes += 1
        if self.writes > self.space:
            self.name = name
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_after(self, writes: int) -> None:
        self.space, self.writes = writes, 0

    def make_space(self) -> None:
        self.space = NEVER


def patched(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    """All ways in which a run writes; a write fails before, halfway or at the flush after it."""
    honest: dict[str, Callable[..., Any]] = {
        name: getattr(os, name)
        for name in ("open", "pwrite", "fsync", "fdatasync", "replace", "mkdir")
    }

    def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):
            disk.write("open")
        return honest["open"](path, flags, *rest, **options)

    def pwrite(handle: int, content: bytes, at: int) -> int:
        try:
            disk.write("pwrite")
        except OSError:
            # A witness is overwritten within one sector, of which disks write all or nothing.
            is_sector = at == 0 and len(content) == WITNESS_BYTES
            if is_sector or len(content) < 2 or disk.writes > disk.space + 1:
                raise
            return honest["pwrite"](handle, content[: len(content) // 2], at)
        return honest["pwrite"](handle, content, at)

    def plain(name: str) -> Callable[..., Any]:
        def full(*args: Any, **options: Any) -> Any:
            disk.write(name)
            return honest[name](*args, **options)

        return full

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", pwrite)
    for name in ("fsync", "fdatasync", "replace", "mkdir"):
        monkeypatch.setattr(os, name, plain(name))
    monkeypatch.setattr(os, "fdopen", partial(FullFile, disk, os.fdopen))


class FullFile:
    """A file that is written through a descriptor; half of what is too much is written."""

    def __init__(self, disk: Disk, fdopen: Callable[..., Any], handle: int, mode: str) -> None:
        self._disk = disk
        self._file = fdopen(handle, mode)

    def __enter__(self) -> "FullFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: bytes) -> int:
        try:
            self._disk.write("write")
        except OSError:
            self._file.write(content[: len(content) // 2])
            raise
        return self._file.write(content)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    patched(monkeypatch, found)
    return found


@pytest.fixture
def places() -> Iterator[Iterator[Place]]:
    with fast_places() as found:
        yield found


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    return unharmed()


def ran_out(act: Callable[[], object]) -> bool:
    """Whether there was no space for it; then it says so, in one line."""
    try:
        act()
    except InvalidInput as error:
        reason = str(error)
    else:
        return False
    assert "No space left" in reason
    assert "\n" not in reason
    return True


def step(place: Place, rounds: int) -> int:
    """Open or begin a run, and make one round of it."""
    with place.open_or_create() as server:
        go_on(server, rounds=rounds)
        return server.rounds


def test_a_disk_that_fills_up_during_a_creation(
    disk: Disk, places: Iterator[Place], wanted: dict[str, str]
) -> None:
    writes = 0
    for writes in range(200):
        place = next(places)
        disk.fill_after(writes)
        is_full = ran_out(lambda place=place: place.create().close())
        disk.make_space()
        step(place, ROUNDS if writes % 5 == 0 else 0)
        assert writes % 5 or result(place) == wanted
        if not is_full:
            break
    assert 20 < writes < 199


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_disk_that_fills_up_during_a_round(
    disk: Disk, places: Iterator[Place], wanted: dict[str, str], rounds: int
) -> None:
    """The second round saves the noise; an attempt is abandoned before the third."""
    assert ABANDONED == 2
    failures = 0
    for writes in range(0, 200, rounds - 1):  # the third is twice as long
        place = next(places)
        step(place, rounds - 1)
        disk.fill_after(writes)
        failures += ran_out(lambda place=place: step(place, rounds))
        is_over = disk.writes <= disk.space
        disk.make_space()
        assert step(place, rounds) == rounds  # in the same process: no lock is left
        if writes % 6 == 0:
            step(place, ROUNDS)
            assert result(place) == wanted
        if is_over:
            break
    assert failures > 15, failures


def test_a_server_that_could_not_write_says_so_and_can_be_closed(
    disk: Disk, places: Iterator[Place], wanted: dict[str, str]
) -> None:
    place = next(places)
    with place.create() as server:
        attempt = server.begin(NAMES)
        take_reports(attempt)
        disk.fill_after(0)
        assert ran_out(partial(server.commit, attempt))
        assert server.rounds == 0
        assert not server.model.any()
        disk.make_space()
        with pytest.raises(InvalidInput, match="resume the run"):
            server.commit(attempt)
    step(place, ROUNDS)
    assert result(place) == wanted


def test_a_guarantee_never_says_less_than_what_is_released(
    disk: Disk, places: Iterator[Place]
) -> None:
    """However a commit fails, a model that can be had is covered by the file beside it."""
    for writes in range(40):
        place = next(places)
        step(place, 1)
        with place.open() as server:
            old = server.model.tobytes()
            attempt = server.begin(NAMES)
            take_reports(attempt)
            disk.fill_after(writes)
            ran_out(partial(server.commit, attempt))
            disk.make_space()
            if server.model.tobytes() != old:
                said = load_guarantee(place.folder / "guarantee.json")
                assert said.epsilon >= server.epsilon
                assert server.rounds == 2


def mounted(folder: Path, size: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if not mounted(folder, "512k"):
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, left: int) -> Path:
    """Leave so many pages of 4 KiB."""
    ballast = folder / "ballast"
    with builtins.open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
        os.ftruncate(file.fileno(), max(0, file.tell() - left * 4096))
    return ballast


@pytest.mark.parametrize("where", ["all", "state", "folder"])
def test_a_small_disk(small_disk: Path, tmp_path: Path, wanted: dict[str, str], where: str) -> None:
    """A real file system, whose pages run out in the midst of whatever is written."""
    folder = (tmp_path if where == "state" else small_disk) / "run"
    place = Place(folder, (tmp_path if where == "folder" else small_disk) / "state")
    with place.create() as server:
        go_on(server, rounds=1)
    failures = 0
    for left in range(14):
        ballast = fill(small_disk, left)
        rounds = min(ROUNDS, 2 + left // 3)
        failures += ran_out(lambda rounds=rounds: step(place, rounds))
        ballast.unlink()
    assert failures > 0
    step(place, ROUNDS)
    assert result(place) == wanted
