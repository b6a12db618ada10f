"""The journal of a run: one line a decision, on the disk before anything follows from it.

Every line carries a keyed digest of itself and of all lines before it, so that nobody without the
key can change, drop or reorder any but the last ones; and those the witness remembers.
"""

import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import append_durably, replace_durably
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.noise import NoiseKey


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """One line."""


@final
class Created(Record, frozen=True, tag="created"):
    """A run begins.

    Attributes:
        run: Its identity: 16 random bytes, in hexadecimal.
        settings_sha256: Of the file `run.json`.
        plan_sha256: Of the file `plan.json`.
        key_fingerprint: Tells noise keys apart.
        checkpoint_sha256: Of the checkpoint before the first round.
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
        attempt: Counts all attempts, from 0.
        row: The row of noise that it is for: rounds committed before it.
        clients: Their pseudonyms, 16 hexadecimal digits each, in rising order, without a separator.
        time: When, in hours, where timers go by time.
        names: Their names in the same order, where the run does not hash them.
    """

    attempt: int
    row: int
    clients: str
    time: float | None = None
    names: tuple[str, ...] | None = None


@final
class Committed(Record, frozen=True, tag="committed"):
    """A round is done: what it made may be released from here on.

    Attributes:
        attempt: Which attempt it was.
        row: The row of noise that it took.
        reports: Updates in the sum: the report goal.
        digest: Keyed digest of the sum and all before: the noise is made again from it.
        checkpoint_sha256: Of the model and the optimiser after the round.
        ledger_bytes: Length of the ledger with this round's rows.
        ledger_sha256: Of so many bytes.
        epsilon: What everything released so far guarantees, at the plan's delta.
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
    """Too few reported: nothing is released, and the next attempt takes the same row."""

    attempt: int
    row: int
    reason: str
    ledger_bytes: int
    ledger_sha256: str


AnyRecord = Created | Cohort | Committed | Abandoned


Keys = NDArray[np.uint64]


@final
class RunState:
    """The journal so far, in short.

    Attributes:
        created: Its first line.
        rounds: Rounds committed: the row of noise that comes next.
        attempts: Attempts begun.
        pending: The cohort of an attempt that has neither been committed nor abandoned.
        digests: Keyed digests of the rounds' sums, in hexadecimal: as secret as the noise.
        checkpoint_sha256: Of the model and the optimiser as they stand.
        ledger: Length and digest of the ledger.
        epsilon: What was said of it after the last round.
        clock: When the last cohort was contacted, in hours, if that was told.
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
        """Go on by a line."""
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
        """Refuse a line that makes no sense after those before."""
        if not self._fits(record):
            raise UnsafeState(
                f"the journal makes no sense: after {self.rounds} rounds and {self.attempts} "
                f"attempts comes {type(record).__name__.lower()}"
            )

    def _fits(self, record: AnyRecord) -> bool:
        if isinstance(record, Created):
            return self.created is None
        if isinstance(record, Cohort):
            here = (self.attempts, self.rounds)
            return (
                self.created is not None
                and self.pending is None
                and ((record.attempt, record.row) == here)
            )
        pending = self.pending
        return pending is not None and (
            (record.attempt, record.row) == (pending.attempt, pending.row)
        )


def packed(keys: Keys) -> str:
    """Pseudonyms as a cohort's line has them."""
    return keys.astype(">u8").tobytes().hex()


def unpacked(clients: str) -> Keys:
    """And back."""
    return np.frombuffer(bytes.fromhex(clients), ">u8").astype(np.uint64)


# Before the first line.
START: Final = "0" * 64


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A record and its digest."""

    mac: str
    record: msgspec.Raw


@final
class Journal:
    """A journal that can be continued.

    Attributes:
        lines: How many it has.
        mac: The digest of the last.
    """

    def __init__(self, path: Path, key: NoiseKey):
        self._path = path
        self._key = key.derive(b"journal")
        self._bytes = 0
        self.lines = 0
        self.mac = START

    def __repr__(self) -> str:
        return f"Journal({self._path}, {self.lines} lines)"

    def append(self, record: AnyRecord) -> None:
        """Add a line; on return it is on the disk."""
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
        """Go through all lines, from the first, with the digest of each.

        A last line that was only half written is left out: nothing followed from it. If it is not
        that but was cut or changed, the witness knows.
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
        message = bytes.fromhex(self.mac) + content
        return hmac.digest(self._key.secret_bytes(), message, "sha256").hex()

    def _move(self, line: bytes, mac: str) -> None:
        self._bytes += len(line)
        self.lines += 1
        self.mac = mac


def _decoded(content: bytes) -> AnyRecord:
    try:
        return msgspec.json.decode(content, type=AnyRecord)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"the journal cannot hold this: {error}") from None
