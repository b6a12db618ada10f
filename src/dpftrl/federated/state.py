"""Where a run stands, as its journal tells it."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import UnsafeState
from dpftrl.federated.records import AnyRecord, Cohort, Committed, Created

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
