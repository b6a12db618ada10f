"""The journal of a run: reading it, checking its keyed digests and the order of its records.

Each line holds a record and a MAC. The MAC covers the record and the MAC of the line before, so
that no line can be changed, removed or inserted without the noise key.
"""

import base64
import binascii
import hmac
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, final

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from dpftrl._internal.storage import read_file
from dpftrl.errors import InvalidInput, UnsafeState

KEY_BYTES: Final = 32
LEDGER_HEADER: Final = b"round,client,status\n"  # the first line of ledger.csv
DIGEST: Final = re.compile(rb'"[0-9a-f]{32}"')


def read_key(path: Path) -> memoryview:
    """Read the noise key of a run, into a memoryview: tracebacks do not show its content.

    Raises:
        UnsafeState: The file does not have the size of a key.
    """
    key = memoryview(read_file(path, limit=2**20))
    if len(key) != KEY_BYTES:
        raise UnsafeState(
            f"{path} is not a noise key: it has {len(key)} bytes, expected {KEY_BYTES}"
        )
    return key


def derive_key(
    key: memoryview, purpose: bytes, public: bytes = b"", secret: bytes = b""
) -> memoryview:
    """Derive a key for one purpose from the noise key or from another derived key.

    This is HMAC-SHA256 of three parts: the purpose, and public and secret data that the key depends
    on. Each part follows its length, as four bytes.
    """
    parts = (purpose, public, secret)
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return memoryview(hmac.digest(key, message, "sha256"))


def fingerprint(key: memoryview) -> str:
    """Return a short identifier of a key. It reveals nothing else about the key."""
    return derive_key(key, b"fingerprint")[:8].hex()


Count = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
SixteenBytes = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
EightBytes = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
HEXADECIMAL: Final = re.compile(r"([0-9a-f]{16})+")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The record of one journal line."""


@final
class Created(Record, frozen=True, tag="created"):
    """The run was created. This is always the first record."""

    run: SixteenBytes
    settings_sha256: Sha256
    plan_sha256: Sha256
    key_fingerprint: EightBytes
    checkpoint_sha256: Sha256
    files: dict[str, Sha256] = {}
    version: Literal[1, 2] = 1


@final
class Cohort(Record, frozen=True, tag="cohort"):
    """An attempt: these clients are contacted for this noise row.

    In a journal of version 1, `clients` has 16 hexadecimal digits per client. In version 2, there
    is a `size`, and `clients` is an Elias-Fano code in base64; see `_decode_clients`.
    """

    attempt: Count
    row: Count
    clients: str
    time: float | None = None
    names: tuple[str, ...] | None = None
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | UnsetType = UNSET


@final
class Empty(Record, frozen=True, tag="empty"):
    """The round is closed as one in which nobody takes part; its release must follow."""

    attempt: Count
    row: Count
    reason: str


@final
class ClipState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The clip norm of a round, and the number of rounds since the search for it ended."""

    clip_norm: float
    settled: Count


