"""Delta and epsilon of training on secret random batches, recomputed with independent code.

Poisson and cyclic Poisson sampling: an example's participations are compositions of a Gaussian
mechanism on a Poisson sample, with sampling probability q. One of them compares
P = (1 - q) N(0, s^2) + q N(1, s^2) with Q = N(0, s^2), in both directions. The privacy loss of one
composition is rounded to a grid so that no delta becomes smaller ("connect the dots", Doroshenko
et al. 2022): each cell keeps its probability under P and under Q. The sum over all compositions is
a convolution, computed by a Fourier transform.

Balls-in-bins sampling: P is the uniform mixture over the bins i of N(m_i, s^2 I), with m_i the sum
of the columns of C that belong to bin i, and Q = N(0, s^2 I). Delta is estimated by importance
sampling, from Gaussians around t mbar + u m_i, where mbar is the mean of the m_i. This is another
proposal than that of the library's certificate. It gives an estimate with a standard error, and no
certificate.
"""

import math
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl.errors import InvalidInput

# --- Poisson sampling -----------------------------------------------------------------------------

# Width of a cell in standard deviations of the loss of one composition. Splitting a cell between
# its ends adds at most a quarter of its squared width to the variance: epsilon grows by about 1e-5.
CELL: Final = 0.01
MOST_CELLS: Final = 2**23  # wider cells are used if more would be needed: a transform of a second
REMOTE: Final = 10.0  # a normal exceeds this with probability 8e-24, which counts as infinite loss
OUTSIDE: Final = 1e-18  # probability that the sum of the losses leaves the grid, at either end
SLOPES: Final = np.geomspace(1e-3, 1e3, 61)  # exponents of the Chernoff bounds that place the grid
HALVINGS: Final = 200  # more than the halvings after which a float64 interval cannot shrink


@final
class LossDistribution(NamedTuple):
    """The distribution of a privacy loss on a grid; a privacy loss is the log of a density ratio.

    Attributes:
        losses: The points of the grid, in rising order.
        probabilities: The probability of each point.
        infinite: The probability of an infinite loss.
    """

    losses: Vector
    probabilities: Vector
    infinite: float

    def delta(self, epsilon: float) -> float:
        """Return the hockey-stick divergence at epsilon."""
        above = self.losses > epsilon
        shares = -np.expm1(epsilon - self.losses[above])
        return self.infinite + float(self.probabilities[above] @ shares)

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon at this delta, by bisection; infinity if there is none."""
        if self.delta(0.0) <= delta:
            return 0.0
        if self.infinite > delta:
            return math.inf
        low, high = 0.0, max(0.0, float(self.losses[-1]))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


def poisson_losses(
    noise_multiplier: float, probability: float, compositions: int
) -> tuple[LossDistribution, LossDistribution]:
    """Return the loss distributions of a composed Gaussian mechanism on Poisson samples.

    Args:
        noise_multiplier: Standard deviation of the noise over the largest norm of a column.
        probability: The probability that an example is in a batch.
        compositions: How often an example may take part.

    Returns:
        The distributions of the loss of P against Q, and of Q against P. Their deltas are upper
        bounds, except for the rounding errors of the Fourier transforms.
    """
    cell = CELL * _spread(noise_multiplier, probability)
    while True:
        once = _losses_of_one(noise_multiplier, probability, cell)
        windows = [_window(losses, compositions) for losses in once]
        needed = max(
            max((high - low) / cell for low, high in windows),
            max(len(losses.losses) for losses in once),
        )
        if needed <= MOST_CELLS:
            break
        cell *= 1.1 * needed / MOST_CELLS
    first, second = (
        _composed(losses, compositions, cell, *window)
        for losses, window in zip(once, windows, strict=True)
    )
    return first, second


def poisson_epsilon(
    noise_multiplier: float, probability: float, compositions: int, delta: float
) -> float:
    """Return epsilon of a composed Gaussian mechanism on Poisson samples.

    The arguments are those of `poisson_losses`, and the delta at which epsilon is stated.

    >>> round(poisson_epsilon(1.0, 0.01, 1_000, 1e-6), 2)
    2.12
    """
    return max(
        losses.epsilon(delta)
        for losses in poisson_losses(noise_multiplier, probability, compositions)
    )


def _loss_at(x: Vector, scale: float, probability: float) -> Vector:
    """Return log(dP/dQ) at x."""
    exponent = (2 * x - 1) / (2 * scale**2)
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-probability), math.log(probability) + exponent)


def _point_at(loss: Vector, scale: float, probability: float) -> Vector:
    """Return the x at which log(dP/dQ) has this value; minus infinity if it is always larger."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # log(e^l - (1 - q)) = l + log(1 - (1 - q) e^-l)
        shifted = loss + np.log1p(-(1 - probability) * np.exp(-loss)) - math.log(probability)
    return np.where(np.isnan(shifted), -np.inf, scale**2 * shifted + 0.5)


