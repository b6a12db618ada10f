"""The (epsilon, delta) of Gaussian noise: exact for ideal Gaussians, and for noise as it is drawn.

A mechanism whose outputs on two neighboring datasets are Gaussians of unit variance, `mu` apart,
is (epsilon, delta)-DP exactly for delta >= Phi(-a) - exp(epsilon) Phi(-b) with
a = epsilon / mu - mu / 2 and b = a + mu (Balle and Wang 2018, Theorem 8). As
exp(epsilon) phi(b) = phi(a), this bound is phi(a) (M(a) - M(b)) with Mills' ratio
M(x) = Phi(-x) / phi(x): no term overflows, and delta may be as small as exp(-1e9).

Real noise differs from ideal Gaussians in two ways. First, its range is finite: the Box-Muller
method turns a radius and an angle into two normals, and a radius that is computed from a finite
number of random bits is at most R = sqrt(2 ln(2) bits). A pair of coordinates that one client moves
by s can therefore land where the noise of the neighboring dataset never does. No epsilon covers
such an outcome, so its probability is a lower limit of delta (`sampler_delta`). Second, the noise
buffers are rounded to float64, which adds to mu (`mu_with_rounding`).

Guarantees:
    `delta_of`, `log_delta_of` and `epsilon_of` never return less than the true value, and `mu_of`
    and `rho_of` never more. They add or subtract a bound on the rounding error of every step.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from dpftrl._internal.checks import as_float, positive_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism

ULP: Final = 2.0**-52
ROOT_HALF: Final = math.sqrt(0.5)
ROOT_HALF_PI: Final = math.sqrt(math.pi / 2)
LOG_ROOT_2PI: Final = 0.5 * math.log(2 * math.pi)

# Below this mu, the subtraction M(a) - M(b) would lose too many digits, so it is replaced by an
# integral.
NARROW: Final = 0.02
# Above this x, 1 - x M(x) is computed by its asymptotic series, since the subtraction loses digits.
FAR: Final = 30.0
# Above this a, M(a) - M(b) is bounded instead of computed.
REMOTE: Final = 1e6
# Nodes and weights of Gauss-Legendre quadrature. On so short an interval, 12 nodes are exact up to
# rounding.
LEGENDRE: Final = [
    (float(node), float(weight))
    for node, weight in zip(*np.polynomial.legendre.leggauss(12), strict=True)
]
# Largest number of Newton steps; about six are needed.
MOST_STEPS: Final = 100
# Newton steps for mu, before the slower search by bisection; about six are needed.
NEWTON_STEPS: Final = 20
# A Newton step for mu that is relatively shorter than this is the last: the error of its result is
# about the square of this.
SHORT_STEP: Final = 1e-10
# The smallest mu that is searched for. The square of a much smaller one would be 0.
SMALLEST_MU: Final = 1e-300
# Larger arguments of the exponential function overflow.
LARGEST_EXPONENT: Final = 700.0
# Replaces a slope of 0, to avoid a division by zero.
TINY: Final = 1e-300
# The smallest float above 0: no Gaussian mechanism has a delta of 0.
SMALLEST: Final = 5e-324
# Above this mu, mu^2 would be close to overflow.
BOUNDLESS: Final = 1e150
# Random bits per radius, including its tail: what the sampler of dpftrl.noise draws.
RADIUS_BITS: Final = 76
# Largest number of normals per run, such as a hundred million coordinates times ten thousand
# rounds.
MOST_DRAWS: Final = 2.0**40
# The largest relative rounding error of a float64 operation.
UNIT_ROUNDOFF: Final = 2.0**-53
# The largest share of the mu of a new run that rounding in the noise buffers may contribute.
MOST_ROUNDING: Final = 1e-3
# The largest R / (r + m) (see `mu_with_rounding`) that is accounted for: mu doubles there.
MOST_SHARE: Final = 0.5


def delta_of(epsilon: float, mu: float) -> float:
    """The smallest delta at which the Gaussian mechanism with this mu is (epsilon, delta)-DP.

    Args:
        epsilon: At least 0.
        mu: The distance between the two Gaussians, in standard deviations.

    >>> round(delta_of(epsilon=1.0, mu=1.0), 9)
    0.126936738
    """
    return min(1.0, max(math.exp(log_delta_of(epsilon, mu)) * (1 + 2 * ULP), SMALLEST))


def log_delta_of(epsilon: float, mu: float) -> float:
    """The logarithm of `delta_of`, for a delta that is too small for a float."""
    return _log_delta(_not_negative(epsilon), positive_number("mu", mu))


def epsilon_of(delta: float, mu: float, guess: float | None = None) -> float:
    """The smallest epsilon at which the Gaussian mechanism with this mu is (epsilon, delta)-DP.

    Args:
        delta: Between 0 and 1.
        mu: The distance between the two Gaussians, in standard deviations.
        guess: An approximate result, if one is known. It changes only the speed.

    >>> round(epsilon_of(delta=1e-7, mu=1.0), 3)
    5.349
    """
    return _epsilon(math.log(_fraction(delta)), positive_number("mu", mu), guess)


def _epsilon(target: float, mu: float, guess: float | None = None) -> float:
    """`epsilon_of` for the logarithm of a delta."""
    if _log_delta(0.0, mu) <= target:
        return 0.0
    if mu > BOUNDLESS:
        return math.inf
    # Log delta is concave in epsilon. A Newton step from the left of the root lands on its right,
    # and steps from the right approach the root without crossing it, except for rounding.
    most = _zcdp_epsilon(mu, target)
    epsilon = min(guess, most) if guess is not None and guess > 0 else most
    for _ in range(MOST_STEPS):
        log_delta = _log_delta(epsilon, mu)
        step = (log_delta - target) / max(_slope(epsilon, mu, log_delta), TINY)
        following = min(max(epsilon + step, epsilon / 8), most)
        if abs(following - epsilon) <= 4 * ULP * epsilon:
            break
        epsilon = following
    return _raise_until_safe(epsilon, target, mu)


def mu_of(epsilon: float, delta: float, guess: float | None = None) -> float:
    """The largest mu at which a Gaussian mechanism is (epsilon, delta)-DP.

    Args:
        epsilon: At least 0.
        delta: Between 0 and 1.
        guess: An approximate result, if one is known. It changes only the speed.
    """
    epsilon, delta = _not_negative(epsilon), _fraction(delta)
    target = math.log(delta)
    low, high = 0.0, math.inf
    mu = guess if guess is not None and SMALLEST_MU < guess < math.inf else SMALLEST_MU
    mu = max(mu, _least_mu(epsilon, delta, target))
    steps = 0
    while True:
        log_delta = _log_delta(epsilon, mu)
        low, high = (mu, high) if log_delta <= target else (low, mu)
        # The derivative of delta with respect to mu is the normal density at a. Log delta is
        # concave in mu, so that steps from the left approach the root without crossing it.
        a = epsilon / mu - mu / 2
        slope = math.exp(min(-a * a / 2 - LOG_ROOT_2PI - log_delta, LARGEST_EXPONENT))
        following = mu + (target - log_delta) / max(slope, TINY)
        steps += 1
        if steps <= NEWTON_STEPS and abs(following - mu) <= SHORT_STEP * mu:
            return _lower_until_safe(following, target, epsilon)
        if steps > NEWTON_STEPS or not low < following < high:
            following = (low + high) / 2 if high < math.inf else 2 * mu
            if high - low <= 2 * ULP * high or not low < following < high:
                return low
        mu = following
        if mu < SMALLEST_MU:
            raise InvalidInput(f"no amount of noise gives epsilon {epsilon!r}, delta {delta!r}")


def rho_of(epsilon: float, delta: float) -> float:
    """The largest rho of zCDP that a Gaussian mechanism within (epsilon, delta) can have."""
    mu = mu_of(epsilon, delta)
    return mu * (mu / 2) * (1 - 2 * ULP)  # the square itself could overflow


def _log_delta(epsilon: float, mu: float) -> float:
    """Log delta plus a bound on its rounding error."""
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    # a is a difference: its error is up to an ulp of b, and that of log phi(a) is |a| times larger.
    rounding = ULP * (8 + (abs(a) + 1) * (b + abs(a)))
    if a > REMOTE:  # M(a) - M(b) is at most mu / a^2, and for so large an a it is close to that
        square = min(a * a, 1e308)
        return math.log(mu) - math.log(square) - LOG_ROOT_2PI - square / 2 + 4 * rounding
    if a <= 0 and rounding > 0.01:
        return 0.0
    log_density = -a * a / 2 - LOG_ROOT_2PI
    if mu < NARROW:
        difference, spread = _integrated(a, mu), 32.0
    elif a > 0:
        larger = _mills(a)
        difference = larger - _mills(b)
        spread = 8 * (1 + larger / difference)
    else:
        rest = math.exp(log_density) * (_mills(-a) + _mills(b))
        return min(0.0, math.nextafter(_log1p(-rest * (1 - 16 * rounding)), 0.0))
    log_difference = math.log(difference)
    rounding += ULP * (spread + 4 * (abs(log_density) + abs(log_difference)))
    return min(0.0, log_density + log_difference + rounding)


def _log1p(x: float) -> float:
    """The logarithm of 1 + x; a safe upper value if rounding made x -1 or less."""
    return math.log1p(x) if x > -1 else math.log(ULP)


def _integrated(a: float, mu: float) -> float:
    """M(a) - M(a + mu) as the integral of -M', by Gauss-Legendre quadrature."""
    middle, half = a + mu / 2, mu / 2
    return half * sum(weight * _mills_fall(middle + half * node) for node, weight in LEGENDRE)


