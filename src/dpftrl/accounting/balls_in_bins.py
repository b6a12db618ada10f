"""Amplification by balls-in-bins sampling, for any mechanism, with certified Monte Carlo bounds.

Every example is put into one of b bins at random, once and in secret, and takes part in the steps
i, i + b, i + 2b, ... of its bin i. An observer who does not know the bin sees a mixture: with
m_i = C u_i, where u_i marks the steps of bin i, the outputs with and without the example are
dominated, in both directions, by

    P = (1 / b) sum_i N(m_i, sigma^2 I)  and  Q = N(0, sigma^2 I)

(Choquette-Choo et al. 2024, arXiv 2410.06266). This needs C to have no negative entries. Only the
b x b Gram matrix G of the m_i enters: everything depends on x through y_j = <x, m_j>, and L is the
logarithm of dP/dQ = mean_j exp((y_j - G_jj / 2) / sigma^2).

Guarantees:
    `certify` returns an upper bound on delta that is wrong with a probability of at most
    `failure`, over fresh randomness that nobody can choose. It draws importance samples whose
    weights have a proven upper bound, as many as were fixed in advance, and bounds their mean by
    betting (Waudby-Smith and Ramdas 2024). `smallest_certified` may certify several times; its
    certificates share one failure probability.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.threads import parallel_map
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism

# Numbers that a thread works on at a time: they fit into the cache of a processor.
TILE: Final = 2**18
# Multiplications of a matrix product that OpenBLAS computes without threads of its own.
SERIAL_PRODUCT: Final = 2**18
# The probability that a certificate is wrong, unless the caller states another.
DEFAULT_FAILURE: Final = 1e-9
# Samples per direction: for a certificate, and for the estimates that choose what to certify.
DEFAULT_SAMPLES: Final = 2**19
PILOT_SAMPLES: Final = 2**15
# Relative margin for rounding in samples and weights; the rounding errors are far smaller.
ROUNDING: Final = 1e-6
# The most bins: their Gram matrix takes 130 MB.
MOST_BINS: Final = 4096
# The largest order of a proposal, and the largest logarithm of a number that it multiplies.
MOST_ORDER: Final = 32
MOST_LOG: Final = 600.0
# What is certified first lies this much, relatively, on the safe side of the estimate; after each
# certificate that misses the target, the next one lies further on the safe side.
FIRST_MARGIN: Final = 1e-3
NEXT_MARGIN: Final = 4e-3
MOST_CERTIFICATES: Final = 20
# The first step of a search, in the logarithm of what is searched for.
FIRST_STEP: Final = 0.3
# The same, if the search starts from a guess.
NEXT_STEP: Final = 4e-3
# Stands for the logarithm of a bound on delta over its target, where the target is not positive.
IMPOSSIBLE: Final = 100.0


@final
class Certificate(NamedTuple):
    """An upper bound on delta for one epsilon.

    Attributes:
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        epsilon: The epsilon.
        delta: The upper bound; it holds except with probability `failure`.
        failure: The largest probability that the bound is wrong.
        estimate: The point estimate of delta. It is no guarantee.
        samples: Number of samples per direction.
    """

    noise_multiplier: float
    epsilon: float
    delta: float
    failure: float
    estimate: float
    samples: int


@final
class Moments(NamedTuple):
    """What is known about the weights of a proposal from a few samples.

    Attributes:
        mean: Their mean: an estimate of delta.
        square: The mean of their squares.
        largest: A proven upper bound on every weight.
    """

    mean: float
    square: float
    largest: float

    def expected_bound(self, samples: int, failure: float) -> float:
        """About the upper bound that `upper_mean` will return for so many samples (Bernstein)."""
        trust = math.log(1 / failure) / samples
        variance = max(0.0, self.square - self.mean**2)
        return self.mean + math.sqrt(2 * variance * trust) + self.largest * trust / 3

    def best_stake(self, samples: int, failure: float) -> float:
        """The stake with which `upper_mean` is expected to return the smallest bound."""
        wanted = math.sqrt(2 * math.log(1 / failure) / (samples * max(self.square, 1e-300)))
        return min(wanted, 0.5 / self.largest)


def gram_matrix(mechanism: Mechanism, steps: int, bins: int) -> Matrix:
    """The Gram matrix of the m_i = C u_i, at clip norm 1.

    A bin whose first step never comes has m_i = 0.

    Args:
        mechanism: The mechanism; its strategy C must have no negative entries.
        steps: Number of steps.
        bins: Number of bins.

    Raises:
        InvalidInput: C has a negative entry, or there are too many bins.
    """
    steps, bins = whole_number("steps", steps), whole_number("bins", bins)
    if bins > MOST_BINS:
        raise InvalidInput(
            f"balls-in-bins sampling is computed for at most {MOST_BINS:,} bins (steps per epoch), "
            f"got {bins:,}; use larger batches, or another sampling"
        )
    if (column := mechanism.first_column(steps)) is not None:
        return _toeplitz_gram(_non_negative(mechanism, column), bins)
    strategy = _non_negative(mechanism, mechanism.strategy(steps))
    sums = np.zeros((len(strategy), bins))
    for start in range(0, steps, bins):  # one epoch
        epoch = strategy[:, start : start + bins]
        sums[:, : epoch.shape[1]] += epoch
    return sums.T @ sums


def _non_negative(mechanism: Mechanism, entries: NDArray[np.float64]) -> NDArray[np.float64]:
    if not np.all(entries >= 0):
        raise InvalidInput(
            f"{mechanism.name} has negative entries in C, which balls-in-bins sampling does not "
            "cover; use a mechanism without, such as blt"
        )
    return entries


def _toeplitz_gram(column: Vector, bins: int) -> Matrix:
    """The Gram matrix of the Toeplitz strategy with this first column, in O(steps * bins).

    m_i is the same sequence for every bin, moved by i and cut off at the last step.
    """
    steps = len(column)
    sequence = column.copy()
    for start in range(bins, steps, bins):
        sequence[start:] += column[: steps - start]
    gram = np.zeros((bins, bins))
    for lag in range(min(bins, steps)):
        sums = np.cumsum(sequence[: steps - lag] * sequence[lag:])
        later = np.arange(lag, min(bins, steps))
        gram[later, later - lag] = gram[later - lag, later] = sums[steps - 1 - later]
    return gram


class Direction(ABC):
    """One of the two directions: samples whose weights have delta as their mean.

    Attributes:
        largest_weight: A proven upper bound on every weight.
    """

    largest_weight: float

    def __init__(self, gram: Matrix, noise_multiplier: float, epsilon: float):
        self._bins = len(gram)
        self._epsilon = epsilon
        # Adding to the diagonal adds a private coordinate to each m_i, which only helps an
        # observer. It exceeds the rounding errors of the factorization.
        scaled = gram / noise_multiplier**2
        scaled[np.diag_indices(self._bins)] += self._bins**2 * 4e-16 * scaled.max()
        self._gram = scaled
        self._factor = np.linalg.cholesky(scaled).T.copy()

    @abstractmethod
    def _weights(self, count: int, generator: np.random.Generator) -> Vector:
        """Draw samples and return their weights."""

    def draw(self, samples: int, entropy: int) -> Vector:
        """Draw samples and return the weights that are not zero.

        Args:
            samples: Number of samples.
            entropy: Determines the samples.
        """
        tile = max(1, TILE // self._bins)
        counts = [min(tile, samples - start) for start in range(0, samples, tile)]
        seeds = np.random.SeedSequence(entropy).spawn(len(counts))

        def weights(item: tuple[int, np.random.SeedSequence]) -> Vector:
            drawn = self._weights(item[0], np.random.Generator(np.random.SFC64(item[1])))
            drawn[np.isnan(drawn)] = self.largest_weight  # an overflow counts as the largest weight
            return drawn[drawn > 0] * (1 + ROUNDING)

        items = list(zip(counts, seeds, strict=True))
        return np.concatenate(parallel_map(weights, items, os.cpu_count() or 1))

    def moments(self, samples: int, entropy: int) -> Moments:
        """Estimate the moments of the weights."""
        weights = self.draw(samples, entropy)
        square = float(weights @ weights) / samples
        return Moments(float(weights.sum()) / samples, square, self.largest_weight)

    def _normals(self, count: int, generator: np.random.Generator) -> Matrix:
        """Draw y / sigma^2 from Q.

        The product is computed a few rows at a time: larger ones start threads of the linear
        algebra library, which get in the way of ours.
        """
        normals = generator.standard_normal((count, self._bins))
        rows = max(1, SERIAL_PRODUCT // self._bins**2)
        if rows < count and self._bins**2 <= SERIAL_PRODUCT:
            for start in range(0, count, rows):
                normals[start : start + rows] = normals[start : start + rows] @ self._factor
            return normals
        return normals @ self._factor

    def _log_ratio(self, products: Matrix) -> Vector:
        """L at y / sigma^2; overwrites `products`."""
        products -= np.diag(self._gram) / 2
        largest = products.max(axis=1)
        products -= largest[:, None]
        return largest + np.log(np.exp(products, out=products).mean(axis=1))


@final
class WithAgainstWithout(Direction):
    """P against Q, by samples from the distribution with density proportional to (dP/dQ)^s.

    For a whole order s, (dP/dQ)^s is a mixture of Gaussians around m_j1 + ... + m_js, over all
    tuples of bins, in proportion to exp(sum of G_ja,jb / sigma^2 over a < b). Such tuples are
    drawn bin by bin, each in proportion to what it adds to that sum: the ratio R of the two is the
    product over k of mean_j exp(sum_{a < k} G_ja,j / sigma^2). A sample is a tuple and an x, and
    its weight is R exp(-(s - 1) L) (1 - exp(epsilon - L))_+, whose mean is delta, because given x
    the bins of the tuple are independent.

    By Hoelder's inequality, factor k of R is at most max_i mean_j exp((k - 1) G_ij / sigma^2). The
    rest is largest at exp(epsilon - L) = (s - 1) / s.
    """

    def __init__(self, gram: Matrix, noise_multiplier: float, epsilon: float):
        super().__init__(gram, noise_multiplier, epsilon)
        most = max(1, min(MOST_ORDER, int(MOST_LOG / self._gram.max())))
        factors = np.array(
            [np.max(_log_mean_exp(k * self._gram)) for k in range(most)]  # of R, for s = k + 1
        )
        orders = np.arange(1, most + 1, dtype=np.float64)
        bounds = (
            np.cumsum(factors) - (orders - 1) * epsilon + _x_log_x(orders - 1) - _x_log_x(orders)
        )
        # Of orders with about the same bound, the largest has the smallest variance. Order 1 has
        # the bound 1, so that no other bound needs to be larger.
        self.order = int(orders[bounds <= min(0.0, bounds.min() + math.log(1.5))][-1])
        self.largest_weight = _bound(bounds[self.order - 1])
        self._ratios = np.exp(np.minimum(self._gram, MOST_LOG))  # not used where that matters
        from dpftrl.accounting._tuples_of_bins import add_tuples  # importing numba is slow

        self._add_tuples = add_tuples

    def _weights(self, count: int, generator: np.random.Generator) -> Vector:
        products = self._normals(count, generator)
        uniforms = generator.random((count, self.order))
        log_ratio = self._add_tuples(products, uniforms, self._gram, self._ratios)
        loss = self._log_ratio(products)
        excess = -np.expm1(np.minimum(self._epsilon - loss, 0.0))
        return np.exp(log_ratio - (self.order - 1) * loss) * excess


@final
class WithoutAgainstWith(Direction):
    """Q against P, by samples from N(-t mean, sigma^2 I), where mean is the mean of all m_j.

    The weight is the density of Q over that of the samples, times (1 - exp(epsilon + L))_+. By
    Jensen's inequality, L is at least the mean of (y_j - G_jj / 2) / sigma^2. So a weight is at
    most exp(t L + t mean(G_jj) / (2 sigma^2) + t^2 |mean|^2 / (2 sigma^2)) (1 - exp(epsilon + L)),
    which is largest at exp(epsilon + L) = t / (1 + t).
    """

    def __init__(self, gram: Matrix, noise_multiplier: float, epsilon: float):
        super().__init__(gram, noise_multiplier, epsilon)
        self._length = float(self._gram.mean())
        half_square = float(np.diag(self._gram).mean()) / 2
        shifts = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 601)])
        bounds = (
            shifts * (half_square - epsilon)
            + shifts**2 * self._length / 2
            + _x_log_x(shifts)
            - _x_log_x(1 + shifts)
        )
        best = int(np.argmin(bounds))
        self._shift = float(shifts[best])
        self.largest_weight = _bound(bounds[best])

    def _weights(self, count: int, generator: np.random.Generator) -> Vector:
        products = self._normals(count, generator)
        products -= self._shift * self._gram.mean(axis=0)
        along = self._shift * products.mean(axis=1)
        log_weight = along + self._shift**2 * self._length / 2
        excess = -np.expm1(np.minimum(self._epsilon + self._log_ratio(products), 0.0))
        return np.exp(log_weight) * excess


def _bound(logarithm: float) -> float:
    """The largest weight from its logarithm, with a margin for rounding and for underflow."""
    return max(math.exp(logarithm), 1e-300) * (1 + ROUNDING)


DIRECTIONS: Final[Sequence[type[WithAgainstWithout] | type[WithoutAgainstWith]]] = (
    WithAgainstWithout,
    WithoutAgainstWith,
)


def certify(
    gram: Matrix,
    noise_multiplier: float,
    epsilon: float,
    *,
    failure: float = DEFAULT_FAILURE,
    samples: int | None = None,
) -> Certificate:
    """Bound delta from above, with fresh randomness from the operating system.

    One certificate spends its whole `failure`. Of several certificates, for example for several
    noise multipliers, at least one is wrong with a probability of at most the sum of their
    failures; `smallest_certified` sees to that. There is no seed: who could choose one could
    choose a bound that is too small.

    Args:
        gram: The result of `gram_matrix`.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        epsilon: At least 0.
        failure: The largest probability that the bound is too small.
        samples: Number of samples per direction, fixed before any is drawn; by default 2^19.
    """
    sigma = positive_number("noise_multiplier", noise_multiplier)
    if not 0 <= epsilon < math.inf:
        raise InvalidInput(f"epsilon must be a finite number of at least 0, got {epsilon!r}")
    if not 0 < failure < 1:
        raise InvalidInput(f"failure must be between 0 and 1, got {failure!r}")
    samples = DEFAULT_SAMPLES if samples is None else whole_number("samples", samples)
    bounds, estimates = list[float](), list[float]()
    for kind in DIRECTIONS:
        direction = kind(gram, sigma, epsilon)
        # The stake comes from samples of its own, so that it is fixed before the weights are drawn.
        stake = direction.moments(max(1, samples // 16), _fresh()).best_stake(samples, failure / 2)
        weights = direction.draw(samples, _fresh())
        estimates.append(float(weights.sum()) / samples)
        bounds.append(
            upper_mean(weights, samples, direction.largest_weight, failure / 2, stake=stake)
        )
    return Certificate(sigma, epsilon, min(1.0, max(bounds)), failure, max(estimates), samples)


def _fresh() -> int:
    """A random number from the operating system."""
    return int.from_bytes(os.urandom(32), "big")


def upper_mean(
    weights: Vector, samples: int, largest: float, failure: float, *, stake: float
) -> float:
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
        stake: The stake, below 1 / largest. It must not depend on the weights.
    """
    zeros, target = samples - len(weights), math.log(1 / failure)

    def log_capital(mean: float) -> float:
        return float(np.log1p(stake * (mean - weights)).sum()) + zeros * math.log1p(stake * mean)

    low, high = float(weights.sum()) / samples, largest
    if log_capital(high) < target:
        return high
    while high - low > 1e-5 * high:
        middle = math.sqrt(max(low, 1e-4 * high) * high)
        low, high = (low, middle) if log_capital(middle) >= target else (middle, high)
    return high


