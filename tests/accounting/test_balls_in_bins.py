"""Certified bounds for balls-in-bins sampling, against integration of the divergence.

Certificates use fresh randomness, and so do these tests. Each comparison fails by chance with a
probability of about 1e-9.
"""

import inspect
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import dblquad
from scipy.optimize import minimize
from scipy.special import ndtr

from dpftrl.accounting import balls_in_bins
from dpftrl.accounting._tuples_of_bins import add_tuples
from dpftrl.accounting.balls_in_bins import (
    DIRECTIONS,
    MOST_BINS,
    Direction,
    Question,
    WithoutAgainstWith,
    certify,
    estimated_bound,
    estimated_delta,
    falling_root,
    gram_matrix,
    smallest_certified,
    upper_mean,
)
from dpftrl.accounting.gaussian import delta_of
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import (
    BLT,
    Banded,
    FullTree,
    Independent,
    Mechanism,
    SquareRoot,
    Toeplitz,
)

TINY = Toeplitz([1.0, 0.5, 0.3, 0.2])
# Columns of different norms, and two bands.
BANDED = Banded([[1.0, 0.9, 1.1, 1.0, 0.8, 1.0], [0.6, 0.4, 0.5, 0.3, 0.7, 0.0]])
MECHANISMS: dict[str, Mechanism] = {
    "independent": Independent(),
    "short toeplitz": TINY,
    "blt": BLT([0.9, 0.3], [0.3, 0.2]),
    "square root": SquareRoot(),
    "banded": BANDED,
    "tree": FullTree(6),
}
EPSILONS = (0.0, 0.3, 1.0, 2.0, 5.0)
SAMPLES = 2**15


def means(mechanism: Mechanism, steps: int, bins: int) -> np.ndarray:
    """The m_i: sums of the columns of the dense C over the steps of each bin, one by one."""
    strategy = mechanism.strategy(steps)
    return np.array(
        [strategy[:, [t for t in range(steps) if t % bins == i]].sum(1) for i in range(bins)]
    )


def integrated(vectors: np.ndarray, sigma: float, epsilon: float) -> tuple[float, float]:
    """Delta of P against Q and of Q against P, by integration over the span of the m_i.

    Along the mean of the m_i, dP/dQ increases, because no two m_i have a negative product. So the
    innermost integral is over a half-line, and has a closed form. The rest is smooth and decays as
    a Gaussian, for which the trapezoidal rule is exact up to rounding.
    """
    bins = len(vectors)
    along = vectors.mean(0) / np.linalg.norm(vectors.mean(0))
    a = vectors @ along / sigma
    rest = vectors / sigma - np.outer(a, along)
    _, lengths, basis = np.linalg.svd(rest, full_matrices=False)
    v = rest @ basis[lengths > 1e-9 * lengths.max()].T if lengths.max() > 1e-9 else rest[:, :0]
    step = 0.1 if v.shape[1] == 1 else 0.4
    ends = zip(v.min(0) - 9, v.max(0) + 9, strict=True)
    axes = [np.arange(low, high, step) for low, high in ends]
    grid = np.array(list(itertools.product(*axes)))
    cell = step ** v.shape[1]
    density = np.exp(-((grid[:, None] - v) ** 2).sum(2) / 2) / (2 * math.pi) ** (v.shape[1] / 2)
    density0 = np.exp(-(grid**2).sum(1) / 2) / (2 * math.pi) ** (v.shape[1] / 2)
    constant = grid @ v.T - (v**2).sum(1) / 2 - a**2 / 2

    def threshold(loss: float) -> np.ndarray:
        low, high = np.full(len(grid), -300.0), np.full(len(grid), 300.0)
        for _ in range(60):
            middle = (low + high) / 2
            below = np.logaddexp.reduce(constant + middle[:, None] * a, axis=1) < loss + math.log(
                bins
            )
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return low

    r = threshold(epsilon)
    forward = (density * ndtr(a - r[:, None])).mean(1) - math.exp(epsilon) * density0 * ndtr(-r)
    r = threshold(-epsilon)
    backward = density0 * ndtr(r) - math.exp(epsilon) * (density * ndtr(r[:, None] - a)).mean(1)
    return float(forward.sum() * cell), float(backward.sum() * cell)


