"""Sensitivity of a lower-triangular Toeplitz strategy, from its coefficients."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpftrl.participation import Participation
from dpftrl.sensitivity.result import Sensitivity

Vector = NDArray[np.float64]


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