def estimated_bound(
    gram: Matrix,
    noise_multiplier: float,
    epsilon: float,
    *,
    failure: float = DEFAULT_FAILURE,
    samples: int | None = None,
    pilot: int = PILOT_SAMPLES,
    entropy: int = 0,
) -> float:
    """About the delta that `certify` will return, from fewer samples. It is no guarantee.

    Args:
        gram: The result of `gram_matrix`.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        epsilon: At least 0.
        failure: As for `certify`.
        samples: As for `certify`.
        pilot: Number of samples to draw per direction.
        entropy: Determines the samples: with equal entropy, results for similar arguments are
            similar.
    """
    planned = DEFAULT_SAMPLES if samples is None else samples
    return max(
        kind(gram, noise_multiplier, epsilon)
        .moments(pilot, entropy)
        .expected_bound(planned, failure / 2)
        for kind in DIRECTIONS
    )


def estimated_delta(
    gram: Matrix, noise_multiplier: float, epsilon: float, *, pilot: int, entropy: int = 0
) -> float:
    """The point estimate of delta from a few samples; the arguments are as for `estimated_bound`.

    It is no guarantee.
    """
    return max(
        kind(gram, noise_multiplier, epsilon).moments(pilot, entropy).mean for kind in DIRECTIONS
    )


