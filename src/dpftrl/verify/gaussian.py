"""Conversion of a Gaussian DP parameter mu to epsilon, and the delta of the noise sampler.

The conversion evaluates the exact formula through the logarithm of the normal distribution
function, and solves for epsilon by bisection.
"""

import math
from typing import Final, NamedTuple

import numpy as np

RADIUS_BITS: Final = 76  # random bits that the sampler uses for the radius of a pair of normals
MOST_DRAWS: Final = 2.0**40  # the largest number of normals in a run (coordinates times rounds)
HALVINGS: Final = 200  # more than the halvings after which a float64 interval cannot shrink
MOST_MU: Final = 30.0  # a larger mu gives no privacy, so `sampler_delta` need not be larger
TERMS: Final = 1_000  # Poisson terms; their mean is at most MOST_MU**2 / 2 = 450


def log_delta(epsilon: float, mu: float) -> float:
    """Return the log of Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu)."""
    from scipy.special import log_ndtr

    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    share = -math.expm1(second - first)
    return first + math.log(share) if share > 0 else -math.inf


def epsilon_of(delta: float, mu: float) -> float:
    """Return the smallest epsilon at this delta, by bisection.

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
    """Return a lower bound on the delta that a correct file states for the sampler.

    The sampler adds to delta because its normals have a finite range. A pair of normals, shifted
    by mu, leaves the disc of radius R with the probability that a noncentral chi-square variable
    exceeds R^2. This is a mixture of gamma tails with Poisson weights. The boundary layers of the
    other draws are added.
    """
    from scipy.special import gammaincc, gammaln

    mu = min(abs(mu), MOST_MU)
    radius_squared = 2 * math.log(2) * RADIUS_BITS
    terms = np.arange(TERMS)
    mean = max(mu * mu / 2, 1e-300)  # not 0, so that its logarithm is finite
    weights = np.exp(terms * math.log(mean) - mean - gammaln(terms + 1))
    outside_disc = float(weights @ gammaincc(terms + 1, radius_squared / 2))
    boundary_layers = mu * math.sqrt(radius_squared * MOST_DRAWS / 2) * 2.0**-RADIUS_BITS
    return min(1.0, outside_disc + boundary_layers)


def stated_epsilon(delta: float, mu: float, sampler_share: float = 1.0) -> float:
    """Return epsilon at the delta that is left after the sampler's part, at least delta / 2.

    Args:
        delta: The delta of the guarantee.
        mu: The Gaussian DP parameter of the guarantee.
        sampler_share: The sampler's part, as a multiple of `sampler_delta`.
    """
    return epsilon_of(max(delta - sampler_share * sampler_delta(mu), delta / 2), mu)


class MuRange(NamedTuple):
    """The smallest and the largest mu that a correct file may state."""

    least: float
    most: float

    def composed_with(self, other: "MuRange") -> "MuRange":
        """Return the mu of two runs together: the squares add up."""
        return MuRange(math.hypot(self.least, other.least), math.hypot(self.most, other.most))

    def epsilons(self, delta: float, is_v1: bool) -> tuple[float, float]:
        """Return the smallest and the largest epsilon that a correct file may state.

        Args:
            delta: The delta of the guarantee.
            is_v1: Whether the guarantee covers a run of version 0.1. Version 0.1 did not subtract
                the sampler's part of delta.
        """
        if is_v1:
            return epsilon_of(delta, self.least), epsilon_of(delta, self.most)
        # The library uses an upper bound on the sampler's part, less than twice `sampler_delta`.
        most = stated_epsilon(delta, self.most, sampler_share=2.0)
        return stated_epsilon(delta, self.least), most
