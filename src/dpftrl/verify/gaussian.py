"""From mu to epsilon, through the logarithm of the normal distribution function."""

import math
from typing import Final, NamedTuple

import numpy as np

# Random bits behind the radius of a pair of normals, and coordinates times rounds: what the noise
# is made with.
RADIUS_BITS: Final = 76
MOST_DRAWS: Final = 2.0**40
HALVINGS: Final = 200
# Beyond this mu nothing is private anyway; so many terms are enough up to it.
MOST_MU: Final = 30.0
TERMS: Final = 1_000


def log_delta(epsilon: float, mu: float) -> float:
    """Log of Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu)."""
    from scipy.special import log_ndtr

    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    share = -math.expm1(second - first)
    return first + math.log(share) if share > 0 else -math.inf


def epsilon_of(delta: float, mu: float) -> float:
    """The smallest epsilon at this delta, by halving an interval.

    >>> round(epsilon_of(1e-7, 1.0), 6)
    5.349345
    """
    target = math.log(delta)
    low, high = 0.0, 1.0
    if log_delta(low, mu) <= target:
        return 0.0
    while log_delta(high, mu) > target:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if log_delta(middle, mu) <= target else (middle, high)
    return high


def sampler_delta(mu: float) -> float:
    """At least what the finite range of the sampler adds to delta: an honest file says no less.

    A normal in the plane, moved by mu, leaves the disc of radius R with the probability that a
    noncentral chi-square exceeds R^2: a mixture of gamma tails with Poisson weights. The boundary
    layers of the other draws come on top.
    """
    from scipy.special import gammaincc, gammaln

    mu = min(abs(mu), MOST_MU)
    square = 2 * math.log(2) * RADIUS_BITS
    extra, mean = np.arange(TERMS), max(mu * mu / 2, 1e-300)
    weights = np.exp(extra * math.log(mean) - mean - gammaln(extra + 1))
    leaves = float(weights @ gammaincc(extra + 1, square / 2))
    layers = mu * math.sqrt(square * MOST_DRAWS / 2) * 2.0**-RADIUS_BITS
    return min(1.0, leaves + layers)


def stated_epsilon(delta: float, mu: float, sampler_share: float = 1.0) -> float:
    """Epsilon where the sampler's part of delta, at most half of it, is taken off first.

    Args:
        delta: The delta of the guarantee.
        mu: Its Gaussian differential privacy parameter.
        sampler_share: How much to take off, as a multiple of `sampler_delta`.
    """
    return epsilon_of(max(delta - sampler_share * sampler_delta(mu), delta / 2), mu)


class MuRange(NamedTuple):
    """The least and the most mu that an honest file states."""

    least: float
    most: float

    def composed_with(self, other: "MuRange") -> "MuRange":
        """Two runs together: the squares add up."""
        return MuRange(math.hypot(self.least, other.least), math.hypot(self.most, other.most))

    def epsilons(self, delta: float, is_v1: bool) -> tuple[float, float]:
        """The least and the most epsilon that an honest file states.

        Args:
            delta: Where it is stated.
            is_v1: Whether a run of version 0.1 is in it: then the sampler's part of delta is not.
        """
        if is_v1:
            return epsilon_of(delta, self.least), epsilon_of(delta, self.most)
        # The library bounds the sampler's part from above, by less than a factor of two.
        most = stated_epsilon(delta, self.most, sampler_share=2.0)
        return stated_epsilon(delta, self.least), most