class Question(NamedTuple):
    """Whether a run is (epsilon, delta)-DP with this noise.

    Attributes:
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        epsilon: The epsilon.
        delta: The delta.
    """

    noise_multiplier: float
    epsilon: float
    delta: float


def smallest_certified(
    gram: Matrix,
    question: Callable[[float], Question],
    largest: float,
    *,
    failure: float = DEFAULT_FAILURE,
    samples: int | None = None,
) -> float:
    """Find a small value, such as a noise multiplier, whose question is certified.

    Estimates choose the value. It is then certified with new samples, a little on the safe side. If
    that fails, larger values follow. Certificate k fails with a probability of at most
    failure / 2^(k + 1), so that the probability that any of them is wrong is below `failure`.

    Args:
        gram: The result of `gram_matrix`.
        question: The question for a value: the larger the value, the more surely it is true.
        largest: A value that is enough without sampling.
        failure: The largest probability that the result is wrong, whatever was tried.
        samples: Number of samples per direction and certificate.
    """

    def search(pilot: int, accuracy: float, guess: float | None) -> float:
        def log_excess(log_value: float) -> float:
            noise_multiplier, epsilon, delta = question(math.exp(log_value))
            if not delta > 0:
                return IMPOSSIBLE
            bound = estimated_bound(
                gram, noise_multiplier, epsilon, failure=failure, samples=samples, pilot=pilot
            )
            return math.log(max(bound, 1e-300)) - math.log(delta)

        return falling_root(log_excess, math.log(largest), accuracy, guess)

    rough = search(PILOT_SAMPLES // 16, 4e-3, None)  # with few samples, since this is far away
    start = math.exp(search(PILOT_SAMPLES, 3e-4, rough))
    for k in range(MOST_CERTIFICATES):
        value = start * (1 + FIRST_MARGIN + NEXT_MARGIN * k)
        if value >= largest:
            return largest
        noise_multiplier, epsilon, delta = question(value)
        certificate = certify(
            gram, noise_multiplier, epsilon, failure=failure / 2 ** (k + 1), samples=samples
        )
        if certificate.delta <= delta:
            return value
    return largest


def is_certified(gram: Matrix, question: Question, *, failure: float = DEFAULT_FAILURE) -> bool:
    """Whether a question can be certified, with up to 16 times the usual samples.

    The certificates that are tried share the failure probability.
    """
    noise_multiplier, epsilon, delta = question
    for k in range(3):
        certificate = certify(
            gram,
            noise_multiplier,
            epsilon,
            failure=failure / 2 ** (k + 1),
            samples=DEFAULT_SAMPLES * 4**k,
        )
        if certificate.delta <= delta:
            return True
        if certificate.estimate > 1.1 * delta:
            return False
    return False


def falling_root(
    function: Callable[[float], float],
    largest: float,
    accuracy: float,
    guess: float | None = None,
) -> float:
    """A root of a falling function below `largest`; `largest` if there is none.

    The result is at most about `accuracy` above the root, and the function is not positive there.

    Args:
        function: The function.
        largest: Where the search ends.
        accuracy: The accuracy of the root.
        guess: About where the root is; without it, the search starts at `largest`.
    """
    value = cache(function)
    high, step = largest, FIRST_STEP
    if guess is not None and guess < largest:
        high, step = guess, NEXT_STEP
        while value(high) >= 0 and high < largest:
            high, step = min(largest, high + step), 2 * step
    if value(high) >= 0:
        return largest
    # Small steps: below the root, evaluations may take much longer.
    low = high - step
    while value(low) < 0:
        if step > 40:
            return low
        step *= 1.15 if guess is None else 2
        high, low = low, low - step
    root = _brent(value, low, high, accuracy / 4)
    while value(root) > 0:
        root += accuracy / 2
    return min(root, largest)


def _brent(function: Callable[[float], float], low: float, high: float, accuracy: float) -> float:
    from scipy import optimize  # here, because importing scipy is slow

    solver: Any = optimize
    return float(solver.brentq(function, low, high, xtol=accuracy, rtol=1e-15))


def _log_mean_exp(values: Matrix) -> Vector:
    """The logarithm of the mean of exp(values), for each row."""
    largest = values.max(axis=1)
    return largest + np.log(np.exp(values - largest[:, None]).mean(axis=1))


def _x_log_x(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """X log x, and 0 for x = 0."""
    return values * np.log(np.maximum(values, 1e-300))
