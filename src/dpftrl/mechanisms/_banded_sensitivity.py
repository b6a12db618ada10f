"""Sensitivity of a general banded strategy, by a dynamic program over its Gram matrix.

`columns[p, j]` is the entry of C in row j + p and column j: P bands of an n x n strategy take P x n
numbers. Columns that are P or more apart are orthogonal. Two participations therefore *interact*,
that is, their columns have a non-zero inner product, only if they are fewer than P rounds apart.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix
from dpftrl.mechanisms._sensitivity import (
    MOST_PATTERNS,
    Sensitivity,
    column_sum,
    non_increasing_majorant,
)
from dpftrl.participation import FixedEpochs, Participation, Pattern

# Limits on the multiplications (they take seconds) and on the table entries (they take 0.8 GB) of
# the dynamic program. Above either limit, a cheaper bound is used.
MOST_WORK = 2e10
MOST_ENTRIES = 1e8


def banded_sensitivity(columns: Matrix, participation: Participation) -> Sensitivity:
    """Sensitivity of a banded strategy for a participation.

    Guarantees:
        The result is never below the true sensitivity. It is exact if the number of bands is at
        most min_sep (then only column norms count). It is also exact if all Gram entries are
        non-negative and the number of bands is at most twice min_sep (then only consecutive
        participations interact, and the program counts those interactions exactly). Otherwise the
        interactions beyond consecutive participations are bounded for each participation.
    """
    scale = float(np.abs(columns).max())  # so that squares neither overflow nor underflow
    return _banded_sensitivity(columns / scale, participation).times(scale)


def _banded_sensitivity(columns: Matrix, participation: Participation) -> Sensitivity:
    bands, rounds = columns.shape
    most = participation.max_participations
    gaps = range(participation.min_sep, min(bands, rounds))
    if isinstance(participation, FixedEpochs) and participation.pattern_count() <= MOST_PATTERNS:
        return _worst_of_few(columns, participation)
    energy = np.einsum("pj,pj->j", columns, columns)
    if not gaps:
        equal_norms = Sensitivity.between(
            _attained(columns, participation.earliest()), (most * float(energy.max())) ** 0.5
        )
        if equal_norms.kind == "exact":
            return equal_norms
    too_much = len(gaps) * rounds * max(bands, most) > MOST_WORK
    if too_much or max(len(gaps), most) * rounds > MOST_ENTRIES:
        return _majorant_bound(columns, participation)
    pairs = {gap: 2 * np.abs(gram_at_gap(columns, gap)) for gap in gaps}
    bound, pattern = _best_pattern(energy, pairs, participation)
    if isinstance(participation, FixedEpochs):
        # The bound covers all gaps, but its pattern may not be possible with fixed epochs.
        pattern = participation.earliest()
    return Sensitivity.between(_attained(columns, pattern), bound**0.5, pattern)


def banded_pattern_norm(columns: Matrix, pattern: Sequence[int]) -> float:
    """Largest norm by which a client with exactly this pattern can change C X, at clip norm 1.

    The result is an upper bound if C has entries of both signs.
    """
    scale = float(np.abs(columns).max())
    return scale * _attained(np.abs(columns) / scale, pattern)


def gram_at_gap(columns: Matrix, gap: int) -> NDArray[np.float64]:
    """Gram entries between column j and column j + gap, for every j."""
    bands, rounds = columns.shape
    later = columns[: bands - gap, gap:]
    earlier = columns[gap:, : rounds - gap]
    return np.einsum("pj,pj->j", later, earlier)


def _attained(columns: Matrix, pattern: Sequence[int]) -> float:
    """Norm of the sum of the pattern's columns.

    A client attains this norm if all its updates point in the same direction.
    """
    bands, rounds = columns.shape
    total = np.zeros(rounds + bands)
    for start in pattern:
        total[start : start + bands] += columns[:, start]
    return float(np.linalg.norm(total[:rounds]))


def _worst_of_few(columns: Matrix, participation: Participation) -> Sensitivity:
    """Sensitivity by trying every pattern, for a participation with few patterns."""
    worst = max(participation.patterns(), key=lambda pattern: _attained(columns, pattern))
    bound = max(banded_pattern_norm(columns, pattern) for pattern in participation.patterns())
    return Sensitivity.between(_attained(columns, worst), bound, worst)


def _majorant_bound(columns: Matrix, participation: Participation) -> Sensitivity:
    """Bound the sensitivity by that of a non-increasing Toeplitz strategy that dominates C."""
    majorant = non_increasing_majorant(np.abs(columns).max(axis=1))
    bound = float(np.linalg.norm(column_sum(majorant, participation)))
    pattern = participation.earliest()
    return Sensitivity.between(_attained(columns, pattern), bound, pattern)


def _best_pattern(
    energy: NDArray[np.float64], pairs: dict[int, NDArray[np.float64]], participation: Participation
) -> tuple[float, Pattern]:
    """Maximize the sum of energies and pair terms over all patterns of a participation.

    Args:
        energy: Squared norm of each column.
        pairs: For each gap below the number of bands, twice the absolute Gram entries at that gap.
        participation: Which rounds one client may take part in.

    Returns:
        A bound on the squared sensitivity, and the pattern for which the sum is largest.
    """
    rounds, gap, most = (
        participation.rounds,
        participation.min_sep,
        participation.max_participations,
    )
    reach = max(pairs, default=gap - 1) + 1
    beyond_consecutive = _bound_beyond_consecutive(pairs, rounds, gap)
    # ending[t, j] is the best total of j + 1 participations of which the last is in round t;
    # came_from[t, j] is the round of the participation before it.
    ending = np.full((rounds, most), -np.inf)
    came_from = np.full((rounds, most), -1)
    ending[:, 0] = energy
    # The best totals whose last participation is too long ago to interact with round t, and the
    # rounds of these last participations.
    free = np.full(most, -np.inf)
    free_from = np.full(most, -1)
    for t in range(gap, rounds):
        if (old := t - reach) >= 0:
            better = ending[old] > free
            free, free_from = np.where(better, ending[old], free), np.where(better, old, free_from)
        best, best_from = free[:-1].copy(), free_from[:-1].copy()
        near = range(max(0, t - reach + 1), t - gap + 1)
        if near:
            bonus = np.array([pairs[t - s][s] for s in near])
            candidates = ending[near.start : near.stop, :-1] + bonus[:, None]
            choice = candidates.argmax(axis=0)
            top = np.take_along_axis(candidates, choice[None], axis=0)[0]
            better = top > best
            best = np.where(better, top, best)
            best_from = np.where(better, choice + near.start, best_from)
        ending[t, 1:] = best + energy[t]
        ending[t, 2:] += beyond_consecutive[t]
        came_from[t, 1:] = best_from
    last, count = np.unravel_index(ending.argmax(), ending.shape)
    pattern = [int(last)]
    for j in range(int(count), 0, -1):
        pattern.append(int(came_from[pattern[-1], j]))
    return float(ending.max()), tuple(reversed(pattern))


def _bound_beyond_consecutive(
    pairs: dict[int, NDArray[np.float64]], rounds: int, gap: int
) -> NDArray[np.float64]:
    """For each round, bound its pair terms with all participations before the previous one."""
    best = {distance: np.zeros(rounds) for distance in range(gap, 2 * gap)}
    for distance in range(2 * gap, max(pairs, default=0) + 1):
        at_distance = np.zeros(rounds)
        at_distance[distance:] = pairs[distance]
        best[distance] = np.maximum(best[distance - 1], at_distance + best[distance - gap])
    return best[max(best)]
