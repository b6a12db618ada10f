"""The journal of a run: one line per decision, on the disk before anything follows from it.

Every line carries a keyed digest of itself and of all lines before it. Without the key nobody can
change, remove or reorder lines, except at the end of the file; the end is what the witness
remembers. The witness is a file outside the folder of the run: a folder that was restored from a
backup, or copied, does not know what was released since, and the witness does. Its lock also keeps
two servers from working on one run, wherever the folder is.
"""

import contextlib
import fcntl
import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import STATE, append_durably, read_json, replace_durably
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState
from dpftrl.federated.eligibility import PREFIX
from dpftrl.noise import NoiseKey


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """What one line of the journal says."""


@final
class Created(Record, frozen=True, tag="created"):
    """A run was created: the first line of every journal.

    Attributes:
        run: The identity of the run: 16 random bytes, in hexadecimal.
        settings_sha256: SHA-256 of the file `run.json`.
        plan_sha256: SHA-256 of the file `plan.json`.
        key_fingerprint: The fingerprint of the noise key.
        checkpoint_sha256: SHA-256 of the checkpoint before the first round.
    """

    run: str
    settings_sha256: str
    plan_sha256: str
    key_fingerprint: str
    checkpoint_sha256: str


@final
class Cohort(Record, frozen=True, tag="cohort"):
    """Clients are about to be contacted.

    Attributes:
        attempt: The number of the attempt; attempts are counted from 0 over the whole run.
        row: The row of noise that the attempt takes: the number of rounds committed before it.
        clients: Pseudonyms of the clients, 16 hexadecimal digits each, in rising order, without a
            separator.
        time: The time of the contact in hours, where timers go by time.
        names: Names of the clients in the same order, where the run does not hash them.
    """

    attempt: int
    row: int
    clients: str
    time: float | None = None
    names: tuple[str, ...] | None = None


@final
class Committed(Record, frozen=True, tag="committed"):
    """A round was committed: from here on its model may be released.

    Attributes:
        attempt: The number of the attempt that succeeded.
        row: The row of noise that the round took.
        reports: How many updates are in the sum: the report goal.
        digest: Keyed digest of this sum and of all earlier sums. The noise of the round can be
            computed again from it.
        checkpoint_sha256: SHA-256 of the checkpoint after the round.
        ledger_bytes: Length of the ledger, including the rows of this round.
        ledger_sha256: SHA-256 of these bytes.
        epsilon: Epsilon of everything released so far, at the delta of the plan.
    """

    attempt: int
    row: int
    reports: int
    digest: str
    checkpoint_sha256: str
    ledger_bytes: int
    ledger_sha256: str
    epsilon: float


@final
class Abandoned(Record, frozen=True, tag="abandoned"):
    """An attempt was abandoned: nothing is released, and the next attempt takes the same row."""

    attempt: int
    row: int
    reason: str
    ledger_bytes: int
    ledger_sha256: str


AnyRecord = Created | Cohort | Committed | Abandoned


Keys = NDArray[np.uint64]
# What became of a client's update, as the ledger says it.
Status = Literal["counted", "contacted", "abandoned"]
DIGITS: Final = 16  # of one pseudonym


@final
class RunState:
    """Where a run stands, as its journal tells it.

    Attributes:
        created: The first record of the journal.
        rounds: How many rounds were committed; also the row of noise that the next one takes.
        attempts: How many attempts were made, the open one included.
        pending: The cohort of the open attempt, which is neither committed nor abandoned.
        digests: The keyed digest of each round's sum, in hexadecimal. As secret as the noise.
        checkpoint_sha256: SHA-256 of the newest checkpoint.
        ledger: Length and SHA-256 of the ledger.
        epsilon: Epsilon as journalled after the last round.
        clock: When the last cohort was contacted, in hours, where timers go by time.
    """

    def __init__(self) -> None:
        self.created: Created | None = None
        self.rounds = 0
        self.attempts = 0
        self.pending: Cohort | None = None
        self.digests: list[str] = []
        self.checkpoint_sha256 = ""
        self.ledger: tuple[int, str] | None = None
        self.epsilon = 0.0
        self.clock: float | None = None

    def __repr__(self) -> str:
        return f"RunState({self.rounds} rounds, {self.attempts} attempts)"

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