def divergences(
    mechanism: Mechanism, steps: int, bins: int, sigma: float, epsilon: float
) -> tuple[float, float]:
    return integrated(means(mechanism, steps, bins), sigma, epsilon)


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [(TINY, (0.11385, 0.11270)), (Independent(), (0.02606, 0.02140))],
)
def test_the_integration_agrees_with_another_one(mechanism, expected):
    """The figures come from adaptive quadrature in the plane of the two means."""
    assert divergences(mechanism, 4, 2, 1.7, 1.0) == pytest.approx(expected, abs=1e-5)


def test_the_integration_agrees_with_adaptive_quadrature():
    vectors = means(SquareRoot(), 5, 2)
    sigma, epsilon = 2.0, 0.7
    first = vectors[0] / np.linalg.norm(vectors[0])
    second = vectors[1] - (vectors[1] @ first) * first
    points = vectors @ np.stack([first, second / np.linalg.norm(second)], 1) / sigma

    def excess(sign: int) -> Callable[[float, float], float]:
        def value(y: float, x: float) -> float:
            q = math.exp(-(x * x + y * y) / 2)
            p = sum(math.exp(-((x - u) ** 2 + (y - w) ** 2) / 2) for u, w in points) / 2
            one, other = (p, q) if sign > 0 else (q, p)
            return max(0.0, one - math.exp(epsilon) * other) / (2 * math.pi)

        return value

    exact = [dblquad(excess(sign), -8, 12, -8, 12, epsabs=1e-6)[0] for sign in (1, -1)]
    assert integrated(vectors, sigma, epsilon) == pytest.approx(exact, abs=3e-6)


@pytest.mark.parametrize("sigma", [0.7, 2.0, 6.0])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_integration_is_exact_for_one_bin(sigma, epsilon):
    exact = delta_of(epsilon, float(np.linalg.norm(means(TINY, 6, 1))) / sigma)
    assert divergences(TINY, 6, 1, sigma, epsilon) == pytest.approx((exact, exact), rel=1e-6)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("steps", [1, 2, 4, 6])
@pytest.mark.parametrize("bins", [1, 2, 3, 5, 8])
def test_the_gram_matrix_is_that_of_the_sums_of_columns(name, steps, bins):
    vectors = means(MECHANISMS[name], steps, bins)
    assert gram_matrix(MECHANISMS[name], steps, bins) == pytest.approx(vectors @ vectors.T)


def test_the_gram_matrix_of_a_toeplitz_strategy_counts_every_step():
    """Two coefficients and 1,000 steps: each of 100 bins takes part ten times, not once."""
    gram = gram_matrix(Toeplitz([1.0, 0.5]), 1_000, 100)
    vectors = means(Toeplitz([1.0, 0.5]), 1_000, 100)
    assert np.abs(gram - vectors @ vectors.T).max() < 1e-9
    assert gram[0, 0] == pytest.approx(10 * 1.25)


def check_certificate(
    gram: np.ndarray, exact: tuple[float, float], sigma: float, epsilon: float
) -> None:
    """Assert that a certificate is never below the truth and close to it."""
    certificate = certify(gram, sigma, epsilon, samples=SAMPLES)
    truth = max(exact)
    assert truth <= certificate.delta
    largest = max(kind(gram, sigma, epsilon).largest_weight for kind in DIRECTIONS)
    trust = math.log(2 / certificate.failure) / SAMPLES
    # Bernstein's bound, with the largest variance that such weights can have; the last term is for
    # a stake that cannot be larger.
    assert certificate.delta <= truth + 1.1 * math.sqrt(2 * largest * truth * trust) + (
        2.2 * largest * trust
    )
    # Wherever an epsilon is worth stating, it is within a few percent.
    if truth > 1e-6:
        assert certificate.delta <= 1.15 * truth
        assert certificate.estimate == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("bins", "steps", "sigma"), [(2, 4, 1.7), (3, 6, 2.5)])
def test_a_certificate_is_never_below_the_divergence_and_close_to_it(
    name, epsilon, bins, steps, sigma
):
    mechanism = MECHANISMS[name]
    exact = divergences(mechanism, steps, bins, sigma, epsilon)
    check_certificate(gram_matrix(mechanism, steps, bins), exact, sigma, epsilon)


