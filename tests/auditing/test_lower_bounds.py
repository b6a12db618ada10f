"""Bounds from counts: against scipy, against exact coverage, and against known mechanisms."""

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm

from dpftrl.accounting import epsilon_of
from dpftrl.auditing.lower_bounds import (
    Counts,
    Thresholds,
    at_least,
    at_most,
    best_thresholds,
    epsilon_at_least,
    exceedance_of,
    gaussian_exceedance,
    least_trials,
    log_mean_exp,
    mu_at_least,
)


@pytest.mark.parametrize("successes", [0, 1, 7, 49, 50])
def test_rates_are_those_of_scipy(successes):
    found = binomtest(successes, 50, alternative="less").proportion_ci(0.999, method="exact")
    assert at_most(np.array([float(successes)]), 50, 0.001)[0] == pytest.approx(found.high)
    found = binomtest(successes, 50, alternative="greater").proportion_ci(0.999, method="exact")
    assert at_least(np.array([float(successes)]), 50, 0.001)[0] == pytest.approx(found.low)


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.3, 0.97])
def test_a_rate_is_outside_its_bound_as_rarely_as_stated(rate):
    counts = np.arange(81.0)
    too_small = at_most(counts, 80, 0.02) < rate
    probability = binom.pmf(counts, 80, rate)
    assert probability[too_small].sum() <= 0.02
    # The control: the plain share is too small about half of the time.
    assert probability[counts / 80 < rate].sum() > 0.02


def test_epsilon_of_randomized_response():
    """A coin that tells the truth with probability 3/4 has epsilon log 3."""
    trials = 10**7
    bound = epsilon_at_least(
        np.array([0.75 * trials]), np.array([0.25 * trials]), trials, delta=0.0, failure=1e-6
    )[0]
    assert 0.995 * math.log(3) < bound < math.log(3)


def test_without_a_surplus_the_bound_is_zero():
    none, few = np.array([0.0]), np.array([10.0])
    assert epsilon_at_least(few, none, 100, delta=0.3, failure=0.01)[0] == 0.0
    assert epsilon_at_least(none, few, 100, delta=0.0, failure=0.01)[0] == 0.0
    assert mu_at_least(none, few, 100, failure=0.01)[0] == 0.0


def test_mu_of_a_gaussian():
    trials = 10**8
    right, wrong = norm.sf(-0.4) * trials, norm.sf(0.6) * trials  # mu 1, threshold 0.6
    bound = mu_at_least(np.array([right]), np.array([wrong]), trials, failure=1e-6)[0]
    assert 0.998 < bound < 1.0


def test_the_best_thresholds_show_nearly_all_of_epsilon():
    candidates = np.linspace(-6, 6, 2000)
    expected = best_thresholds(
        candidates, gaussian_exceedance(0.5, 1.0), gaussian_exceedance(-0.5, 1.0), 10**9, 0.01, 1e-6
    )
    epsilon = epsilon_of(0.01, 1.0)
    assert 0.99 * epsilon < expected.epsilon < epsilon
    assert expected.thresholds.present == pytest.approx(
        epsilon, rel=0.1
    )  # where the ratio is e^eps
    assert expected.thresholds.absent == pytest.approx(-epsilon, rel=0.1)


def test_more_trials_until_enough():
    def expected(trials):
        return best_thresholds(
            np.linspace(-6, 6, 500),
            gaussian_exceedance(0.5, 1.0),
            gaussian_exceedance(-0.5, 1.0),
            trials,
            0.01,
            1e-6,
        )

    wanted = 0.9 * epsilon_of(0.01, 1.0)
    trials = least_trials(expected, wanted, 1000, 10**9)
    assert expected(trials).epsilon >= wanted > expected(trials // 2).epsilon
    assert least_trials(expected, 100.0, 1000, 50_000) == 50_000


def test_counts_add_up():
    with_target, without = np.array([2.0, 0.5, -1.0]), np.array([1.5, -2.0, -3.0])
    once = Counts(0).plus(with_target, without, Thresholds(1.0, -1.0, 0.0))
    assert once == Counts(3, 1, 1, 2, 1, 2, 1)
    twice = once.plus(with_target, without, Thresholds(1.0, -1.0, 0.0))
    assert twice == Counts(6, 2, 2, 4, 2, 4, 2)


def test_both_directions_count():
    """An attack that is sure of absence only still bounds epsilon."""
    counts = Counts(10_000, absent_without=5_000, absent_with=10)
    assert counts.epsilon_at_least(0.01, 1e-5) > 4
    assert Counts(10_000, 5_000, 10).epsilon_at_least(0.01, 1e-5) > 4
    assert Counts(10_000, 5_000, 5_000).epsilon_at_least(0.01, 1e-5) == 0.0


def test_exceedance_of_samples():
    above = exceedance_of(np.array([1.0, 2.0, 2.0, 4.0]))
    assert above(np.array([0.0, 1.0, 2.0, 3.0, 4.0])).tolist() == [1.0, 0.75, 0.25, 0.25, 0.0]


def test_log_mean_exp_of_large_numbers():
    logs = np.array([[800.0, 0.0], [800.0, math.log(3)]])
    assert log_mean_exp(logs, np.array([0.5, 0.5])) == pytest.approx([800.0, math.log(2)])