@final
class Clipping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The clip norm of a round of adaptive clipping, and the noisy sum of its bits, in steps."""

    state: ClipState
    bits: int


@final
class Committed(Record, frozen=True, tag="committed"):
    """An attempt was committed, and its round released.

    Version 1 refers to the ledger. In version 2, `counted` has a bit for each client, in base64.
    """

    attempt: Count
    row: Count
    reports: Count
    digest: msgspec.Raw  # 16 bytes in hexadecimal; tracebacks would show the content of a string
    checkpoint_sha256: Sha256
    epsilon: Annotated[float, msgspec.Meta(ge=0)]
    counted: str | UnsetType = UNSET
    ledger_bytes: Count | UnsetType = UNSET
    ledger_sha256: Sha256 | UnsetType = UNSET
    clipping: Clipping | None = None


@final
class Abandoned(Record, frozen=True, tag="abandoned"):
    """An attempt was abandoned, and nothing released."""

    attempt: Count
    row: Count
    reason: str
    ledger_bytes: Count | UnsetType = UNSET
    ledger_sha256: Sha256 | UnsetType = UNSET
    goal_reached: bool = False


AnyRecord = Created | Cohort | Empty | Committed | Abandoned

RECORD_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(AnyRecord)

Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]

# A line has exactly this form: BEFORE_MAC, 64 hexadecimal digits, BEFORE_RECORD, a record,
# AFTER_RECORD.
BEFORE_MAC: Final = b'{"mac":"'
BEFORE_RECORD: Final = b'","record":'
AFTER_RECORD: Final = b"}\n"
MAC_AT: Final = slice(len(BEFORE_MAC), len(BEFORE_MAC) + 64)
RECORD_FROM: Final = MAC_AT.stop + len(BEFORE_RECORD)


@final
@dataclass(frozen=True, eq=False)
class Attempt:
    """One attempt at a round: who was contacted, and how it ended.

    Attributes:
        cohort: The record of the attempt, with `clients` emptied to save memory; None if the round
            is closed as empty.
        number: The number of the attempt.
        row: The noise row (the round) that the attempt is for.
        clients: The pseudonyms of the contacted clients as numbers, in rising order.
        end: The record that ended the attempt, or None while it is in flight.
        counted: A mask of the clients that were counted; None while the attempt is in flight, and
            if the ledger says it instead of the journal.
    """

    cohort: Cohort | None
    number: int
    row: int
    clients: Keys
    end: Committed | Abandoned | None = None
    counted: Mask | None = None


@final
@dataclass(frozen=True, eq=False)
class Journal:
    """The content of a journal.

    Attributes:
        created: The first record.
        attempts: All attempts, in order.
        macs: The MAC of each complete line, in hexadecimal.
        torn: Whether the file ends with an incomplete line.
    """

    created: Created
    attempts: tuple[Attempt, ...]
    macs: tuple[str, ...]
    torn: bool

    @property
    def commits(self) -> tuple[Committed, ...]:
        """The records of the released rounds, in order."""
        ends = (attempt.end for attempt in self.attempts)
        return tuple(end for end in ends if isinstance(end, Committed))

    @property
    def empty_rounds(self) -> int:
        """The number of released rounds that were closed as empty."""
        return sum(attempt.cohort is None and attempt.end is not None for attempt in self.attempts)

    @property
    def in_flight(self) -> bool:
        """Whether the last attempt has not ended."""
        return bool(self.attempts) and self.attempts[-1].end is None


class AnyJournal(Protocol):
    """What the journals of federated and of centralized runs have in common."""

    @property
    def created(self) -> Created:
        """The first record."""
        ...

    @property
    def macs(self) -> tuple[str, ...]:
        """The MAC of each complete line, in hexadecimal."""
        ...

    @property
    def torn(self) -> bool:
        """Whether the file ends with an incomplete line."""
        ...


def read_journal(path: Path, key: memoryview) -> Journal:
    """Read a journal and check every line.

    Args:
        path: The journal file.
        key: The noise key of the run.

    Raises:
        InvalidInput: The file cannot be read.
        UnsafeState: A line was changed, or a record cannot follow the records before it.
    """
    history = _History()
    lines = read_lines(path, key, RECORD_DECODER, history.append)
    if history.created is None:
        raise UnsafeState("the journal has no complete line")
    return Journal(history.created, tuple(history.attempts), lines.macs, lines.torn)


class Lines(NamedTuple):
    """The lines of a journal.

    Attributes:
        macs: The MAC of each complete line, in hexadecimal.
        torn: Whether the file ends with an incomplete line.
    """

    macs: tuple[str, ...]
    torn: bool


def read_lines(
    path: Path,
    key: memoryview,
    decoder: msgspec.json.Decoder[Any],
    append: Callable[[Any], None],
) -> Lines:
    """Read a journal, check the MAC of every line, and pass on the records.

    Args:
        path: The journal file.
        key: The noise key of the run.
        decoder: Decodes the records.
        append: Is called with each record, in order. It raises `InvalidInput` if the record cannot
            follow the records before it.

    Raises:
        InvalidInput: The file cannot be read.
        UnsafeState: A line was changed, or a record cannot follow the records before it.
    """
    macs: list[str] = []
    for number, (mac, record) in enumerate(_lines(path, derive_key(key, b"journal")), start=1):
        if mac is None:
            return Lines(tuple(macs), torn=True)
        macs.append(mac)
        try:
            append(decoder.decode(record))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UnsafeState(f"line {number} is not a valid journal record: {error}") from None
        except InvalidInput as error:
            raise UnsafeState(f"line {number}: {error}") from None
    return Lines(tuple(macs), torn=False)


def _lines(path: Path, key: memoryview) -> Iterator[tuple[str | None, memoryview]]:
    """Yield the MAC and the record of each line, with None as MAC for an incomplete last line.

    Raises:
        InvalidInput: The file cannot be read.
        UnsafeState: The MAC of a line does not fit.
    """
    previous_mac = bytes(32)
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(map(memoryview, file), start=1):
                if line[-1] != ord("\n"):
                    yield None, line
                    return
                record = line[RECORD_FROM : -len(AFTER_RECORD)]
                mac = hmac.digest(key, memoryview(b"".join((previous_mac, record))), "sha256")
                start = mac.hex().encode().join((BEFORE_MAC, BEFORE_RECORD))
                expected = memoryview(b"".join((start, record, AFTER_RECORD)))
                if not hmac.compare_digest(line, expected):
                    raise UnsafeState(
                        f"line {number} was changed, or a line before it is missing; "
                        "this line and all later lines cannot be trusted"
                    )
                yield mac.hex(), record
                previous_mac = mac
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None


@final
class _History:
    """The records read so far, and the rules for which record may come next."""

    def __init__(self) -> None:
        self.created: Created | None = None
        self.attempts: list[Attempt] = []
        self.rows = 0
        self.ledger_bytes = len(LEDGER_HEADER)
        self.time: float | None = None

    def append(self, record: AnyRecord) -> None:
        """Add the next record.

        Raises:
            InvalidInput: The record cannot follow the records before it.
        """
        if isinstance(record, Created):
            if self.created is not None:
                raise InvalidInput("the run was already created; only the first line may create it")
            self.created = record
        elif self.created is None:
            raise InvalidInput("the first line does not create the run")
        elif isinstance(record, Cohort | Empty):
            self._check_next(record)
            self.attempts.append(
                self._attempt(record)
                if isinstance(record, Cohort)
                else Attempt(None, record.attempt, record.row, np.empty(0, np.uint64))
            )
        else:
            self._end_attempt(record)

    def _check_next(self, record: Cohort | Empty) -> None:
        if self.attempts and self.attempts[-1].end is None:
            raise InvalidInput("an attempt starts before the attempt before it has ended")
        if (record.attempt, record.row) != (len(self.attempts), self.rows):
            raise InvalidInput(
                f"expected attempt {len(self.attempts)} for row {self.rows}, got attempt "
                f"{record.attempt} for row {record.row}"
            )
        if isinstance(record, Empty) and self._goal_was_reached(record.row):
            raise InvalidInput(
                f"row {record.row} is closed as empty, but an attempt at it had all its reports"
            )

    def _goal_was_reached(self, row: int) -> bool:
        """Whether an abandoned attempt at the row had all its reports."""
        attempts = takewhile(lambda attempt: attempt.row == row, reversed(self.attempts))
        ends = (attempt.end for attempt in attempts)
        return any(isinstance(end, Abandoned) and end.goal_reached for end in ends)

    def _attempt(self, cohort: Cohort) -> Attempt:
        clients = self._clients(cohort)
        if not np.all(clients[1:] > clients[:-1]):
            raise InvalidInput("the clients of a cohort must be in rising order, each of them once")
        if cohort.names is not None and len(set(cohort.names)) != len(clients):
            raise InvalidInput("a cohort must have one name per client, and each name once")
        times = [time for time in (self.time, cohort.time) if time is not None]
        if not all(later >= sooner for sooner, later in pairwise(times)):
            raise InvalidInput(f"the clock goes backwards, from {times[0]} to {times[1]} hours")
        self.time = cohort.time
        # The pseudonyms as numbers take half the memory of the hexadecimal string.
        without_clients = msgspec.structs.replace(cohort, clients="")
        return Attempt(without_clients, cohort.attempt, cohort.row, clients)

    def _end_attempt(self, end: Committed | Abandoned) -> None:
        outcome = type(end).__name__.lower()
        if not self.attempts or self.attempts[-1].end is not None:
            raise InvalidInput(f"an attempt is {outcome}, but no attempt is in flight")
        attempt = self.attempts[-1]
        if (end.attempt, end.row) != (attempt.number, attempt.row):
            raise InvalidInput(
                f"attempt {end.attempt} for row {end.row} is {outcome}, but attempt "
                f"{attempt.number} for row {attempt.row} is in flight"
            )
        is_empty = attempt.cohort is None
        if is_empty and (isinstance(end, Abandoned) or end.reports):
            raise InvalidInput(f"row {end.row} was closed as empty, but is {outcome} otherwise")
        if isinstance(end, Committed) and not DIGEST.fullmatch(bytes(end.digest)):
            raise InvalidInput("the digest of a round must be 32 hexadecimal digits")
        has_ledger = (end.ledger_bytes is not UNSET, end.ledger_sha256 is not UNSET)
        if has_ledger != (self._version == 1, self._version == 1):
            raise InvalidInput(
                f"the end of an attempt is not written as in version {self._version}"
            )
        if end.ledger_bytes is not UNSET:
            has_grown = end.ledger_bytes > self.ledger_bytes
            if has_grown == is_empty or end.ledger_bytes < self.ledger_bytes:
                raise InvalidInput(
                    "the ledger must grow with every attempt that contacts clients, and with no "
                    f"other, but has {end.ledger_bytes} bytes after {self.ledger_bytes}"
                )
            self.ledger_bytes = end.ledger_bytes
        counted = self._counted(end, len(attempt.clients))
        if isinstance(end, Committed):
            end = msgspec.structs.replace(end, counted=UNSET)
        self.attempts[-1] = replace(attempt, end=end, counted=counted)
        self.rows += isinstance(end, Committed)

    @property
    def _version(self) -> int:
        return 1 if self.created is None else self.created.version

    def _clients(self, cohort: Cohort) -> Keys:
        """The pseudonyms of a cohort as numbers, in the order of the journal."""
        if (cohort.size is UNSET) != (self._version == 1):
            raise InvalidInput(f"a cohort is not written as in version {self._version}")
        if cohort.size is not UNSET:
            return _decode_clients(cohort.clients, cohort.size)
        if not HEXADECIMAL.fullmatch(cohort.clients):
            raise InvalidInput("a cohort must have 16 hexadecimal digits for each client")
        return np.frombuffer(bytes.fromhex(cohort.clients), ">u8").astype(np.uint64)

    def _counted(self, end: Committed | Abandoned, clients: int) -> Mask | None:
        """A mask of the clients of an attempt that were counted; None if the ledger says it."""
        if self._version == 1:
            if isinstance(end, Committed) and end.counted is not UNSET:
                raise InvalidInput("a journal of version 1 does not say who was counted")
            return None
        if isinstance(end, Abandoned):
            return np.zeros(clients, np.bool_)
        if end.counted is UNSET:
            raise InvalidInput("the journal does not say who was counted")
        bits = _bits(end.counted)
        if len(bits) != 8 * -(-clients // 8) or bits[clients:].any():
            raise InvalidInput(f"it is not clear who of {clients} clients was counted")
        if bits.sum() != end.reports:
            raise InvalidInput(
                f"{bits.sum()} clients were counted, but there are {end.reports} reports"
            )
        return bits[:clients].astype(np.bool_)


def _bits(text: str) -> NDArray[np.uint8]:
    """Decode base64 into bits, the highest bit of each byte first.

    Raises:
        InvalidInput: The text is not base64, or has another spelling.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("a text is not valid base64") from None
    if base64.b64encode(data).decode() != text:
        raise InvalidInput("a text is not valid base64")
    return np.unpackbits(np.frombuffer(data, np.uint8))


