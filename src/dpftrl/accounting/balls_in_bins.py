"""Amplification by balls-in-bins sampling, for any mechanism, with certified Monte Carlo bounds.

Every example is put into one of b bins at random, once and in secret, and takes part in the steps
i, i + b, i + 2b, ... of its bin i. An observer who does not know the bin sees a mixture: with
m_i = C u_i, where u_i marks the steps of bin i, the outputs with and without the example are
dominated, in both directions, by

    P = (1 / b) sum_i N(m_i, sigma^2 I)  and  Q = N(0, sigma^2 I)

(Choquette-Choo et al. 2024, arXiv 2410.06266). This needs C to have no negative entries. Only the
b x b Gram matrix of the m_i enters.

Guarantees:
    `certify` returns an upper bound on delta that is wrong with a probability of at most
    `failure`, over fresh randomness that nobody can choose. It draws importance samples whose
    weights have a proven upper bound, as many as were fixed in advance, and bounds their mean by
    betting (Waudby-Smith and Ramdas 2024).
"""

import math
import os
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism

# Samples that are drawn at a time: with 100 bins they take about 50 MB.
BATCH: Final = 2**16
# The probability that a certificate is wrong, unless the caller states another.
DEFAULT_FAILURE: Final = 1e-9
DEFAULT_SAMPLES: Final = 4_000_000
# Relative margin for rounding in weights and sums; the rounding errors are far smaller.
ROUNDING: Final = 1e-9
# Bets per certificate: the capital is the mean over so many fixed bets.
BETS: Final = 24


@final
class Certificate(NamedTuple):
    """An upper bound on delta for one epsilon.

    Attributes:
        epsilon: The epsilon.
        delta: The upper bound; it holds except with probability `failure`.
        failure: The largest probability that the bound is wrong.
        estimate: The point estimate of delta. It is no guarantee.
        samples: Number of samples per direction.
    """

    epsilon: float
    delta: float
    failure: float
    estimate: float
    samples: int


