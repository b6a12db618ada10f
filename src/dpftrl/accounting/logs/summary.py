"""The summary of a participation log: counts, gaps, and the clients that broke a limit."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, final

import numpy as np

from dpftrl._internal.checks import whole_number
from dpftrl.accounting.logs.partitions import NO_GAP, ClientIds, Contacts, Integers, Patterns
from dpftrl.mechanisms._sensitivity import Kind
from dpftrl.participation import FixedEpochs, MinSep, Participation, Pattern

# A histogram with more distinct values than this shows ranges: a table that fits on a screen.
MOST_BINS = 50
# A summary lists at most this many clients that broke a limit.
MOST_SHOWN = 20


class Bin(NamedTuple):
    """A range of values, both ends included, and the number of values in it."""

    low: int
    high: int
    number: int


@final
class Histogram:
    """The number of times that each distinct value was added."""

    def __init__(self) -> None:
        self.values = np.zeros(0, dtype=np.int64)
        self.numbers = np.zeros(0, dtype=np.int64)

    def add(self, values: Integers) -> None:
        """Add these values."""
        new_values, new_numbers = np.unique(values, return_counts=True)
        all_values = np.concatenate([self.values, new_values])
        self.values, positions = np.unique(all_values, return_inverse=True)
        numbers = np.zeros(len(self.values), dtype=np.int64)
        np.add.at(numbers, positions, np.concatenate([self.numbers, new_numbers]))
        self.numbers = numbers

    def bins(self) -> tuple[Bin, ...]:
        """One bin per value, or bins of equal width if there are more than MOST_BINS values."""
        width = 1
        if len(self.values) > MOST_BINS:
            spread = int(self.values[-1] - self.values[0])
            # MOST_BINS - 2, because bins start at multiples of the width: this may add a bin at
            # each end.
            width = _round_width(spread // (MOST_BINS - 2) + 1)
        low_of_value = self.values // width * width
        lows, positions = np.unique(low_of_value, return_inverse=True)
        numbers = np.zeros(len(lows), dtype=np.int64)
        np.add.at(numbers, positions, self.numbers)
        return tuple(
            Bin(start, start + width - 1, number)
            for start, number in zip(lows.tolist(), numbers.tolist(), strict=True)
        )


def _round_width(least: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least `least`.

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
    """The limits on participation that the run promised; None means no limit.

    Attributes:
        min_sep: The smallest allowed difference between two rounds of one client.
        max_participations: The largest allowed number of rounds of one client.
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
    """A client that broke a limit.

    Attributes:
        client: The client's id.
        limit: The name of the limit.
        rounds: For `min_sep`: two rounds that are too close, numbered as in the log; None
            for the other limit.
        count: For `max_participations`: the number of participations; None for the other limit.
        counted: Whether the client's counted rows alone break the limit. If not, the client was
            contacted too often, but the released sums keep the limit.
    """

    client: str
    limit: Literal["min_sep", "max_participations"]
    rounds: tuple[int, int] | None
    count: int | None
    counted: bool


@final
@dataclass(frozen=True)
class Duplicate:
    """A client with several counted rows for one round (numbered as in the log)."""

    client: str
    round: int
    rows: int