def _decode_clients(text: str, size: int) -> Keys:
    """Decode the pseudonyms of a cohort from an Elias-Fano code.

    With b the number of bits of `size`, a pseudonym is its upper b bits and its lower 64 - b bits.
    First come `size` + 2^b bits, of which bit `upper + i` is set for the i-th client; then
    the lower bits of all clients. Both are filled up with zeros to whole bytes.

    Raises:
        InvalidInput: The text is not such a code.
    """
    bits, upper_width = _bits(text), size.bit_length()
    lower_width, upper_bits = 64 - upper_width, size + 2**upper_width
    lower_from = 8 * -(-upper_bits // 8)
    lower_to = lower_from + size * lower_width
    (places,) = np.nonzero(bits[:lower_from])
    if (
        len(bits) != 8 * -(-lower_to // 8)
        or bits[lower_to:].any()
        or len(places) != size
        or places[-1] >= upper_bits
    ):
        raise InvalidInput(f"this is not the code of a cohort of {size} clients")
    weights = np.uint64(1) << np.arange(lower_width - 1, -1, -1, dtype=np.uint64)
    lower = bits[lower_from:lower_to].reshape(size, lower_width) @ weights
    return (places - np.arange(size)).astype(np.uint64) * np.uint64(2**lower_width) + lower
