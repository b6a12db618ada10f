"""What the lines of a journal say, as `docs/runs.md` has it."""

from typing import Annotated, Any, final

import msgspec

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