@pytest.mark.parametrize(
    ("mechanism", "steps", "bins", "sigma", "epsilon"),
    [
        (SquareRoot(), 6, 2, 0.9, 1.0),
        (BANDED, 6, 2, 0.9, 5.0),
        (TINY, 2, 2, 1.0, 0.5),  # one step per bin
        (TINY, 2, 3, 1.0, 0.5),  # a bin whose step never comes
        (Independent(), 1, 3, 0.8, 1.0),  # only one bin takes part
        (TINY, 4, 2, 0.3, 0.0),  # nearly everything is revealed
        (TINY, 4, 2, 0.3, 20.0),
        (SquareRoot(), 6, 3, 6.0, 0.3),
        (Toeplitz([1.0, 1.0, 1.0]), 3, 3, 1.5, 1.0),
    ],
)
def test_a_certificate_is_right_in_unusual_cases(mechanism, steps, bins, sigma, epsilon):
    exact = divergences(mechanism, steps, bins, sigma, epsilon)
    check_certificate(gram_matrix(mechanism, steps, bins), exact, sigma, epsilon)


def test_equal_means_give_the_gaussian_mechanism():
    """All bins have the same m_i, so that the Gram matrix is singular, and nothing is amplified."""
    for epsilon in EPSILONS:
        exact = delta_of(epsilon, 1.0)
        check_certificate(np.full((3, 3), 4.0), (exact, exact), 2.0, epsilon)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize(("bins", "sigma"), [(2, 1.7), (3, 2.5)])
def test_each_direction_estimates_its_own_divergence(name, epsilon, bins, sigma):
    gram = gram_matrix(MECHANISMS[name], 6, bins)
    exact = divergences(MECHANISMS[name], 6, bins, sigma, epsilon)
    for kind, truth in zip(DIRECTIONS, exact, strict=True):
        moments = kind(gram, sigma, epsilon).moments(SAMPLES, entropy=1)
        error = math.sqrt((moments.square - moments.mean**2) / SAMPLES)
        assert abs(moments.mean - truth) <= 5 * error + 2e-6 * truth


def test_tuples_of_bins_are_drawn_in_the_stated_proportions():
    """All tuples of three of three bins, against the product of their probabilities."""
    gram = gram_matrix(BANDED, 6, 3) / 2.5**2
    count, order = 200_000, 3
    generator = np.random.default_rng(4)
    # Bin i adds row i of the Gram matrix, which is regular: the sum tells how often each was drawn.
    products = np.zeros((count, 3))
    log_ratio = add_tuples(products, generator.random((count, order)), gram, np.exp(gram))
    drawn = np.rint(np.linalg.solve(gram, products.T).T).astype(int)
    assert np.all(drawn.sum(1) == order)
    expected, ratios = dict[tuple[int, ...], float](), dict[tuple[int, ...], set[float]]()
    for bins in itertools.product(range(3), repeat=order):
        probability, log_of_means = 1 / 3, 0.0
        for k in range(1, order):
            chances = np.exp(gram[list(bins[:k])].sum(0))
            probability *= chances[bins[k]] / chances.sum()
            log_of_means += math.log(chances.mean())
        counts = tuple(bins.count(i) for i in range(3))
        expected[counts] = expected.get(counts, 0.0) + probability
        ratios.setdefault(counts, set()).add(log_of_means)
    for counts, probability in expected.items():
        rows = np.all(drawn == counts, axis=1)
        error = math.sqrt(probability / count)
        assert abs(rows.mean() - probability) <= 5 * error
        for value in np.unique(log_ratio[rows].round(9)):
            assert min(abs(value - one) for one in ratios[counts]) < 1e-8


def test_swapped_directions_are_noticed(monkeypatch):
    """The control: with P against Q left out, the certificate is too small."""
    exact = divergences(Independent(), 4, 2, 1.7, 1.0)
    assert exact[0] > 1.2 * exact[1]
    gram = gram_matrix(Independent(), 4, 2)
    check_certificate(gram, exact, 1.7, 1.0)
    monkeypatch.setattr(balls_in_bins, "DIRECTIONS", (WithoutAgainstWith, WithoutAgainstWith))
    with pytest.raises(AssertionError):
        check_certificate(gram, exact, 1.7, 1.0)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("bins", "wrong"), [(2, 3), (2, 1), (3, 2)])
def test_a_missing_or_additional_bin_is_noticed(name, bins, wrong):
    exact = divergences(MECHANISMS[name], 6, bins, 1.7, 1.0)
    with pytest.raises(AssertionError):
        check_certificate(gram_matrix(MECHANISMS[name], 6, wrong), exact, 1.7, 1.0)


@pytest.mark.parametrize("name", ["independent", "blt"])
def test_a_missing_step_is_noticed(name):
    exact = divergences(MECHANISMS[name], 6, 2, 1.7, 1.0)
    with pytest.raises(AssertionError):
        check_certificate(gram_matrix(MECHANISMS[name], 5, 2), exact, 1.7, 1.0)


