"""Guarantees of sampled runs: against other accountants, against attacks, and what is refused."""

import inspect
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dpftrl.accounting import amplification
from dpftrl.accounting.amplification import (
    CERTIFICATE,
    FIXED_STEPS,
    LARGEST_EPSILON,
    REMOTE_PROBABILITY,
    SampledGuarantee,
    account_sampled,
    calibrate_sampled,
    check_sampled,
)
from dpftrl.accounting.balls_in_bins import (
    DEFAULT_FAILURE,
    MOST_BINS,
    estimated_delta,
    gram_matrix,
    smallest_certified,
)
from dpftrl.accounting.gaussian import delta_of, epsilon_of, sampler_delta
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.mechanisms import (
    BLT,
    Banded,
    BinaryTree,
    FullTree,
    Independent,
    Mechanism,
    SquareRoot,
    Toeplitz,
)
from dpftrl.noise.key import NoiseKey
from dpftrl.participation import BallsInBins, CyclicPoisson, Poisson, Sampling
from dpftrl.sampler import Sampler

DELTA = 1e-6
BLT_OF_TRIAL = BLT([0.925], [0.226])


@pytest.fixture
def few_samples(monkeypatch):
    """Certificates from fewer samples: faster, and about 10% above the truth."""
    quick = partial(smallest_certified, samples=2**14)
    monkeypatch.setattr(amplification, "smallest_certified", quick)


def unit_norm(*coefficients: float) -> Toeplitz:
    """A Toeplitz strategy whose columns have norm 1, except for the last ones."""
    return Toeplitz((np.array(coefficients) / np.linalg.norm(coefficients)).tolist())


def close(value: float, expected: float) -> bool:
    return abs(value / expected - 1) <= 1e-3


# Comparison with other accountants.


def dp_accounting_epsilon(probability: float, sigma: float, times: int, delta: float) -> float:
    """Epsilon of compositions of a Poisson-subsampled Gaussian, by dp_accounting's accountant."""
    event = pytest.importorskip("dp_accounting.dp_event")
    pld = pytest.importorskip("dp_accounting.pld")
    sampled = event.PoissonSampledDpEvent(probability, event.GaussianDpEvent(sigma))
    accountant = pld.PLDAccountant()
    accountant.compose(event.SelfComposedDpEvent(sampled, times))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(
    ("sampling", "sigma", "delta"),
    [
        (Poisson(1_000, 10, 1_000), 2.0, 1e-6),
        (Poisson(1_000, 200, 50), 1.5, 1e-5),
        (Poisson(50, 25, 7), 0.9, 1e-3),
        (Poisson(10_000, 50, 3_000), 1.5, 1e-8),
    ],
)
def test_poisson_sampling_agrees_with_dp_accounting(sampling, sigma, delta):
    expected = dp_accounting_epsilon(sampling.probability, sigma, sampling.steps, delta)
    stated = account_sampled(Independent(), sampling, sigma, delta).epsilon
    assert close(stated, expected)


def test_a_slightly_different_sampling_does_not_agree_with_dp_accounting():
    """The control: one example in 200 more per batch, or one step in 50 more."""
    expected = dp_accounting_epsilon(0.2, 1.5, 50, 1e-5)
    assert close(
        account_sampled(Independent(), Poisson(1_000, 200, 50), 1.5, 1e-5).epsilon, expected
    )
    for other in (Poisson(1_000, 201, 50), Poisson(1_000, 199, 50), Poisson(1_000, 200, 51)):
        assert not close(account_sampled(Independent(), other, 1.5, 1e-5).epsilon, expected)


