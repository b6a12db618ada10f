"""From mu to epsilon and delta, as balls."""

from collections.abc import Callable
from typing import Final

from flint import arb

from dpftrl.errors import TooLarge
from dpftrl.verify.rigorous.rounding import MOST_DRAWS, RADIUS_BITS

LARGE_MU: Final = 10.3  # beyond the sampler's radius: more than half of the draws may leave it
TERMS: Final = 400  # Poisson terms; their mean is at most LARGE_MU^2 / 2 = 53
MOST_HALVINGS: Final = 500  # of an interval for epsilon, which ends when it is narrow
NARROW: Final = 2.0**-70  # relative width
MOST_WIDENINGS: Final = 200  # doublings of a distance that starts near the precision


def gaussian_delta(epsilon: arb, mu: arb) -> arb:
    """Return Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu).

    This is the smallest delta of two Gaussians at distance mu (Balle and Wang 2018, Theorem 8).
    """
    root_two = arb(2).sqrt()
    first = ((epsilon / mu - mu / 2) / root_two).erfc()
    second = ((epsilon / mu + mu / 2) / root_two).erfc()
    return (first - epsilon.exp() * second) / 2


def sampler_delta(mu: arb) -> arb:
    """Return the part of delta that is due to the finite range of the sampler.

    It is the probability that a pair of normals, moved by mu, leaves the disc of radius R, plus the
    boundary layers of all other pairs: mu R sqrt(2^39) 2^-76, where exp(-R^2 / 2) = 2^-76. The
    probability is a mixture of gamma tails with Poisson weights. From `LARGE_MU` on, the result is
    the interval from 1/2 to 1.
    """
    half_square = RADIUS_BITS * arb.const_log2()  # R^2 / 2
    if not mu < LARGE_MU:
        return arb(0.75, 0.25)
    layers = mu * (2 * half_square).sqrt() * (arb(MOST_DRAWS) / 2).sqrt() * arb(2) ** -RADIUS_BITS
    mean = mu * mu / 2
    weight, term = (-mean).exp(), arb(2) ** -RADIUS_BITS
    tail, outside = arb(0), arb(0)
    for k in range(TERMS):
        tail += term  # the probability that a gamma variable of shape k + 1 exceeds R^2 / 2
        outside += weight * tail
        weight, term = weight * mean / (k + 1), term * half_square / (k + 1)
    # The remaining Poisson weights are at most those of a geometric series, and every tail is
    # at most 1.
    rest = weight / (1 - mean / (TERMS + 1))
    return (outside + layers + arb(0).union(rest)).min(arb(1))


def delta_for_gaussians(delta: float, mu: arb) -> arb:
    """Return what the sampler leaves of delta, at least half of it."""
    return (arb(delta) - sampler_delta(mu)).max(arb(delta) / 2)


def smallest_epsilon(delta: arb, mu: arb) -> arb:
    """Return the epsilon at which `gaussian_delta` is `delta`, or 0 if it is smaller even there.

    Both ends of the result are found by the sign of the difference, which a ball decides if it does
    not contain zero. Delta falls with epsilon, so the root is between an epsilon where it is
    certainly too large and one where it is certainly small enough.

    Raises:
        TooLarge: The precision does not suffice.
    """

    def is_enough(epsilon: arb) -> bool | None:
        difference = gaussian_delta(epsilon, mu) - delta
        return True if difference < 0 else False if difference > 0 else None

    if is_enough(arb(0)) is True:
        return arb(0)
    # zCDP gives an epsilon that is certainly large enough (Bun and Steinke 2016).
    low, high = arb(0), (mu * mu / 2 + mu * (-2 * delta.log()).sqrt()).upper()
    for _ in range(MOST_HALVINGS):
        if high - low <= NARROW * high:
            break
        middle = ((low + high) / 2).mid()
        enough = is_enough(middle)
        if enough is None:
            low = high = middle  # nearer to the root than the precision can tell
            break
        low, high = (low, middle) if enough else (middle, high)
    return _widened(low, is_enough, upward=False).union(_widened(high, is_enough, upward=True))


def _widened(epsilon: arb, is_enough: Callable[[arb], bool | None], *, upward: bool) -> arb:
    """Move epsilon away from the root until it is certain on which side it is."""
    step = epsilon * arb(2) ** -100 + arb(2) ** -1000
    for _ in range(MOST_WIDENINGS):
        if is_enough(epsilon) is upward:
            return epsilon
        moved = epsilon + step if upward else epsilon - step
        epsilon, step = moved.mid(), 2 * step
        if not upward and epsilon <= 0:
            return arb(0)
    raise TooLarge("interval arithmetic does not separate epsilon from its neighbors")