class ChosenNumbers:
    """In place of a random generator: returns the numbers that it was given."""

    def __init__(self, normals: np.ndarray, uniforms: np.ndarray):
        self._normals, self._uniforms = normals, uniforms

    def standard_normal(self, shape: tuple[int, int]) -> np.ndarray:
        return self._normals.reshape(shape).copy()

    def random(self, shape: tuple[int, int]) -> np.ndarray:
        return self._uniforms[:, : shape[1]].copy()


def heaviest_weight(direction: Direction, bins: int) -> float:
    """The largest weight over tuples of bins and points x that optimization finds."""
    generator = np.random.default_rng(0)

    def weights(normals: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        return direction._weights(len(normals), ChosenNumbers(normals, uniforms))  # type: ignore

    count = 5_000
    scales = generator.choice([0.3, 1.0, 3.0, 8.0], count)[:, None]
    normals = generator.standard_normal((count, bins)) * scales
    # One uniform number for all bins of a tuple makes tuples of one bin likely.
    uniforms = np.where(
        generator.random(count)[:, None] < 0.5,
        generator.random((count, 1)),
        generator.random((count, 64)),
    )
    first = weights(normals, uniforms)
    heaviest = float(np.nanmax(first))
    for start in np.argsort(first)[-8:]:
        fixed = uniforms[start : start + 1]
        result = minimize(
            lambda point, fixed=fixed: -float(weights(point[None], fixed)[0]),
            normals[start],
            method="Nelder-Mead",
            options={"maxfev": 400},
        )
        heaviest = max(heaviest, -float(result.fun))
    return heaviest


@pytest.mark.parametrize("kind", DIRECTIONS)
@pytest.mark.parametrize("name", ["independent", "short toeplitz", "banded"])
@pytest.mark.parametrize(
    ("bins", "sigma", "epsilon"),
    [(2, 1.7, 0.0), (2, 1.7, 1.0), (2, 3.0, 0.0), (3, 3.0, 0.3), (3, 2.0, 2.0), (2, 0.8, 5.0)],
)
def test_no_weight_exceeds_its_bound_and_half_the_bound_is_too_small(
    kind, name, bins, sigma, epsilon
):
    direction = kind(gram_matrix(MECHANISMS[name], 6, bins), sigma, epsilon)
    heaviest = heaviest_weight(direction, bins)
    assert heaviest <= direction.largest_weight
    assert heaviest > 0.8 * direction.largest_weight  # so half of it would not be a bound


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_no_weight_needs_a_bound_above_one(kind):
    """A weight of 1 for every sample is possible without importance sampling."""
    for sigma in (0.01, 0.3, 1.0, 1.7, 2.4, 3.0, 10.0, 1e3):
        for epsilon in (*EPSILONS, 1e-6, 50.0):
            for bins in (1, 2, 3):
                direction = kind(gram_matrix(TINY, 6, bins), sigma, epsilon)
                assert 0 < direction.largest_weight <= 1 + 2e-6


@pytest.mark.filterwarnings("ignore:.*encountered")
@pytest.mark.parametrize("sigma", [1e-150, 1e-8, 1e-3, 0.05])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 400.0])
def test_weights_are_numbers_even_without_noise(sigma, epsilon):
    gram = gram_matrix(TINY, 6, 2)
    for kind in DIRECTIONS:
        direction = kind(gram, sigma, epsilon)
        weights = direction.draw(2_000, entropy=3)
        assert np.all(weights > 0)
        assert np.all(weights <= direction.largest_weight * (1 + 1e-5))
    certificate = certify(gram, sigma, epsilon, samples=2_000)
    assert 0.98 <= certificate.delta <= 1


@pytest.mark.parametrize("sigma", [1e3, 1e6, 1e100])
def test_much_noise_leaves_almost_nothing(sigma):
    gram = gram_matrix(TINY, 6, 2)
    certificate = certify(gram, sigma, 0.0, samples=2_000)
    exact = max(divergences(TINY, 6, 2, sigma, 0.0)) if sigma < 1e5 else 0.0
    assert exact * (1 - 1e-9) <= certificate.delta <= 0.05


def coverage(gram: np.ndarray, exact: float) -> tuple[int, list[float]]:
    """How many of 200 bounds, each wrong with a probability of at most 0.2, are wrong."""
    bounds = [certify(gram, 1.7, 1.0, failure=0.2, samples=1_000).delta for _ in range(200)]
    return sum(bound < exact for bound in bounds), bounds


