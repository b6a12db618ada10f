"""Bounds on the sensitivity, from the Gram matrix of the strategy C alone.

A pattern is the list of rounds that one client takes part in. Let G = C^T C. A client with a given
pattern can move C X by at most the square root of the sum of |G| over all pairs of its rounds. It
attains this bound if these entries of G are not negative. This module has three bounds on the
largest such sum over all patterns. They hold for every matrix, and for most mechanisms one of them
is attained.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np

from dpftrl._internal.arrays import Matrix

Pattern = list[int]

MOST_WORK: Final = 5e8  # matrix entries that the search over chains may read: a few seconds
ROUNDING: Final = 1e-9  # relative difference allowed between two ways to add up the same terms


@final
@dataclass(frozen=True)
class Limits:
    """The rounds that one client may take part in.

    Attributes:
        rounds: The number of rounds.
        min_sep: The smallest distance of two rounds of one client.
        cap: The largest number of rounds of one client.
    """

    rounds: int
    min_sep: int
    cap: int

    @property
    def max_participations(self) -> int:
        """The largest number of rounds of one client that fits into the run."""
        return min(self.cap, -(-self.rounds // self.min_sep))

    def earliest_pattern(self) -> Pattern:
        """Return the pattern that is as early and as often as possible: 0, b, 2b, ..."""
        return list(range(0, self.max_participations * self.min_sep, self.min_sep))


class SensitivityBounds(NamedTuple):
    """A lower and an upper bound on the sensitivity: how far one client can move C X.

    Attributes:
        attained: Some client attains this norm.
        bound: No client exceeds this norm.
    """

    attained: float
    bound: float

    @property
    def is_exact(self) -> bool:
        """Whether the two bounds agree up to rounding."""
        return self.bound <= self.attained * (1 + ROUNDING)

    def combined_with(self, other: "SensitivityBounds") -> "SensitivityBounds":
        """Return the tighter lower and the tighter upper bound of the two."""
        return SensitivityBounds(max(self.attained, other.attained), min(self.bound, other.bound))


def pattern_norm(gram: Matrix, pattern: Pattern) -> float:
    """Return the norm of the sum of the columns of C in a pattern."""
    return float(max(gram[np.ix_(pattern, pattern)].sum(), 0.0)) ** 0.5


def bound_sensitivity(gram: Matrix, limits: Limits) -> SensitivityBounds:
    """Return the tightest bounds; the expensive search runs only if the cheap bounds are loose."""
    bounds = _by_start_and_gap(gram, limits).combined_with(_by_all_rounds(gram, limits))
    if bounds.is_exact or limits.max_participations * limits.rounds**2 > MOST_WORK:
        return bounds
    return bounds.combined_with(_by_chain(gram, limits))


def _by_all_rounds(gram: Matrix, limits: Limits) -> SensitivityBounds:
    """Bound every pattern by the pattern of all rounds."""
    attained = pattern_norm(gram, limits.earliest_pattern())
    return SensitivityBounds(attained, float(np.abs(gram).sum()) ** 0.5)


def _by_start_and_gap(gram: Matrix, limits: Limits) -> SensitivityBounds:
    """Bound |G| by a matrix for which the earliest pattern is the worst one.

    That matrix is the smallest one above |G| whose entries never increase with the start of a pair
    of rounds, nor with its gap. In any pattern, round number s (from 0) is at least s b, and its
    gap to round number r is at least (r - s) b. So every pair of the pattern 0, b, 2b, ... has an
    entry at least as large as that of the same pair in any other pattern.
    """
    rounds = limits.rounds
    by_gap = np.zeros((rounds, rounds))
    for start in range(rounds):
        by_gap[start, : rounds - start] = np.abs(gram[start, start:])
    reversed_view = by_gap[::-1, ::-1]  # accumulates from the end; writes into `by_gap`
    np.maximum.accumulate(reversed_view, axis=0, out=reversed_view)
    np.maximum.accumulate(reversed_view, axis=1, out=reversed_view)
    b, most = limits.min_sep, limits.max_participations
    total = sum(
        by_gap[s * b, 0] + 2 * by_gap[s * b, b : (most - s - 1) * b + 1 : b].sum()
        for s in range(most)
    )
    return SensitivityBounds(pattern_norm(gram, limits.earliest_pattern()), float(total) ** 0.5)


def _by_chain(gram: Matrix, limits: Limits) -> SensitivityBounds:
    """Bound all patterns by dynamic programming over their last round.

    Pairs of consecutive rounds of a pattern count exactly; all other pairs are bounded. The entry
    `best[t, j]` bounds the sum of |G| over all pairs, for patterns of j + 1 rounds that end with
    round t. The second-nearest, third-nearest, ... earlier rounds are at least 2b, 3b, ... rounds
    before t. `far[j]` bounds what their pairs with t add, each by the largest entry at that
    distance or further. The bound is exact for matrices of at most 2b bands.
    """
    size, rounds, b = np.abs(gram), limits.rounds, limits.min_sep
    most = limits.max_participations
    best = np.full((rounds, most), -np.inf)
    previous_round = np.zeros((rounds, most), dtype=np.int64)
    best[:, 0] = np.diag(size)
    for t in range(b, rounds):
        pairs = 2 * size[: t - b + 1, t]
        far = _far_pairs_bound(pairs, b, most)
        chains = best[: t - b + 1, : most - 1] + pairs[:, None]
        previous_round[t, 1:] = chains.argmax(axis=0)
        best[t, 1:] = chains.max(axis=0) + size[t, t] + far[1:]
    last, count = np.unravel_index(best.argmax(), best.shape)
    pattern = [int(last)]
    for j in range(int(count), 0, -1):
        pattern.append(int(previous_round[pattern[-1], j]))
    return SensitivityBounds(pattern_norm(gram, pattern[::-1]), float(best.max()) ** 0.5)


def _far_pairs_bound(pairs: Matrix, b: int, most: int) -> Matrix:
    """Bound what a round's pairs with j earlier rounds add, except the pair with the nearest.

    Args:
        pairs: The contribution of each earlier round. The last entry is b rounds earlier.
        b: The min-sep.
        most: The number of entries of the result: j = 0, 1, ..., most - 1.
    """
    largest_up_to = np.maximum.accumulate(pairs)
    far = np.zeros(most)
    distant = largest_up_to[::-1][b::b][: max(most - 2, 0)]  # at least 2b, 3b, ... rounds earlier
    far[2 : 2 + len(distant)] = np.cumsum(distant)
    far[2 + len(distant) :] = far[1 + len(distant)] if len(distant) else 0.0
    return far
