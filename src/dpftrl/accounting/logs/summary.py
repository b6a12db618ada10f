"""What a participation log says."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import numpy as np

from dpftrl._internal.checks import whole_number
from dpftrl.accounting.logs.patterns import NO_GAP, Integers, Patterns, Visits
from dpftrl.mechanisms._sensitivity import Kind
from dpftrl.participation import FixedEpochs, MinSep, Participation, Pattern

if TYPE_CHECKING:
    import polars as pl


# More distinct numbers than this are shown as ranges.
MOST_BINS = 50


class Bin(NamedTuple):
    """A range of numbers, both ends included, and how many fall into it."""

    low: int
    high: int
    number: int


@final
class Histogram:
    """A count for each distinct number seen."""

    def __init__(self) -> None:
        self.values = np.zeros(0, dtype=np.int64)
        self.numbers = np.zeros(0, dtype=np.int64)

    def add(self, values: Integers) -> None:
        """Count these as well."""
        more, times = np.unique(values, return_counts=True)
        together = np.concatenate([self.values, more])
        self.values, where = np.unique(together, return_inverse=True)
        numbers = np.zeros(len(self.values), dtype=np.int64)
        np.add.at(numbers, where, np.concatenate([self.numbers, times]))
        self.numbers = numbers

    def bins(self) -> tuple[Bin, ...]:
        """One for each value, or ranges of equal width where there are too many values."""
        width = 1
        if len(self.values) > MOST_BINS:
            spread = int(self.values[-1] - self.values[0])
            width = _round_width(spread // (MOST_BINS - 2) + 1)  # the ends may be cut off ranges
        low = self.values // width * width
        lows, where = np.unique(low, return_inverse=True)
        numbers = np.zeros(len(lows), dtype=np.int64)
        np.add.at(numbers, where, self.numbers)
        return tuple(
            Bin(start, start + width - 1, number)
            for start, number in zip(lows.tolist(), numbers.tolist(), strict=True)
        )


def _round_width(least: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least this.

    >>> [_round_width(least) for least in (1, 3, 14, 51)]
    [1, 5, 20, 100]
    """
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10


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


MOST_SHOWN = 20

# Counted ones first, then the worst, then by id: the same whatever the partitions are.
Rank = tuple[bool, int, str]


class Rule(NamedTuple):
    """A limit as something that must not be below a number."""

    limit: Literal["min_sep", "max_participations"]
    measure: Callable[[Patterns], Integers]
    least: int


def _min_gaps(patterns: Patterns) -> Integers:
    return patterns.min_gaps


def _minus_counts(patterns: Patterns) -> Integers:
    return -patterns.counts