# Measured with jax_privacy 2.0.0 and dp-accounting 0.6.0: `PLDAccountant().get_epsilon` of
# `experimental.accounting.amplified_bandmf_event(sigma, n, num_bands=groups, sampling_prob=q)` at
# delta 1e-6 and 1e-4.
JAX_PRIVACY = [
    (2.0, CyclicPoisson(1_000, 10, 1_000, groups=4), 1.5763199801576704, 1.1430619578139198),
    (1.2, CyclicPoisson(1_000, 10, 1_000, groups=8), 5.110984248108542, 3.761613065710703),
    (1.0, CyclicPoisson(30, 1, 250, groups=3), 7.452695622318769, 5.466628230341773),
    (0.8, CyclicPoisson(20, 1, 103, groups=4), 12.73980007320482, 9.382783149968711),
]


@pytest.mark.parametrize(("sigma", "sampling", "at_1e6", "at_1e4"), JAX_PRIVACY)
def test_cyclic_poisson_sampling_agrees_with_jax_privacy(sigma, sampling, at_1e6, at_1e4):
    mechanism = unit_norm(*[0.9**i for i in range(sampling.groups)])
    for delta, expected in ((1e-6, at_1e6), (1e-4, at_1e4)):
        assert close(account_sampled(mechanism, sampling, sigma, delta).epsilon, expected)
    # The control: one group fewer, for a strategy that allows it.
    fewer = replace(sampling, groups=sampling.groups - 1)
    assert not close(account_sampled(Independent(), fewer, sigma, 1e-6).epsilon, at_1e6)


def test_one_group_is_poisson_sampling():
    args = (Independent(), 1.3, DELTA)
    poisson = account_sampled(args[0], Poisson(500, 20, 80), *args[1:])
    cyclic = account_sampled(args[0], CyclicPoisson(500, 20, 80, groups=1), *args[1:])
    assert poisson.epsilon == cyclic.epsilon


@pytest.mark.parametrize("sigma", [2.0, 5.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-9])
def test_a_sampling_probability_of_one_is_the_gaussian_mechanism(sigma, delta):
    banded = Banded([[1.0, 0.9, 1.1, 1.0, 0.8, 1.0], [0.6, 0.4, 0.5, 0.3, 0.7, 0.0]])
    cases: list[tuple[Mechanism, Sampling, float]] = [
        (Independent(), Poisson(10, 10, 9), 3.0),
        (unit_norm(2.0, 1.0), CyclicPoisson(10, 5, 9, groups=2), math.sqrt(5)),
        (banded, CyclicPoisson(10, 5, 6, groups=2), math.sqrt(3 * (1.1**2 + 0.5**2))),
    ]
    for mechanism, sampling, norm in cases:
        exact = epsilon_of(delta, norm / sigma)
        stated = account_sampled(mechanism, sampling, sigma, delta).epsilon
        assert exact <= stated <= exact * 1.001 + 1e-4


@pytest.mark.parametrize("mechanism", [Independent(), BLT_OF_TRIAL, Toeplitz([1.0, 0.4])])
def test_one_bin_is_the_gaussian_mechanism(mechanism, few_samples):  # noqa: ARG001
    """Full batches: every example is in the only bin."""
    sampling = BallsInBins(10, 10, 8)
    norm = np.linalg.norm(mechanism.strategy(8).sum(1))
    exact = epsilon_of(1e-5, float(norm) / 12.0)
    stated = account_sampled(mechanism, sampling, 12.0, 1e-5)
    assert exact <= stated.epsilon <= 1.05 * exact
    assert stated.sensitivity == pytest.approx(norm)


def test_one_epoch_of_balls_in_bins_is_between_poisson_sampling_and_none(few_samples):  # noqa: ARG001
    """Independent noise and one participation: less amplified than Poisson sampling at large eps.

    A single batch of one step is exactly Poisson sampling with probability 1 / bins.
    """
    single = BallsInBins(40, 10, 1)  # the other three bins never take part
    exact = dp_accounting_epsilon(0.25, 1.0, 1, 1e-3)
    stated = account_sampled(Independent(), single, 1.0, 1e-3).epsilon
    assert exact * (1 - 1e-3) <= stated <= 1.05 * exact


