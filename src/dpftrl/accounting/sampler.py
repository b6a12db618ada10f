"""What a real sampler of Gaussians takes away from the guarantee of ideal ones.

Box and Muller's method turns a radius and an angle into two normals. A radius made from so many
random bits ends at R = sqrt(2 ln 2 bits), so a pair of coordinates that one client moves by s can
land where the neighbouring dataset's noise never does. No epsilon forgives that: its probability is
a floor under delta.
"""

import math
from typing import Final

from dpftrl.checks import as_float
from dpftrl.errors import InvalidInput

# Random bits behind the radius, tail included; the sampler of dpftrl.noise draws as many.
RADIUS_BITS: Final = 76
# Coordinates times rounds: a hundred million of the one, ten thousand of the other.
MOST_DRAWS: Final = 2.0**40


def largest_normal(bits: int = RADIUS_BITS) -> float:
    """The radius at which the sampler stops.

    >>> round(largest_normal(bits=32), 2)
    6.66
    """
    return math.sqrt(2 * math.log(2) * bits)


def sampler_delta(mu: float, bits: int = RADIUS_BITS) -> float:
    """The delta that the end of the sampler's range costs, whatever the epsilon.

    Guarantees:
        A bound on the probability that the noise falls where the neighbour's cannot, over every way
        to spread a distance of `mu` over at most 2^40 draws: in one pair, it is that of a normal in
        the plane, moved by mu, leaving the disc; in many, each pair leaves by its boundary layer,
        at most s R exp(-R^2 / 2) with exp(-R^2 / 2) = 2^-bits, and the s sum to mu sqrt(pairs).
    """
    mu = as_float(mu)
    if not 0 <= mu < math.inf:
        raise InvalidInput(f"mu must be a finite number of at least 0, got {mu!r}")
    radius = largest_normal(bits)
    return min(1.0, _leaves_disc(mu, radius) + mu * radius * math.sqrt(MOST_DRAWS / 2) * 2.0**-bits)


def _leaves_disc(shift: float, radius: float) -> float:
    """At least P(|z + shift| > radius) for a normal z in the plane, which is Marcum's Q.

    Its density by the radius x is x exp(-(x - shift)^2 / 2) i0e(shift x), where i0e falls with x.
    """
    if shift >= radius:
        return 1.0
    from scipy.special import i0e, ndtr

    gap = radius - shift
    whole = math.exp(-gap * gap / 2) + shift * math.sqrt(2 * math.pi) * float(ndtr(-gap))
    return float(i0e(shift * radius)) * whole * (1 + 1e-9)
