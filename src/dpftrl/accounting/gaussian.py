"""The exact (epsilon, delta) of a Gaussian mechanism, computed in log space, with safe rounding.

A mechanism whose outputs on two neighbouring datasets are Gaussians of unit variance, `mu` apart,
is (epsilon, delta)-DP exactly for delta >= Phi(-a) - exp(epsilon) Phi(-b) with
a = epsilon / mu - mu / 2 and b = a + mu (Balle and Wang 2018, Theorem 8). As
exp(epsilon) phi(b) = phi(a), that is phi(a) (M(a) - M(b)) with Mills' ratio M = Phi(-x) / phi(x):
nothing in it overflows, and delta may be as small as exp(-1e9).

Guarantees:
    `delta_of`, `log_delta_of` and `epsilon_of` never return less than the true value, and `mu_of`
    and `rho_of` never more. They add or subtract a bound on the rounding error of every step.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np

from dpftrl._internal.checks import as_float, positive_number
from dpftrl.errors import InvalidInput

ULP: Final = 2.0**-52
ROOT_HALF: Final = math.sqrt(0.5)
ROOT_HALF_PI: Final = math.sqrt(math.pi / 2)
LOG_ROOT_2PI: Final = 0.5 * math.log(2 * math.pi)

# Below this mu, subtracting M(a) - M(b) would lose too many digits: the difference is integrated.
NARROW: Final = 0.02
# Above this x, 1 - x M(x) is summed from its asymptotic series, since subtracting loses digits.
FAR: Final = 30.0
# Above this a, M(a) - M(b) is bounded instead of computed.
REMOTE: Final = 1e6
# Nodes and weights of Gauss-Legendre quadrature: 12 are exact to rounding on so short an interval.
LEGENDRE: Final = [
    (float(node), float(weight))
    for node, weight in zip(*np.polynomial.legendre.leggauss(12), strict=True)
]
# The most Newton steps; about six are needed.
MOST_STEPS: Final = 100
# Replaces a slope of 0, to avoid a division by zero.
TINY: Final = 1e-300
# The smallest float above 0: no Gaussian mechanism has a delta of 0.
SMALLEST: Final = 5e-324
# Above this mu, mu^2 would be close to overflow.
BOUNDLESS: Final = 1e150


def delta_of(epsilon: float, mu: float) -> float:
    """The smallest delta at which the mechanism is (epsilon, delta)-DP.

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
    """The smallest epsilon at which the mechanism is (epsilon, delta)-DP.

    Args:
        delta: Between 0 and 1.
        mu: The distance between the two Gaussians, in standard deviations.
        guess: An approximate result, if one is known. It changes only the speed.

    >>> round(epsilon_of(delta=1e-7, mu=1.0), 3)
    5.349
    """
    mu = positive_number("mu", mu)
    target = math.log(_fraction(delta))
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


def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu at which the mechanism is (epsilon, delta)-DP."""
    epsilon, target = _not_negative(epsilon), math.log(_fraction(delta))
    low, high = 0.0, 1.0
    while _log_delta(epsilon, high) <= target:
        low, high = high, 2 * high
    while low == 0.0 and _log_delta(epsilon, high / 2) > target:
        high /= 2
        if high < 1e-300:
            raise InvalidInput(f"no amount of noise gives epsilon {epsilon!r}, delta {delta!r}")
    low = max(low, high / 2)
    while high - low > 2 * ULP * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _log_delta(epsilon, middle) <= target else (low, middle)
    return low


def rho_of(epsilon: float, delta: float) -> float:
    """The largest rho of zCDP that a Gaussian mechanism within (epsilon, delta) can have."""
    return mu_of(epsilon, delta) ** 2 / 2 * (1 - 2 * ULP)


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
