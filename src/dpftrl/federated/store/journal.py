"""The records in the journal of a run of clients, and the state that follows from them."""

from dataclasses import dataclass
from typing import Final, Literal, NoReturn, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl.adaptive_clipping import ClippedRound
from dpftrl.errors import UnsafeState
from dpftrl.federated.eligibility import PREFIX
from dpftrl.journal import Chain, Record


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
    files: dict[str, str] = msgspec.field(default_factory=dict)


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
        ledger_bytes: Length of the ledger, including the rows of this round.
        ledger_sha256: SHA-256 of the first `ledger_bytes` bytes of the ledger.
        epsilon: Epsilon of everything released so far, at the delta of the plan.
        clipping: The clip norm and the noisy bits of the round, with adaptive clipping; else None.
    """

    attempt: int
    row: int
    reports: int
    digest: msgspec.Raw  # a Raw value: a traceback would show the content of a string
    checkpoint_sha256: str
    ledger_bytes: int
    ledger_sha256: str
    epsilon: float
    clipping: ClippedRound | None = None


@final
class Abandoned(Record, frozen=True, tag="abandoned", omit_defaults=True):
    """An attempt was abandoned: nothing is released, and the next attempt uses the same row.

    Attributes:
        attempt: The number of the attempt.
        row: The row of noise that it was for.
        reason: Why it was abandoned.
        ledger_bytes: Length of the ledger, including the rows of this attempt.
        ledger_sha256: SHA-256 of the ledger up to that length.
        goal_reached: Whether the attempt had all its reports. Then clients were available, and
            its row cannot be closed as empty.
    """

    attempt: int
    row: int
    reason: str
    ledger_bytes: int
    ledger_sha256: str
    goal_reached: bool = False


AnyRecord = Created | Cohort | Empty | Committed | Abandoned


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
        empty: The record of an empty round that is not committed yet; None if there is none.
        goal_reached: Whether an abandoned attempt at the next round had all its reports.
        digests: The keyed digest of each round's sum. They are as secret as the noise.
        checkpoint_sha256: SHA-256 of the newest checkpoint.
        ledger: Length and SHA-256 of the ledger after the last attempt that ended.
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
            self.ledger = (record.ledger_bytes, record.ledger_sha256)
        if isinstance(record, Abandoned):
            self.goal_reached |= record.goal_reached
        if isinstance(record, Committed):
            self.rounds += 1
            self.goal_reached = False
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
        current = self.empty or self.pending
        if isinstance(record, Cohort | Empty):
            is_next = (record.attempt, record.row) == (self.attempts, self.rounds)
            is_allowed = isinstance(record, Cohort) or not self.goal_reached
            return self.created is not None and current is None and is_next and is_allowed
        if current is None or (record.attempt, record.row) != (current.attempt, current.row):
            return False
        if isinstance(record, Abandoned):  # a row that was closed as empty is not attempted again
            return self.empty is None
        return (record.reports == 0) == (self.empty is not None)


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
