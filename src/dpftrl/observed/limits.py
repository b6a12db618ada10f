"""Which clients did not keep to the limits that the server promised."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import numpy as np

from dpftrl.observed.patterns import Integers, Patterns, Visits
from dpftrl.observed.result import Broken, Limits

if TYPE_CHECKING:
    import polars as pl

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
