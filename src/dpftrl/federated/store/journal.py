"""The records in the journal of a run of clients, and the state that follows from them."""

from base64 import b64decode, b64encode
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, NoReturn, final

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from dpftrl.adaptive_clipping import ClippedRound
from dpftrl.errors import UnsafeState
from dpftrl.journal import Chain, Record

Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]
VERSION: Literal[2] = 2  # of the journals of new runs


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
        version: The format of the journal. In version 1, a ledger is kept beside the journal, and
            the journal has its digests. In version 2, the journal says itself who was counted.
    """

    run: str
    settings_sha256: str
    plan_sha256: str
    key_fingerprint: str
    checkpoint_sha256: str
    files: dict[str, str] = msgspec.field(default_factory=dict)
    version: Literal[1, 2] = 1


@final
class Cohort(Record, frozen=True, tag="cohort"):
    """A cohort was chosen, and its clients are about to be contacted.

    Attributes:
        attempt: The number of the attempt; attempts are counted from 0 over the whole run.
        row: The row of noise that the attempt uses: the number of rounds committed before it.
        clients: Pseudonyms of the clients in rising order. In version 2, they are written as
            `packed` does it; in version 1 with 16 hexadecimal digits each, without a separator.
        time: The time of the contact in hours; None unless the timers of the run count hours.
        names: Names of the clients in the same order; None if the run stores only pseudonyms.
        size: Number of the clients; version 1 does not have this field.
    """

    attempt: int
    row: int
    clients: str
    time: float | None = None
    names: tuple[str, ...] | None = None
    size: int | UnsetType = UNSET

    @property
    def contacted(self) -> int:
        """The number of clients."""
        return len(self.clients) // 16 if self.size is UNSET else self.size

    def keys(self) -> Keys:
        """The pseudonyms of the clients as numbers, in rising order."""
        return unpacked(self.clients, None if self.size is UNSET else self.size)

    def mask_of(self, some: Container[int]) -> Mask:
        """Which clients of the cohort are among some pseudonyms."""
        return np.array([key in some for key in self.keys().tolist()], np.bool_)


@final
class Empty(Record, frozen=True, tag="empty"):
    """The next round is closed as one in which nobody takes part. A `Committed` must follow.

    From this record on, nobody can be contacted for the row.

    Attributes:
        attempt: The number of the attempt, counted like the attempts that contact clients.
        row: The row of noise, which is released on a sum of zeros.
        reason: Why nobody could take part.
    """

    attempt: int
    row: int
    reason: str

    def mask_of(self, _: Container[int]) -> Mask:
        """Which clients are among some pseudonyms; there are none."""
        return np.zeros(0, np.bool_)


@final
class Committed(Record, frozen=True, tag="committed", omit_defaults=True):
    """A round was committed. From now on its model may be released.

    Attributes:
        attempt: The number of the attempt that succeeded.
        row: The row of noise that the round used.
        reports: The number of updates in the sum: the report goal, or 0 after an `Empty`.
        digest: Keyed digest of this sum and of all earlier sums. With the noise key, the noise of
            the round can be recomputed from this digest.
        checkpoint_sha256: SHA-256 of the checkpoint after the round.
        epsilon: Epsilon of everything released so far, at the delta of the plan.
        counted: The clients of the cohort whose updates are in the sum, as `packed_mask` writes
            them. Version 1 does not have this field.
        ledger_bytes: Only in version 1: length of the ledger, including the rows of this round.
        ledger_sha256: Only in version 1: SHA-256 of the first `ledger_bytes` bytes of the ledger.
        clipping: The clip norm and the noisy bits of the round, with adaptive clipping; else None.
    """

    attempt: int
    row: int
    reports: int
    digest: msgspec.Raw  # a Raw value: a traceback would show the content of a string
    checkpoint_sha256: str
    epsilon: float
    counted: str | UnsetType = UNSET
    ledger_bytes: int | UnsetType = UNSET
    ledger_sha256: str | UnsetType = UNSET
    clipping: ClippedRound | None = None


@final
class Abandoned(Record, frozen=True, tag="abandoned", omit_defaults=True):
    """An attempt was abandoned: nothing is released, and the next attempt uses the same row.

    Attributes:
        attempt: The number of the attempt.
        row: The row of noise that it was for.
        reason: Why it was abandoned.
        ledger_bytes: Only in version 1: length of the ledger, including the rows of this attempt.
        ledger_sha256: Only in version 1: SHA-256 of the ledger up to that length.
        goal_reached: Whether the attempt had all its reports. Then clients were available, and
            its row cannot be closed as empty.
    """

    attempt: int
    row: int
    reason: str
    ledger_bytes: int | UnsetType = UNSET
    ledger_sha256: str | UnsetType = UNSET
    goal_reached: bool = False


AnyRecord = Created | Cohort | Empty | Committed | Abandoned


@final
class RunState:
    """The current state of a run, computed from the records of its journal.

    Attributes:
        created: The first record of the journal.
        rounds: Number of committed rounds, which is also the row of noise of the next round.
        attempts: Number of attempts so far, including the open one.
        pending: The cohort of the open attempt (not committed or abandoned); None if there is none.
        empty: The record of an empty round that is not committed yet; None if there is none.
        goal_reached: Whether an abandoned attempt at the next round had all its reports.
        failures: Number of abandoned attempts since the last round that had reports.
        digests: The keyed digest of each round's sum. They are as secret as the noise.
        checkpoint_sha256: SHA-256 of the newest checkpoint.
        ledger: Length and SHA-256 of the ledger after the last attempt that ended; None before,
            and if the journal is not of version 1.
        epsilon: Epsilon in the record of the last committed round.
        clipping: The clip norm and the noisy bits of the last committed round, with adaptive
            clipping; None before the first.
        clock: Time of the last contact in hours; None unless the timers of the run count hours.
    """

    def __init__(self) -> None:
        self.created: Created | None = None
        self.rounds = 0
        self.attempts = 0
        self.pending: Cohort | None = None
        self.empty: Empty | None = None
        self.goal_reached = False
        self.failures = 0
        self.digests: list[msgspec.Raw] = []
        self.checkpoint_sha256 = ""
        self.ledger: tuple[int, str] | None = None
        self.epsilon = 0.0
        self.clipping: ClippedRound | None = None
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
        elif isinstance(record, Empty):
            self.empty = record
            self.attempts += 1
        else:
            self.pending = self.empty = None
            if record.ledger_bytes is not UNSET and record.ledger_sha256 is not UNSET:
                self.ledger = (record.ledger_bytes, record.ledger_sha256)
        if isinstance(record, Abandoned):
            self.goal_reached |= record.goal_reached
            self.failures += 1
        if isinstance(record, Committed):
            self.rounds += 1
            self.goal_reached = False
            self.failures = 0 if record.reports else self.failures
            self.digests.append(record.digest)
            self.checkpoint_sha256 = record.checkpoint_sha256
            self.epsilon = record.epsilon
            self.clipping = record.clipping

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
        if self.created is None or not _is_of_version(record, self.created.version):
            return False
        current = self.empty or self.pending
        if isinstance(record, Cohort | Empty):
            is_next = (record.attempt, record.row) == (self.attempts, self.rounds)
            is_allowed = isinstance(record, Cohort) or not self.goal_reached
            return current is None and is_next and is_allowed
        if current is None or (record.attempt, record.row) != (current.attempt, current.row):
            return False
        if isinstance(record, Abandoned):  # a row that was closed as empty is not attempted again
            return self.empty is None
        return (record.reports == 0) == (self.empty is not None)


def _is_of_version(record: Cohort | Empty | Committed | Abandoned, version: int) -> bool:
    """Whether a record has the fields of this version of the journal, and no others."""
    if isinstance(record, Empty):
        return True
    if isinstance(record, Cohort):
        return (record.size is UNSET) == (version == 1)
    in_ledger = (record.ledger_bytes is not UNSET, record.ledger_sha256 is not UNSET)
    if in_ledger != (version == 1, version == 1):
        return False
    return isinstance(record, Abandoned) or (record.counted is UNSET) == (version == 1)


def packed(keys: Keys) -> str:
    """Encode pseudonyms, which rise, as the journal stores them.

    This is the Elias-Fano code. The lower 64 - b bits of each number are written as they are; b is
    the number of bits of the number of clients. The upper bits are a sequence of bits: for the
    i-th client, counted from 0, the bit at i plus its upper part is set. Thousands of
    clients take 6.7 bytes each. Bits are written from the highest, the upper parts first, both
    filled up to whole bytes with zeros, and all of it in base64.
    """
    size, low = len(keys), _low_bits(len(keys))
    upper = np.zeros(_upper_length(size), np.uint8)
    upper[(keys >> np.uint64(low)).astype(np.int64) + np.arange(size)] = 1
    bits = np.unpackbits(keys.astype(">u8").view(np.uint8)).reshape(size, 64)[:, 64 - low :]
    return b64encode(np.packbits(upper).tobytes() + np.packbits(bits).tobytes()).decode()


def packed_as_digits(keys: Keys) -> str:
    """Encode pseudonyms as a journal of version 1 stores them: 16 hexadecimal digits each."""
    return keys.astype(">u8").tobytes().hex()


def unpacked(clients: str, size: int | None) -> Keys:
    """Decode pseudonyms from the journal; the inverse of `packed`.

    Args:
        clients: The pseudonyms, as the journal has them.
        size: The number of clients; None for a journal of version 1, in which each pseudonym has
            16 hexadecimal digits.

    Raises:
        UnsafeState: This is not what `packed` writes.
    """
    try:
        if size is None:
            return np.frombuffer(bytes.fromhex(clients), ">u8").astype(np.uint64)
        data = np.frombuffer(b64decode(clients, validate=True), np.uint8)
    except ValueError:
        raise UnsafeState("the journal makes no sense: a cohort cannot be read") from None
    low, length = _low_bits(size), _upper_length(size)
    end = -(-length // 8)
    places = np.flatnonzero(np.unpackbits(data[:end]))
    if not size or len(data) != end - (-size * low // 8) or len(places) != size:
        raise UnsafeState("the journal makes no sense: a cohort has another number of clients")
    bits = np.zeros((size, 64), np.uint8)
    bits[:, 64 - low :] = np.unpackbits(data[end:], count=size * low).reshape(size, low)
    lower = np.packbits(bits).view(">u8").astype(np.uint64)
    return lower | ((places - np.arange(size)).astype(np.uint64) << np.uint64(low))


def _low_bits(size: int) -> int:
    return 64 - size.bit_length()


def _upper_length(size: int) -> int:
    return size + (1 << size.bit_length())


def packed_mask(mask: Mask) -> str:
    """Encode which clients of a cohort were counted: one bit each, in base64."""
    return b64encode(np.packbits(mask).tobytes()).decode()


def unpacked_mask(text: str, size: int) -> Mask:
    """Decode what `packed_mask` has encoded, for a cohort of this size."""
    try:
        data = np.frombuffer(b64decode(text, validate=True), np.uint8)
    except ValueError:
        data = np.empty(0, np.uint8)
    if len(data) != -(-size // 8):
        raise UnsafeState("the journal makes no sense: it is not clear who was counted")
    return np.unpackbits(data, count=size).astype(np.bool_)


@final
@dataclass(frozen=True)
class Decisions:
    """The journal with its witness, and the state that follows from it: they change together."""

    chain: Chain[AnyRecord]
    state: RunState

    def append(self, record: AnyRecord) -> None:
        """Update the state, and append the decision to the journal on the disk.

        If this fails, the state is ahead of the journal, and must not be used any more.
        """
        self.state.follow(record)
        self.chain.append(record)
