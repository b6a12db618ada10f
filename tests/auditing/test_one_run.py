"""The test of a trade-off curve in one run: against linear programs, real attacks, and others."""

import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom, norm

from dpftrl import InvalidInput
from dpftrl.accounting import epsilon_of
from dpftrl.auditing.one_run import (
    Guesses,
    classical_epsilon_lower_bound,
    epsilon_delta_inverse,
    gaussian_inverse,
    is_rejected,
    mu_lower_bound,
    needed_probability,
    p_value,
)


def largest_tail(guesses, curve):
    """The largest P(at least `correct`) under r_i <= F(h_(i-1)), by a linear program.

    F is the least of its tangents, so that each constraint is many linear ones.

    Args:
        guesses: Canaries, guesses and correct guesses.
        curve: Slopes and intercepts of tangents of F.
    """
    canaries, made, correct = guesses
    counts = np.arange(made + 1)
    rows, limits = [], []
    for i in range(1, made + 1):
        r = np.where(counts >= i, counts / canaries, 0.0)
        h = np.where(counts >= i - 1, (made - counts) / canaries, 0.0)
        for slope, intercept in curve:
            rows.append(r - slope * h)
            limits.append(intercept)
    found = linprog(
        -(counts >= correct).astype(float),
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=np.ones((1, made + 1)),
        b_eq=[1.0],
        method="highs",
    )
    return -found.fun


def gaussian_tangents(mu, count=400):
    """Tangents of F(x) = Phi(Phi^-1(x) + mu)."""
    z = np.linspace(-9, 9, count)
    slopes = norm.pdf(z + mu) / norm.pdf(z)
    return list(zip(slopes, norm.cdf(z + mu) - slopes * norm.cdf(z), strict=True))


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("made", "correct"), [(4, 4), (6, 5), (8, 6), (8, 8), (5, 3)])
def test_the_p_value_is_that_of_the_linear_program(mu, made, correct):
    guesses = Guesses(8, made, correct)
    wanted = largest_tail(guesses, gaussian_tangents(mu))
    assert p_value(guesses, gaussian_inverse(mu)) == pytest.approx(wanted, rel=0.02)


def test_the_p_value_of_pure_dp_by_the_linear_program():
    growth = math.exp(0.7)
    lines = [(growth, 0.0), (1 / growth, 1 - 1 / growth)]
    for correct in (5, 7, 8):
        guesses = Guesses(8, 8, correct)
        found = p_value(guesses, epsilon_delta_inverse(0.7, 0.0))
        assert found == pytest.approx(largest_tail(guesses, lines), rel=0.02)


@pytest.mark.parametrize("mu", [0.5, 1.5])
def test_independent_gaussians_never_beat_the_bound(mu):
    """The best attack on independent canaries has binomial successes of rate Phi(mu / 2)."""
    for made in (10, 50):
        for correct in range(made // 2, made + 1):
            real = binom.sf(correct - 1, made, norm.cdf(mu / 2))
            assert p_value(Guesses(made, made, correct), gaussian_inverse(mu)) >= real * 0.999


def test_abstaining_attackers_never_beat_the_bound():
    """Guesses about the most extreme of many canaries, simulated."""
    mu, canaries, made, runs = 1.0, 20, 5, 20_000
    random = np.random.default_rng(1)
    coins = random.integers(0, 2, (runs, canaries))
    scores = random.normal(size=(runs, canaries)) + mu * (coins - 0.5)
    chosen = np.argsort(-np.abs(scores), axis=1)[:, :made]
    right = np.take_along_axis((scores > 0) == coins, chosen, axis=1).sum(axis=1)
    for correct in range(1, made + 1):
        bound = p_value(Guesses(canaries, made, correct), gaussian_inverse(mu))
        assert np.mean(right >= correct) <= bound + 0.01


def test_randomized_response_never_beats_the_bound_and_nearly_attains_it():
    """Each coin is told with rate e^eps / (1 + e^eps): the binomial of Steinke et al. 2023."""
    epsilon, made = 1.0, 40
    rate = math.exp(epsilon) / (1 + math.exp(epsilon))
    for correct in (32, 36, 40):
        real = binom.sf(correct - 1, made, rate)
        bound = p_value(Guesses(made, made, correct), epsilon_delta_inverse(epsilon, 0.0))
        assert real * 0.999 <= bound <= 3 * real


def test_a_classical_bound_is_rejected_by_the_recursion_too():
    """At delta 0, the recursion confirms nearly the epsilon of the classical bound."""
    guesses = Guesses(200, 200, 180)
    epsilon = classical_epsilon_lower_bound(guesses, 0.05)
    assert is_rejected(guesses, epsilon_delta_inverse(0.9 * epsilon, 0.0), 0.05)
    assert not is_rejected(guesses, epsilon_delta_inverse(1.01 * epsilon, 0.0), 0.05)


def test_all_of_a_thousand():
    """The classical bound ends at 5.8; the curve of the largest mu goes beyond."""
    everything = Guesses(1000, 1000, 1000)
    assert classical_epsilon_lower_bound(everything, 0.05) == pytest.approx(5.8, abs=0.02)
    mu = mu_lower_bound(everything, 0.05)
    assert epsilon_of(1e-4, mu) > 8


def test_the_lower_bound_is_where_rejection_ends():
    guesses = Guesses(300, 300, 280)
    mu = mu_lower_bound(guesses, 0.01)
    assert is_rejected(guesses, gaussian_inverse(mu * 0.999), 0.01)
    assert not is_rejected(guesses, gaussian_inverse(mu * 1.001), 0.01)
    assert p_value(guesses, gaussian_inverse(mu)) == pytest.approx(0.01, rel=0.05)


def test_coin_tossing_shows_nothing():
    assert mu_lower_bound(Guesses(1000, 1000, 510), 0.05) == 0.0
    assert p_value(Guesses(1000, 1000, 500), gaussian_inverse(0.1)) == 1.0


def test_more_correct_guesses_need_more_probability():
    tail = np.array([1e-3])
    needed = [
        needed_probability(Guesses(50, 50, correct), gaussian_inverse(0.1), tail)[0]
        for correct in range(1, 51)
    ]
    below = [one for one in needed if one < 1]
    assert below == sorted(below)
    assert needed[-1] > 1


def test_numbers_that_do_not_fit_are_refused():
    for wrong in (Guesses(10, 11, 5), Guesses(10, 5, 6), Guesses(0, 0, 0), Guesses(5, 5, -1)):
        with pytest.raises(InvalidInput):
            p_value(wrong, gaussian_inverse(1.0))
