"""The witness: what a run has journalled, remembered outside the folder of the run.

A folder that was restored from a backup, or copied, does not know what was released since. The
witness does. Its lock also keeps two servers from working on one run, wherever the folder is.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Literal, final

import msgspec

from dpftrl._internal.storage import STATE, read_json, replace_durably
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState


class WitnessFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the witness file."""

    format: Literal["dpftrl witness"]
    version: Literal[1]
    run: str
    lines: int
    mac: str


@final
class Witness:
    """The witness of one run, locked by one server at a time."""

    def __init__(self, folder: Path, run: str):
        self._run = run
        self._path = folder / f"{run}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidInput(
                f"{folder} cannot be made: {error.strerror}; ${STATE} names another folder"
            ) from None
        self._lock = Lock(folder / f"{run}.lock")

    def seen(self) -> WitnessFile | None:
        """What the witness remembers, or None if there is no witness file."""
        if not self._path.exists():
            return None
        found = read_json(self._path, WitnessFile, "witness")
        if found.run != self._run:
            raise UnsafeState(f"{self._path} is the witness of another run, {found.run:.40}")
        return found

    def check(self, lines: int, mac: str) -> None:
        """Refuse to go on if another server has worked on the run meanwhile."""
        self._lock.check()
        seen = self.seen()
        if seen is None or (seen.lines, seen.mac) != (lines, mac):
            raise UnsafeState(
                f"somebody else has worked on this run, or changed {self._path}; open it again"
            )

    def remember(self, lines: int, mac: str) -> None:
        """Record the number of lines in the journal, and the digest of the last one."""
        content = msgspec.json.encode(WitnessFile("dpftrl witness", 1, self._run, lines, mac))
        replace_durably(self._path, content)

    def close(self) -> None:
        """Let another server have the run."""
        self._lock.close()


@final
class Lock:
    """A file lock: one process holds it, and the system releases it when that process ends."""

    def __init__(self, path: Path):
        self._path = path
        self._process = os.getpid()
        try:
            self._handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(f"{path} cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._handle, 20, 0).decode(errors="replace").strip()
            os.close(self._handle)
            raise RunInUse(
                f"another server (process {holder or 'unknown'}) is working on this run; "
                "wait for it, or stop it"
            ) from None
        with contextlib.suppress(OSError):  # who holds it is a courtesy, for the message above
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, str(self._process).encode(), 0)

    def check(self) -> None:
        """Refuse to go on if the lock file was replaced: another process may hold the new one."""
        try:
            here, there = os.fstat(self._handle), self._path.stat()
        except OSError:
            here = there = None
        if here is None or there is None or not os.path.samestat(here, there):
            raise UnsafeState(f"{self._path} was removed while this server worked; open it again")

    def close(self) -> None:
        """Release the lock. A copy of this process by fork closes its handle only."""
        if self._handle >= 0:
            if os.getpid() == self._process:
                fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
            self._handle = -1
