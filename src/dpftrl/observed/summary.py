"""What a log says, gathered partition by partition."""

from collections.abc import Iterable

import numpy as np

from dpftrl.observed.histogram import Histogram
from dpftrl.observed.limits import Offenders
from dpftrl.observed.patterns import NO_GAP, Patterns, Visits
from dpftrl.observed.result import Duplicate, Limits, Observed


def summarise(
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
