"""The sensitivity by brute force: over every pattern of participation."""

from itertools import combinations, pairwise

import numpy as np

from dpftrl.verify.sensitivity import Limits


def every_pattern(limits: Limits):
    for count in range(1, limits.max_participations + 1):
        for pattern in combinations(range(limits.rounds), count):
            if all(later - sooner >= limits.min_sep for sooner, later in pairwise(pattern)):
                yield list(pattern)


def brute_force(gram, limits: Limits) -> tuple[float, float]:
    """Return the largest norm of a pattern, with the signs of the Gram entries and without."""
    blocks = [gram[np.ix_(pattern, pattern)] for pattern in every_pattern(limits)]
    return (
        max(max(block.sum(), 0.0) for block in blocks) ** 0.5,
        max(np.abs(block).sum() for block in blocks) ** 0.5,
    )
