"""The journal of a run: one line per decision, written to the disk before anything acts on it.

Every line carries a keyed digest of itself and of all lines before it. Without the key nobody can
change, remove or reorder lines, except that lines can be cut off at the end of the file. The
witness detects this: it is a file outside the folder of the run that records the number of lines
and the digest of the last line. The witness therefore also detects a folder that was restored from
a backup, or copied, and lacks later releases. A lock beside the witness file prevents two processes
from working on one run, even in two copies of its folder.

Which records a journal holds is decided by its user: `dpftrl.federated` or `dpftrl.centralized`.
"""

import contextlib
import errno
import fcntl
import hmac
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, final

import msgspec

from dpftrl._internal.storage import (
    STATE,
    append_durably,
    check_own_folder,
    cut_durably,
    default_state_folder,
    open_own,
    overwrite_durably,
    read_file,
    read_json,
    replace_file,
)
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState
from dpftrl.noise import NoiseKey
from dpftrl.noise.key import Secret


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The content of one line of a journal."""


AnyRecord = TypeVar("AnyRecord", bound=Record)


# Size of a witness file. It lies in one sector, so that a disk writes all of it or nothing.
WITNESS_BYTES: Final = 512
# The digest that the first line uses in place of the digest of a line before it.
START: Final = "0" * 64


# One line of the file: a record, and the keyed digest of this record and all before it.
BEFORE_MAC: Final = b'{"mac":"'
BEFORE_RECORD: Final = b'","record":'
AFTER_RECORD: Final = b"}\n"
RECORD_FROM: Final = len(BEFORE_MAC) + len(START) + len(BEFORE_RECORD)


def _line(mac: str, content: memoryview) -> memoryview:
    """The line of a record, in a memoryview, because tracebacks do not show its content."""
    return memoryview(b"".join((BEFORE_MAC, mac.encode(), BEFORE_RECORD, content, AFTER_RECORD)))


@final
class Journal(Generic[AnyRecord]):
    """The journal file, which is read once and then appended to.

    Args:
        path: The file.
        key: The noise key of the run. A key for the digests of lines is derived from it.
        kinds: The type of its records, which may be a union.

    Attributes:
        lines: Number of lines read or written so far.
        mac: The keyed digest of the last line read or written.
    """

    def __init__(self, path: Path, key: NoiseKey, kinds: Any):
        self._path = path
        self._kinds = kinds
        secret = key.derive(b"journal")
        self._hmac = hmac.new(secret.secret_bytes(), digestmod="sha256")
        self._bytes = 0
        self.lines = 0
        self.mac = START

    def __repr__(self) -> str:
        return f"Journal({self._path}, {self.lines} lines)"

    def append(self, record: AnyRecord) -> None:
        """Append a record. When the method returns, the record is on the disk."""
        content = _encoded(record)
        self._decoded(content)  # raises for a record that could not be read back
        mac = self._mac(content)
        line = _line(mac, content)
        if self.lines:
            append_durably(self._path, line, self._bytes)
        else:  # the first line creates the file, so that no journal is ever empty
            replace_file(self._path, line, private=True)
        self._move(line, mac)

    def read(self, skip: int = 0) -> Iterator[tuple[AnyRecord | None, str]]:
        """Yield every record from the first on, with the keyed digest of its line.

        An incomplete last line is left out: the process was killed while writing it, and had not
        acted on it yet. If somebody cut or changed that line instead, the witness detects it.

        Args:
            skip: Number of lines whose digests are checked, but whose records are not decoded:
                None stands for them.
        """
        try:
            with os.fdopen(open_own(self._path), "rb") as file:
                yield from self._read(map(memoryview, file), skip)
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be read: {error.strerror}") from None

    def cut(self) -> None:
        """Cut off an incomplete last line."""
        cut_durably(self._path, self._bytes)

    def _read(
        self, lines: Iterator[memoryview], skip: int
    ) -> Iterator[tuple[AnyRecord | None, str]]:
        for line in lines:
            content = line[RECORD_FROM : -len(AFTER_RECORD)]
            mac = self._mac(content)
            # `verify` accepts no other spelling of a line either, such as one with more spaces.
            if not hmac.compare_digest(line, _line(mac, content)):
                if next(lines, None) is not None:
                    raise UnsafeState(
                        f"{self._path}: line {self.lines + 1} was changed, or a line before it is "
                        "missing; the run cannot go on from it"
                    )
                return
            self._move(line, mac)
            yield (self._decoded(content) if self.lines > skip else None), mac

    def _decoded(self, content: memoryview) -> AnyRecord:
        try:
            return msgspec.json.decode(content, type=self._kinds)
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"the journal cannot hold this: {error}") from None

    def _mac(self, content: memoryview) -> str:
        """The keyed digest of a record that follows the lines so far."""
        keyed = self._hmac.copy()
        keyed.update(bytes.fromhex(self.mac))
        keyed.update(content)
        return keyed.hexdigest()

    def _move(self, line: memoryview, mac: str) -> None:
        """Count a line that was read or written, and keep its keyed digest."""
        self._bytes += len(line)
        self.lines += 1
        self.mac = mac


def _encoded(record: Record) -> memoryview:
    """Encode a record as JSON, in a memoryview, because tracebacks do not show its content."""
    try:
        return memoryview(msgspec.json.encode(record))
    except UnicodeEncodeError:
        raise InvalidInput("the journal holds valid Unicode, and nothing else") from None


class WitnessFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the witness file.

    Attributes:
        run: The identity of the run.
        lines: The number of lines in the journal when the witness was last written.
        mac: The keyed digest of the last of these lines.
    """

    format: Literal["dpftrl witness"]
    version: Literal[1]
    run: str
    lines: int
    mac: str