@pytest.mark.parametrize(
    ("steps", "deltas"),
    [
        (10_000, (1e-6, 1e-9, 3e-11)),
        (100_000, (1e-6, 1e-9, 3e-10)),
        pytest.param(1_000_000, (1e-6, 1e-8, 3e-9), marks=pytest.mark.slow),
    ],
)
def test_long_compositions_are_not_below_the_gaussian_mechanism(steps, deltas):
    """With full batches the exact value is known, and Fourier transforms round."""
    mu = 1.0
    for delta in deltas:
        stated = account_sampled(
            Independent(), Poisson(10, 10, steps), math.sqrt(steps) / mu, delta
        ).epsilon
        exact = epsilon_of(delta, mu)
        assert exact <= stated <= 1.02 * exact


@pytest.mark.parametrize("delta", [1e-13, 1e-100])
def test_a_delta_below_the_error_of_fourier_transforms_is_refused(delta):
    with pytest.raises(InvalidInput, match="larger delta"):
        account_sampled(Independent(), Poisson(100, 10, 40), 2.0, delta)


def test_a_toeplitz_strategy_with_few_coefficients_counts_every_step(few_samples):  # noqa: ARG001
    """Two coefficients given, or the same two followed by zeros: the same strategy."""
    sampling = BallsInBins(40, 10, 16)
    short, long = (
        account_sampled(Toeplitz([1.0, 0.5, *zeros]), sampling, 3.0, 1e-4)
        for zeros in ([], [0.0] * 14)
    )
    assert short.sensitivity == pytest.approx(math.sqrt(4 * 1.25), rel=1e-6)
    assert short.sensitivity == pytest.approx(long.sensitivity)
    assert short.epsilon == pytest.approx(long.epsilon, rel=0.05)


# Attacks.


def attacked_epsilon(
    with_example: np.ndarray, without: np.ndarray, delta: float
) -> tuple[float, float]:
    """The largest epsilon that a threshold test rules out at delta: an estimate, a lower bound.

    The threshold is chosen with one half of the values of the test, and judged with the other.
    """
    half = len(with_example) // 2
    p, q = np.sort(with_example[:half]), np.sort(without[:half])
    thresholds = np.quantile(q, np.linspace(0.3, 1 - 400 / half, 200))
    hits = 1 - np.searchsorted(p, thresholds) / half
    alarms = 1 - np.searchsorted(q, thresholds) / half
    best = thresholds[np.argmax((hits - delta) / np.maximum(alarms, 1e-9))]
    hit, alarm = float(np.mean(with_example[half:] > best)), float(np.mean(without[half:] > best))
    error = 4.5 / math.sqrt(half)
    low, high = hit - error * math.sqrt(hit), alarm + error * math.sqrt(alarm)
    return math.log((hit - delta) / alarm), math.log((low - delta) / high)


def releases(
    mechanism: Mechanism, taking_part: np.ndarray, sigma: float
) -> tuple[np.ndarray, np.ndarray]:
    """C X + Z with an example that takes part in these steps, and without; one row per run."""
    generator = np.random.default_rng(1)
    noise = sigma * generator.standard_normal((2, *taking_part.shape))
    strategy = mechanism.strategy(taking_part.shape[1])
    return taking_part @ strategy.T + noise[0], noise[1]


def participations(sampling: Sampling) -> np.ndarray:
    """For each example of the data set, whether it is in the batch of each step."""
    sampler = Sampler(sampling, NoiseKey.insecure_for_tests(5))
    taking_part = np.zeros((sampling.dataset_size, sampling.steps))
    for step in range(sampling.steps):
        taking_part[sampler.batch(step), step] = 1.0
    return taking_part


def log_ratio_of_mixture(x: np.ndarray, patterns: np.ndarray, sigma: float) -> np.ndarray:
    """log dP/dQ, where P is the uniform mixture of Gaussians around the rows of `patterns`."""
    exponents = (x @ patterns.T - (patterns**2).sum(1) / 2) / sigma**2
    return np.logaddexp.reduce(exponents, axis=1) - math.log(len(patterns))


