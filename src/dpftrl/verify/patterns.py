"""The worst pattern of one client, from the Gram matrix of the strategy's columns alone.

A client that takes part in the rounds of a pattern moves C X by at most the square root of the sum
of |G| over all pairs of them, G = C^T C, and attains it where G is not negative. Three bounds on
the largest such sum hold for every matrix; for most mechanisms one of them is attained.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np

from dpftrl._internal.arrays import Matrix

Pattern = list[int]

# Entries that the search for the best chain may look at: some seconds.
MOST_WORK: Final = 5e8
# Two ways to add up the same terms differ by less.
ROUNDING: Final = 1e-9


@final
@dataclass(frozen=True)
class Limits:
    """Which rounds one client may take part in."""

    rounds: int
    min_sep: int
    cap: int

    @property
    def most(self) -> int:
        """Most participations that fit."""
        return min(self.cap, -(-self.rounds // self.min_sep))

    def earliest(self) -> Pattern:
        """As early and as often as possible."""
        return list(range(0, self.most * self.min_sep, self.min_sep))


class Reach(NamedTuple):
    """How far one client can move C X: at least, and at most."""

    attained: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether the two agree."""
        return self.bound <= self.attained * (1 + ROUNDING)

    def or_better(self, other: "Reach") -> "Reach":
        """What both know together."""
        return Reach(max(self.attained, other.attained), min(self.bound, other.bound))


def moved_by(gram: Matrix, pattern: Pattern) -> float:
    """The norm of the sum of the columns of a pattern."""
    return float(max(gram[np.ix_(pattern, pattern)].sum(), 0.0)) ** 0.5


def worst_of_all(gram: Matrix, limits: Limits) -> Reach:
    """The tightest of the bounds; the dearest is only looked for if the others are loose."""
    found = _by_start_and_gap(gram, limits).or_better(_by_all_rounds(gram, limits))
    if found.exact or limits.most * limits.rounds**2 > MOST_WORK:
        return found
    return found.or_better(_by_chain(gram, limits))


def _by_all_rounds(gram: Matrix, limits: Limits) -> Reach:
    """Nobody can do more than take part in every round."""
    attained = moved_by(gram, limits.earliest())
    return Reach(attained, float(np.abs(gram).sum()) ** 0.5)


def _by_start_and_gap(gram: Matrix, limits: Limits) -> Reach:
    """Raise |G| until it falls with the start of a pair and with its gap; then earliest is worst.

    The s-th round of any pattern is at least s b, and the gap to its r-th at least (r - s) b: pair
    by pair the pattern 0, b, 2b, ... is worth as much in the raised matrix, or more.
    """
    rounds = limits.rounds
    by_gap = np.zeros((rounds, rounds))
    for start in range(rounds):
        by_gap[start, : rounds - start] = np.abs(gram[start, start:])
    turned = by_gap[::-1, ::-1]
    np.maximum.accumulate(turned, axis=0, out=turned)
    np.maximum.accumulate(turned, axis=1, out=turned)
    b, most = limits.min_sep, limits.most
    total = sum(
        by_gap[s * b, 0] + 2 * by_gap[s * b, b : (most - s - 1) * b + 1 : b].sum()
        for s in range(most)
    )
    return Reach(moved_by(gram, limits.earliest()), float(total) ** 0.5)


def _by_chain(gram: Matrix, limits: Limits) -> Reach:
    """The best chain of rounds, where neighbours are weighed exactly and others are bounded.

    `best[t, j]` is the most that j + 1 rounds, the last of them t, are worth. Rounds before the
    neighbour are at least 2b, 3b, ... away; `far[j]` bounds what they add to round t, each by the
    largest entry so far away. Exact for matrices of at most 2b bands.
    """
    size, rounds, b, most = np.abs(gram), limits.rounds, limits.min_sep, limits.most
    best = np.full((rounds, most), -np.inf)
    came_from = np.zeros((rounds, most), dtype=np.int64)
    best[:, 0] = np.diag(size)
    for t in range(b, rounds):
        pairs = 2 * size[: t - b + 1, t]
        far = _far_away(pairs, b, most)
        chains = best[: t - b + 1, : most - 1] + pairs[:, None]
        came_from[t, 1:] = chains.argmax(axis=0)
        best[t, 1:] = chains.max(axis=0) + size[t, t] + far[1:]
    last, count = np.unravel_index(best.argmax(), best.shape)
    pattern = [int(last)]
    for j in range(int(count), 0, -1):
        pattern.append(int(came_from[pattern[-1], j]))
    return Reach(moved_by(gram, pattern[::-1]), float(best.max()) ** 0.5)


def _far_away(pairs: Matrix, b: int, most: int) -> Matrix:
    """For j earlier rounds, the most that all but the nearest add; `pairs` ends b rounds away."""
    largest_up_to = np.maximum.accumulate(pairs)
    far = np.zeros(most)
    away = largest_up_to[::-1][b::b][: max(most - 2, 0)]  # at least 2b, 3b, ... rounds away
    far[2 : 2 + len(away)] = np.cumsum(away)
    far[2 + len(away) :] = far[1 + len(away)] if len(away) else 0.0
    return far
