"""Brute force over every pattern, for strategies small enough to write down."""

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import TooLarge
from dpftrl.participation import Participation
from dpftrl.sensitivity.result import Sensitivity

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
