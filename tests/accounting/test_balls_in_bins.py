"""Certified bounds for balls-in-bins sampling, against integration of the divergence."""

import math

import numpy as np
import pytest
from scipy.integrate import dblquad

from dpftrl import BLT, Banded, Independent, SquareRoot, Toeplitz
from dpftrl.accounting import balls_in_bins as module
from dpftrl.accounting.balls_in_bins import (
    certify,
    gram_matrix,
    upper_mean,
    with_against_without,
    without_against_with,
)
from dpftrl.accounting.gaussian import delta_of
from dpftrl.errors import InvalidInput

TINY = Toeplitz([1.0, 0.5, 0.3, 0.2])
# (mechanism, steps, noise multiplier, epsilon), all with two bins, whose divergence has two
# dimensions.
CASES = {
    "toeplitz": (TINY, 4, 1.7, 1.0),
    "independent": (Independent(), 4, 1.7, 1.0),
    "square root, little noise": (SquareRoot(), 6, 0.8, 2.0),
    "one step per bin": (TINY, 2, 1.0, 0.5),
    "epsilon of zero": (TINY, 4, 3.0, 0.0),
    "much noise": (TINY, 5, 6.0, 0.3),
}


def columns(strategy: np.ndarray, bins: int) -> np.ndarray:
    """The sums of the columns of C over the steps of each bin, one by one."""
    steps = len(strategy)
    return np.array(
        [strategy[:, [t for t in range(steps) if t % bins == i]].sum(1) for i in range(bins)]
    )


def integrated(one, steps: int, sigma: float, epsilon: float) -> tuple[float, float]:
    """Delta in both directions for two bins, by integrating over the plane of the two means."""
    first, second = columns(one.strategy(steps), 2)
    along = first / np.linalg.norm(first)
    rest = second - (second @ along) * along
    length = np.linalg.norm(rest)
    a = np.array([np.linalg.norm(first), 0.0])
    b = np.array([second @ along, length])

    def density(x: float, y: float, mean: np.ndarray) -> float:
        square = (x - mean[0]) ** 2 + (y - mean[1]) ** 2
        return math.exp(-square / (2 * sigma**2)) / (2 * math.pi * sigma**2)

    def forward(y: float, x: float) -> float:
        p = (density(x, y, a) + density(x, y, b)) / 2
        return max(0.0, p - math.exp(epsilon) * density(x, y, np.zeros(2)))

    def backward(y: float, x: float) -> float:
        p = (density(x, y, a) + density(x, y, b)) / 2
        return max(0.0, density(x, y, np.zeros(2)) - math.exp(epsilon) * p)

    far = 8 * sigma + max(np.linalg.norm(a), np.linalg.norm(b))
    return tuple(
        dblquad(f, -far, far, -far, far, epsabs=1e-8, epsrel=1e-7)[0] for f in (forward, backward)
    )