@final
@dataclass(frozen=True)
class Observed:
    """The participation that a log shows.

    Each (client, round) pair is used once, even if several rows of the log repeat it.

    Attributes:
        rounds: Number of training rounds.
        first_round: The number of the first round in the log.
        empty_rounds: Number of rounds in which no client was counted.
        clients: Number of clients that were counted at least once.
        participations: Number of counted (client, round) pairs.
        min_sep: Smallest difference between two counted rounds of one client; `rounds` if no
            client was counted twice.
        max_participations: Largest number of counted rounds of one client.
        gaps: Histogram of the differences between consecutive counted rounds of a client.
        counts: Histogram of the number of counted rounds per client.
        contacted_clients: Number of clients in any row, whatever its status.
        contacts: Number of (client, round) pairs in any row.
        contacted_min_sep: Like `min_sep`, but over all rows.
        duplicate_rows: Counted rows beyond the first for their client and round. If they mean that
            an update was summed twice, and not that a line was written twice, no statement about
            privacy holds.
        duplicate_example: The client and round with the most counted rows.
        limits: The promised limits.
        broken: Up to 20 clients that broke a limit; those that broke it by counted rows first.
        broken_clients: Number of clients that broke a limit.
        broken_counted_clients: Number of clients that broke a limit by counted rows alone.
        from_times: Whether the log has times instead of rounds. Each gap is then a lower bound: the
            number of whole round lengths between two contacts, or 1 if they are closer. Each
            (client, time) pair is a participation. `duplicate_rows` includes counted rows of one
            client that are so close that they can be in one round.
        unseen_rounds: How many more rounds the run can have had than the log shows: 1 if the log
            has times, and neither the start of the first round nor the rounds were stated.
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
    from_times: bool = False
    unseen_rounds: int = 0

    @property
    def participation(self) -> MinSep:
        """The smallest participation that covers the log, if there is no round after `rounds`."""
        most = max(1, self.max_participations)
        return MinSep(self.rounds + self.unseen_rounds, self.min_sep, most, observed=True)

    def within(self, planned: Participation) -> Participation:
        """The smallest participation that covers the log, over all planned rounds.

        A client's update also changes the releases after the last round of the log. Fewer rounds
        than planned would therefore understate the sensitivity.
        """
        rounds, most = planned.rounds, max(1, self.max_participations)
        if self.rounds > rounds:
            rounds = self.rounds + self.unseen_rounds
        if isinstance(planned, FixedEpochs) and self.comes_back_after(planned.min_sep):
            return FixedEpochs(rounds, planned.min_sep, most, observed=True)
        return MinSep(rounds, self.min_sep, most, observed=True)

    def comes_back_after(self, rounds: int) -> bool:
        """Whether all consecutive counted rounds of a client are exactly this many rounds apart.

        A log with times cannot show this, because its gaps are lower bounds.
        """
        if self.from_times and self.gaps:
            return False
        return all(gap.low == gap.high == rounds for gap in self.gaps)

    def as_json(self) -> dict[str, Any]:
        """A dict that can be written as JSON; it mentions limits only if some were given."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        example = self.duplicate_example
        content["duplicate_example"] = None if example is None else asdict(example)
        for name in ("gaps", "counts"):
            content[name] = [
                {"from": low, "to": high, "number": number} for low, high, number in content[name]
            ]
        content["broken"] = [
            {name: value for name, value in asdict(broken).items() if value is not None}
            for broken in self.broken
        ]
        if self.limits == Limits():
            for name in ("limits", "broken", "broken_clients", "broken_counted_clients"):
                del content[name]
        if not self.from_times:
            for name in ("from_times", "unseen_rounds"):
                del content[name]
        return content


@final
@dataclass(frozen=True)
class WorstPattern:
    """How far one client of the log can move C X at most, at clip norm 1.

    Attributes:
        value: The largest norm over all counted clients, or an upper bound on it.
        kind: "exact" if `value` is the largest `pattern_norm` of all counted patterns (itself a
            bound where the strategy has entries of both signs).
        pattern: The worst pattern found, with rounds counted from 0.
        client: The client with that pattern; None if no client was counted, or if the log has
            times, which do not show the rounds of a client exactly.
    """

    value: float
    kind: Kind
    pattern: Pattern
    client: str | None


# The sort key of a client that broke a limit: whether its counted rows alone keep the limit, its
# `Rule.measure`, and its id. Smaller keys come first: clients whose counted rows break the limit,
# and among them the worst. The order does not depend on the partitions.
Rank = tuple[bool, int, str]


class Rule(NamedTuple):
    """A limit, written as: `measure` of each client must be at least `least`."""

    limit: Literal["min_sep", "max_participations"]
    measure: Callable[[Patterns], Integers]
    least: int


def _min_gaps(patterns: Patterns) -> Integers:
    return patterns.min_gaps


def _minus_counts(patterns: Patterns) -> Integers:
    return -patterns.counts