def check_attack(
    sampling: Sampling,
    weaker: Sampling,
    mechanism: Mechanism,
    sigma: float,
    estimate: float,
    lower: float,
    delta: float,
) -> None:
    stated = account_sampled(mechanism, sampling, sigma, delta).epsilon
    assert lower <= stated  # no attack succeeds
    assert estimate >= 0.8 * stated  # and this one comes close
    # The control: the guarantee of a sampling with smaller probabilities is broken by the attack.
    assert account_sampled(mechanism, weaker, sigma, delta).epsilon < lower


EXAMPLES = 240_000


@pytest.mark.parametrize("delta", [0.01, 0.03])
def test_an_attack_on_balls_in_bins(delta, few_samples):  # noqa: ARG001
    mechanism, sigma = BLT([0.9, 0.3], [0.3, 0.2]), 1.5
    sampling = BallsInBins(EXAMPLES, EXAMPLES // 4, 8)
    assert sampling.bins == 4
    outputs = releases(mechanism, participations(sampling), sigma)
    strategy = mechanism.strategy(8)
    patterns = np.array([strategy[:, i::4].sum(1) for i in range(4)])
    losses = [log_ratio_of_mixture(x, patterns, sigma) for x in outputs]
    attack = attacked_epsilon(losses[0], losses[1], delta)
    weaker = BallsInBins(80, 10, 8)
    check_attack(sampling, weaker, mechanism, sigma, *attack, delta)


@pytest.mark.parametrize("delta", [0.01, 0.03])
def test_an_attack_on_poisson_sampling(delta):
    sigma, sampling = 0.9, Poisson(EXAMPLES, EXAMPLES // 5, 6)
    outputs = releases(Independent(), participations(sampling), sigma)
    losses = [np.log(0.8 + 0.2 * np.exp((x - 0.5) / sigma**2)).sum(1) for x in outputs]
    attack = attacked_epsilon(losses[0], losses[1], delta)
    check_attack(sampling, Poisson(10, 1, 6), Independent(), sigma, *attack, delta)


@pytest.mark.parametrize("delta", [0.01, 0.03])
def test_an_attack_on_cyclic_poisson_sampling(delta):
    """The observer may know the group of the example: here it is the first."""
    mechanism, sigma = Toeplitz([1.0, 0.7]), 1.2
    sampling = CyclicPoisson(40, 8, 8, groups=2)
    generator = np.random.default_rng(2)
    taking_part = (generator.random((EXAMPLES, 8)) < 0.4) * (np.arange(8) % 2 == 0)
    outputs = releases(mechanism, taking_part, sigma)
    columns = mechanism.strategy(8)[:, ::2]
    losses = [
        np.log(0.6 + 0.4 * np.exp((x @ columns - (columns**2).sum(0) / 2) / sigma**2)).sum(1)
        for x in outputs
    ]
    attack = attacked_epsilon(losses[0], losses[1], delta)
    weaker = CyclicPoisson(40, 4, 8, groups=2)
    check_attack(sampling, weaker, mechanism, sigma, *attack, delta)


# Calibration.


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [
        (Independent(), Poisson(1_000, 50, 200)),
        (unit_norm(1.0, 0.6, 0.4), CyclicPoisson(1_000, 50, 200, groups=3)),
    ],
)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, pytest.param(8.0, marks=pytest.mark.slow)])
def test_calibration_and_accounting_of_poisson_sampling_agree(mechanism, sampling, epsilon):
    calibrated = calibrate_sampled(mechanism, sampling, epsilon, DELTA)
    assert calibrated.epsilon == epsilon
    assert calibrated.failure == 0
    accounted = account_sampled(mechanism, sampling, calibrated.noise_multiplier, DELTA)
    assert accounted.epsilon == pytest.approx(epsilon, rel=1e-3)
    less = account_sampled(mechanism, sampling, 0.99 * calibrated.noise_multiplier, DELTA)
    assert less.epsilon > epsilon