@final
class Witness:
    """The witness of one run: the length and the last digest of its journal, in another folder.

    One process at a time holds the lock of the witness.
    """

    def __init__(self, folder: Path, run: str):
        self._run = run
        self._path = folder / f"{run}.json"
        self._handle = -1  # of the file that this process has written
        self._content = b""  # what this process has written to it last
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidInput(
                f"{folder} cannot be made: {error.strerror}; ${STATE} names another folder"
            ) from None
        check_own_folder(folder, may_be_link=True)
        self._lock = Lock(folder / f"{run}.lock")
        for draft in folder.glob(f".{run}.json.*"):  # drafts of processes that were killed
            with contextlib.suppress(OSError):
                draft.unlink()

    def seen(self) -> WitnessFile | None:
        """The content of the witness file, or None if there is no such file."""
        if not self._path.exists():
            return None
        found = read_json(self._path, WitnessFile, "witness", own=True)
        if not read_file(self._path, own=True).rstrip(b" ").endswith(b"}"):
            raise UnsafeState(f"{self._path} was changed: it does not end in spaces")
        if found.run != self._run:
            raise UnsafeState(f"{self._path} is the witness of another run, {found.run:.40}")
        return found

    def check(self) -> None:
        """Raise an error if the file is not what this process has written last."""
        self._lock.check()
        if not self._holds(self._content):
            raise UnsafeState(
                f"somebody else has worked on this run, or changed {self._path}; open it again"
            )

    def remember(self, lines: int, mac: str) -> None:
        """Record the number of lines in the journal, and the digest of the last line.

        The first time, a new file replaces the old one. After that the file is overwritten in
        place, which takes a tenth of the time.
        """
        known = WitnessFile("dpftrl witness", 1, self._run, lines, mac)
        content = msgspec.json.encode(known).ljust(WITNESS_BYTES)
        if self._is_current():
            overwrite_durably(self._path, self._handle, content)
        else:
            self._forget_handle()
            replace_file(self._path, content, private=True)
            try:
                self._handle = open_own(self._path, os.O_RDWR)
            except OSError as error:
                raise InvalidInput(f"{self._path} cannot be opened: {error.strerror}") from None
        self._content = content

    def _holds(self, content: bytes) -> bool:
        """Whether the file at the path has this content."""
        if self._is_current():
            return os.pread(self._handle, len(content) + 1, 0) == content
        return self._path.exists() and read_file(self._path, own=True) == content

    def _is_current(self) -> bool:
        """Whether the file at the path is still the one that this process has written."""
        return self._handle >= 0 and _is_at(self._handle, self._path)

    def _forget_handle(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def close(self) -> None:
        """Release the lock, so that another process can open the run."""
        self._forget_handle()
        self._lock.close()


@final
class Lock:
    """A file lock: one process holds it, and the system releases it when that process ends."""

    def __init__(self, path: Path):
        self._path = path
        self._process = os.getpid()
        try:
            self._handle = open_own(path, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise InvalidInput(f"{path} cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._handle, 20, 0).decode(errors="replace").strip()
            os.close(self._handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise InvalidInput(
                    f"{path} cannot be locked: {error.strerror}; use a file system with locks, "
                    "such as a local disk"
                ) from None
            if holder == str(self._process):
                raise RunInUse(
                    "another object of this process is using this run; close() it first"
                ) from None
            raise RunInUse(
                f"another program (process {holder or 'unknown'}) is using this run; "
                "wait for it, or stop it"
            ) from None
        with contextlib.suppress(OSError):  # the process id only improves the message above
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, str(self._process).encode(), 0)
        _LOCKS.add(self)

    def check(self) -> None:
        """Raise an error if the lock file was replaced: another process may hold the new file."""
        if not _is_at(self._handle, self._path):
            raise UnsafeState(f"{self._path} was removed while the run was open; open it again")

    def close(self) -> None:
        """Release the lock. A forked copy of this process only closes its own handle."""
        if self._handle >= 0:
            if os.getpid() == self._process:
                fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
            self._handle = -1


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


# All locks of this process. Processes that are forked from it, such as those that load examples,
# must not keep them.
_LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _close_locks() -> None:
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_close_locks)


@final
@dataclass(frozen=True)
class Chain(Generic[AnyRecord]):
    """A journal and its witness, which change together.

    `lock` is the lock on the folder of the run.
    """

    journal: Journal[AnyRecord]
    witness: Witness
    lock: Lock

    def begin(self) -> None:
        """Write the witness of a new journal: if it is missing later, somebody removed it."""
        self.witness.remember(self.journal.lines, self.journal.mac)

    def append(self, record: AnyRecord) -> None:
        """Append a record to the journal on the disk, then to the witness."""
        self.lock.check()
        self.witness.check()
        self.journal.append(record)
        self.witness.remember(self.journal.lines, self.journal.mac)

    def read(
        self, folder: Path, trust_folder: bool, after: tuple[int, str] = (0, START)
    ) -> Iterator[AnyRecord]:
        """Yield all records. At the end, refuse a journal that is not what the witness has seen.

        Args:
            folder: The folder of the run, for messages.
            trust_folder: Accept a missing or an older witness.
            after: The number and the digest of a line that the journal must have. The records up
                to it are not decoded; the digests of their lines are checked all the same.

        Raises:
            UnsafeState: The folder was rolled back or changed, or the witness is missing.
        """
        journal, seen = self.journal, self.witness.seen()
        # The journal is written before the witness: a killed process leaves a witness that has seen
        # all lines but the last.
        newest = [(journal.lines, journal.mac)]
        is_known = False
        has_line = after == newest[0]
        for record, mac in journal.read(skip=after[0]):
            has_line |= (journal.lines, mac) == after
            if record is not None and has_line:
                yield record
            newest = [newest[-1], (journal.lines, mac)]
            is_known |= seen is not None and (journal.lines, mac) == (seen.lines, seen.mac)
        if seen is None and not trust_folder:
            raise UnsafeState(
                f"the witness of this run is missing, so nobody knows whether {folder} is its "
                "newest state; bring the witness along, and name its folder as state_folder "
                "(--state-folder), or say that you trust the folder with trust_folder=True "
                "(--trust-folder)"
            )
        if not has_line:
            raise UnsafeState(
                f"{folder} was rolled back: its snapshot was written after line {after[0]} of a "
                f"journal of this run, and the journal of {journal.lines} lines has no such line"
            )
        if seen is None or (seen.lines, seen.mac) in newest:
            return
        if is_known and trust_folder:
            return
        if is_known:
            raise UnsafeState(
                f"the journal in {folder} has {journal.lines} lines, and the witness has seen "
                f"{seen.lines}: lines were added, or the witness is an old copy; bring the newest "
                "witness along, or say that you trust the folder with trust_folder=True "
                "(--trust-folder)"
            )
        raise UnsafeState(
            f"{folder} was rolled back or changed: its journal has {journal.lines} lines, and the "
            f"witness has seen {seen.lines}; going on could use the same noise twice; restore "
            "the newest state of the folder, or start in another folder"
        )

    def resume(self) -> None:
        """Cut off an incomplete last line, and let the witness catch up with the journal."""
        self.journal.cut()
        self.witness.remember(self.journal.lines, self.journal.mac)


def witness_folder(folder: Path, state_folder: Path | None) -> Path:
    """The folder for the witness of a run; it must lie outside the folder of the run."""
    place = state_folder or default_state_folder()
    if Path(os.path.realpath(place)).is_relative_to(Path(os.path.realpath(folder))):
        raise InvalidInput(
            f"{place} lies in the folder of the run: a witness there would be rolled back with it"
        )
    return place


def digest_of(raw: msgspec.Raw) -> Secret:
    """The digest in a record, decoded from a hexadecimal JSON string.

    Raises:
        UnsafeState: The value is not a hexadecimal string.
    """
    try:
        return Secret(memoryview(bytes.fromhex(msgspec.json.decode(raw, type=str))))
    except (ValueError, msgspec.MsgspecError):
        raise UnsafeState("the journal makes no sense: a digest is not hexadecimal") from None