@final
class Offenders:
    """Gathers them partition by partition. A client is in one partition only.

    A client that is contacted has had its turn, whatever became of its update, so that limits are
    checked on all rows; those that the counted rows alone break are marked.
    """

    def __init__(self, limits: Limits, first_round: int):
        self._rules: list[Rule] = []
        if limits.min_sep is not None:
            self._rules.append(Rule("min_sep", _min_gaps, limits.min_sep))
        if limits.max_participations is not None:
            most = limits.max_participations
            self._rules.append(Rule("max_participations", _minus_counts, -most))
        self._first_round = first_round
        self._worst: dict[str, list[tuple[Rank, Broken]]] = {rule.limit: [] for rule in self._rules}
        self.clients, self.counted_clients = 0, 0

    def add(self, visits: Visits, contacted: Patterns, counted: Patterns) -> None:
        """Look at one partition."""
        by_any, by_counted = np.zeros((2, len(visits.ids)), dtype=bool)
        for rule in self._rules:
            bad = np.flatnonzero(rule.measure(counted) < rule.least)
            in_sums = counted.clients[bad]
            asked = np.flatnonzero(rule.measure(contacted) < rule.least)
            only_asked = asked[~np.isin(contacted.clients[asked], in_sums)]
            by_counted[in_sums] = True
            by_any[contacted.clients[asked]] = True
            worst = self._worst[rule.limit]
            worst.extend(self._ranked(rule, visits.ids, counted, bad, True))
            worst.extend(self._ranked(rule, visits.ids, contacted, only_asked, False))
            worst.sort(key=lambda entry: entry[0])
            del worst[MOST_SHOWN:]
        self.clients += int(by_any.sum())
        self.counted_clients += int(by_counted.sum())

    def _ranked(
        self, rule: Rule, ids: "pl.Series", patterns: Patterns, bad: Integers, counted: bool
    ) -> Iterator[tuple[Rank, Broken]]:
        import polars as pl

        found = pl.DataFrame(
            {
                "measure": rule.measure(patterns)[bad],
                "client": ids.gather(patterns.clients[bad]),
                "position": bad,
            }
        )
        for measure, client, position in found.sort("measure", "client").head(MOST_SHOWN).rows():
            if rule.limit == "min_sep":
                first, second = (t + self._first_round for t in patterns.closest(position))
                broken = Broken(client, rule.limit, (first, second), None, counted)
            else:
                broken = Broken(client, rule.limit, None, -measure, counted)
            yield (not counted, measure, client), broken

    def shown(self) -> tuple[Broken, ...]:
        """The worst, some of both kinds where there are both."""
        kinds = [[broken for _, broken in worst] for worst in self._worst.values()]
        if len(kinds) == 2:
            kinds[0] = kinds[0][: max(MOST_SHOWN // 2, MOST_SHOWN - len(kinds[1]))]
        return tuple(broken for kind in kinds for broken in kind)[:MOST_SHOWN]


def summarize(
    partitions: Iterable[Visits], rounds: int, first_round: int, limits: Limits
) -> Observed:
    """Everything that `Observed` holds."""
    gaps, counts, counted_rounds = Histogram(), Histogram(), Histogram()
    offenders = Offenders(limits, first_round)
    clients, participations, contacted_clients, contacts, surplus = 0, 0, 0, 0, 0
    contacted_min_sep, worst_duplicate = rounds, None
    for visits in partitions:
        contacted, counted = visits.contacted(), visits.counted()
        clients += len(counted)
        participations += len(counted.rounds)
        contacted_clients += len(contacted)
        contacts += len(contacted.rounds)
        contacted_min_sep = min(contacted_min_sep, _min_sep(contacted))
        gaps.add(counted.gaps)
        counts.add(counted.counts)
        counted_rounds.add(counted.rounds)
        surplus += int(np.maximum(visits.counted_rows - 1, 0).sum())
        worst_duplicate = _worse(worst_duplicate, _most_repeated(visits, first_round))
        offenders.add(visits, contacted, counted)
    return Observed(
        rounds=rounds,
        first_round=first_round,
        empty_rounds=rounds - len(counted_rounds.values),
        clients=clients,
        participations=participations,
        min_sep=int(gaps.values[0]) if len(gaps.values) else rounds,
        max_participations=int(counts.values[-1]) if len(counts.values) else 0,
        gaps=gaps.bins(),
        counts=counts.bins(),
        contacted_clients=contacted_clients,
        contacts=contacts,
        contacted_min_sep=contacted_min_sep,
        duplicate_rows=surplus,
        duplicate_example=worst_duplicate,
        limits=limits,
        broken=offenders.shown(),
        broken_clients=offenders.clients,
        broken_counted_clients=offenders.counted_clients,
    )


def _min_sep(patterns: Patterns) -> int:
    return int(patterns.min_gaps.min(initial=NO_GAP))


def _most_repeated(visits: Visits, first_round: int) -> Duplicate | None:
    """The (client, round) with the most counted rows, if that is more than one."""
    most = int(visits.counted_rows.max(initial=0))
    if most < 2:
        return None
    where = np.flatnonzero(visits.counted_rows == most)
    earliest = where[visits.rounds[where] == visits.rounds[where].min()]
    client = visits.ids.gather(visits.owner[earliest]).min()
    return Duplicate(str(client), int(visits.rounds[earliest[0]]) + first_round, most)


def _worse(one: Duplicate | None, other: Duplicate | None) -> Duplicate | None:
    """More rows, then the earlier round, then the smaller id: whatever the partitions are."""
    found = [duplicate for duplicate in (one, other) if duplicate is not None]
    return min(found, key=lambda d: (-d.rows, d.round, d.client), default=None)
