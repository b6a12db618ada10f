"""What real noise takes away from the guarantee of ideal Gaussians: range and rounding.

Box and Muller's method turns a radius and an angle into two normals. A radius made from so many
random bits ends at R = sqrt(2 ln 2 bits), so a pair of coordinates that one client moves by s can
land where the neighbouring dataset's noise never does. No epsilon forgives that: its probability is
a floor under delta.
"""

import math
from typing import Final

from dpftrl._internal.checks import as_float
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism

# Random bits behind the radius, tail included; the sampler of dpftrl.noise draws as many.
RADIUS_BITS: Final = 76
# Coordinates times rounds: a hundred million of the one, ten thousand of the other.
MOST_DRAWS: Final = 2.0**40
# Relative rounding of a float64 number.
UNIT_ROUNDOFF: Final = 2.0**-53
# The most that rounding in the noise buffers may contribute to the mu of a new run, as a share.
MOST_ROUNDING: Final = 1e-3
# R over r + m (see `mu_with_rounding`) above which there is no guarantee: mu would double.
MOST_SHARE: Final = 0.5


def largest_normal(bits: int = RADIUS_BITS) -> float:
    """The radius at which the sampler stops.

    >>> round(largest_normal(bits=32), 2)
    6.66
    """
    return math.sqrt(2 * math.log(2) * bits)


# No normal is larger than this. The last radius belongs to the middle of its cell: a uniform 2^-77.
FARTHEST_NORMAL: Final = largest_normal(RADIUS_BITS + 1)


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
        a norm of at most R = 2 u (r + m) sqrt(coordinates) * `rounding_gain`, always: u is the
        rounding of float64, r the largest normal of the sampler. Shifts of Gaussians that are
        chosen by the past, and whose norms together never exceed m, are m-Gaussian DP (the proof
        is in `docs/guarantees.md`). So m = mu + R, solved for m.
    """
    share = _rounding_share(mechanism, rounds)
    return (mu + share * FARTHEST_NORMAL) / (1 - share)


def mu_before_rounding(mu: float, mechanism: Mechanism, rounds: int) -> float:
    """The ideal mu at which a real stream has this mu; the inverse of `mu_with_rounding`.

    Raises:
        InvalidInput: Rounding makes up too much of `mu`; see `check_rounding`.
    """
    share = _rounding_share(mechanism, rounds)
    before = mu * (1 - share) - share * FARTHEST_NORMAL
    check_rounding(mu - before, mu, mechanism, rounds)
    return before


def check_rounding(rounding: float, mu: float, mechanism: Mechanism, rounds: int) -> None:
    """Refuse a run in which more than 0.1% of mu comes from rounding in the noise buffers.

    Plans and calibration share this check. `account` does not make it: what was released has the
    guarantee that it has.
    """
    if not rounding <= MOST_ROUNDING * mu:
        raise InvalidInput(
            f"rounding in the noise buffers of {mechanism.name} over {rounds:,} rounds would make "
            f"up {100 * rounding / mu:.3g}% of mu {mu:g}, and {MOST_ROUNDING:.1%} is the limit; "
            "use a mechanism with smaller scales, fewer rounds, or a larger epsilon"
        )


def _rounding_share(mechanism: Mechanism, rounds: int) -> float:
    """R over r + m."""
    coordinates = MOST_DRAWS / rounds
    share = 2 * UNIT_ROUNDOFF * math.sqrt(coordinates) * mechanism.rounding_gain(rounds)
    if not share <= MOST_SHARE:
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
