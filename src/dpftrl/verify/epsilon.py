"""The arithmetic of epsilon: the cost of rounding, from mu to epsilon, and the sampler's delta.

Rounding: the noise stream keeps float64 buffers between rounds. A buffer is rounded when it is
stored, unless it is a row of the noise or of Z itself. The rounding depends on the noise.
`docs/guarantees.md` shows that it costs no more than a shift of Z by a further vector, and bounds
the norm of that vector. This module computes the norm in another way than the library: it follows
every single rounding error through all later rounds.

Epsilon: the conversion of a Gaussian DP parameter mu evaluates the exact formula through the
logarithm of the normal distribution function, and solves for epsilon by bisection.
"""

import math
from typing import Final, NamedTuple

import numpy as np

from dpftrl._internal.arrays import Matrix
from dpftrl.mechanisms import Mechanism, StreamState

UNIT_ROUNDOFF: Final = 2.0**-53  # the relative rounding error of float64
RADIUS_BITS: Final = 76  # random bits that the sampler uses for the radius of a pair of normals
# The largest normal that the sampler returns: it adds half of the last bit, so that the smallest
# uniform is 2^-77.
LARGEST_NORMAL: Final = math.sqrt(2 * (RADIUS_BITS + 1) * math.log(2))
MOST_DRAWS: Final = 2.0**40  # the largest number of normals in a run (coordinates times rounds)
MOST_FRESH: Final = 128  # no mechanism reads more new rows of Z in one round
PROBES: Final = 4  # random coordinates that are sent through the stream
HALVINGS: Final = 200  # more than the halvings after which a float64 interval cannot shrink
MOST_MU: Final = 30.0  # a larger mu gives no privacy, so `sampler_delta` need not be larger
TERMS: Final = 1_000  # Poisson terms; their mean is at most MOST_MU**2 / 2 = 450


def rounding_cost(shift: float, rounds: int, mu: float) -> float:
    """Return what rounding adds to mu.

    Args:
        shift: The norm by which rounding can shift one coordinate of Z; see `worst_shift`.
        rounds: The number of rounds.
        mu: The mu without rounding.
    """
    share = 2 * UNIT_ROUNDOFF * math.sqrt(MOST_DRAWS / rounds) * shift
    return (mu + share * LARGEST_NORMAL) / (1 - share) - mu


def worst_shift(mechanism: Mechanism, rounds: int) -> float:
    """Return the norm, over all rounds, by which rounding can shift one coordinate of Z.

    The unit is the rounding error of one normal.
    """
    if _stores_exactly(mechanism, rounds):
        return 0.0
    content = np.zeros((0, 0))  # weights: one row per buffer, one column per row of Z
    errors = np.zeros((0, 0))  # weights: one row per buffer, one column per rounding error
    sizes = np.zeros(0)  # the size of each rounding error
    next_row, squares, rounds_once = 0, 0.0, mechanism.rounds_buffers_once
    for round_ in range(rounds):
        noise, after, fresh = _step_weights(mechanism, round_, next_row, len(content))
        kept = len(content)
        pivot = kept + int(np.argmax(np.abs(noise[kept:])))
        # A change of one new row of Z compensates for the effect of the errors on the noise.
        change = -(noise[:kept] @ errors) / noise[pivot]
        squares += float(np.abs(change) @ sizes) ** 2
        errors = after[:, :kept] @ errors + np.outer(after[:, pivot], change)
        largest_inputs = np.append(np.abs(content).sum(axis=1), np.ones(fresh))
        content = np.hstack([after[:, :kept] @ content, after[:, kept:]])
        new_errors = [
            (
                j,
                float(np.abs(content[j]).sum())
                if rounds_once
                else _error_size(after[j], largest_inputs),
            )
            for j in range(len(after))
            if not _is_exact(after[j], noise)
        ]
        new_weights = np.zeros((len(after), len(new_errors)))
        for column, (buffer, _) in enumerate(new_errors):
            new_weights[buffer, column] = 1.0
        errors = np.hstack([errors, new_weights])
        sizes = np.append(sizes, [size for _, size in new_errors])
        next_row += fresh
    return math.sqrt(squares)


def _error_size(weights: Matrix, largest_inputs: Matrix) -> float:
    """Return the error of a buffer that is rounded after each of its products.

    The unit is the rounding error of one normal.
    """
    return float(np.count_nonzero(weights) * (np.abs(weights) @ largest_inputs))


def _is_exact(weights: Matrix, noise: Matrix) -> bool:
    """Return whether a buffer is stored exactly: it is the noise, or a copy of one input."""
    return bool(np.array_equal(weights, noise)) or (
        weights.max() == 1 and np.count_nonzero(weights) == 1
    )


def _step_weights(
    mechanism: Mechanism, round_: int, next_row: int, kept: int
) -> tuple[Matrix, Matrix, int]:
    """Return one step of the stream as weights of its inputs.

    The inputs are the old buffers and the new rows of Z.

    Returns:
        The weights of the noise, those of the new buffers (one row per buffer), and the number of
        new rows of Z that the step reads.
    """
    units = np.eye(kept + MOST_FRESH)
    state = StreamState(round_, next_row, units[:kept])
    noise, after = mechanism.step(state, lambda row: units[kept + row - next_row])
    fresh = after.next_row - next_row
    return noise[: kept + fresh], after.buffers[:, : kept + fresh], fresh


def _stores_exactly(mechanism: Mechanism, rounds: int) -> bool:
    """Return whether every buffer is a row of the noise or of Z.

    This is tested by sending random numbers through the stream.
    """
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((MOST_FRESH, PROBES))
    state = mechanism.init(PROBES)
    for _ in range(rounds):
        fresh = {state.next_row + i: row for i, row in enumerate(rows)}
        exact_rows = {row.tobytes() for row in (*state.buffers, *rows)}
        noise, state = mechanism.step(state, fresh.__getitem__)
        if any(
            row.tobytes() not in exact_rows and row.tobytes() != noise.tobytes()
            for row in state.buffers
        ):
            return False
        rows = generator.standard_normal((MOST_FRESH, PROBES))
    return True


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