def _spread(scale: float, probability: float) -> float:
    """Return the standard deviation of the loss of one composition, under P."""
    x = np.linspace(-REMOTE * scale, 1 + REMOTE * scale, 200_001)  # fine enough for a width
    density = (1 - probability) * np.exp(-((x / scale) ** 2) / 2)
    density += probability * np.exp(-(((x - 1) / scale) ** 2) / 2)
    density /= density.sum()
    losses = _loss_at(x, scale, probability)
    return math.sqrt(float(density @ (losses - float(density @ losses)) ** 2))


def _losses_of_one(
    scale: float, probability: float, cell: float
) -> tuple[LossDistribution, LossDistribution]:
    """Return the loss of P against Q, and of Q against P, for one composition."""
    ends = _loss_at(np.array([-REMOTE * scale, 1 + REMOTE * scale]), scale, probability)
    first, last = math.floor(float(ends[0]) / cell), math.ceil(float(ends[1]) / cell)
    edges = cell * np.arange(first, last + 1, dtype=np.float64)
    points = _point_at(edges, scale, probability) / scale
    without = _normal_masses(points)
    with_unit = (1 - probability) * without + probability * _normal_masses(points - 1 / scale)
    return (
        _connect_dots(edges, with_unit, without, cell),
        _connect_dots(-edges[::-1], without[::-1], with_unit[::-1], cell),
    )


def _normal_masses(points: Vector) -> Vector:
    """Return the probabilities of a normal below, between and above the points."""
    from scipy.special import ndtr

    bounds = np.concatenate([[-np.inf], points, [np.inf]])
    low, high = bounds[:-1], bounds[1:]
    # Above the mean, differences of upper tails keep the digits that the others lose.
    above = np.asarray(ndtr(-low)) - np.asarray(ndtr(-high))
    return np.where(low > 0, above, np.asarray(ndtr(high)) - np.asarray(ndtr(low)))


def _connect_dots(edges: Vector, upper: Vector, lower: Vector, cell: float) -> LossDistribution:
    """Move the probability of each cell to its two ends.

    Args:
        edges: The points of the grid.
        upper: The probabilities below, between and above the edges, under the distribution that the
            loss is drawn from.
        lower: The same under the other one.
        cell: The width of a cell.
    """
    inside = upper[1:-1]
    with np.errstate(over="ignore", invalid="ignore"):
        # The two parts add up to `upper`, and each times exp(-loss) to `lower`.
        right = (inside - lower[1:-1] * np.exp(edges[:-1])) / -math.expm1(-cell)
    right = np.clip(np.where(np.isnan(right), inside, right), 0, inside)
    probabilities = np.zeros(len(edges))
    probabilities[:-1] += inside - right
    probabilities[1:] += right
    probabilities[0] += upper[0]
    return LossDistribution(edges, probabilities, float(upper[-1]))


def _window(once: LossDistribution, compositions: int) -> tuple[float, float]:
    """Return bounds that the sum of the losses exceeds with probability `OUTSIDE` at most."""
    kept = once.probabilities > 0
    losses, logs = once.losses[kept], np.log(once.probabilities[kept])
    lowest, highest = compositions * float(losses[0]), compositions * float(losses[-1])
    for slope in SLOPES.tolist():
        room = -math.log(OUTSIDE)
        up = (compositions * _log_sum_exp(slope * losses + logs) + room) / slope
        down = (compositions * _log_sum_exp(-slope * losses + logs) + room) / slope
        lowest, highest = max(lowest, -down), min(highest, up)
    return lowest, highest


def _log_sum_exp(exponents: Vector) -> float:
    largest = float(exponents.max())
    return largest + math.log(float(np.exp(exponents - largest).sum()))


def _composed(
    once: LossDistribution, compositions: int, cell: float, low: float, high: float
) -> LossDistribution:
    """Return the distribution of the sum of independent losses, on a grid from `low` to `high`."""
    size = 1 << math.ceil((high - low) / cell + 1).bit_length()  # a power of 2, and large enough
    first = round(float(once.losses[0]) / cell)
    folded = np.bincount(
        (first + np.arange(len(once.losses))) % size, weights=once.probabilities, minlength=size
    )
    # The transform adds indices modulo `size`, which is unique on the grid. Its rounding errors
    # have both signs: without the negative ones, the others would add up.
    summed = np.fft.irfft(np.fft.rfft(folded) ** compositions, n=size)
    indices = math.floor(low / cell) + np.arange(size, dtype=np.int64)
    infinite = -math.expm1(compositions * math.log1p(-once.infinite)) + 2 * OUTSIDE
    losses = cell * indices.astype(np.float64)
    return LossDistribution(losses, summed[indices % size], infinite)


