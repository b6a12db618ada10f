"""What a participation log says."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final

from dpftrl.checks import whole_number
from dpftrl.observed.histogram import Bin
from dpftrl.participation import FixedEpochs, MinSep, Participation, Pattern
from dpftrl.sensitivity.result import Kind


@final
@dataclass(frozen=True)
class Limits:
    """What the server promised: None where nothing was.

    Attributes:
        min_sep: Least difference between two rounds of one client.
        max_participations: Most rounds of one client.
    """

    min_sep: int | None = None
    max_participations: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_sep", "max_participations"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value))


@final
@dataclass(frozen=True)
class Broken:
    """A client that did not keep to a limit.

    Attributes:
        client: Its id.
        limit: The name of the limit.
        rounds: Two rounds that are too close, as the log numbers them; None for the other limit.
        count: The participations that are too many; None for the other limit.
        counted: Whether its counted rows alone break the limit. If not, it was asked too often,
            but what was released keeps to the limit.
    """

    client: str
    limit: Literal["min_sep", "max_participations"]
    rounds: tuple[int, int] | None
    count: int | None
    counted: bool


@final
@dataclass(frozen=True)
class Duplicate:
    """A client with several counted rows for one round (as the log numbers it)."""

    client: str
    round: int
    rows: int


@final
@dataclass(frozen=True)
class Observed:
    """What really happened. Each (client, round) is taken once, however many rows it has.

    Attributes:
        rounds: Rounds of training.
        first_round: The number that the log gives to the first.
        empty_rounds: Rounds in which nobody was counted.
        clients: Clients that were counted at least once.
        participations: Counted (client, round) pairs.
        min_sep: Smallest difference between two counted rounds of one client; `rounds` if nobody
            was counted twice.
        max_participations: Most counted rounds of one client.
        gaps: How often each difference between neighbouring counted rounds of a client occurs.
        counts: How many clients were counted how often.
        contacted_clients: Clients in any row, whatever its status.
        contacts: (client, round) pairs in any row.
        contacted_min_sep: As `min_sep`, over all rows.
        duplicate_rows: Counted rows beyond the first for their client and round. If they are not
            lines written twice but updates summed twice, no statement about privacy holds.
        duplicate_example: The client and round with the most.
        limits: What was to be kept.
        broken: Up to 20 clients that did not, those in released sums first.
        broken_clients: How many there are.
        broken_counted_clients: How many of them broke a limit by counted rows alone.
    """

    rounds: int
    first_round: int
    empty_rounds: int
    clients: int
    participations: int
    min_sep: int
    max_participations: int
    gaps: tuple[Bin, ...]
    counts: tuple[Bin, ...]
    contacted_clients: int
    contacts: int
    contacted_min_sep: int
    duplicate_rows: int = 0
    duplicate_example: Duplicate | None = None
    limits: Limits = field(default_factory=Limits)
    broken: tuple[Broken, ...] = ()
    broken_clients: int = 0
    broken_counted_clients: int = 0

    @property
    def participation(self) -> MinSep:
        """The least that accounting has to allow for, if no round after `rounds` was released."""
        often = max(1, self.max_participations)
        return MinSep(self.rounds, self.min_sep, often, observed=True)

    def within(self, planned: Participation) -> Participation:
        """The least that accounting has to allow for, over all rounds that were planned.

        A client still moves the rounds after the last one that the log has, so that fewer rounds
        than planned would understate the sensitivity.
        """
        rounds, often = max(planned.rounds, self.rounds), max(1, self.max_participations)
        if isinstance(planned, FixedEpochs) and self.comes_back_after(planned.min_sep):
            return FixedEpochs(rounds, planned.min_sep, often, observed=True)
        return MinSep(rounds, self.min_sep, often, observed=True)

    def comes_back_after(self, rounds: int) -> bool:
        """Whether every client that was counted again was so after exactly this many rounds."""
        return all(gap.low == gap.high == rounds for gap in self.gaps)

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON; what concerns limits is there only if some were stated."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        example = self.duplicate_example
        content["duplicate_example"] = None if example is None else asdict(example)
        for name in ("gaps", "counts"):
            content[name] = [
                {"from": low, "to": high, "number": number} for low, high, number in content[name]
            ]
        content["broken"] = [
            {name: value for name, value in asdict(one).items() if value is not None}
            for one in self.broken
        ]
        if self.limits == Limits():
            for name in ("limits", "broken", "broken_clients", "broken_counted_clients"):
                del content[name]
        return content


@final
@dataclass(frozen=True)
class WorstPattern:
    """The most that any one client who was really there could have moved C X, at clip norm 1.

    Attributes:
        value: That, or a number that it cannot exceed.
        kind: "exact" if `value` is the largest `pattern_norm` of all counted patterns (itself a
            bound where the strategy has entries of both signs).
        pattern: The worst pattern found, rounds counted from 0.
        client: Whose it is; None if nobody was counted.
    """

    value: float
    kind: Kind
    pattern: Pattern
    client: str | None
