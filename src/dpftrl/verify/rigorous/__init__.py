"""Rigorous numbers: sensitivity, mu, epsilon and delta in interval arithmetic.

The library computes with float64 numbers and adds margins for their rounding. This package computes
the same quantities again, with other code, as *enclosures*: intervals that contain the true value
for certain. The parameters of the mechanism, the noise multiplier and delta are taken as the exact
binary numbers of the file. Every operation is done with balls of the library Arb (python-flint),
whose radius bounds the rounding of all steps so far. Only the search over the patterns of a banded
strategy uses float64, with every sum rounded outward.

What is enclosed are the numbers of the theorems in `docs/guarantees.md`: the sensitivity is exact
where the mechanism states an exact one, and otherwise the bound that the mechanism states. The cost
of rounding in the noise buffers and the sampler's part of delta are included.
"""

from dpftrl.verify.rigorous.check import SAMPLED, check_epsilon
from dpftrl.verify.rigorous.numbers import (
    Enclosure,
    NoiseStream,
    RigorousNumbers,
    enclose,
    is_installed,
)

__all__ = [
    "SAMPLED",
    "Enclosure",
    "NoiseStream",
    "RigorousNumbers",
    "check_epsilon",
    "enclose",
    "is_installed",
]