def noise_by_estimate(
    mechanism: Mechanism, sampling: BallsInBins, epsilon: float, start: float, pilot: int
) -> float:
    """The noise multiplier at which the point estimate of delta is `DELTA`, by bisection."""
    gram = gram_matrix(mechanism, sampling.steps, sampling.bins)
    low, high = 0.9 * start, 1.1 * start
    while high > 1.001 * low:
        middle = (low + high) / 2
        enough = estimated_delta(gram, middle, epsilon, pilot=pilot, entropy=11) <= DELTA
        low, high = (low, middle) if enough else (middle, high)
    return high


def test_calibration_and_accounting_of_balls_in_bins_agree():
    sampling = BallsInBins(1_000, 250, 16)
    calibrated = calibrate_sampled(BLT_OF_TRIAL, sampling, 2.0, DELTA)
    assert calibrated.failure == DEFAULT_FAILURE
    accounted = account_sampled(BLT_OF_TRIAL, sampling, calibrated.noise_multiplier, DELTA)
    assert accounted.epsilon == pytest.approx(2.0, rel=0.02)
    estimate = noise_by_estimate(
        BLT_OF_TRIAL, sampling, 2.0, calibrated.noise_multiplier, pilot=2**16
    )
    assert 0.995 <= calibrated.noise_multiplier / estimate <= 1.02


@pytest.mark.slow
def test_calibration_of_a_long_run_is_close_to_the_point_estimate():
    sampling = BallsInBins(50_000, 500, 1_000)
    calibrated = calibrate_sampled(BLT_OF_TRIAL, sampling, 1.0, DELTA)
    estimate = noise_by_estimate(
        BLT_OF_TRIAL, sampling, 1.0, calibrated.noise_multiplier, pilot=2**18
    )
    assert 0.995 <= calibrated.noise_multiplier / estimate <= 1.02
    assert calibrated.rms_noise == pytest.approx(32.1, rel=0.03)  # of a trial on other samples


@pytest.mark.parametrize("mechanism", [FullTree(8), BinaryTree(), SquareRoot()])
def test_trees_and_dense_strategies_are_accounted(mechanism, few_samples):  # noqa: ARG001
    sampling = BallsInBins(40, 10, 8)
    guarantee = account_sampled(mechanism, sampling, 8.0, 1e-4)
    strategy = mechanism.strategy(8)
    norm = max(np.linalg.norm(strategy[:, i::4].sum(1)) for i in range(4))
    assert guarantee.sensitivity == pytest.approx(norm)
    assert 0 < guarantee.epsilon <= epsilon_of(5e-5, 1.001 * float(norm) / 8.0)


# Precision and batches that are cut.