# Binomial with 200 trials of probability 0.2: a larger number has probability 1e-6.
MOST_WRONG = 68


@pytest.mark.parametrize("name", ["independent", "blt"])
def test_coverage_at_a_large_failure_probability(name):
    exact = max(divergences(MECHANISMS[name], 6, 2, 1.7, 1.0))
    wrong, bounds = coverage(gram_matrix(MECHANISMS[name], 6, 2), exact)
    assert wrong <= MOST_WRONG
    assert float(np.median(bounds)) < 1.3 * exact  # they are not all far above


def test_coverage_notices_an_additional_bin():
    exact = max(divergences(Independent(), 6, 2, 1.7, 1.0))
    assert coverage(gram_matrix(Independent(), 6, 3), exact)[0] > MOST_WRONG


def test_one_bin_is_the_gaussian_mechanism():
    """Everybody is in the only bin: nothing is sampled, and nothing amplified."""
    for sigma in (1.0, 5.0, 20.0):
        for epsilon in EPSILONS:
            gram = gram_matrix(TINY, 4, 1)
            exact = delta_of(epsilon, math.sqrt(gram[0, 0]) / sigma)
            check_certificate(gram, (exact, exact), sigma, epsilon)


WEIGHTS = {
    "rare": (lambda generator: np.ones(generator.binomial(2_000, 0.005)), 0.005),
    "uniform": (lambda generator: generator.random(2_000), 0.5),
    "constant": (lambda _: np.full(2_000, 0.3), 0.3),
    "skewed": (lambda generator: generator.random(2_000) ** 20, 1 / 21),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("stake", [0.01, 0.1, 0.5])
def test_the_bound_on_a_mean_holds_for_other_weights(name, stake):
    draw, mean = WEIGHTS[name]
    generator = np.random.default_rng(5)
    wrong = sum(
        upper_mean(draw(generator), 2_000, 1.0, 0.1, stake=stake) < mean for _ in range(300)
    )
    assert wrong <= 30 + 4 * math.sqrt(300 * 0.1 * 0.9)


def test_a_bound_on_rare_weights_that_is_too_small_is_noticed():
    """The control: a bound on weights below the true one breaks the coverage."""
    generator = np.random.default_rng(3)
    mean, missed = 0.001, {1.0: 0, 0.05: 0}
    for _ in range(300):
        hits = generator.binomial(1_000, mean)
        for largest in missed:
            bound = upper_mean(np.full(hits, largest), 1_000, largest, 0.05, stake=0.5 / largest)
            missed[largest] += bound < mean
    assert missed[1.0] <= 15 + 4 * math.sqrt(15)
    assert missed[0.05] > 200


def test_a_bound_on_a_mean_is_at_most_the_largest_weight():
    assert upper_mean(np.ones(3), 3, 1.0, 1e-9, stake=0.5) == 1.0
    assert 0 < upper_mean(np.ones(0), 10**6, 1.0, 1e-9, stake=0.5) < 1e-4


def test_more_samples_give_a_tighter_bound():
    gram = gram_matrix(TINY, 4, 2)
    few, many = (certify(gram, 1.7, 1.0, samples=count).delta for count in (10_000, 200_000))
    assert many < few


def test_estimates_are_close_to_certificates():
    gram = gram_matrix(TINY, 6, 3)
    exact = max(divergences(TINY, 6, 3, 2.5, 1.0))
    certificate = certify(gram, 2.5, 1.0, samples=SAMPLES)
    assert estimated_delta(gram, 2.5, 1.0, pilot=SAMPLES) == pytest.approx(exact, rel=0.05)
    bound = estimated_bound(gram, 2.5, 1.0, samples=SAMPLES)
    assert bound == pytest.approx(certificate.delta, rel=0.05)


def test_a_sampled_mechanism_needs_less_noise_than_one_that_is_not():
    for mechanism, factor in ((Independent(), 10), (BLT([0.925], [0.226]), 3)):
        gram = gram_matrix(mechanism, 200, 20)
        sampled = certify(gram, 3.0, 2.0, samples=2**15).delta
        alone = delta_of(2.0, math.sqrt(np.diag(gram).max()) / 3.0)
        assert sampled < alone / factor


@pytest.mark.parametrize("function", [certify, smallest_certified])
def test_nobody_can_choose_the_randomness_of_a_certificate(function):
    assert not {"seed", "entropy", "generator", "rng", "key"} & set(
        inspect.signature(function).parameters
    )


def test_two_certificates_differ():
    gram = gram_matrix(TINY, 4, 2)
    deltas = {certify(gram, 1.7, 1.0, samples=5_000).delta for _ in range(5)}
    assert len(deltas) == 5


def test_the_seeds_of_numpy_do_not_change_a_certificate():
    gram, deltas = gram_matrix(TINY, 4, 2), set[float]()
    for _ in range(3):
        np.random.seed(0)  # noqa: NPY002
        deltas.add(certify(gram, 1.7, 1.0, samples=5_000).delta)
    assert len(deltas) == 3


def test_tiles_do_not_change_the_distribution(monkeypatch):
    """Samples in many small parts, the last one shorter, with rows of matrix products split up."""
    monkeypatch.setattr(balls_in_bins, "TILE", 2_000)
    monkeypatch.setattr(balls_in_bins, "SERIAL_PRODUCT", 64)
    exact = divergences(TINY, 6, 3, 2.5, 1.0)
    for kind, truth in zip(DIRECTIONS, exact, strict=True):
        direction = kind(gram_matrix(TINY, 6, 3), 2.5, 1.0)
        assert direction.moments(100_500, 1).mean == pytest.approx(truth, rel=0.05)
        assert len(np.unique(weights := direction.draw(5_000, 2))) == len(weights)


def test_the_smallest_certified_noise_is_enough_and_little_more():
    gram = gram_matrix(TINY, 6, 2)
    target = 1e-3
    scale = smallest_certified(
        gram, lambda value: Question(value, 1.0, target), largest=50.0, samples=2**17
    )
    assert max(divergences(TINY, 6, 2, scale, 1.0)) <= target
    assert max(divergences(TINY, 6, 2, 0.97 * scale, 1.0)) > target


def test_certificates_of_a_search_share_one_failure_probability(monkeypatch):
    failures = list[float]()
    real = balls_in_bins.certify

    def too_large(*args, failure, **options):
        failures.append(failure)
        return real(*args, failure=failure, **options)._replace(delta=1.0)

    monkeypatch.setattr(balls_in_bins, "certify", too_large)
    largest = 50.0
    value = smallest_certified(
        gram_matrix(TINY, 6, 2),
        lambda value: Question(value, 1.0, 1e-3),
        largest,
        failure=0.1,
        samples=1_000,
    )
    assert value == largest  # what needs no certificate
    assert len(failures) > 1
    assert sum(failures) <= 0.1


def test_a_question_without_a_delta_is_never_certified():
    largest = 50.0
    gram = gram_matrix(TINY, 6, 2)
    value = smallest_certified(gram, lambda value: Question(value, 1.0, 0.0), largest, samples=100)
    assert value == largest


@pytest.mark.parametrize("root", [-3.0, 0.0, 1.99, 2.5])
def test_a_falling_function_is_not_positive_at_its_root(root):
    def function(value: float) -> float:
        return root - value

    found = falling_root(function, 2.0, 1e-4)
    if root > 2.0:
        assert found == 2.0
    else:
        assert function(found) <= 0
        assert found == pytest.approx(root, abs=1.5e-4)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: gram_matrix(Banded([[1.0] * 4, [-0.5] * 3 + [0.0]]), 4, 2), "negative entries"),
        (lambda: gram_matrix(Independent(), 10_000, MOST_BINS + 1), "at most 4,096 bins"),
        (lambda: gram_matrix(Independent(), 0, 1), "steps"),
        (lambda: gram_matrix(Independent(), 1, 0), "bins"),
        (lambda: certify(np.eye(2), 0.0, 1.0), "noise_multiplier"),
        (lambda: certify(np.eye(2), math.nan, 1.0), "noise_multiplier"),
        (lambda: certify(np.eye(2), math.inf, 1.0), "noise_multiplier"),
        (lambda: certify(np.eye(2), 1.0, -1.0), "epsilon"),
        (lambda: certify(np.eye(2), 1.0, math.nan), "epsilon"),
        (lambda: certify(np.eye(2), 1.0, math.inf), "epsilon"),
        (lambda: certify(np.eye(2), 1.0, 1.0, failure=0.0), "failure"),
        (lambda: certify(np.eye(2), 1.0, 1.0, failure=1.0), "failure"),
        (lambda: certify(np.eye(2), 1.0, 1.0, failure=math.nan), "failure"),
        (lambda: certify(np.eye(2), 1.0, 1.0, samples=0), "samples"),
    ],
)
def test_what_makes_no_sense_is_refused(act, message):
    with pytest.raises(InvalidInput, match=message):
        act()