# --- Balls-in-bins sampling -----------------------------------------------------------------------

MOST_SAMPLES: Final = 2**17  # per direction: enough for a standard error of about 1%
PILOT_SAMPLES: Final = 2**12  # per direction, to choose the proposal
# Work of an estimate per direction, in multiplications: a few seconds. A number of a sample costs
# as much as SAMPLE_COST of the multiplications of a matrix product.
MOST_WORK: Final = 3e10
SAMPLE_COST: Final = 1_000
TILE: Final = 2**20  # numbers that are computed at a time: 8 MB
SHIFTS: Final = 8  # shifts that the pilot tries along mbar, and along one bin
PROPOSALS: Final = 4  # of them, those that are mixed
JITTER: Final = 1e-13  # added to the diagonal of the Gram matrix, relatively: it may be singular


@final
class DeltaEstimate(NamedTuple):
    """An estimate of delta. It is not a bound.

    Attributes:
        value: The estimate.
        standard_error: Its standard error, estimated from the same samples.
        samples: The number of samples.
    """

    value: float
    standard_error: float
    samples: int

    @property
    def least(self) -> float:
        """The estimate minus 4 standard errors: delta is smaller with probability 3e-5 only."""
        return self.value - 4 * self.standard_error


def estimate_bins_delta(
    gram: Matrix, noise_multiplier: float, epsilon: float
) -> tuple[DeltaEstimate, DeltaEstimate]:
    """Estimate delta of balls-in-bins sampling, for P against Q and for Q against P.

    Args:
        gram: The inner products of the m_i.
        noise_multiplier: Standard deviation of the noise, at clip norm 1.
        epsilon: The epsilon.
    """
    generator = np.random.default_rng()
    scaled = gram / noise_multiplier**2
    mixture = _Mixture(scaled)
    return (
        _estimate(mixture, epsilon, 1.0, generator),
        _estimate(mixture, epsilon, -1.0, generator),
    )


class _Shift(NamedTuple):
    """A proposal: a Gaussian around t mbar + u m_i, with the bin i drawn at random."""

    along_mean: float  # t
    along_bin: float  # u


@final
class _Mixture:
    """P and Q, seen through y_j = <x, m_j> / s^2: under Q they are normal with covariance G / s^2.

    Args:
        gram: G / s^2.
    """

    def __init__(self, gram: Matrix):
        self.bins = len(gram)
        self.gram = gram
        self.squares = np.diag(gram).copy()
        self.row_means = gram.mean(axis=1)
        self.mean_square = float(self.row_means.mean())
        padded = gram.copy()
        padded[np.diag_indices(self.bins)] += JITTER * self.bins * max(self.squares.max(), 1e-300)
        self._factor = np.linalg.cholesky(padded).T.copy()

    def draw(self, count: int, generator: np.random.Generator) -> Matrix:
        """Draw y under Q, one sample per row."""
        return generator.standard_normal((count, self.bins)) @ self._factor

    def moved(self, products: Matrix, shift: _Shift, bins: NDArray[np.int64]) -> Matrix:
        """Return the samples, moved from Q to a proposal with these bins."""
        moved = products + shift.along_mean * self.row_means
        if shift.along_bin:
            moved += shift.along_bin * self.gram[bins]
        return moved

    def log_ratio(self, products: Matrix, shift: _Shift) -> Vector:
        """Return the log of the density of a proposal over that of Q."""
        t, u = shift
        along_mean = t * products.mean(axis=1) - t * t * self.mean_square / 2
        if not u:
            return along_mean
        exponents = u * products - (t * u * self.row_means + u * u * self.squares / 2)
        largest = exponents.max(axis=1)
        exponents -= largest[:, None]
        return along_mean + largest + np.log(np.exp(exponents, out=exponents).mean(axis=1))

    def loss(self, products: Matrix) -> Vector:
        """Return log(dP/dQ)."""
        return self.log_ratio(products, _Shift(0.0, 1.0))