def test_cut_batches_are_paid_for():
    """What is left of delta covers the ideal composition, and each neighbor's cut batches."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    sampling = Poisson(1_000, 100, 20, max_batch_size=160)
    stated = account_sampled(Independent(), sampling, 1.0, 1e-5).epsilon
    composed = pld.from_gaussian_mechanism(1.0, sampling_prob=0.1).self_compose(20)
    cut = (1 + math.exp(stated)) * sampling.overflow_probability
    assert cut > 1e-8
    assert composed.get_delta_for_epsilon(stated) + cut <= 1e-5
    free = account_sampled(Independent(), replace(sampling, max_batch_size=None), 1.0, 1e-5)
    assert free.epsilon < stated


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [
        (Independent(), Poisson(1_000, 100, 20)),
        (BLT_OF_TRIAL, BallsInBins(1_000, 100, 20)),
    ],
)
def test_the_finite_range_of_the_noise_is_part_of_delta(mechanism, sampling):
    model = amplification._model_of(mechanism, sampling)
    for scale in (0.5, 1.0, 3.0):
        precision = model.precision(scale)
        assert precision.outside >= sampler_delta(1.0 / scale)
        for epsilon in (0.1, 1.0, 30.0):
            left = precision.ideal(epsilon, DELTA)
            assert left[0] <= epsilon
            spent = (1 + math.exp(epsilon)) * REMOTE_PROBABILITY
            assert left[1] <= max(0.0, DELTA - precision.outside - spent)


@pytest.mark.parametrize("max_batch_size", [121, 130, 140])
@pytest.mark.parametrize(
    "kind",
    [Poisson, BallsInBins, partial(CyclicPoisson, groups=2)],
    ids=["poisson", "bins", "cyclic"],
)
def test_batches_that_are_cut_too_often_are_refused(kind, max_batch_size):
    sampling = kind(1_000, 100, 40, max_batch_size=max_batch_size)
    with pytest.raises(InvalidInput, match="use a larger max_batch_size"):
        account_sampled(Independent(), sampling, 1.0, DELTA)
    with pytest.raises(InvalidInput, match="use a larger max_batch_size"):
        calibrate_sampled(Independent(), sampling, 1.0, DELTA)


def test_an_epsilon_that_cut_batches_do_not_allow_is_refused_for_balls_in_bins(few_samples):  # noqa: ARG001
    """Nothing is left of delta at the epsilon that so little noise needs."""
    for most in range(170, 200, 3):
        sampling = BallsInBins(1_000, 100, 40, max_batch_size=most)
        with pytest.raises(InvalidInput, match="max_batch_size"):
            account_sampled(BLT_OF_TRIAL, sampling, 0.6, DELTA)


def test_an_epsilon_that_cut_batches_do_not_allow_is_refused_for_poisson_sampling():
    free = account_sampled(Independent(), Poisson(1_000, 100, 10), 0.3, DELTA).epsilon
    for most in range(170, 200):
        sampling = Poisson(1_000, 100, 10, max_batch_size=most)
        try:
            stated = account_sampled(Independent(), sampling, 0.3, DELTA).epsilon
        except InvalidInput:
            continue
        assert stated >= free


@pytest.mark.parametrize("noise_multiplier", [1e-8, 0.001])
@pytest.mark.parametrize(
    "sampling", [Poisson(1_000, 100, 10), CyclicPoisson(1_000, 100, 10, groups=2)]
)
def test_too_little_noise_is_refused_for_poisson_sampling(sampling, noise_multiplier):
    with pytest.raises(InvalidInput, match="use more noise"):
        account_sampled(Independent(), sampling, noise_multiplier, DELTA)


@pytest.mark.parametrize("noise_multiplier", [1e-300, 1e-8, 0.001, 0.05, 0.2])
def test_too_little_noise_is_refused_for_balls_in_bins(noise_multiplier):
    with pytest.raises(InvalidInput, match="use more noise"):
        account_sampled(BLT_OF_TRIAL, BallsInBins(1_000, 100, 40), noise_multiplier, DELTA)


@pytest.mark.parametrize("noise_multiplier", [0.25, 0.3, 0.5, 1.0, 1e3, 1e9, 1e100])
def test_poisson_sampling_never_states_less_than_one_step_needs(noise_multiplier):
    """One step of the run is a part of it, and the example is in it with probability 0.1.

    Its delta is at least 0.1 times that of the Gaussian mechanism at log(1 + 10 (exp(e) - 1)).
    """
    try:
        stated = account_sampled(Independent(), Poisson(100, 10, 4), noise_multiplier, DELTA)
    except InvalidInput:
        return
    assert stated.epsilon < LARGEST_EPSILON
    inner = math.log1p(10 * math.expm1(stated.epsilon))
    assert 0.1 * delta_of(inner, 1 / noise_multiplier) <= DELTA


# Stopping early, comparing, and hypotheses.


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [
        (Independent(), Poisson(100, 10, 40)),
        (Toeplitz([1.0, 0.5]), CyclicPoisson(100, 10, 40, groups=4)),
        (BLT_OF_TRIAL, BallsInBins(40, 10, 40)),
    ],
)
def test_a_run_that_stops_early_has_a_smaller_epsilon(mechanism, sampling, few_samples):  # noqa: ARG001
    planned = calibrate_sampled(mechanism, sampling, 2.0, 1e-5)
    assert planned.after(40) is planned
    before = planned.epsilon
    for steps in (39, 10):
        stopped = planned.after(steps)
        assert stopped.epsilon <= before
        before = stopped.epsilon
        assert stopped.sampling == sampling.after(steps)
        assert stopped.noise_multiplier == planned.noise_multiplier
        assert FIXED_STEPS in stopped.hypotheses
        assert stopped.delta == planned.delta
        # The planned certificate and the new one must both be right.
        assert stopped.failure == 2 * planned.failure
    assert before < 0.8 * planned.epsilon


@pytest.mark.parametrize("steps", [41, 10**6])
def test_a_run_must_not_go_past_its_plan(steps):
    planned = account_sampled(Independent(), Poisson(100, 10, 40), 2.0, DELTA)
    with pytest.raises(InvalidInput, match="covers 40 steps"):
        planned.after(steps)


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    planned = account_sampled(Independent(), Poisson(100, 10, 40), 2.0, DELTA)
    with pytest.raises(InvalidInput, match="steps"):
        planned.after(steps)


def test_failures_of_compared_guarantees_add_up():
    poisson = account_sampled(Independent(), Poisson(100, 10, 4), 2.0, DELTA)
    certified = replace(poisson, failure=1e-9)
    other = replace(poisson, failure=3e-9)
    assert certified.with_failure_of(other, other, poisson).failure == pytest.approx(7e-9)
    assert certified.with_failure_of(other).epsilon == certified.epsilon
    assert certified.with_failure_of(other).confidence < certified.confidence


def test_only_certified_guarantees_rest_on_a_certificate(few_samples):  # noqa: ARG001
    poisson = account_sampled(Independent(), Poisson(100, 10, 4), 2.0, DELTA)
    bins = account_sampled(Independent(), BallsInBins(40, 10, 8), 2.0, 1e-4, failure=1e-6)
    assert poisson.failure == 0
    assert poisson.confidence == 1
    assert CERTIFICATE not in poisson.hypotheses
    assert bins.failure == 1e-6
    assert CERTIFICATE in bins.hypotheses
    for guarantee in (poisson, bins):
        topics = {hypothesis.name for hypothesis in guarantee.hypotheses}
        assert {"sampling", "clipping", "batch size"} <= topics
        (sampled,) = [h for h in guarantee.hypotheses if h.name == "sampling"]
        assert guarantee.sampling.name in sampled.text
        assert guarantee.adjacency == "zero-out"
        assert guarantee.kind == "upper bound"
        assert guarantee.unit == "example"


@pytest.mark.parametrize("function", [account_sampled, calibrate_sampled, SampledGuarantee.after])
def test_nobody_can_choose_the_randomness_of_a_guarantee(function):
    names = set(inspect.signature(function).parameters)
    assert not {"seed", "entropy", "generator", "rng", "key", "samples"} & names


# Refusals.


def account_plain(**changes: object) -> SampledGuarantee:
    arguments: dict[str, object] = {
        "mechanism": Independent(),
        "sampling": Poisson(100, 10, 4),
        "noise_multiplier": 2.0,
        "delta": DELTA,
    }
    return account_sampled(**(arguments | changes))  # type: ignore[arg-type]


NEGATIVE = Banded([[1.0] * 8, [-0.5] * 7 + [0.0]])
NOT_A_FRACTION = [0.0, 1.0, -1e-6, 2.0, math.nan, math.inf]


@pytest.mark.parametrize("value", NOT_A_FRACTION)
@pytest.mark.parametrize("name", ["delta", "failure"])
def test_what_is_no_fraction_is_refused(name, value):
    with pytest.raises(InvalidInput, match=f"{name} must be between 0 and 1"):
        account_plain(**{name: value})
    arguments = {"epsilon": 1.0, "delta": DELTA, name: value}
    with pytest.raises(InvalidInput, match=f"{name} must be between 0 and 1"):
        calibrate_sampled(Independent(), Poisson(100, 10, 4), **arguments)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_multiplier_or_epsilon_that_is_not_positive_is_refused(value):
    with pytest.raises(InvalidInput, match="noise_multiplier"):
        account_plain(noise_multiplier=value)
    with pytest.raises(InvalidInput, match="epsilon"):
        calibrate_sampled(Independent(), Poisson(100, 10, 4), value, DELTA)


@pytest.mark.parametrize(
    ("mechanism", "sampling", "message"),
    [
        (NEGATIVE, BallsInBins(40, 10, 8), "negative entries in C"),
        (Toeplitz([1.0, 0.5]), Poisson(40, 10, 8), "at most as many bands, and toeplitz has 2"),
        (Toeplitz([1.0, 0.0, 0.1]), CyclicPoisson(40, 10, 8, groups=2), "toeplitz has 3"),
        (BLT_OF_TRIAL, CyclicPoisson(80, 10, 8, groups=7), "blt has 8"),
        (BinaryTree(), CyclicPoisson(80, 10, 8, groups=8), "no bands"),
        (Independent(), BallsInBins(10**6, 1, 10**6), f"at most {MOST_BINS:,} bins"),
        (FullTree(8), BallsInBins(40, 10, 9), "9"),
    ],
)
def test_what_a_sampling_does_not_cover_is_refused(mechanism, sampling, message):
    with pytest.raises(DpftrlError, match=message):
        account_sampled(mechanism, sampling, 2.0, DELTA)
    with pytest.raises(DpftrlError, match=message):
        calibrate_sampled(mechanism, sampling, 2.0, DELTA)


def test_negative_entries_are_covered_by_cyclic_poisson_sampling():
    """Columns of two participations do not overlap, so that signs do not matter."""
    sampling = CyclicPoisson(40, 10, 8, groups=2)
    positive = Banded(np.abs(NEGATIVE.columns))
    stated = [account_sampled(one, sampling, 2.0, DELTA).epsilon for one in (NEGATIVE, positive)]
    assert stated[0] == pytest.approx(stated[1], rel=1e-9)


@pytest.mark.parametrize("epsilon", [1e-9, 400.0])
def test_an_epsilon_without_room_for_rounding_is_refused(epsilon):
    with pytest.raises(InvalidInput, match="leave no room"):
        calibrate_sampled(BLT_OF_TRIAL, BallsInBins(40, 10, 8), epsilon, DELTA)


@pytest.mark.parametrize(
    ("mechanism", "sampling", "noise_multiplier"),
    [
        (Independent(), Poisson(1_000, 50, 100), 2.0),
        (Independent(), Poisson(1_000, 100, 10), 0.9),
        (Toeplitz([1.0, 0.5]), CyclicPoisson(1_000, 50, 100, groups=2), 1.5),
        (BLT_OF_TRIAL, BallsInBins(1_000, 100, 40), 4.0),
    ],
)
def test_what_is_stated_is_confirmed_and_less_is_not(mechanism, sampling, noise_multiplier):
    stated = account_sampled(mechanism, sampling, noise_multiplier, DELTA)
    again = check_sampled(mechanism, sampling, noise_multiplier, stated.epsilon, DELTA)
    assert again.epsilon == stated.epsilon
    for epsilon, delta in ((0.97 * stated.epsilon, DELTA), (stated.epsilon, 0.8 * DELTA)):
        with pytest.raises(InvalidInput, match="not confirmed"):
            check_sampled(mechanism, sampling, noise_multiplier, epsilon, delta)
