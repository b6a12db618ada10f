"""Sensitivity of a lower-triangular Toeplitz strategy, from its coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Vector
from dpftrl.errors import TooLarge
from dpftrl.participation import Participation, Pattern

Kind = Literal["exact", "upper bound"]

# Two ways of summing the same terms differ by rounding; bounds this close to attained are attained.
ROUNDING = 1e-12


@final
@dataclass(frozen=True)
class Sensitivity:
    """The largest L2 norm that one client can add to the strategy's output, at clip norm 1.

    Attributes:
        value: The sensitivity, or a number that it cannot exceed.
        lower_bound: What the worst pattern found really attains; equal to `value` when exact.
        pattern: A pattern that attains `lower_bound`, where it is short enough to be worth keeping.

    Guarantees:
        `value` is never below the true sensitivity under the participation it was computed for,
        which holds if every client keeps to that participation and every update to the clip norm.
    """

    value: float
    lower_bound: float
    pattern: Pattern | None = None

    @classmethod
    def exact(cls, value: float, pattern: Pattern | None = None) -> Self:
        """The true sensitivity."""
        return cls(value, value, pattern)

    @classmethod
    def between(
        cls, lower_bound: float, upper_bound: float, pattern: Pattern | None = None
    ) -> Self:
        """An upper bound, or the exact value where the pattern found attains it."""
        if upper_bound <= lower_bound * (1 + ROUNDING):
            return cls.exact(max(upper_bound, lower_bound), pattern)
        return cls(upper_bound, lower_bound, pattern)

    def times(self, scale: float) -> Self:
        """The sensitivity of a strategy so many times as large."""
        return type(self)(self.value * scale, self.lower_bound * scale, self.pattern)

    @property
    def kind(self) -> Kind:
        """Whether `value` is the sensitivity itself or only bounds it from above."""
        return "exact" if self.value == self.lower_bound else "upper bound"

    def __float__(self) -> float:
        return self.value


# Patterns that are tried one by one where a participation has no more.
MOST_PATTERNS = 20_000


def brute_force_is_cheap(participation: Participation) -> bool:
    """Whether listing every pattern is a matter of a second."""
    return participation.rounds <= 64 and participation.pattern_count() <= MOST_PATTERNS


def brute_force(strategy: NDArray[np.float64], participation: Participation) -> Sensitivity:
    """Maximise over every pattern.

    Guarantees:
        Updates may point in any direction, so that a pattern contributes at most the sum of the
        absolute Gram entries of its columns; it attains that where those entries are non-negative.
    """
    if not brute_force_is_cheap(participation):
        raise TooLarge(
            f"brute force over {participation} would take too long; "
            f"it is meant for at most 64 rounds and {MOST_PATTERNS} patterns"
        )
    gram = strategy.T @ strategy
    size = np.abs(gram)
    bound, attained, worst = 0.0, 0.0, ()
    for pattern in participation.patterns():
        block = np.ix_(pattern, pattern)
        bound = max(bound, float(size[block].sum()))
        moved = float(gram[block].sum())
        if moved > attained:
            attained, worst = moved, pattern
    return Sensitivity.between(attained**0.5, bound**0.5, worst)


def toeplitz_sensitivity(
    c: Vector, participation: Participation, *, rounding: float = 0.0
) -> Sensitivity:
    """Sensitivity of LtToep(c) under a participation.

    Args:
        c: Coefficients, the diagonal first; those beyond its length are zero.
        participation: Which rounds one client may take part in.
        rounding: Relative size (of c[0]) below which an increase or a negative coefficient is an
            artefact of computing c, not a property of the mechanism.

    Guarantees:
        For c non-negative and non-increasing the pattern 0, b, 2b, ... is the worst (Kalinin and
        Lampert 2024, Theorem 2; Theorem 3.1 of the paper): the result is exact. It is exact too
        when the columns of one client never overlap, since then they are orthogonal and the
        earlier ones are longer. Otherwise the smallest non-increasing majorant of |c| dominates
        the strategy entry by entry, so that its sensitivity is an upper bound.

    >>> from dpftrl.participation import MinSep
    >>> toeplitz_sensitivity(np.array([1.0, 0.5, 0.5]), MinSep(rounds=3, min_sep=1)).kind
    'exact'
    >>> toeplitz_sensitivity(np.array([1.0, 0.0, 0.5]), MinSep(rounds=3, min_sep=1)).kind
    'upper bound'
    """
    c = c[: participation.rounds]
    scale = float(np.abs(c).max()) or 1.0  # so that squares neither overflow nor vanish
    c = c / scale
    majorant = non_increasing_majorant(c)
    slack = rounding * majorant[0]
    if np.all(c >= -slack) and np.all(majorant - c <= slack):
        exact = float(np.linalg.norm(column_sum(majorant, participation)))
        return Sensitivity.exact(exact).times(scale)
    attained = float(np.linalg.norm(column_sum(c, participation)))
    if all_columns_apart(c, participation):
        return Sensitivity.exact(attained).times(scale)
    bound = float(np.linalg.norm(column_sum(majorant, participation)))
    return Sensitivity.between(attained, bound).times(scale)


def all_columns_apart(c: Vector, participation: Participation) -> bool:
    """Whether no two columns of one client can overlap."""
    return len(c) <= participation.min_sep or participation.max_participations == 1


def toeplitz_pattern_norm(c: Vector, pattern: Sequence[int], rounds: int) -> float:
    """The most that a client with exactly this pattern can add (a bound if c has mixed signs)."""
    size = np.abs(c[:rounds])
    scale = float(size.max()) or 1.0
    size = size / scale
    total = np.zeros(rounds)
    for start in pattern:
        total[start : start + len(size)] += size[: rounds - start]
    return scale * float(np.linalg.norm(total))


def non_increasing_majorant(c: Vector) -> Vector:
    """The smallest non-increasing sequence that is nowhere below |c|.

    >>> non_increasing_majorant(np.array([1.0, -0.25, 0.5, 0.0]))
    array([1. , 0.5, 0.5, 0. ])
    """
    return np.maximum.accumulate(np.abs(c)[::-1])[::-1]


def column_sum(c: Vector, participation: Participation) -> Vector:
    """C u for u the pattern 0, b, 2b, ...: the first k shifts by b of c, added up."""
    rounds, gap, most = (
        participation.rounds,
        participation.min_sep,
        participation.max_participations,
    )
    if most == 1:
        return c
    segments = -(-rounds // gap)
    padded = np.zeros(segments * gap)
    padded[: len(c)] = c
    total = np.cumsum(padded.reshape(segments, gap), axis=0)
    total[most:] -= total[:-most].copy()
    return total.ravel()[:rounds]