@cache
def _erfcx() -> Callable[[float], float]:
    """The function erfcx of scipy, imported at first use because importing scipy is slow."""
    from scipy.special import erfcx

    return erfcx


def _mills(x: float) -> float:
    """Mills' ratio M(x) = Phi(-x) / phi(x)."""
    return ROOT_HALF_PI * float(_erfcx()(x * ROOT_HALF))


def _mills_fall(x: float) -> float:
    """-M'(x) = 1 - x M(x)."""
    if x < FAR:
        return 1 - x * _mills(x)
    y = 1 / (x * x)
    return y * (1 - y * (3 - y * (15 - y * (105 - y * (945 - y * (10395 - 135135 * y))))))


def _slope(epsilon: float, mu: float, log_delta: float) -> float:
    """Minus the derivative of log delta with respect to epsilon: exp(epsilon) Phi(-b) / delta."""
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    return _mills(b) * math.exp(-a * a / 2 - LOG_ROOT_2PI - log_delta)


def _zcdp_epsilon(mu: float, log_delta: float) -> float:
    """The epsilon that follows from zCDP (Bun and Steinke 2016): an upper bound."""
    return mu * mu / 2 + mu * math.sqrt(-2 * log_delta)


def _least_mu(epsilon: float, delta: float, log_delta: float) -> float:
    """A lower bound on `mu_of`: the larger of what zCDP gives and what epsilon 0 would give."""
    log_part = math.sqrt(-log_delta)
    from_zcdp = math.sqrt(2) * (epsilon / (math.sqrt(epsilon - log_delta) + log_part))
    return max(from_zcdp, delta * 2 * ROOT_HALF_PI)  # delta is at most mu / sqrt(2 pi)


