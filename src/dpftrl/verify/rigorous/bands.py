"""Sensitivity of general banded strategies: intervals of floating-point numbers, rounded outward.

Let G = C^T C. A client with a given pattern can move C X by at most the square root of the sum of
|G| over all pairs of its rounds. Columns that are as far apart as there are bands, or further, are
orthogonal. A dynamic program finds the largest sum over all patterns. It counts pairs of
consecutive participations exactly, so it is exact if there are at most 2 min-sep bands. Otherwise
it bounds the other pairs of each round on their own.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from flint import arb
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix
from dpftrl.errors import TooLarge
from dpftrl.participation import FixedEpochs, Participation
from dpftrl.verify.rigorous.toeplitz import spend

# The numbers of the longest format of the machine, which has 64 bits on most.
Long = NDArray[np.longdouble]
UNIT_ROUNDOFF: Final = np.finfo(np.longdouble).eps / 2
TINY: Final = 1e-300  # more than underflow can lose, next to entries of which the largest is near 1
MOST_WORK: Final = 3e8  # table entries that may be read, and multiplications: a few seconds
MOST_TRIED_ROUNDS: Final = 64  # up to here, and for so many patterns, all of them are tried
MOST_TRIED_PATTERNS: Final = 20_000


class _Intervals(NamedTuple):
    """Lower and upper bounds on many numbers that are not negative."""

    low: Long
    high: Long


def banded_sensitivity(columns: Matrix, participation: Participation) -> arb:
    """Return the sensitivity of a banded strategy, or its bound.

    Args:
        columns: columns[p, j] is the entry of C in row j + p and column j.
        participation: The rounds that one client may take part in.

    Raises:
        TooLarge: The computation takes too long.
    """
    rounds = participation.rounds
    leading = columns[:rounds, :rounds].copy()
    leading[np.add.outer(np.arange(len(leading)), np.arange(rounds)) >= rounds] = 0.0
    if isinstance(participation, FixedEpochs):
        return _largest_pattern(leading, participation)
    exponent = math.frexp(float(np.abs(leading).max()))[1]
    leading = np.ldexp(leading, -exponent)  # exact, so that squares neither overflow nor underflow
    squares = _largest_sum(leading, participation)
    return _exact(squares[0]).union(_exact(squares[1])).sqrt() * arb(2) ** exponent


def _exact(number: np.longdouble) -> arb:
    """Return a long float as a ball without a radius: the sum of two float64 numbers."""
    head = float(number)
    return arb(head) + arb(float(number - np.longdouble(head)))


def _largest_pattern(columns: Matrix, participation: Participation) -> arb:
    """Return the largest norm of a pattern in |C|, over all patterns."""
    bands, rounds = columns.shape
    spend(participation.pattern_count() * (rounds + participation.max_participations * bands))
    largest = arb(0)
    for pattern in participation.patterns():
        total = [arb(0)] * (rounds + bands)
        for start in pattern:
            for p in range(bands):
                total[start + p] += abs(float(columns[p, start]))
        largest = largest.max(sum((entry * entry for entry in total), arb(0)))
    return largest.sqrt()


def _largest_sum(
    columns: Matrix, participation: Participation
) -> tuple[np.longdouble, np.longdouble]:
    """Return bounds on the largest sum of |G| over the pairs of a pattern."""
    bands, rounds = columns.shape
    gap, most = participation.min_sep, participation.max_participations
    gaps = range(gap, bands)
    work = max(len(gaps), 1) * rounds * max(bands, most)
    if work > MOST_WORK:
        raise TooLarge(f"the bands of the strategy take about {work:.2g} operations")
    energy = _gram(columns, 0)
    shape = len(gaps), rounds
    pairs = _Intervals(np.zeros(shape, np.longdouble), np.zeros(shape, np.longdouble))
    for i, distance in enumerate(gaps):
        gram = _gram(columns, distance)
        pairs.low[i, : rounds - distance] = 2 * gram.low
        pairs.high[i, : rounds - distance] = 2 * gram.high
    is_small = rounds <= MOST_TRIED_ROUNDS and participation.pattern_count() <= MOST_TRIED_PATTERNS
    search = _try_all if bands > 2 * gap and is_small else _best_chain
    return (
        search(participation, energy.low, pairs.low, -math.inf),
        search(participation, energy.high, pairs.high, math.inf),
    )


def _gram(columns: Matrix, distance: int) -> _Intervals:
    """Bound |G| between column j and column j + distance, for every j.

    A sum of P products has an error of at most P + 1 roundings of the sum of absolute products
    (Higham 2002, section 3.1), in whatever order it is added up.
    """
    bands, rounds = columns.shape
    later, earlier = columns[: bands - distance, distance:], columns[distance:, : rounds - distance]
    products = later.astype(np.longdouble) * earlier.astype(np.longdouble)
    size = np.abs(products.sum(axis=0))
    error = 2 * (bands + 4) * UNIT_ROUNDOFF * np.abs(products).sum(axis=0) + TINY
    return _Intervals(np.maximum(size - error, 0), size + error)


def _add(one: Long, other: Long, direction: float) -> Long:
    """Add, and round in this direction: -inf for lower bounds, inf for upper bounds."""
    return np.nextafter(one + other, np.longdouble(direction))


def _try_all(
    participation: Participation, energy: Long, pairs: Long, direction: float
) -> np.longdouble:
    """Return the largest sum over all patterns, tried one by one."""
    largest, outward = np.longdouble(0), np.longdouble(direction)
    for pattern in participation.patterns():
        total = np.longdouble(0)
        for i, end in enumerate(pattern):
            total = np.nextafter(total + energy[end], outward)
            for start in pattern[:i]:
                if end - start - participation.min_sep < len(pairs):
                    pair = pairs[end - start - participation.min_sep, start]
                    total = np.nextafter(total + pair, outward)
        largest = max(largest, total)
    return largest


def _best_chain(
    participation: Participation, energy: Long, pairs: Long, direction: float
) -> np.longdouble:
    """Return the largest sum over all patterns, by their last round.

    `best[t, j]` belongs to patterns of j + 1 rounds of which the last is t.

    Args:
        participation: The rounds that one client may take part in.
        energy: The squared norm of every column.
        pairs: pairs[i, j] is twice |G| between column j and the one min-sep + i later.
        direction: The direction in which every sum is rounded.
    """
    rounds, gap, most = (
        participation.rounds,
        participation.min_sep,
        participation.max_participations,
    )
    far = _far_pairs(pairs, gap, rounds, direction)
    best = np.full((rounds, most), -np.inf, np.longdouble)
    best[:, 0] = energy
    # The best of all patterns that ended so long ago that their last column is orthogonal.
    orthogonal = np.full(most, -np.inf, np.longdouble)
    for t in range(gap, rounds):
        if (old := t - gap - len(pairs)) >= 0:
            orthogonal = np.maximum(orthogonal, best[old])
        before = orthogonal[:-1]
        starts = np.arange(t - gap, max(t - gap - len(pairs), -1), -1)
        if len(starts):
            bonus = pairs[np.arange(len(starts)), starts]
            chains = _add(best[starts, :-1], bonus[:, None], direction)
            before = np.maximum(before, chains.max(axis=0))
        best[t, 1:] = _add(before, energy[t], direction)
        best[t, 2:] = _add(best[t, 2:], far[t], direction)
    return best.max()


def _far_pairs(pairs: Long, gap: int, rounds: int, direction: float) -> Long:
    """Bound, for every round, its pairs with all participations before the one before it.

    Those are at distances of at least 2 min-sep, and at least min-sep apart from each other.
    """
    zeros = np.zeros(rounds, np.longdouble)
    up_to = dict.fromkeys(range(gap, 2 * gap), zeros)
    for distance in range(2 * gap, gap + len(pairs)):
        with_it = zeros.copy()
        with_it[distance:] = pairs[distance - gap, : rounds - distance]
        up_to[distance] = np.maximum(
            up_to[distance - 1], _add(with_it, up_to[distance - gap], direction)
        )
    return up_to[max(up_to)]
