"""Sensitivity of a general banded strategy, by a dynamic program over its Gram matrix.

`columns[p, j]` is the entry of C in row j + p and column j: P bands of an n x n strategy take P x n
numbers. Columns at least P apart are orthogonal, so that only closer participations interact.
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

# Most multiplications and most table entries of the dynamic program (seconds, and 0.8 GB). Above
# these a cheaper bound is used.
MOST_WORK = 2e10
MOST_ENTRIES = 1e8


def banded_sensitivity(columns: Matrix, participation: Participation) -> Sensitivity:
    """Sensitivity of a banded strategy under a participation.

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
        # The bound covers all gaps, but the pattern behind it may not be one of fixed epochs.
        pattern = participation.earliest()
    return Sensitivity.between(_attained(columns, pattern), bound**0.5, pattern)


def banded_pattern_norm(columns: Matrix, pattern: Sequence[int]) -> float:
    """Largest norm that a client with exactly this pattern can add; a bound if signs are mixed."""
    scale = float(np.abs(columns).max())
    return scale * _attained(np.abs(columns) / scale, pattern)


def gram_at_gap(columns: Matrix, gap: int) -> NDArray[np.float64]:
    """Gram entries between column j and column j + gap, for every j."""
    bands, rounds = columns.shape
    later = columns[: bands - gap, gap:]
    earlier = columns[gap:, : rounds - gap]
    return np.einsum("pj,pj->j", later, earlier)


def _attained(columns: Matrix, pattern: Sequence[int]) -> float:
    """Norm of the sum of the pattern's columns: what updates in one direction attain."""
    bands, rounds = columns.shape
    total = np.zeros(rounds + bands)
    for start in pattern:
        total[start : start + bands] += columns[:, start]
    return float(np.linalg.norm(total[:rounds]))


def _worst_of_few(columns: Matrix, participation: Participation) -> Sensitivity:
    """Sensitivity by trying every pattern."""
    worst = max(participation.patterns(), key=lambda pattern: _attained(columns, pattern))
    bound = max(banded_pattern_norm(columns, pattern) for pattern in participation.patterns())
    return Sensitivity.between(_attained(columns, worst), bound, worst)


def _majorant_bound(columns: Matrix, participation: Participation) -> Sensitivity:
    """Bound by a non-increasing Toeplitz strategy that dominates C entry by entry."""
    majorant = non_increasing_majorant(np.abs(columns).max(axis=1))
    bound = float(np.linalg.norm(column_sum(majorant, participation)))
    pattern = participation.earliest()
    return Sensitivity.between(_attained(columns, pattern), bound, pattern)


def _best_pattern(
    energy: NDArray[np.float64], pairs: dict[int, NDArray[np.float64]], participation: Participation
) -> tuple[float, Pattern]:
    """Maximize the sum of energies and pair terms over patterns.

    Args:
        energy: Squared norm of each column.
        pairs: For each gap below the number of bands, twice the absolute Gram entries at that gap.
        participation: Which rounds one client may take part in.

    Returns:
        A bound on the squared sensitivity, and the pattern that maximizes it.
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
    # The best totals that end too long ago to interact with round t, and where they end.
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
    """For each round, a bound on the pair terms with participations before the previous one."""
    best = {distance: np.zeros(rounds) for distance in range(gap, 2 * gap)}
    for distance in range(2 * gap, max(pairs, default=0) + 1):
        at_distance = np.zeros(rounds)
        at_distance[distance:] = pairs[distance]
        best[distance] = np.maximum(best[distance - 1], at_distance + best[distance - gap])
    return best[max(best)]