def gram_matrix(mechanism: Mechanism, steps: int, bins: int) -> Matrix:
    """The Gram matrix of the columns C u_i, at clip norm 1.

    Args:
        mechanism: The mechanism; its strategy C must have no negative entries.
        steps: Number of steps.
        bins: Number of bins, at most the number of steps.

    Raises:
        InvalidInput: C has a negative entry, or there are more bins than steps.
    """
    steps, bins = whole_number("steps", steps), whole_number("bins", bins)
    if bins > steps:
        raise InvalidInput(f"there are {bins:,} bins and only {steps:,} steps; use fewer bins")
    strategy = mechanism.strategy(steps)
    if not np.all(strategy >= 0):
        raise InvalidInput(
            f"{mechanism.name} has negative entries in C, which balls-in-bins does not cover; use "
            "a mechanism without, such as blt"
        )
    sums = np.add.reduceat(
        strategy[:, np.argsort(np.arange(steps) % bins, kind="stable")],
        np.cumsum([0, *(-(-(steps - i) // bins) for i in range(bins - 1))]),
        axis=1,
    )
    return sums.T @ sums


def certify(
    gram: Matrix,
    noise_multiplier: float,
    epsilon: float,
    *,
    failure: float = DEFAULT_FAILURE,
    samples: int = DEFAULT_SAMPLES,
) -> Certificate:
    """Bound delta from above, with fresh randomness from the operating system.

    One certificate spends its whole `failure`. Of several certificates, for example for several
    noise multipliers, at least one is wrong with a probability of at most the sum of their
    failures. There is no seed: who could choose one could choose a bound that is too small.

    Args:
        gram: The result of `gram_matrix`.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        epsilon: At least 0.
        failure: The largest probability that the bound is too small.
        samples: Number of samples per direction, fixed before any is drawn.
    """
    sigma = positive_number("noise_multiplier", noise_multiplier)
    if not 0 <= epsilon < math.inf:
        raise InvalidInput(f"epsilon must be a finite number of at least 0, got {epsilon!r}")
    if not 0 < failure < 1:
        raise InvalidInput(f"failure must be between 0 and 1, got {failure!r}")
    samples = whole_number("samples", samples)
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(os.urandom(32), "big")))
    bounds, estimates = list[float](), list[float]()
    for direction in (with_against_without, without_against_with):
        proposal = direction(gram, sigma, epsilon)
        weights = proposal.draw(samples, generator)
        estimates.append(float(np.sum(weights)) / samples)
        bounds.append(upper_mean(weights, samples, proposal.largest_weight, failure / 2))
    return Certificate(epsilon, min(1.0, max(bounds)), failure, max(estimates), samples)


@final
class Proposal:
    """A distribution to draw from, with the weights that make their mean a delta.

    Args:
        gram: Gram matrix of the m_i.
        sigma: The noise multiplier.
        epsilon: The epsilon.
        shift: How far the mean of a sample is moved along its direction.
        largest_weight: A proven upper bound on every weight.
        from_mixture: Whether samples are drawn around s m_i for a random bin i, for P against Q;
            otherwise around the negative mean of all m_i, for Q against P.
    """

    def __init__(
        self,
        gram: Matrix,
        sigma: float,
        epsilon: float,
        shift: float,
        largest_weight: float,
        from_mixture: bool,
    ):
        self._gram = gram
        self._variance = sigma * sigma
        self._epsilon = epsilon
        self._shift = shift
        self._from_mixture = from_mixture
        self._factor = sigma * _square_root(gram)
        self.largest_weight = min(1.0, largest_weight * (1 + ROUNDING))

    def draw(self, samples: int, generator: np.random.Generator) -> Vector:
        """Draw samples and return the weights that are not zero."""
        parts = list[Vector]()
        for start in range(0, samples, BATCH):
            weights = self._weights(min(BATCH, samples - start), generator)
            parts.append(weights[weights > 0])
        return np.concatenate(parts)

    def _weights(self, count: int, generator: np.random.Generator) -> Vector:
        bins = len(self._gram)
        products = generator.standard_normal((count, self._factor.shape[1])) @ self._factor.T
        if self._from_mixture:
            products += self._shift * self._gram[generator.integers(bins, size=count)]
        else:
            products -= self._shift * self._gram.mean(axis=0)
        squares = np.diag(self._gram)
        log_ratio = _log_mean_exp((products - squares / 2) / self._variance)
        if self._from_mixture:
            tilted = self._shift * products - self._shift**2 * squares / 2
            log_weight = log_ratio - _log_mean_exp(tilted / self._variance)
            excess = -np.expm1(np.minimum(self._epsilon - log_ratio, 0.0))
        else:
            along = self._shift * products.mean(axis=1)
            log_weight = (along + self._shift**2 * self._gram.mean() / 2) / self._variance
            excess = -np.expm1(np.minimum(self._epsilon + log_ratio, 0.0))
        return np.exp(log_weight) * excess * (1 + ROUNDING)


def with_against_without(gram: Matrix, sigma: float, epsilon: float) -> Proposal:
    """The proposal for P against Q: samples around s m_i.

    By Jensen's inequality, dQ_s / dQ is at least exp(s L - s (s - 1) M / (2 sigma^2)), where L is
    the log ratio of P and Q and M the largest diagonal entry. So where L is at least epsilon, a
    weight is at most exp((s - 1) (s M / (2 sigma^2) - epsilon)), which is least at this s.
    """
    largest, variance = float(np.diag(gram).max()), sigma * sigma
    shift = max(1.0, 0.5 + epsilon * variance / largest)
    bound = math.exp((shift - 1) * (shift * largest / (2 * variance) - epsilon))
    return Proposal(gram, sigma, epsilon, shift, bound, from_mixture=True)


def without_against_with(gram: Matrix, sigma: float, epsilon: float) -> Proposal:
    """The proposal for Q against P: samples around -t times the mean of all m_i.

    By Jensen's inequality, L is at least the mean of (y_j - M_j / 2) / sigma^2. So where L is at
    most -epsilon, a weight is at most exp(t (mean(M_j) / (2 sigma^2) - epsilon) + t^2 |mean|^2 /
    (2 sigma^2)), which is least at this t.
    """
    variance, length = sigma * sigma, float(gram.mean())
    mean = float(np.diag(gram).mean()) / (2 * variance)
    shift = max(0.0, (epsilon - mean) * variance / length)
    bound = math.exp(shift * (mean - epsilon) + shift * shift * length / (2 * variance))
    return Proposal(gram, sigma, epsilon, shift, bound, from_mixture=False)


def upper_mean(weights: Vector, samples: int, largest: float, failure: float) -> float:
    """An upper bound on the mean of independent weights between 0 and `largest`.

    Somebody who claims a mean m takes bets on every weight w: a stake of x pays 1 + x (m - w). If
    the true mean is at least m, no bet wins on average, so that the capital reaches 1 / failure
    with a probability of at most `failure` (Ville). All m at which the capital is that large are
    ruled out.

    Args:
        weights: The weights that are not zero.
        samples: Number of weights, including those that are zero.
        largest: Upper bound on every weight.
        failure: The largest probability that the result is below the true mean.
    """
    if not largest > 0:
        return 0.0
    zeros, target = samples - len(weights), math.log(1 / failure)
    stakes = np.geomspace(1e-4, 0.5, BETS) / largest  # fixed: they do not depend on the weights

    def log_capital(mean: float) -> float:
        logs = [
            float(np.log1p(stake * (mean - weights)).sum()) + zeros * math.log1p(stake * mean)
            for stake in stakes
        ]
        top = max(logs)
        return top + math.log(sum(math.exp(log - top) for log in logs) / len(logs))

    low, high = float(weights.sum()) / samples, largest
    if log_capital(high) < target:
        return high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if log_capital(middle) >= target else (middle, high)
    return high


def _log_mean_exp(values: Matrix) -> Vector:
    """The logarithm of the mean of exp(values), for each row."""
    largest = values.max(axis=1)
    return largest + np.log(np.exp(values - largest[:, None]).mean(axis=1))


def _square_root(gram: Matrix) -> NDArray[np.float64]:
    """A matrix F with F F^T = gram; bins with equal columns make the Gram matrix singular."""
    values, vectors = np.linalg.eigh(gram)
    kept = values > 1e-13 * values.max()
    return vectors[:, kept] * np.sqrt(values[kept])
