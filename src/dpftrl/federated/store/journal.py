"""The journal of a run: one line per decision, written to the disk before the server acts on it.

Every line carries a keyed digest of itself and of all lines before it. Without the key nobody can
change, remove or reorder lines, except that lines can be cut off at the end of the file. The
witness detects this: it is a file outside the folder of the run that records the number of lines
and the digest of the last line. The witness therefore also detects a folder that was restored from
a backup, or copied, and lacks later releases. A lock beside the witness file prevents two servers
from working on one run, even in two copies of its folder.
"""

import contextlib
import errno
import fcntl
import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import (
    STATE,
    append_durably,
    check_own_folder,
    cut_durably,
    open_own,
    read_json,
    replace_file,
)
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState
from dpftrl.federated.eligibility import PREFIX
from dpftrl.noise import NoiseKey
from dpftrl.noise.key import Secret


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The content of one line of the journal."""


@final
class Created(Record, frozen=True, tag="created", omit_defaults=True):
    """The run was created. This is the first record of every journal.

    Attributes:
        run: The identity of the run: 16 random bytes, in hexadecimal.
        settings_sha256: SHA-256 of the file `run.json`.
        plan_sha256: SHA-256 of the file `plan.json`.
        key_fingerprint: The fingerprint of the noise key.
        checkpoint_sha256: SHA-256 of the checkpoint before the first round.
        files: SHA-256 of further files of the run, by name, such as a configuration. Journals
            of version 0.1 have no such digests.
    """

    run: str
    settings_sha256: str
    plan_sha256: str
    key_fingerprint: str
    checkpoint_sha256: str
    files: dict[str, str] = {}


@final
class Cohort(Record, frozen=True, tag="cohort"):
    """A cohort was chosen, and its clients are about to be contacted.

    Attributes:
        attempt: The number of the attempt; attempts are counted from 0 over the whole run.
        row: The row of noise that the attempt uses: the number of rounds committed before it.
        clients: Pseudonyms of the clients, 16 hexadecimal digits each, in rising order, without a
            separator.
        time: The time of the contact in hours; None unless the timers of the run count hours.
        names: Names of the clients in the same order; None if the run stores only pseudonyms.
    """

    attempt: int
    row: int
    clients: str
    time: float | None = None
    names: tuple[str, ...] | None = None


@final
class Committed(Record, frozen=True, tag="committed"):
    """A round was committed. From now on its model may be released.

    Attributes:
        attempt: The number of the attempt that succeeded.
        row: The row of noise that the round used.
        reports: The number of updates in the sum, which is the report goal.
        digest: Keyed digest of this sum and of all earlier sums. With the noise key, the noise of
            the round can be recomputed from this digest.
        checkpoint_sha256: SHA-256 of the checkpoint after the round.
        ledger_bytes: Length of the ledger, including the rows of this round.
        ledger_sha256: SHA-256 of the first `ledger_bytes` bytes of the ledger.
        epsilon: Epsilon of everything released so far, at the delta of the plan.
    """

    attempt: int
    row: int
    reports: int
    digest: msgspec.Raw  # a Raw value: a traceback would show the content of a string
    checkpoint_sha256: str
    ledger_bytes: int
    ledger_sha256: str
    epsilon: float


@final
class Abandoned(Record, frozen=True, tag="abandoned"):
    """An attempt was abandoned: nothing is released, and the next attempt uses the same row.

    Attributes:
        attempt: The number of the attempt.
        row: The row of noise that it was for.
        reason: Why it was abandoned.
        ledger_bytes: Length of the ledger, including the rows of this attempt.
        ledger_sha256: SHA-256 of the ledger up to that length.
    """

    attempt: int
    row: int
    reason: str
    ledger_bytes: int
    ledger_sha256: str


AnyRecord = Created | Cohort | Committed | Abandoned


Keys = NDArray[np.uint64]
# The status of a client's update in the ledger.
Status = Literal["counted", "contacted", "abandoned"]
DIGITS: Final = 16  # hexadecimal digits of one pseudonym


@final
class RunState:
    """The current state of a run, computed from the records of its journal.

    Attributes:
        created: The first record of the journal.
        rounds: Number of committed rounds, which is also the row of noise of the next round.
        attempts: Number of attempts so far, including the open one.
        pending: The cohort of the open attempt (not committed or abandoned); None if there is none.
        digests: The keyed digest of each round's sum. They are as secret as the noise.
        checkpoint_sha256: SHA-256 of the newest checkpoint.
        ledger: Length and SHA-256 of the ledger after the last attempt that ended.
        epsilon: Epsilon in the record of the last committed round.
        clock: Time of the last contact in hours; None unless the timers of the run count hours.
    """

    def __init__(self) -> None:
        self.created: Created | None = None
        self.rounds = 0
        self.attempts = 0
        self.pending: Cohort | None = None
        self.digests: list[msgspec.Raw] = []
        self.checkpoint_sha256 = ""
        self.ledger: tuple[int, str] | None = None
        self.epsilon = 0.0
        self.clock: float | None = None

    def __repr__(self) -> str:
        return f"RunState({self.rounds} rounds, {self.attempts} attempts)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RunState cannot be pickled or copied: it holds secret digests")

    def follow(self, record: AnyRecord) -> None:
        """Apply one journal record to the state."""
        self.check(record)
        if isinstance(record, Created):
            self.created = record
            self.checkpoint_sha256 = record.checkpoint_sha256
        elif isinstance(record, Cohort):
            self.pending = record
            self.attempts += 1
            self.clock = record.time
        else:
            self.pending = None
            self.ledger = (record.ledger_bytes, record.ledger_sha256)
        if isinstance(record, Committed):
            self.rounds += 1
            self.digests.append(record.digest)
            self.checkpoint_sha256 = record.checkpoint_sha256
            self.epsilon = record.epsilon

    def check(self, record: AnyRecord) -> None:
        """Refuse a record that cannot follow the records before it."""
        if not self._fits(record):
            raise UnsafeState(
                f"the journal makes no sense: after {self.rounds} rounds and {self.attempts} "
                f"attempts comes {type(record).__name__.lower()}"
            )

    def _fits(self, record: AnyRecord) -> bool:
        if isinstance(record, Created):
            return self.created is None
        if isinstance(record, Cohort):
            is_next = (record.attempt, record.row) == (self.attempts, self.rounds)
            return self.created is not None and self.pending is None and is_next
        pending = self.pending
        return pending is not None and (
            (record.attempt, record.row) == (pending.attempt, pending.row)
        )


def digest_of(raw: msgspec.Raw) -> Secret:
    """The digest in a record, decoded from a hexadecimal JSON string.

    Raises:
        UnsafeState: The value is not a hexadecimal string.
    """
    try:
        return Secret(memoryview(bytes.fromhex(msgspec.json.decode(raw, type=str))))
    except (ValueError, msgspec.MsgspecError):
        raise UnsafeState("the journal makes no sense: a digest is not hexadecimal") from None


def statuses(cohort: Cohort, counted: set[int], otherwise: Status) -> list[tuple[str, Status]]:
    """The name of each client of a cohort in the ledger, and the status of its update.

    Args:
        cohort: The record of the cohort.
        counted: Pseudonyms of the clients whose updates are in the sum.
        otherwise: The status of all other clients.
    """
    names = cohort.names or tuple(
        PREFIX + cohort.clients[i : i + DIGITS] for i in range(0, len(cohort.clients), DIGITS)
    )
    keys = unpacked(cohort.clients).tolist()
    return [
        (name, "counted" if key in counted else otherwise)
        for key, name in zip(keys, names, strict=True)
    ]


def packed(keys: Keys) -> str:
    """Encode pseudonyms as the journal stores them: 16 hexadecimal digits each."""
    return keys.astype(">u8").tobytes().hex()


def unpacked(clients: str) -> Keys:
    """Decode pseudonyms from the journal; the inverse of `packed`."""
    return np.frombuffer(bytes.fromhex(clients), ">u8").astype(np.uint64)


# The digest that the first line uses in place of the digest of a line before it.
START: Final = "0" * 64


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file: a record, and the keyed digest of this record and all before it."""

    mac: str
    record: msgspec.Raw