def statuses(cohort: Cohort, counted: set[int], otherwise: Status) -> list[tuple[str, Status]]:
    """The name of each client of a cohort as the ledger shows it, and what became of its update."""
    names = cohort.names or tuple(
        PREFIX + cohort.clients[i : i + DIGITS] for i in range(0, len(cohort.clients), DIGITS)
    )
    keys = unpacked(cohort.clients).tolist()
    return [
        (name, "counted" if key in counted else otherwise)
        for key, name in zip(keys, names, strict=True)
    ]


def packed(keys: Keys) -> str:
    """Encode pseudonyms as the journal keeps them: 16 hexadecimal digits each."""
    return keys.astype(">u8").tobytes().hex()


def unpacked(clients: str) -> Keys:
    """Decode pseudonyms from the journal; the inverse of `packed`."""
    return np.frombuffer(bytes.fromhex(clients), ">u8").astype(np.uint64)


# The digest that the first line builds on.
START: Final = "0" * 64


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file: a record, and the keyed digest of it and all lines before."""

    mac: str
    record: msgspec.Raw


@final
class Journal:
    """The journal file, which is read once and then appended to.

    Attributes:
        lines: How many lines were read or written so far.
        mac: The keyed digest of the last of them.
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
        """Append a record; on return it is on the disk."""
        try:
            content = msgspec.json.encode(record)
        except UnicodeEncodeError:
            raise InvalidInput("the journal holds valid Unicode, and nothing else") from None
        _decoded(content)  # what could not be read back must never be written
        mac = self._mac(content)
        line = msgspec.json.encode(Line(mac, msgspec.Raw(content))) + b"\n"
        if self.lines:
            append_durably(self._path, line, self._bytes)
        else:  # a journal has a first line, or does not exist
            replace_durably(self._path, line)
        self._move(line, mac)

    def read(self) -> Iterator[tuple[AnyRecord, str]]:
        """Yield every record from the first on, with the keyed digest of its line.

        An incomplete last line is left out: the process was killed while writing it, and nothing
        followed from it. If somebody cut or changed that line instead, the witness notices.
        """
        try:
            with self._path.open("rb") as file:
                yield from self._read(file)
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be read: {error.strerror}") from None

    def _read(self, file: Iterator[bytes]) -> Iterator[tuple[AnyRecord, str]]:
        for line in file:
            known = self._authentic(line)
            if known is None:
                if next(file, None) is not None:
                    raise UnsafeState(
                        f"{self._path}: line {self.lines + 1} was changed, or a line before it is "
                        "missing; the run cannot go on from it"
                    )
                return
            self._move(line, known.mac)
            yield _decoded(bytes(known.record)), known.mac

    def _authentic(self, line: bytes) -> Line | None:
        try:
            known = msgspec.json.decode(line, type=Line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        whole = line.endswith(b"\n")
        fits = hmac.compare_digest(known.mac.encode(), self._mac(bytes(known.record)).encode())
        return known if whole and fits else None

    def _mac(self, content: bytes) -> str:
        keyed = self._hmac.copy()
        keyed.update(bytes.fromhex(self.mac) + content)
        return keyed.hexdigest()

    def _move(self, line: bytes, mac: str) -> None:
        self._bytes += len(line)
        self.lines += 1
        self.mac = mac


def _decoded(content: bytes) -> AnyRecord:
    try:
        return msgspec.json.decode(content, type=AnyRecord)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"the journal cannot hold this: {error}") from None


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


@final
@dataclass(frozen=True)
class Decisions:
    """The journal, the state that follows from it, and the witness: they change together."""

    journal: Journal
    state: RunState
    witness: Witness
    lock: Lock

    def append(self, record: AnyRecord) -> None:
        """Journal a decision; on return it is on the disk, and the witness knows of it."""
        self.state.check(record)
        self.lock.check()
        self.witness.check(self.journal.lines, self.journal.mac)
        self.journal.append(record)
        self.state.follow(record)
        self.witness.remember(self.journal.lines, self.journal.mac)
