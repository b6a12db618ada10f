"""What real noise takes away from the guarantee of ideal Gaussians: range and rounding.

Box and Muller's method turns a radius and an angle into two normals. A radius made from so many
random bits ends at R = sqrt(2 ln 2 bits), so a pair of coordinates that one client moves by s can
land where the neighbouring dataset's noise never does. No epsilon forgives that: its probability is
a floor under delta.
"""

import math
from typing import Final

from dpftrl.checks import as_float
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism

# Random bits behind the radius, tail included; the sampler of dpftrl.noise draws as many.
RADIUS_BITS: Final = 76
# Coordinates times rounds: a hundred million of the one, ten thousand of the other.
MOST_DRAWS: Final = 2.0**40
# Relative rounding of a float64 number.
UNIT_ROUNDOFF: Final = 2.0**-53
# Rounding may enlarge mu by this factor at most before no guarantee is given at all.
MOST_ENLARGEMENT: Final = 2.0


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


def ideal_delta(delta: float, mu: float) -> float:
    """What a total delta leaves for ideal Gaussians once the sampler has taken its part.

    The sampler may take half of it. With so little noise that it takes more, the total delta is
    larger than `delta`; see `Guarantee.total_delta`.
    """
    if not 0 < delta < 1:  # what is left of a delta of 1 would pass every later check
        raise InvalidInput(f"delta must be between 0 and 1, got {delta!s:.40}")
    return max(delta - sampler_delta(mu), delta / 2)


def mu_with_rounding(mu: float, mechanism: Mechanism, rounds: int) -> float:
    """The mu of a real stream, whose buffers are rounded to float64, at ideal mu.

    Guarantees:
        An upper bound for every model of at most 2^40 / `rounds` coordinates. Rounding moves the
        two hypotheses about Z apart by a further vector, which depends on earlier releases and has
        a norm of at most R = 2 u (r + mu) sqrt(coordinates) * `rounding_gain`, always: u is the
        rounding of float64, r the largest normal of the sampler. Shifts of Gaussians that are
        chosen by the past, and whose norms together never exceed m, are m-Gaussian DP (the proof
        is in `docs/guarantees.md`). So m = mu + R, solved for m.
    """
    share = _rounding_share(mechanism, rounds)
    return (mu + share * largest_normal()) / (1 - share)


def mu_before_rounding(mu: float, mechanism: Mechanism, rounds: int) -> float:
    """The ideal mu at which a real stream has this mu; the inverse of `mu_with_rounding`."""
    share = _rounding_share(mechanism, rounds)
    before = mu * (1 - share) - share * largest_normal()
    if not before > 0:
        raise InvalidInput(
            f"rounding in the noise buffers of {mechanism.name} over {rounds:,} rounds costs more "
            f"than mu {mu:g} allows; use fewer rounds, or a mechanism with smaller scales"
        )
    return before


def _rounding_share(mechanism: Mechanism, rounds: int) -> float:
    """R over r + mu."""
    coordinates = MOST_DRAWS / rounds
    share = 2 * UNIT_ROUNDOFF * math.sqrt(coordinates) * mechanism.rounding_gain(rounds)
    if not 1 / (1 - share) <= MOST_ENLARGEMENT or not share < 1:
        raise InvalidInput(
            f"rounding in the noise buffers of {mechanism.name} over {rounds:,} rounds leaves no "
            "guarantee; use fewer rounds, or a mechanism with smaller scales"
        )
    return share


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