@final
class Journal:
    """The journal file, which is read once and then appended to.

    Attributes:
        lines: Number of lines read or written so far.
        mac: The keyed digest of the last line read or written.
    """

    def __init__(self, path: Path, key: NoiseKey):
        self._path = path
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
        _decoded(content)  # raises for a record that could not be read back
        mac = self._mac(content)
        line = memoryview(msgspec.json.encode(Line(mac, msgspec.Raw(content))) + b"\n")
        if self.lines:
            append_durably(self._path, line, self._bytes)
        else:  # the first line creates the file, so that no journal is ever empty
            replace_file(self._path, line, private=True)
        self._move(line, mac)

    def read(self) -> Iterator[tuple[AnyRecord, str]]:
        """Yield every record from the first on, with the keyed digest of its line.

        An incomplete last line is left out: the process was killed while writing it, and had not
        acted on it yet. If somebody cut or changed that line instead, the witness detects it.
        """
        try:
            with os.fdopen(open_own(self._path), "rb") as file:
                yield from self._read(map(memoryview, file))
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be read: {error.strerror}") from None

    def cut(self) -> None:
        """Cut off an incomplete last line."""
        cut_durably(self._path, self._bytes)

    def _read(self, lines: Iterator[memoryview]) -> Iterator[tuple[AnyRecord, str]]:
        for line in lines:
            known = self._authentic(line)
            if known is None:
                if next(lines, None) is not None:
                    raise UnsafeState(
                        f"{self._path}: line {self.lines + 1} was changed, or a line before it is "
                        "missing; the run cannot go on from it"
                    )
                return
            self._move(line, known.mac)
            yield _decoded(memoryview(known.record)), known.mac

    def _authentic(self, line: memoryview) -> Line | None:
        """Parse a line; None if the line is incomplete or has a wrong keyed digest."""
        try:
            known = msgspec.json.decode(line, type=Line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        mac = self._mac(memoryview(known.record))
        # `verify` accepts no other spelling of a line either, such as one with more spaces.
        expected = memoryview(msgspec.json.encode(Line(mac, known.record)) + b"\n")
        return known if hmac.compare_digest(line, expected) else None

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


def _encoded(record: AnyRecord) -> memoryview:
    """Encode a record as JSON, in a memoryview, because tracebacks do not show its content."""
    try:
        return memoryview(msgspec.json.encode(record))
    except UnicodeEncodeError:
        raise InvalidInput("the journal holds valid Unicode, and nothing else") from None


def _decoded(content: memoryview) -> AnyRecord:
    try:
        return msgspec.json.decode(content, type=AnyRecord)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"the journal cannot hold this: {error}") from None


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

    One server at a time holds the lock of the witness.
    """

    def __init__(self, folder: Path, run: str):
        self._run = run
        self._path = folder / f"{run}.json"
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
        if found.run != self._run:
            raise UnsafeState(f"{self._path} is the witness of another run, {found.run:.40}")
        return found

    def check(self, lines: int, mac: str) -> None:
        """Raise an error if another server has worked on the run in the meantime."""
        self._lock.check()
        seen = self.seen()
        if seen is None or (seen.lines, seen.mac) != (lines, mac):
            raise UnsafeState(
                f"somebody else has worked on this run, or changed {self._path}; open it again"
            )

    def remember(self, lines: int, mac: str) -> None:
        """Record the number of lines in the journal, and the digest of the last line."""
        content = msgspec.json.encode(WitnessFile("dpftrl witness", 1, self._run, lines, mac))
        replace_file(self._path, content, private=True)

    def close(self) -> None:
        """Release the lock, so that another server can open the run."""
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
            raise RunInUse(
                f"another server (process {holder or 'unknown'}) is working on this run; "
                "wait for it, or stop it"
            ) from None
        with contextlib.suppress(OSError):  # the process id only improves the message above
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, str(self._process).encode(), 0)

    def check(self) -> None:
        """Raise an error if the lock file was replaced: another process may hold the new file."""
        try:
            here, there = os.fstat(self._handle), self._path.stat()
        except OSError:
            here = there = None
        if here is None or there is None or not os.path.samestat(here, there):
            raise UnsafeState(f"{self._path} was removed while this server worked; open it again")

    def close(self) -> None:
        """Release the lock. A forked copy of this process only closes its own handle."""
        if self._handle >= 0:
            if os.getpid() == self._process:
                fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
            self._handle = -1


@final
@dataclass(frozen=True)
class Decisions:
    """The journal, the state that follows from it, and the witness: they change together.

    `lock` is the lock on the folder of the run.
    """

    journal: Journal
    state: RunState
    witness: Witness
    lock: Lock

    def append(self, record: AnyRecord) -> None:
        """Append a decision to the journal on the disk, then update the state and the witness."""
        self.state.check(record)
        self.lock.check()
        self.witness.check(self.journal.lines, self.journal.mac)
        self.journal.append(record)
        self.state.follow(record)
        self.witness.remember(self.journal.lines, self.journal.mac)
