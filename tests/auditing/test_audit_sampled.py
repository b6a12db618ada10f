"""Audits of secret random batches: the likelihood ratio by brute force, and the whole audit."""

from itertools import product

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from wrong_noise import scaled_noise

from dpftrl import BallsInBins, CyclicPoisson, Independent, InvalidInput, Poisson, Sampler, Toeplitz
from dpftrl.auditing.sampled import Mixture, audit_sampled

BANDS = Toeplitz([1.0, 0.6])
# Sampling, mechanism, and the probability of every pattern of steps, written by hand.
CASES = {
    "poisson": (Poisson(10, 3, 3), Independent()),
    "cyclic-poisson": (CyclicPoisson(10, 2, 5, groups=2), BANDS),
    "balls-in-bins": (BallsInBins(9, 3, 5), Toeplitz([1.0, 0.6, 0.3, 0.2])),
}


def patterns(sampling):
    """Every pattern of steps with its probability, from the description of the sampling."""
    steps = sampling.steps
    if isinstance(sampling, BallsInBins):
        for first in range(sampling.bins):
            yield 1 / sampling.bins, np.isin(np.arange(steps) % sampling.bins, first)
        return
    groups = getattr(sampling, "groups", 1)
    for group in range(groups):
        for bits in product([0, 1], repeat=steps):
            pattern = np.array(bits, dtype=bool)
            mine = np.arange(steps) % groups == group
            if pattern[~mine].any():
                continue
            joined = int(pattern.sum())
            q = sampling.probability
            yield (q**joined * (1 - q) ** (int(mine.sum()) - joined)) / groups, pattern


@pytest.mark.parametrize("name", CASES)
def test_the_likelihood_ratio_is_that_of_all_patterns(name):
    sampling, chosen = CASES[name]
    noise, steps = 0.8, sampling.steps
    mixture = Mixture(chosen, sampling, noise)
    releases = np.random.default_rng(3).normal(0.4, 1.2, (steps, 20))
    found = mixture.log_ratio(mixture.weights @ releases)
    decoder = chosen.decoder(steps)
    covariance = noise**2 * decoder @ decoder.T
    absent = multivariate_normal(np.zeros(steps), covariance).logpdf(releases.T)
    weights, logs = [], []
    for probability, pattern in patterns(sampling):
        weights.append(probability)
        logs.append(multivariate_normal(pattern.astype(float), covariance).logpdf(releases.T))
    assert sum(weights) == pytest.approx(1)
    present = logsumexp(logs, axis=0, b=np.array(weights)[:, None])
    assert found == pytest.approx(present - absent, abs=1e-9)


LARGER = {
    "poisson": (Poisson(1000, 100, 20), Independent(), 1.0),
    "cyclic-poisson": (CyclicPoisson(1000, 100, 20, groups=2), BANDS, 1.5),
    "balls-in-bins": (BallsInBins(1000, 100, 20), Toeplitz([1.0, 0.6, 0.3, 0.2]), 1.5),
}


@pytest.mark.parametrize("name", LARGER)
def test_correct_training_does_not_exceed_the_claim(name):
    sampling, chosen, scale = LARGER[name]
    found = audit_sampled(chosen, sampling, scale, 0.01, trials=2**13)
    assert not found.exceeds_claim
    assert 0.35 < found.ratio < 1
    assert found.counts.trials == 2**13


@pytest.mark.parametrize("name", LARGER)
def test_noise_that_is_halved_exceeds_the_claim(name):
    sampling, chosen, scale = LARGER[name]
    found = audit_sampled(
        chosen,
        sampling,
        scale,
        0.01,
        trials=2**13,
        make_stream=scaled_noise(chosen, scale, 0.5),
    )
    assert found.exceeds_claim


def test_a_sampler_that_takes_everybody_exceeds_the_claim():
    """Batches of all examples, over which an epsilon for Poisson sampling is stated."""

    class Everybody:
        def __init__(self, sampling, key):
            del key
            self._size = sampling.dataset_size

        def batch(self, step):
            del step
            return np.arange(self._size)

    sampling, chosen, scale = LARGER["poisson"]
    found = audit_sampled(chosen, sampling, scale, 0.01, trials=2**14, make_sampler=Everybody)
    assert found.exceeds_claim
    right = audit_sampled(chosen, sampling, scale, 0.01, trials=2**14, make_sampler=Sampler)
    assert not right.exceeds_claim


def test_batches_that_are_cut_are_refused():
    with pytest.raises(InvalidInput, match="max_batch_size"):
        audit_sampled(Independent(), Poisson(100, 10, 5, max_batch_size=30), 1.0, 0.01)
