"""The worst pattern of a log: the counted client that can change the output C X the most.

There are two ways to find it in a log with rounds. `worst_by_gram` computes the norm of every
pattern from the Gram matrix |C|^T |C|. `worst_by_bounds` is for logs with more rounds than a Gram
matrix has room for. It puts clients with the same count and the same smallest gap into a group; the
sensitivity for that count and gap bounds every pattern of the group. It then evaluates the groups
in descending order of their bounds. It stops when no remaining bound is above the largest norm, or
at a limit on the work. For a log with times, `worst_by_gaps` gives a bound.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from dpftrl.accounting.logs.partitions import Contacts, Integers, Patterns
from dpftrl.accounting.logs.summary import WorstPattern
from dpftrl.mechanisms._sensitivity import ROUNDING, Sensitivity
from dpftrl.mechanisms.base import Matrix, Mechanism, Vector
from dpftrl.participation import MinSep, Pattern

if TYPE_CHECKING:
    import polars as pl


# Number of float64 values that are processed at once: about 30 MB.
CHUNK = 4_000_000

# If a pattern holds more than one in 8 of all rounds, multiplying by the whole Gram matrix is
# faster than picking entries from it.
DENSE_SHARE = 8

# Limits on the work of `worst_by_bounds`, chosen so that it takes from seconds to about a minute:
# pattern norms (the cost of each grows with the rounds, so their number falls with the rounds),
# sensitivities, and rounds in the patterns that are held in memory.
MOST_NORMS, FEWEST_NORMS = 1000, 10
MOST_ROUNDS_OF_NORMS = 5_000_000
MOST_BOUNDS = 100
MOST_KEPT = 2_000_000

# For each count of participations: pairs of (smallest gap, number of clients).
GapsByCount = dict[int, deque[tuple[int, int]]]


class _Candidate(NamedTuple):
    """The worst pattern so far and its squared norm."""

    squared_norm: float
    pattern: Pattern
    client: str | None


def worst_by_gaps(
    mechanism: Mechanism, rounds: int, partitions: Iterable[Contacts]
) -> WorstPattern:
    """The bound for the smallest gap and the largest count of all clients.

    A log with times does not show in which rounds a client took part, only how far apart they are
    at least. So no pattern is computed.
    """
    gap, count = rounds, 0
    for contacts in partitions:
        counted = contacts.counted()
        gap = min(gap, int(counted.min_gaps.min(initial=gap)))
        count = max(count, int(counted.counts.max(initial=0)))
    if not count:
        return WorstPattern(0.0, "exact", (), None)
    bound = mechanism.sensitivity(MinSep(rounds, gap, count, observed=True)).value
    return WorstPattern(bound, "upper bound", (), None)


def worst_by_gram(
    mechanism: Mechanism, rounds: int, partitions: Iterable[Contacts]
) -> WorstPattern:
    """Find the pattern whose rows and columns of |C|^T |C| have the largest sum.

    Guarantees:
        A client moves C X by the sum, over the rounds of its pattern, of a column of C times an
        update of norm at most 1. The norm of this sum is at most the norm of the sum of the same
        columns of |C|.
    """
    absolute = np.abs(mechanism.strategy(rounds))
    gram = absolute.T @ absolute
    del absolute
    worst = _Candidate(0.0, (), None)
    for contacts in partitions:
        counted = contacts.counted()
        squared_norms = _squared_norms(gram, counted)
        if not len(squared_norms) or not squared_norms.max() > worst.squared_norm:
            continue
        position = int(squared_norms.argmax())
        client = str(contacts.ids[int(counted.clients[position])])
        worst = _Candidate(float(squared_norms[position]), counted.pattern(position), client)
    if worst.client is None:
        return WorstPattern(0.0, "exact", (), None)
    # The mechanism computes the same norm in another way. Up to rounding they are equal, unless
    # the mechanism's value is only an upper bound.
    norm, mechanism_norm = worst.squared_norm**0.5, mechanism.pattern_norm(worst.pattern, rounds)
    agrees = abs(norm - mechanism_norm) <= 1e-9 * norm  # far above rounding errors
    kind = "exact" if agrees else "upper bound"
    return WorstPattern(max(norm, mechanism_norm), kind, worst.pattern, worst.client)


def _squared_norms(gram: Matrix, patterns: Patterns) -> Vector:
    """The squared norm of every pattern."""
    squared_norms = np.zeros(len(patterns))
    for count in np.unique(patterns.counts).tolist():
        positions = np.flatnonzero(patterns.counts == count)
        is_dense = count * DENSE_SHARE > len(gram)
        step = max(1, CHUNK // (len(gram) if is_dense else count * count))
        for start in range(0, len(positions), step):
            chunk = positions[start : start + step]
            rounds = patterns.matrix(chunk, count)
            sums = _sums_by_products(gram, rounds) if is_dense else _sums_by_entries(gram, rounds)
            squared_norms[chunk] = sums
    return squared_norms


def _sums_by_entries(gram: Matrix, rounds: Integers) -> Vector:
    """The sum of the Gram entries of each pattern (a row of `rounds`), picked one by one."""
    return gram[rounds[:, :, None], rounds[:, None, :]].sum(axis=(1, 2))


def _sums_by_products(gram: Matrix, rounds: Integers) -> Vector:
    """The same sums, by multiplying 0/1 vectors with the whole Gram matrix."""
    present = np.zeros((len(rounds), len(gram)))
    np.put_along_axis(present, rounds, 1.0, axis=1)
    return np.einsum("ij,ij->i", present @ gram, present)


@final
@dataclass(frozen=True)
class Group:
    """Clients that took part `count` times and have the smallest gap `gap`.

    Attributes:
        count: Participations of each client.
        gap: The smallest gap of each client; the number of rounds if `count` is 1.
        bound: No pattern of the group has a larger norm.
        take: How many of its patterns may be evaluated.
    """

    count: int
    gap: int
    bound: float
    take: int


def worst_by_bounds(
    mechanism: Mechanism, rounds: int, partitions: Callable[[], Iterable[Contacts]]
) -> WorstPattern:
    """Find the counted pattern with the largest `pattern_norm`, or an upper bound on it.

    Guarantees:
        The sensitivity for min-sep g and k participations is a maximum over patterns. It includes
        every pattern of k rounds with smallest gap g, and it falls with g and rises with k. So no
        pattern has a norm above the returned value, whether its group was evaluated or not.
    """
    gaps_by_count = _gaps_by_count(partitions(), rounds)
    if not gaps_by_count:
        return WorstPattern(0.0, "exact", (), None)
    norms = max(FEWEST_NORMS, min(MOST_NORMS, MOST_ROUNDS_OF_NORMS // rounds))
    groups, bound_of_rest = _choose_groups(gaps_by_count, _bound_function(mechanism, rounds), norms)
    patterns_by_group = _patterns_by_group(partitions(), groups, rounds)
    largest, worst, worst_client, upper = 0.0, (), None, 0.0
    for group, patterns in zip(groups, patterns_by_group, strict=True):
        if group.bound <= largest * (1 + ROUNDING):
            upper = max(upper, group.bound)  # bounds descend: no later one is larger
            break
        for pattern, client in islice(sorted(patterns.items()), group.take):
            norm = mechanism.pattern_norm(pattern, rounds)
            if norm > largest:
                largest, worst, worst_client = norm, pattern, client
        if len(patterns) > group.take:
            upper = max(upper, group.bound)
    else:
        upper = max(upper, bound_of_rest)
    sensitivity = Sensitivity.between(largest, max(largest, upper))
    return WorstPattern(sensitivity.value, sensitivity.kind, worst, worst_client)


def _gaps_by_count(partitions: Iterable[Contacts], rounds: int) -> GapsByCount:
    """The groups by count, largest count first; within a count, smallest gap first."""
    import polars as pl

    groups = pl.DataFrame(schema={"count": pl.Int64, "gap": pl.Int64, "clients": pl.Int64})
    for contacts in partitions:
        clients = _counts_and_gaps(contacts.counted(), rounds)
        added = clients.group_by("count", "gap").len("clients")
        groups = pl.concat([groups, added.cast({"clients": pl.Int64})])
        groups = groups.group_by("count", "gap").agg(pl.col("clients").sum())
    gaps_by_count: GapsByCount = {}
    for count, gap, clients in groups.sort("count", "gap", descending=[True, False]).iter_rows():
        gaps_by_count.setdefault(count, deque()).append((gap, clients))
    return gaps_by_count


def _counts_and_gaps(counted: Patterns, rounds: int) -> "pl.DataFrame":
    """The count and the smallest gap of each client; `rounds` where there is no gap."""
    import polars as pl

    gaps = np.minimum(counted.min_gaps, rounds)
    return pl.DataFrame({"count": counted.counts, "gap": gaps})


def _bound_function(mechanism: Mechanism, rounds: int) -> Callable[[int, int], float]:
    """A function from count and gap to the sensitivity; infinity after MOST_BOUNDS calls."""
    calls_left = iter(range(MOST_BOUNDS))

    def bound(count: int, gap: int) -> float:
        if next(calls_left, None) is None:
            return np.inf
        return mechanism.sensitivity(MinSep(rounds, gap, count)).value

    return bound


def _choose_groups(
    gaps_by_count: GapsByCount, bound: Callable[[int, int], float], norms: int
) -> tuple[list[Group], float]:
    """Choose the groups to evaluate, in descending order of their bounds.

    Args:
        gaps_by_count: All groups; the chosen ones are removed.
        bound: Gives the sensitivity for a count and a gap.
        norms: How many pattern norms may be computed.

    Returns:
        The chosen groups, and the largest bound of all others (0 if there are none).
    """
    chosen: list[Group] = []
    bounds: dict[tuple[int, int], float] = {}
    # A group becomes a candidate when every group with at least its count and at most its gap has
    # been chosen. The bound of such a group holds for the candidate too. The first bound, for the
    # largest count and the smallest gap, holds for all groups.
    inherited = bound(max(gaps_by_count), min(gaps[0][0] for gaps in gaps_by_count.values()))
    room = MOST_KEPT
    while candidates := list(_undominated(gaps_by_count)):
        for count, gap, _ in candidates:
            if (count, gap) not in bounds:
                bounds[count, gap] = min(inherited, bound(count, gap))
        inherited, count, gap, clients = max(
            (bounds[c, g], c, g, clients) for c, g, clients in candidates
        )
        take = min(clients, norms, room // count)
        if take == 0:
            return chosen, inherited
        chosen.append(Group(count, gap, inherited, take))
        gaps_by_count[count].popleft()
        norms, room = norms - take, room - take * count
    return chosen, 0.0


def _undominated(gaps_by_count: GapsByCount) -> Iterator[tuple[int, int, int]]:
    """The (count, gap, clients) of each group that no other group dominates.

    A group dominates another if its count is at least as large and its gap at most as large: then
    its sensitivity is at least as large too.
    """
    smallest_gap = np.inf
    for count, gaps in gaps_by_count.items():
        if gaps and gaps[0][0] < smallest_gap:
            smallest_gap, clients = gaps[0]
            yield count, smallest_gap, clients


def _patterns_by_group(
    partitions: Iterable[Contacts], groups: list[Group], rounds: int
) -> list[dict[Pattern, str]]:
    """The distinct patterns of each group, each with one client that has it.

    A group keeps the smallest patterns in lexicographic order, and one more than it may evaluate:
    this shows whether some were left out.
    """
    import polars as pl

    keys = pl.DataFrame(
        {"count": [g.count for g in groups], "gap": [g.gap for g in groups]}
    ).with_row_index("group")
    kept: list[dict[Pattern, str]] = [{} for _ in groups]
    for contacts in partitions:
        counted = contacts.counted()
        clients = _counts_and_gaps(counted, rounds).with_row_index("position")
        members = clients.join(keys, on=["count", "gap"]).partition_by("group", as_dict=True)
        for key, of_group in members.items():
            index, positions = int(key[0]), of_group["position"].to_numpy()
            _keep(kept[index], groups[index], contacts, counted, positions)
    return kept


def _keep(
    kept: dict[Pattern, str],
    group: Group,
    contacts: Contacts,
    counted: Patterns,
    positions: Integers,
) -> None:
    """Add the patterns at these positions to `kept`, and drop the largest if there are too many."""
    most = group.take + 1
    matrix = counted.matrix(positions, group.count)
    distinct, first = np.unique(matrix, axis=0, return_index=True)
    for row, position in zip(distinct[:most].tolist(), positions[first[:most]], strict=True):
        kept.setdefault(tuple(row), str(contacts.ids[int(counted.clients[position])]))
    for pattern in sorted(kept)[most:]:
        del kept[pattern]
