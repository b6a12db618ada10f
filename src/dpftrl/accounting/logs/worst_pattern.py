"""The worst pattern of a log with more rounds than a Gram matrix has room for: best first.

Clients with equal count and smallest gap form a group, and the sensitivity of that count and gap
bounds the group. Groups are opened in descending order of their bounds, and their patterns' norms
computed, until no bound is left above the largest norm, or the work is enough.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from dpftrl.accounting.logs.patterns import Integers, Patterns, Visits
from dpftrl.accounting.logs.summary import WorstPattern
from dpftrl.mechanisms._sensitivity import ROUNDING, Sensitivity
from dpftrl.mechanisms.base import Matrix, Mechanism, Vector
from dpftrl.participation import MinSep, Pattern

if TYPE_CHECKING:
    import polars as pl


# Numbers that are worked on at once: some 30 MB.
CHUNK = 4_000_000

# Multiplying by a whole row of the Gram matrix beats picking entries from it when a pattern holds
# more than one round in so many.
DENSE_SHARE = 8


class _Found(NamedTuple):
    energy: float
    pattern: Pattern
    client: str | None


def worst_by_gram(mechanism: Mechanism, rounds: int, partitions: Iterable[Visits]) -> WorstPattern:
    """Maximise the sum of the entries of |C|^T |C| in the rows and columns of one pattern.

    Guarantees:
        A client whose updates have norm at most 1 moves C X by a sum of columns of C, each times
        such an update: in norm by no more than the sum of the columns of |C|.
    """
    size = np.abs(mechanism.strategy(rounds))
    gram = size.T @ size
    del size
    best = _Found(0.0, (), None)
    for visits in partitions:
        counted = visits.counted()
        energies = _energies(gram, counted)
        if not len(energies) or not energies.max() > best.energy:
            continue
        winner = int(energies.argmax())
        client = str(visits.ids[int(counted.clients[winner])])
        best = _Found(float(energies[winner]), counted.pattern(winner), client)
    if best.client is None:
        return WorstPattern(0.0, "exact", (), None)
    # Summed in another way: equal but for rounding, unless the mechanism's own is a bound.
    norm, own = best.energy**0.5, mechanism.pattern_norm(best.pattern, rounds)
    agreed = abs(norm - own) <= 1e-9 * norm
    return WorstPattern(
        max(norm, own), "exact" if agreed else "upper bound", best.pattern, best.client
    )


def _energies(gram: Matrix, patterns: Patterns) -> Vector:
    """The squared norm of every pattern."""
    energies = np.zeros(len(patterns))
    for count in np.unique(patterns.counts).tolist():
        where = np.flatnonzero(patterns.counts == count)
        dense = count * DENSE_SHARE > len(gram)
        step = max(1, CHUNK // (len(gram) if dense else count * count))
        for start in range(0, len(where), step):
            chunk = where[start : start + step]
            taken = patterns.matrix(chunk, count)
            energies[chunk] = _by_products(gram, taken) if dense else _by_entries(gram, taken)
    return energies


def _by_entries(gram: Matrix, taken: Integers) -> Vector:
    return gram[taken[:, :, None], taken[:, None, :]].sum(axis=(1, 2))


def _by_products(gram: Matrix, taken: Integers) -> Vector:
    present = np.zeros((len(taken), len(gram)))
    np.put_along_axis(present, taken, 1.0, axis=1)
    return np.einsum("ij,ij->i", present @ gram, present)


# Seconds to a minute or so: norms (each costs about as much as there are rounds, so that their
# number falls with it), sensitivities, and rounds of the patterns that are kept.
MOST_NORMS, FEWEST_NORMS = 1000, 10
MOST_ROUNDS_OF_NORMS = 5_000_000
MOST_BOUNDS = 100
MOST_KEPT = 2_000_000


@final
@dataclass(frozen=True)
class Group:
    """Clients that took part `count` times, never with less than `gap` between.

    Attributes:
        count: Participations of each.
        gap: The smallest between two of them; all rounds for those that took part once.
        bound: No pattern of the group has a larger norm.
        take: How many patterns may be evaluated.
    """

    count: int
    gap: int
    bound: float
    take: int


def worst_by_bounds(
    mechanism: Mechanism, rounds: int, partitions: Callable[[], Iterable[Visits]]
) -> WorstPattern:
    """Maximise `pattern_norm` over the counted patterns, or bound it.

    Guarantees:
        A pattern of k rounds with smallest gap g is one of those that the sensitivity under
        (g, k) is a maximum over, and sensitivity falls with g and rises with k. So neither the
        value of an opened group nor that of an unopened one can exceed what is returned.
    """
    columns = _columns(partitions(), rounds)
    if not columns:
        return WorstPattern(0.0, "exact", (), None)
    norms = max(FEWEST_NORMS, min(MOST_NORMS, MOST_ROUNDS_OF_NORMS // rounds))
    opened, unopened = _plan(columns, _bound_function(mechanism, rounds), norms)
    kept = _patterns(partitions(), opened, rounds)
    best, worst, client, upper = 0.0, (), None, 0.0
    for group, patterns in zip(opened, kept, strict=True):
        if group.bound <= best * (1 + ROUNDING):
            upper = max(upper, group.bound)  # and no later bound is larger
            break
        for pattern, whose in islice(sorted(patterns.items()), group.take):
            norm = mechanism.pattern_norm(pattern, rounds)
            if norm > best:
                best, worst, client = norm, pattern, whose
        if len(patterns) > group.take:
            upper = max(upper, group.bound)
    else:
        upper = max(upper, unopened)
    found = Sensitivity.between(best, max(best, upper))
    return WorstPattern(found.value, found.kind, worst, client)


def _columns(partitions: Iterable[Visits], rounds: int) -> dict[int, deque[tuple[int, int]]]:
    """For each count, the most first: the gaps, the smallest first, and their clients."""
    import polars as pl

    groups = pl.DataFrame(schema={"count": pl.Int64, "gap": pl.Int64, "clients": pl.Int64})
    for visits in partitions:
        more = _counts_and_gaps(visits.counted(), rounds).group_by("count", "gap").len("clients")
        groups = pl.concat([groups, more.cast({"clients": pl.Int64})])
        groups = groups.group_by("count", "gap").agg(pl.col("clients").sum())
    columns: dict[int, deque[tuple[int, int]]] = {}
    for count, gap, clients in groups.sort("count", "gap", descending=[True, False]).iter_rows():
        columns.setdefault(count, deque()).append((gap, clients))
    return columns


def _counts_and_gaps(counted: Patterns, rounds: int) -> "pl.DataFrame":
    import polars as pl

    gaps = np.minimum(counted.min_gaps, rounds)
    return pl.DataFrame({"count": counted.counts, "gap": gaps})


def _bound_function(mechanism: Mechanism, rounds: int) -> Callable[[int, int], float]:
    """The sensitivity for a count and a gap; infinite once there were enough of them."""
    left = iter(range(MOST_BOUNDS))

    def bound(count: int, gap: int) -> float:
        if next(left, None) is None:
            return np.inf
        return mechanism.sensitivity(MinSep(rounds, gap, count)).value

    return bound


def _plan(
    columns: dict[int, deque[tuple[int, int]]], bound: Callable[[int, int], float], norms: int
) -> tuple[list[Group], float]:
    """Which groups to open, in descending order of bounds, and the largest bound that is left."""
    opened: list[Group] = []
    bounds: dict[tuple[int, int], float] = {}
    # A group is looked at once another with no smaller count and no larger gap has been opened,
    # whose bound holds for it too; the first, for all of them.
    inherited = bound(max(columns), min(column[0][0] for column in columns.values()))
    kept = MOST_KEPT
    while heads := list(_undominated(columns)):
        for count, gap, _ in heads:
            if (count, gap) not in bounds:
                bounds[count, gap] = min(inherited, bound(count, gap))
        inherited, count, gap, clients = max(
            (bounds[c, g], c, g, clients) for c, g, clients in heads
        )
        take = min(clients, norms, kept // count)
        if take == 0:
            return opened, inherited
        opened.append(Group(count, gap, inherited, take))
        columns[count].popleft()
        norms, kept = norms - take, kept - take * count
    return opened, 0.0


def _undominated(columns: dict[int, deque[tuple[int, int]]]) -> Iterator[tuple[int, int, int]]:
    """Groups for which no other has at least their count and at most their gap."""
    smallest = np.inf
    for count, column in columns.items():
        if column and column[0][0] < smallest:
            smallest, clients = column[0]
            yield count, smallest, clients


def _patterns(
    partitions: Iterable[Visits], opened: list[Group], rounds: int
) -> list[dict[Pattern, str]]:
    """The distinct patterns of each group, with a client: the smallest, one more than it takes."""
    import polars as pl

    chosen = pl.DataFrame(
        {"count": [g.count for g in opened], "gap": [g.gap for g in opened]}
    ).with_row_index("group")
    kept: list[dict[Pattern, str]] = [{} for _ in opened]
    for visits in partitions:
        counted = visits.counted()
        here = _counts_and_gaps(counted, rounds).with_row_index("position")
        members = here.join(chosen, on=["count", "gap"]).partition_by("group", as_dict=True)
        for key, of_group in members.items():
            index, positions = int(key[0]), of_group["position"].to_numpy()
            _keep(kept[index], opened[index], visits, counted, positions)
    return kept


def _keep(
    kept: dict[Pattern, str], group: Group, visits: Visits, counted: Patterns, positions: Integers
) -> None:
    """Add the patterns at these positions, and forget the largest if they are too many."""
    most = group.take + 1
    taken, where = np.unique(counted.matrix(positions, group.count), axis=0, return_index=True)
    for row, position in zip(taken[:most].tolist(), positions[where[:most]], strict=True):
        kept.setdefault(tuple(row), str(visits.ids[int(counted.clients[position])]))
    for pattern in sorted(kept)[most:]:
        del kept[pattern]