def _lower_until_safe(mu: float, target: float, epsilon: float) -> float:
    """Lower mu, in growing steps, until its log delta is at most `target`."""
    step = ULP
    while _log_delta(epsilon, mu) > target:
        mu *= 1 - step
        step *= 2
    return mu


def _raise_until_safe(epsilon: float, target: float, mu: float) -> float:
    """Raise epsilon, in growing steps, until its log delta is at most `target`."""
    step = ULP
    while _log_delta(epsilon, mu) > target:
        epsilon *= 1 + step
        step *= 2
    return epsilon


def _not_negative(epsilon: float) -> float:
    number = as_float(epsilon)
    if not 0 <= number < math.inf:
        raise InvalidInput(f"epsilon must be a finite number of at least 0, got {epsilon!s:.40}")
    return number


def _fraction(delta: float) -> float:
    if not 0 < delta < 1:
        raise InvalidInput(f"delta must be between 0 and 1, got {delta!s:.40}")
    return float(delta)


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
        The result is an upper bound on the probability that the noise falls where the noise of the
        neighboring dataset cannot fall. It holds for every way to spread a distance of `mu` over at
        most 2^40 draws. In one pair, it is the probability that a normal in the plane, moved by mu,
        leaves the disc of radius R. In many pairs, each pair that is moved by s leaves its disc
        with probability at most s R exp(-R^2 / 2), where exp(-R^2 / 2) = 2^-bits, and the s sum to
        at most mu sqrt(pairs).
    """
    mu = as_float(mu)
    if not 0 <= mu < math.inf:
        raise InvalidInput(f"mu must be a finite number of at least 0, got {mu!r}")
    return _sampler_delta(mu, bits)


def _sampler_delta(mu: float, bits: int = RADIUS_BITS) -> float:
    radius = largest_normal(bits)
    return min(1.0, _leaves_disc(mu, radius) + mu * radius * math.sqrt(MOST_DRAWS / 2) * 2.0**-bits)


class EpsilonAsDrawn(NamedTuple):
    """Epsilon of noise as the sampler draws it.

    Attributes:
        epsilon: The smallest epsilon.
        ideal_delta: The part of delta that was left for ideal Gaussians.
        sampler_delta: The part of delta that is due to the finite range of the sampler.
    """

    epsilon: float
    ideal_delta: float
    sampler_delta: float


def epsilon_as_drawn(
    delta: float, mu: float, margin: float, with_sampler: bool = True
) -> EpsilonAsDrawn:
    """The epsilon of noise as the sampler draws it.

    Args:
        delta: The delta of which the sampler takes its part.
        mu: The distance between the two Gaussians, in standard deviations.
        margin: Bound on the relative error of `mu`. Epsilon is computed for a mu larger by this
            much.
        with_sampler: Whether the sampler's part is taken from `delta`. Version 0.1 did not do that.
    """
    padded = mu * (1 + margin)
    if not 0 < padded < math.inf:
        raise InvalidInput(f"mu must be a finite number above 0, got {mu!r}")
    ideal = ideal_delta(delta, padded) if with_sampler else _fraction(delta)
    return EpsilonAsDrawn(_epsilon(math.log(ideal), padded), ideal, _sampler_delta(mu))


def ideal_delta(delta: float, mu: float) -> float:
    """The part of a total delta that is left for ideal Gaussians after `sampler_delta`.

    It is at least half of `delta`. With so little noise that the sampler needs more than the other
    half, the total delta is larger than `delta`; see `Guarantee.total_delta`.
    """
    if not 0 < delta < 1:  # later checks would accept the part that is left of a delta of 1
        raise InvalidInput(f"delta must be between 0 and 1, got {delta!s:.40}")
    return max(delta - _sampler_delta(mu), delta / 2)


def mu_with_rounding(mu: float, mechanism: Mechanism, rounds: int) -> float:
    """The mu of a real stream, whose buffers are rounded to float64.

    Args:
        mu: The mu without rounding.
        mechanism: The mechanism that correlates the noise.
        rounds: Number of rounds.

    Guarantees:
        The result is an upper bound for every model of at most 2^40 / `rounds` coordinates.
        Rounding moves the two Gaussians, whose distance is mu, apart by a further vector. This
        vector depends on earlier releases, and its norm is always at most
        R = 2 u (r + m) sqrt(coordinates) * `rounding_gain`. Here u is the rounding of float64, r
        the largest normal of the sampler, and m the result. Shifts of Gaussians that depend on
        earlier releases, and whose total norm never exceeds m, are m-Gaussian DP (the proof is in
        `docs/guarantees.md`). So the result solves m = mu + R.
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

    Plans and calibration use this check, because their settings can still be changed. `account`
    does not use it: it states the guarantee of what was released, whatever that is.
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
    return float(i0e(shift * radius)) * integral * (1 + 1e-9)  # 1e-9 exceeds all rounding errors
