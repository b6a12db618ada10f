"""What a journal says, line by line."""

from typing import final

import msgspec


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
