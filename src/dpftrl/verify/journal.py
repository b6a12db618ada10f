"""The journal: whether it is whole, and what it tells."""

import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import read_file
from dpftrl.errors import InvalidInput, UnsafeState

KEY_BYTES: Final = 32


def read_key(path: Path) -> bytes:
    """The noise key of a run."""
    key = read_file(path, limit=2**20)
    if len(key) != KEY_BYTES:
        raise UnsafeState(f"{path} is no noise key: it has {len(key)} bytes, not {KEY_BYTES}")
    return key


def derived(key: bytes, purpose: bytes) -> bytes:
    """HMAC-SHA256 of three parts, each with its length before it; the last two are empty."""
    parts = (purpose, b"", b"")
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, message, "sha256")


def fingerprint(key: bytes) -> str:
    """What tells keys apart and gives nothing away."""
    return derived(key, b"fingerprint")[:8].hex()


Count = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
SixteenBytes = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
EightBytes = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Pseudonyms = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})+\Z")]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """One line."""


@final
class Created(Record, frozen=True, tag="created"):
    """The first line."""

    run: SixteenBytes
    settings_sha256: Sha256
    plan_sha256: Sha256
    key_fingerprint: EightBytes
    checkpoint_sha256: Sha256


@final
class Cohort(Record, frozen=True, tag="cohort"):
    """Clients are contacted."""

    attempt: Count
    row: Count
    clients: Pseudonyms
    time: float | None = None
    names: tuple[str, ...] | None = None


@final
class Committed(Record, frozen=True, tag="committed"):
    """A round was released."""

    attempt: Count
    row: Count
    reports: Count
    digest: SixteenBytes
    checkpoint_sha256: Sha256
    ledger_bytes: Count
    ledger_sha256: Sha256
    epsilon: Annotated[float, msgspec.Meta(ge=0)]


@final
class Abandoned(Record, frozen=True, tag="abandoned"):
    """An attempt came to nothing."""

    attempt: Count
    row: Count
    reason: str
    ledger_bytes: Count
    ledger_sha256: Sha256


AnyRecord = Created | Cohort | Committed | Abandoned

decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(AnyRecord)


Keys = NDArray[np.uint64]

# A line is these, with 64 hexadecimal digits and a record between them, and nothing else at all.
BEFORE_MAC: Final = b'{"mac":"'
BEFORE_RECORD: Final = b'","record":'
AFTER_RECORD: Final = b"}\n"
MAC_AT: Final = slice(len(BEFORE_MAC), len(BEFORE_MAC) + 64)
RECORD_FROM: Final = MAC_AT.stop + len(BEFORE_RECORD)


@final
@dataclass(frozen=True, eq=False)
class Attempt:
    """Clients that were contacted for a row, and what became of it.

    Attributes:
        cohort: The line that says so, without its clients.
        clients: Their pseudonyms as numbers, rising.
        end: The line that ended it; None while it is in flight.
    """

    cohort: Cohort
    clients: Keys
    end: Committed | Abandoned | None = None


@final
@dataclass(frozen=True, eq=False)
class Journal:
    """What the whole lines of a journal tell.

    Attributes:
        created: The first.
        attempts: All attempts, in order.
        macs: The keyed digest of each line.
        torn: Whether half a line is left at the end.
    """

    created: Created
    attempts: tuple[Attempt, ...]
    macs: tuple[str, ...]
    torn: bool

    @property
    def commits(self) -> tuple[Committed, ...]:
        """The rounds that were released."""
        return tuple(one.end for one in self.attempts if isinstance(one.end, Committed))

    @property
    def in_flight(self) -> bool:
        """Whether the last attempt has not ended."""
        return bool(self.attempts) and self.attempts[-1].end is None


def read_journal(path: Path, key: bytes) -> Journal:
    """Go through all lines, and refuse the first that was changed or makes no sense."""
    story, torn = _Story(), False
    macs: list[str] = []
    for number, (mac, record) in enumerate(_lines(path, derived(key, b"journal")), start=1):
        if mac is None:
            torn = True
            break
        macs.append(mac)
        try:
            story.follow(decoder.decode(record))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UnsafeState(f"line {number} is no record of a run: {error}") from None
        except InvalidInput as error:
            raise UnsafeState(f"line {number}: {error}") from None
    if story.created is None:
        raise UnsafeState("it has no line that can be trusted")
    return Journal(story.created, tuple(story.attempts), tuple(macs), torn)


def _lines(path: Path, key: bytes) -> Iterator[tuple[str | None, bytes]]:
    """Each line's keyed digest and record; no digest for half a line at the end."""
    before = bytes(32)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    yield None, line
                    return
                record = line[RECORD_FROM : -len(AFTER_RECORD)]
                mac = hmac.digest(key, before + record, "sha256")
                wanted = mac.hex().encode().join((BEFORE_MAC, BEFORE_RECORD))
                if not hmac.compare_digest(line, wanted + record + AFTER_RECORD):
                    raise UnsafeState(
                        f"line {number} was changed, or a line before it is missing; "
                        "nothing from there on can be trusted"
                    )
                yield mac.hex(), record
                before = mac
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None


@final
class _Story:
    """The rules of which line may follow which."""

    def __init__(self) -> None:
        self.created: Created | None = None
        self.attempts: list[Attempt] = []
        self.rows = 0
        self.ledger_bytes = 0
        self.time: float | None = None

    def follow(self, record: AnyRecord) -> None:
        if isinstance(record, Created):
            if self.created is not None:
                raise InvalidInput("the run is created a second time")
            self.created = record
        elif self.created is None:
            raise InvalidInput("the first line does not create the run")
        elif isinstance(record, Cohort):
            self._begin(record)
        else:
            self._end(record)

    def _begin(self, cohort: Cohort) -> None:
        if self.attempts and self.attempts[-1].end is None:
            raise InvalidInput("clients are contacted while another attempt is open")
        if (cohort.attempt, cohort.row) != (len(self.attempts), self.rows):
            raise InvalidInput(
                f"this is attempt {len(self.attempts)} for row {self.rows}, but it says attempt "
                f"{cohort.attempt} for row {cohort.row}"
            )
        clients = np.frombuffer(bytes.fromhex(cohort.clients), ">u8").astype(np.uint64)
        if not np.all(clients[1:] > clients[:-1]):
            raise InvalidInput("the clients of a cohort are not in rising order, each once")
        if cohort.names is not None and len(set(cohort.names)) != len(clients):
            raise InvalidInput("the names of a cohort are not those of its clients, each once")
        times = [time for time in (self.time, cohort.time) if time is not None]
        if not all(later >= sooner for sooner, later in pairwise(times)):
            raise InvalidInput(f"the clock goes backwards, from {times[0]} to {times[1]} hours")
        self.time = cohort.time
        kept = msgspec.structs.replace(cohort, clients="")  # the numbers take half the room
        self.attempts.append(Attempt(kept, clients))

    def _end(self, end: Committed | Abandoned) -> None:
        what = type(end).__name__.lower()
        if not self.attempts or self.attempts[-1].end is not None:
            raise InvalidInput(f"an attempt is {what} that nobody began")
        begun = self.attempts[-1]
        if (end.attempt, end.row) != (begun.cohort.attempt, begun.cohort.row):
            raise InvalidInput(f"another attempt or row is {what} than was begun")
        if not end.ledger_bytes > self.ledger_bytes:
            raise InvalidInput("the ledger did not grow")
        self.attempts[-1] = Attempt(begun.cohort, begun.clients, end)
        self.ledger_bytes = end.ledger_bytes
        self.rows += isinstance(end, Committed)
