"""The class `Sensitivity`, sensitivity by brute force, and sensitivity of Toeplitz strategies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Vector
from dpftrl.errors import TooLarge
from dpftrl.participation import Participation, Pattern

Kind = Literal["exact", "upper bound"]

# Two ways of summing the same terms differ by rounding. A bound counts as exact if its relative
# distance from a norm that some pattern attains is at most this number.
ROUNDING = 1e-12
# Largest number of patterns that are tried one by one, which takes about a second.
MOST_PATTERNS = 20_000
# Largest number of rounds for which every pattern is tried, so that the Gram matrix stays small.
MOST_BRUTE_FORCE_ROUNDS = 64


@final
@dataclass(frozen=True)
class Sensitivity:
    """The largest L2 norm by which one client can change C X, at clip norm 1.

    Attributes:
        value: The sensitivity, or an upper bound on it.
        lower_bound: A norm that some allowed pattern attains; equal to `value` if `value` is exact.
        pattern: A pattern that attains `lower_bound`; None if none is known, or if it is too long
            to keep.
        kind: Whether `value` is the sensitivity itself or an upper bound on it.

    Guarantees:
        `value` is never below the true sensitivity under the participation that it was computed
        for. This holds if every client keeps to that participation and every update is clipped to
        the clip norm.
    """

    value: float
    lower_bound: float
    pattern: Pattern | None = None
    kind: Kind = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = "exact" if self.value == self.lower_bound else "upper bound"
        object.__setattr__(self, "kind", kind)

    @classmethod
    def exact(cls, value: float, pattern: Pattern | None = None) -> Self:
        """A sensitivity that is known exactly."""
        return cls(value, value, pattern)

    @classmethod
    def between(
        cls, lower_bound: float, upper_bound: float, pattern: Pattern | None = None
    ) -> Self:
        """A sensitivity between two bounds; exact if they agree up to rounding."""
        if upper_bound <= lower_bound * (1 + ROUNDING):
            return cls.exact(max(upper_bound, lower_bound), pattern)
        return cls(upper_bound, lower_bound, pattern)

    def times(self, scale: float) -> Self:
        """Sensitivity of the strategy multiplied by `scale`."""
        return type(self)(self.value * scale, self.lower_bound * scale, self.pattern)

    def __float__(self) -> float:
        return self.value


def brute_force_is_cheap(participation: Participation) -> bool:
    """Whether `brute_force` takes about a second or less."""
    few_rounds = participation.rounds <= MOST_BRUTE_FORCE_ROUNDS
    return few_rounds and participation.pattern_count() <= MOST_PATTERNS


def brute_force(strategy: NDArray[np.float64], participation: Participation) -> Sensitivity:
    """Sensitivity of a dense strategy, as the maximum over every pattern.

    Guarantees:
        Updates may point in any direction, so that a pattern contributes at most the sum of the
        absolute Gram entries of its columns. It attains that sum if those entries are
        non-negative.
    """
    if not brute_force_is_cheap(participation):
        raise TooLarge(
            f"brute force over {participation} would take too long; it is limited to "
            f"{MOST_BRUTE_FORCE_ROUNDS} rounds and {MOST_PATTERNS} patterns"
        )
    gram = strategy.T @ strategy
    absolute_gram = np.abs(gram)
    bound, attained, worst = 0.0, 0.0, ()  # squared norms; `worst` attains the second
    for pattern in participation.patterns():
        block = np.ix_(pattern, pattern)
        bound = max(bound, float(absolute_gram[block].sum()))
        same_direction = float(gram[block].sum())
        if same_direction > attained:
            attained, worst = same_direction, pattern
    return Sensitivity.between(attained**0.5, bound**0.5, worst)


def toeplitz_sensitivity(
    c: Vector, participation: Participation, *, rounding: float = 0.0
) -> Sensitivity:
    """Sensitivity of the lower-triangular Toeplitz strategy with coefficients c.

    Args:
        c: Coefficients of C, the diagonal first. Coefficients beyond the end of `c` are zero.
        participation: Which rounds one client may take part in.
        rounding: An increase or a negative coefficient is ignored if it is at most this number
            times c[0]. It then comes from rounding in the computation of c, not from the mechanism.

    Guarantees:
        If c is non-negative and non-increasing, the pattern 0, b, 2b, ... is the worst (Kalinin and
        Lampert 2024, Theorem 2; Theorem 3.1 of the paper), and the result is exact. It is also
        exact if the columns of one client never overlap, because they are then orthogonal and the
        earlier columns have the larger norms. Otherwise the smallest non-increasing majorant of |c|
        dominates the strategy entry by entry, so that its sensitivity is an upper bound.

    >>> from dpftrl.participation import MinSep
    >>> toeplitz_sensitivity(np.array([1.0, 0.5, 0.5]), MinSep(rounds=3, min_sep=1)).kind
    'exact'
    >>> toeplitz_sensitivity(np.array([1.0, 0.0, 0.5]), MinSep(rounds=3, min_sep=1)).kind
    'upper bound'
    """
    c = c[: participation.rounds]
    scale = float(np.abs(c).max()) or 1.0  # so that squares neither overflow nor underflow
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
    """Whether no two columns of one client can have a non-zero entry in the same row."""
    return len(c) <= participation.min_sep or participation.max_participations == 1


def toeplitz_pattern_norm(c: Vector, pattern: Sequence[int], rounds: int) -> float:
    """Largest norm by which a client with exactly this pattern can change C X, at clip norm 1.

    The result is an upper bound if c has entries of both signs.
    """
    column = np.abs(c[:rounds])
    scale = float(column.max()) or 1.0
    column = column / scale
    total = np.zeros(rounds)
    for start in pattern:
        total[start : start + len(column)] += column[: rounds - start]
    return scale * float(np.linalg.norm(total))


def non_increasing_majorant(c: Vector) -> Vector:
    """The smallest non-increasing sequence that is nowhere below |c|.

    >>> non_increasing_majorant(np.array([1.0, -0.25, 0.5, 0.0]))
    array([1. , 0.5, 0.5, 0. ])
    """
    return np.maximum.accumulate(np.abs(c)[::-1])[::-1]


def column_sum(c: Vector, participation: Participation) -> Vector:
    """Sum of the first k of the columns 0, b, 2b, ... of C: c plus its shifts by multiples of b.

    Here b is min-sep, and k the largest number of participations.
    """
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