@pytest.fixture(scope="module")
def deltas() -> dict[str, tuple[float, float]]:
    return {name: integrated(*case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", ["toeplitz", "independent", "square root, little noise"])
@pytest.mark.parametrize("bins", [1, 2, 3])
def test_the_gram_matrix_is_that_of_the_sums_of_columns(name, bins):
    one, steps, _, _ = CASES[name]
    sums = columns(one.strategy(steps), bins)
    assert gram_matrix(one, steps, bins) == pytest.approx(sums @ sums.T)


@pytest.mark.parametrize("name", CASES)
def test_a_certificate_is_never_below_the_divergence_and_close_to_it(name, deltas):
    one, steps, sigma, epsilon = CASES[name]
    certificate = certify(gram_matrix(one, steps, 2), sigma, epsilon, samples=150_000)
    exact = max(deltas[name])
    assert exact <= certificate.delta <= exact * 1.08 + 2e-5
    assert certificate.estimate == pytest.approx(exact, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_each_direction_estimates_its_own_divergence(name, deltas):
    """The control: with the directions swapped, the estimates would be those of the other."""
    one, steps, sigma, epsilon = CASES[name]
    gram, generator = gram_matrix(one, steps, 2), np.random.default_rng(1)
    for direction, exact in zip(
        (with_against_without, without_against_with), deltas[name], strict=True
    ):
        weights = direction(gram, sigma, epsilon).draw(150_000, generator)
        assert weights.sum() / 150_000 == pytest.approx(exact, rel=0.04, abs=1e-6)
        assert weights.max() <= direction(gram, sigma, epsilon).largest_weight


def test_the_two_directions_differ(deltas):
    forward, backward = deltas["toeplitz"]
    assert forward > backward * 1.005


def test_one_bin_is_the_gaussian_mechanism():
    """Everybody is in the only bin: nothing is sampled, and nothing amplified."""
    gram = gram_matrix(TINY, 4, 1)
    mu = math.sqrt(gram[0, 0]) / 5.0
    certificate = certify(gram, 5.0, 1.0, samples=150_000)
    exact = delta_of(1.0, mu)
    assert exact <= certificate.delta <= exact * 1.1 + 1e-6


def test_coverage_at_a_large_failure_probability(deltas):
    """Of 200 bounds, each of which may be wrong with probability 0.2, no more are wrong."""
    one, steps, sigma, epsilon = CASES["toeplitz"]
    gram, generator, exact = (
        gram_matrix(one, steps, 2),
        np.random.default_rng(7),
        deltas["toeplitz"],
    )
    proposal = with_against_without(gram, sigma, epsilon)

    def wrong(factor: float) -> int:
        return sum(
            upper_mean(
                proposal.draw(2_000, generator), 2_000, proposal.largest_weight * factor, 0.2
            )
            < exact[0]
            for _ in range(200)
        )

    assert wrong(1.0) <= 40 + 3 * math.sqrt(200 * 0.2 * 0.8)


def test_a_bound_on_the_weights_that_is_too_small_is_noticed():
    """The control: heavy weights that are rare, with their bound halved, break the coverage."""
    generator = np.random.default_rng(3)
    mean, samples, missed = 0.001, 1_000, {1.0: 0, 0.05: 0}
    for _ in range(300):
        hits = generator.binomial(samples, mean)
        for factor in missed:
            missed[factor] += upper_mean(np.full(hits, factor), samples, factor, 0.05) < mean
    assert missed[1.0] <= 15 + 3 * math.sqrt(15)
    assert missed[0.05] > 200


@pytest.mark.parametrize("distribution", ["rare", "uniform", "constant"])
def test_the_bound_on_a_mean_holds_for_other_weights(distribution):
    generator, wrong = np.random.default_rng(5), 0
    for _ in range(200):
        if distribution == "rare":
            weights, mean = np.ones(generator.binomial(5_000, 0.002)), 0.002
        elif distribution == "uniform":
            weights, mean = generator.random(5_000), 0.5
        else:
            weights, mean = np.full(5_000, 0.3), 0.3
        wrong += upper_mean(weights, 5_000, 1.0, 0.1) < mean
    assert wrong <= 20 + 3 * math.sqrt(20)


def test_more_samples_give_a_tighter_bound():
    gram = gram_matrix(TINY, 4, 2)
    few, many = (certify(gram, 1.7, 1.0, samples=n).delta for n in (20_000, 500_000))
    assert many < few


def test_a_sampled_mechanism_needs_less_noise_than_one_that_is_not():
    for one, factor in ((Independent(), 10), (BLT(theta=(0.925,), omega=(0.226,)), 3)):
        gram = gram_matrix(one, 200, 20)
        sampled = certify(gram, 3.0, 2.0, samples=200_000).delta
        alone = delta_of(2.0, math.sqrt(np.diag(gram).max()) / 3.0)
        assert sampled < alone / factor


def test_there_is_no_seed_to_choose():
    gram = gram_matrix(TINY, 4, 2)
    one, other = (certify(gram, 1.7, 1.0, samples=5_000) for _ in range(2))
    assert one.delta != other.delta
    with pytest.raises(TypeError):
        certify(gram, 1.7, 1.0, seed=1)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: gram_matrix(TINY, 4, 5), "5 bins and only 4 steps"),
        (lambda: gram_matrix(Banded([[1.0] * 4, [-0.5] * 3 + [0.0]]), 4, 2), "negative entries"),
        (lambda: certify(np.eye(2), 0.0, 1.0), "noise_multiplier"),
        (lambda: certify(np.eye(2), 1.0, -1.0), "epsilon"),
        (lambda: certify(np.eye(2), 1.0, 1.0, failure=0.0), "failure"),
        (lambda: certify(np.eye(2), 1.0, 1.0, samples=0), "samples"),
    ],
)
def test_what_makes_no_sense_is_refused(act, message):
    with pytest.raises(InvalidInput, match=message):
        act()


def test_batches_do_not_change_the_distribution(monkeypatch):
    gram = gram_matrix(TINY, 4, 2)
    monkeypatch.setattr(module, "BATCH", 1_000)
    certificate = certify(gram, 1.7, 1.0, samples=100_500)
    assert certificate.estimate == pytest.approx(0.11385, rel=0.05)
