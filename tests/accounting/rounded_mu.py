"""Mu with the rounding of float64 noise buffers, solved step by step instead of in closed form."""

import math

from dpftrl import Mechanism

UNIT_ROUNDOFF = 2.0**-53
# The radius of two normals comes from 76 random bits. The last one stands for the middle of its
# cell, so that its uniform is 2^-77.
LARGEST_NORMAL = math.sqrt(-2 * math.log(2.0**-77))
COORDINATES_TIMES_ROUNDS = 2.0**40
# The share of mu that rounding may have in a new run.
MOST_ROUNDING = 1e-3


def with_rounding(ideal: float, mech: Mechanism, rounds: int) -> float:
    """The m that solves m = ideal + R(m).

    R(m) = 2 u (largest normal + m) sqrt(coordinates) * gain is how far rounding moves the two
    hypotheses apart, by what `docs/guarantees.md` shows.
    """
    per_unit, m = _shift_per_unit(mech, rounds), ideal
    for _ in range(100):
        m = ideal + per_unit * (LARGEST_NORMAL + m)
    return m


def rounding_share(m: float, mech: Mechanism, rounds: int) -> float:
    """How much of a whole mu is rounding."""
    return _shift_per_unit(mech, rounds) * (LARGEST_NORMAL / m + 1)


def _shift_per_unit(mech: Mechanism, rounds: int) -> float:
    coordinates = COORDINATES_TIMES_ROUNDS / rounds
    return 2 * UNIT_ROUNDOFF * math.sqrt(coordinates) * mech.rounding_gain(rounds)
