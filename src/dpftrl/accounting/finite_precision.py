"""How far real noise differs from ideal Gaussians: its finite range, and rounding.

Range: the Box-Muller method turns a radius and an angle into two normals. A radius that is computed
from a finite number of random bits is at most R = sqrt(2 ln 2 bits). A pair of coordinates that one
client moves by s can therefore land where the noise of the neighbouring dataset never does. No
epsilon covers such an outcome, so its probability is a lower limit of delta (`sampler_delta`).

Rounding: the noise buffers are rounded to float64. This adds to mu (`mu_with_rounding`).
"""

import math
from typing import Final

from dpftrl._internal.checks import as_float
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism

# Random bits per radius, including its tail: what the sampler of dpftrl.noise draws.
RADIUS_BITS: Final = 76
# The most normals per run: for example a hundred million coordinates times ten thousand rounds.
MOST_DRAWS: Final = 2.0**40
# The largest relative rounding error of a float64 operation.
UNIT_ROUNDOFF: Final = 2.0**-53
# The largest share of the mu of a new run that rounding in the noise buffers may contribute.
MOST_ROUNDING: Final = 1e-3
# The largest R / (r + m) (see `mu_with_rounding`) that is accounted for: mu doubles there.
MOST_SHARE: Final = 0.5


def largest_normal(bits: int = RADIUS_BITS) -> float:
    """The largest radius that a sampler with this many random bits can draw.

    >>> round(largest_normal(bits=32), 2)
    6.66
    """
    return math.sqrt(2 * math.log(2) * bits)


# No normal is larger than this. The largest radius belongs to the middle of the last cell of the
# uniform numbers, which is 2^-77: hence one more bit.
FARTHEST_NORMAL: Final = largest_normal(RADIUS_BITS + 1)


def sampler_delta(mu: float, bits: int = RADIUS_BITS) -> float:
    """The part of delta that is due to the finite range of the sampler, at any epsilon.

    Guarantees:
        An upper bound on the probability that the noise falls where the neighbour's noise cannot,
        over every way to spread a distance of `mu` over at most 2^40 draws. In one pair, it is the
        probability that a normal in the plane, moved by mu, leaves the disc of radius R. In many
        pairs, each pair that is moved by s leaves its disc with probability at most
        s R exp(-R^2 / 2), where exp(-R^2 / 2) = 2^-bits, and the s sum to at most mu sqrt(pairs).
    """
    mu = as_float(mu)
    if not 0 <= mu < math.inf:
        raise InvalidInput(f"mu must be a finite number of at least 0, got {mu!r}")
    radius = largest_normal(bits)
    return min(1.0, _leaves_disc(mu, radius) + mu * radius * math.sqrt(MOST_DRAWS / 2) * 2.0**-bits)


def ideal_delta(delta: float, mu: float) -> float:
    """The part of a total delta that is left for ideal Gaussians after `sampler_delta`.

    It is at least half of `delta`. With so little noise that the sampler needs more than the other
    half, the total delta is larger than `delta`; see `Guarantee.total_delta`.
    """
    if not 0 < delta < 1:  # later checks would accept the part that is left of a delta of 1
        raise InvalidInput(f"delta must be between 0 and 1, got {delta!s:.40}")
    return max(delta - sampler_delta(mu), delta / 2)


def mu_with_rounding(mu: float, mechanism: Mechanism, rounds: int) -> float:
    """The mu of a real stream, whose buffers are rounded to float64.

    Args:
        mu: The mu without rounding.
        mechanism: The mechanism that correlates the noise.
        rounds: Number of rounds.

    Guarantees:
        An upper bound for every model of at most 2^40 / `rounds` coordinates. Rounding moves the
        two hypotheses about Z apart by a further vector, which depends on earlier releases and has
        a norm of at most R = 2 u (r + m) sqrt(coordinates) * `rounding_gain`, always. Here u is
        the rounding of float64, r the largest normal of the sampler, and m the result. Shifts of
        Gaussians that depend on earlier releases, and whose total norm never exceeds m, are
        m-Gaussian DP (the proof is in `docs/guarantees.md`). So the result solves m = mu + R.
    """
    share = _rounding_share(mechanism, rounds)
    return (mu + share * FARTHEST_NORMAL) / (1 - share)


def mu_before_rounding(mu: float, mechanism: Mechanism, rounds: int) -> float:
    """The mu without rounding at which a real stream has this mu: inverts `mu_with_rounding`.

    Raises:
        InvalidInput: Rounding makes up too much of `mu`; see `check_rounding`.
    """
    share = _rounding_share(mechanism, rounds)
    before = mu * (1 - share) - share * FARTHEST_NORMAL
    check_rounding(mu - before, mu, mechanism, rounds)
    return before


def check_rounding(rounding: float, mu: float, mechanism: Mechanism, rounds: int) -> None:
    """Refuse a run in which more than 0.1% of mu comes from rounding in the noise buffers.

    Plans and calibration use this check, to choose better. `account` does not: it states the
    guarantee of what was released, whatever it is.
    """
    if not rounding <= MOST_ROUNDING * mu:
        raise InvalidInput(
            f"rounding in the noise buffers of {mechanism.name} over {rounds:,} rounds would make "
            f"up {100 * rounding / mu:.3g}% of mu {mu:g}, and {MOST_ROUNDING:.1%} is the limit; "
            "use a mechanism with smaller scales, fewer rounds, or a larger epsilon"
        )


def _rounding_share(mechanism: Mechanism, rounds: int) -> float:
    """R / (r + m), in the notation of `mu_with_rounding`."""
    coordinates = MOST_DRAWS / rounds
    share = 2 * UNIT_ROUNDOFF * math.sqrt(coordinates) * mechanism.rounding_gain(rounds)
    if not share <= MOST_SHARE:
        raise InvalidInput(
            f"rounding in the noise buffers of {mechanism.name} over {rounds:,} rounds leaves no "
            "guarantee; use fewer rounds, or a mechanism with smaller scales"
        )
    return share


def _leaves_disc(shift: float, radius: float) -> float:
    """An upper bound on P(|z + shift| > radius) for a normal z in the plane (Marcum's Q).

    The density of the radius x is x exp(-(x - shift)^2 / 2) i0e(shift x), and i0e decreases in x:
    the bound uses its value at `radius` for all larger x.
    """
    if shift >= radius:
        return 1.0
    from scipy.special import i0e, ndtr

    gap = radius - shift
    integral = math.exp(-gap * gap / 2) + shift * math.sqrt(2 * math.pi) * float(ndtr(-gap))
    return float(i0e(shift * radius)) * integral * (1 + 1e-9)  # 1e-9: more than all rounding