def _estimate(
    mixture: _Mixture, epsilon: float, sign: float, generator: np.random.Generator
) -> DeltaEstimate:
    """Estimate delta in one direction: P against Q (sign 1), or Q against P (sign -1)."""
    shifts = _best_shifts(mixture, epsilon, sign, generator)
    samples = _affordable_samples(mixture.bins)
    tile = max(1, TILE // mixture.bins)
    total = squares = 0.0
    for start in range(0, samples, tile):
        count = min(tile, samples - start)
        products = _draw_from(mixture, shifts, count, generator)
        logs = [mixture.log_ratio(products, shift) for shift in shifts]
        log_proposal = np.logaddexp.reduce(logs, axis=0) - math.log(len(shifts))
        weights = _weights(mixture.loss(products), log_proposal, epsilon, sign)
        total += float(weights.sum())
        squares += float(weights @ weights)
    mean = total / samples
    variance = max(0.0, squares / samples - mean**2)
    return DeltaEstimate(mean, math.sqrt(variance / samples), samples)


def _affordable_samples(bins: int) -> int:
    return int(min(MOST_SAMPLES, max(64, MOST_WORK / (bins * (bins + SAMPLE_COST)))))


def _weights(losses: Vector, log_proposal: Vector, epsilon: float, sign: float) -> Vector:
    """Return the weights of samples, whose mean is delta.

    Args:
        losses: log(dP/dQ) of each sample.
        log_proposal: The log of the density of the proposal over that of Q.
        epsilon: The epsilon.
        sign: 1 for P against Q, -1 for Q against P.
    """
    log_upper = losses if sign > 0 else np.zeros(len(losses))
    excess = sign * losses - epsilon
    weights = np.zeros(len(losses))
    above = excess > 0
    weights[above] = np.exp((log_upper - log_proposal)[above]) * -np.expm1(-excess[above])
    return weights


def _best_shifts(
    mixture: _Mixture, epsilon: float, sign: float, generator: np.random.Generator
) -> list[_Shift]:
    """Return the proposals whose weights have the smallest second moments.

    The moments are estimated from a few samples of all candidates together. With samples of its own
    only, a candidate that misses the important region would look good.
    """
    candidates = _candidate_shifts(mixture, epsilon, sign)
    samples = min(PILOT_SAMPLES, max(64, _affordable_samples(mixture.bins) // 4))
    products = _draw_from(mixture, candidates, samples, generator)
    logs = np.stack([mixture.log_ratio(products, shift) for shift in candidates])
    log_pool = np.logaddexp.reduce(logs, axis=0) - math.log(len(candidates))
    weights = _weights(mixture.loss(products), log_pool, epsilon, sign)
    hit = weights > 0
    # With the density f of what is integrated, weights are f / pool. The second moment for a
    # proposal q is the mean of f^2 / (q pool), that is of weights^2 pool / q.
    moments = [
        np.logaddexp.reduce(2 * np.log(weights[hit]) + log_pool[hit] - log[hit], initial=-np.inf)
        for log in logs
    ]
    return [candidates[position] for position in np.argsort(moments)[:PROPOSALS]]


def _candidate_shifts(mixture: _Mixture, epsilon: float, sign: float) -> list[_Shift]:
    """Return shifts up to those that move the loss past epsilon along mbar or one bin alone."""
    half_square = float(mixture.squares.mean()) / 2  # what the mean of |m_i|^2 takes from the loss
    reach = (epsilon + half_square) / max(mixture.mean_square, 1e-300)
    along_mean = [_Shift(sign * float(t), 0.0) for t in np.linspace(0, 1.5 * reach, 2 * SHIFTS)]
    if sign < 0:  # moving away from one bin hardly matters: the others are as likely as before
        return along_mean
    past = 2 + 4 * epsilon / max(float(mixture.squares.max()), 1e-300)
    return along_mean + [
        _Shift(float(t), float(u))
        for u in np.geomspace(1, past, SHIFTS)
        for t in np.linspace(0, reach, SHIFTS)
    ]


def _draw_from(
    mixture: _Mixture, shifts: list[_Shift], count: int, generator: np.random.Generator
) -> Matrix:
    """Draw samples, equally many from each proposal."""
    products = mixture.draw(count, generator)
    bins = generator.integers(mixture.bins, size=count)
    for shift, rows in zip(shifts, np.array_split(np.arange(count), len(shifts)), strict=True):
        products[rows] = mixture.moved(products[rows], shift, bins[rows])
    return products


def overflow_probability(trials: int, probability: float, batches: int, largest: int) -> float:
    """Return a bound on the probability that a batch is cut: one of them is larger than `largest`.

    Args:
        trials: How many units may join a batch.
        probability: The probability that one of them does.
        batches: The number of batches.
        largest: The largest size of a batch.
    """
    from scipy.special import bdtrc

    if largest >= trials:
        return 0.0
    if not 0 < probability <= 1:
        raise InvalidInput(f"a probability must be above 0 and at most 1, got {probability}")
    return min(1.0, batches * float(bdtrc(largest, trials, probability)))