@final
class BrokenLimits:
    """Collects the clients that broke a limit, partition by partition.

    A client is in one partition only. A contact uses up a client's participation even if its
    update was not counted, so limits are checked on all rows. Clients whose counted rows alone
    break a limit are marked.
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

    def add(self, contacts: Contacts, contacted: Patterns, counted: Patterns) -> None:
        """Check one partition.

        Args:
            contacts: The partition.
            contacted: `contacts.contacted()`.
            counted: `contacts.counted()`.
        """
        broke_by_any, broke_by_counted = np.zeros((2, len(contacts.ids)), dtype=bool)
        for rule in self._rules:
            in_counted = np.flatnonzero(rule.measure(counted) < rule.least)
            counted_clients = counted.clients[in_counted]
            in_contacted = np.flatnonzero(rule.measure(contacted) < rule.least)
            contacted_clients = contacted.clients[in_contacted]
            in_contacted_only = in_contacted[~np.isin(contacted_clients, counted_clients)]
            broke_by_counted[counted_clients] = True
            broke_by_any[contacted_clients] = True
            worst = self._worst[rule.limit]
            worst.extend(self._ranked(rule, contacts.ids, counted, in_counted, True))
            worst.extend(self._ranked(rule, contacts.ids, contacted, in_contacted_only, False))
            worst.sort(key=lambda entry: entry[0])
            del worst[MOST_SHOWN:]
        self.clients += int(broke_by_any.sum())
        self.counted_clients += int(broke_by_counted.sum())

    def _ranked(
        self, rule: Rule, ids: ClientIds, patterns: Patterns, positions: Integers, counted: bool
    ) -> Iterator[tuple[Rank, Broken]]:
        """The worst of the patterns at these positions, which all break the rule."""
        measures = rule.measure(patterns)[positions]
        if len(measures) > MOST_SHOWN:  # only the ids of the worst are looked at, and of their ties
            is_worst = measures <= np.partition(measures, MOST_SHOWN - 1)[MOST_SHOWN - 1]
            measures, positions = measures[is_worst], positions[is_worst]
        clients = ids.gather(patterns.clients[positions]).to_list()
        ranked = zip(measures.tolist(), clients, positions.tolist(), strict=True)
        for measure, client, position in heapq.nsmallest(MOST_SHOWN, ranked):
            if rule.limit == "min_sep":
                first, second = (t + self._first_round for t in patterns.closest(position))
                broken = Broken(client, rule.limit, (first, second), None, counted)
            else:
                broken = Broken(client, rule.limit, None, -measure, counted)
            yield (not counted, measure, client), broken

    def shown(self) -> tuple[Broken, ...]:
        """The worst clients, up to MOST_SHOWN; some for each limit if both were broken."""
        by_limit = [[broken for _, broken in worst] for worst in self._worst.values()]
        if len(by_limit) == 2:
            by_limit[0] = by_limit[0][: max(MOST_SHOWN // 2, MOST_SHOWN - len(by_limit[1]))]
        return tuple(broken for limit in by_limit for broken in limit)[:MOST_SHOWN]


def summarize(
    partitions: Iterable[Contacts], rounds: int, first_round: int, limits: Limits
) -> Observed:
    """Summarize the partitions of a log.

    Args:
        partitions: The contacts of each partition; all rows of a client are in the same one.
        rounds: Number of training rounds.
        first_round: The number of the first round in the log.
        limits: The limits to check.
    """
    gaps, counts, counted_rounds = Histogram(), Histogram(), Histogram()
    broken_limits = BrokenLimits(limits, first_round)
    clients, participations, contacted_clients, contact_count, duplicate_rows = 0, 0, 0, 0, 0
    contacted_min_sep, worst_duplicate = rounds, None
    for contacts in partitions:
        contacted, counted = contacts.contacted(), contacts.counted()
        clients += len(counted)
        participations += len(counted.rounds)
        contacted_clients += len(contacted)
        contact_count += len(contacted.rounds)
        contacted_min_sep = min(contacted_min_sep, _min_sep(contacted))
        gaps.add(counted.gaps)
        counts.add(counted.counts)
        counted_rounds.add(counted.rounds)
        duplicate_rows += int(np.maximum(contacts.counted_rows - 1, 0).sum())
        worst_duplicate = _worse(worst_duplicate, _most_repeated(contacts, first_round))
        broken_limits.add(contacts, contacted, counted)
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
        contacts=contact_count,
        contacted_min_sep=contacted_min_sep,
        duplicate_rows=duplicate_rows,
        duplicate_example=worst_duplicate,
        limits=limits,
        broken=broken_limits.shown(),
        broken_clients=broken_limits.clients,
        broken_counted_clients=broken_limits.counted_clients,
    )


def _min_sep(patterns: Patterns) -> int:
    """The smallest gap of all clients; NO_GAP if no client took part twice."""
    return int(patterns.min_gaps.min(initial=NO_GAP))


def _most_repeated(contacts: Contacts, first_round: int) -> Duplicate | None:
    """The (client, round) with the most counted rows; None if no pair has more than one."""
    most = int(contacts.counted_rows.max(initial=0))
    if most < 2:
        return None
    repeated = np.flatnonzero(contacts.counted_rows == most)
    earliest = repeated[contacts.rounds[repeated] == contacts.rounds[repeated].min()]
    client = contacts.ids.gather(contacts.owner[earliest]).min()
    return Duplicate(str(client), int(contacts.rounds[earliest[0]]) + first_round, most)


def _worse(first: Duplicate | None, second: Duplicate | None) -> Duplicate | None:
    """The duplicate with more rows, then the earlier round, then the smaller id.

    This order does not depend on the partitions.
    """
    duplicates = [duplicate for duplicate in (first, second) if duplicate is not None]
    return min(duplicates, key=lambda d: (-d.rows, d.round, d.client), default=None)
