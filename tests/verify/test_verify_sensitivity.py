"""Sensitivity and epsilon of `verify`, compared with brute force and with exact arithmetic."""

from itertools import combinations, pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl import MinSep, mechanism
from dpftrl.errors import UnsafeState
from dpftrl.verify import sensitivity as sensitivity_module
from dpftrl.verify import trees as trees_module
from dpftrl.verify.contacts import Contacts, largest_client_shift
from dpftrl.verify.gaussian import epsilon_of, sampler_delta
from dpftrl.verify.patterns import Limits, bound_sensitivity
from dpftrl.verify.sensitivity import Strategy
from dpftrl.verify.trees import nested_sensitivity

NAMES = [
    "independent",
    "blt-b400",
    "sqrt",
    "band-sqrt:4",
    "toeplitz:1,0.5,0.3",
    "toeplitz:1,0.2,0.6",
    "banded:3",
    "inv-sqrt:3",
    "lambda:0.7",
    "tree",
    "tree-vanilla",
    "tree-full",
    "smooth-tree",
]


def every_pattern(limits: Limits):
    for count in range(1, limits.max_participations + 1):
        for pattern in combinations(range(limits.rounds), count):
            if all(later - sooner >= limits.min_sep for sooner, later in pairwise(pattern)):
                yield list(pattern)


def brute_force(gram, limits: Limits) -> tuple[float, float]:
    """Return the largest norm of a pattern, with the signs of the Gram entries and without."""
    blocks = [gram[np.ix_(pattern, pattern)] for pattern in every_pattern(limits)]
    return (
        max(max(block.sum(), 0.0) for block in blocks) ** 0.5,
        max(np.abs(block).sum() for block in blocks) ** 0.5,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rounds", "min_sep", "cap"), [(9, 2, 9), (10, 3, 2), (8, 1, 3), (7, 9, 1)]
)
def test_the_sensitivity_of_every_family_is_independent_and_correct(name, rounds, min_sep, cap):
    limits = Limits(rounds, min_sep, cap)
    strategy = Strategy(mechanism(name, MinSep(rounds, min_sep, cap)), rounds)
    sensitivity = strategy.sensitivity(limits)
    _, true = brute_force(strategy.gram, limits)
    assert sensitivity.independent
    assert true * (1 - 1e-9) <= sensitivity.value <= sensitivity.claimable * (1 + 1e-9)
    strategy.check_noise()


@given(data=st.data())
def test_bounds_of_random_matrices_hold(data):
    rounds = data.draw(st.integers(1, 8))
    limits = Limits(rounds, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dense = generator.standard_normal((rounds, rounds)) + data.draw(st.sampled_from([0, 1]))
    gram = np.tril(dense).T @ np.tril(dense)
    bounds = bound_sensitivity(gram, limits)
    attained, true = brute_force(gram, limits)
    assert bounds.attained <= attained * (1 + 1e-9)
    assert bounds.bound >= true * (1 - 1e-9)


@pytest.mark.parametrize("bands", [1, 2, 4, 6])
def test_bounds_are_exact_for_few_bands(bands):
    generator = np.random.default_rng(bands)
    dense = np.tril(generator.uniform(size=(10, 10))) * (np.tri(10) - np.tri(10, k=-bands))
    limits = Limits(10, 3, 4)
    bounds = bound_sensitivity(dense.T @ dense, limits)
    assert bounds.is_exact
    assert bounds.bound == pytest.approx(brute_force(dense.T @ dense, limits)[1])


@pytest.mark.parametrize("name", ["tree", "smooth-tree"])
@pytest.mark.parametrize(("rounds", "min_sep", "cap"), [(13, 1, 4), (16, 2, 4), (19, 5, 9)])
def test_the_sensitivity_of_nested_blocks_is_exact(name, rounds, min_sep, cap):
    limits = Limits(rounds, min_sep, cap)
    dense = mechanism(name, MinSep(rounds, min_sep)).strategy(rounds)
    assert nested_sensitivity(dense, limits) == pytest.approx(
        brute_force(dense.T @ dense, limits)[1]
    )


def test_strategies_without_nested_blocks_give_none():
    crossing = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    assert nested_sensitivity(crossing, Limits(3, 1, 3)) is None
    assert nested_sensitivity(np.array([[1.0, 0.0, 1.0]]), Limits(3, 1, 3)) is None
    assert nested_sensitivity(np.array([[0.5]]), Limits(1, 1, 1)) is None


def test_loose_bounds_fall_back_to_the_library(monkeypatch):
    limits = Limits(40, 3, 9)
    strategy = Strategy(mechanism("tree"), 40)
    assert strategy.sensitivity(limits).independent
    monkeypatch.setattr(trees_module, "MOST_WORK", 0)
    sensitivity = Strategy(mechanism("tree"), 40).sensitivity(limits)
    assert (sensitivity.independent, sensitivity.value) == (False, sensitivity.claimable)


@pytest.mark.parametrize("name", ["blt-b400", "toeplitz:1,0.5,0.3", "tree"])
def test_large_toeplitz_strategies_use_their_coefficients(monkeypatch, name):
    limits = Limits(30, 4, 5)
    dense = Strategy(mechanism(name), 30).sensitivity(limits)
    monkeypatch.setattr(sensitivity_module, "MOST_ROUNDS", 29)
    sensitivity = Strategy(mechanism(name), 30).sensitivity(limits)
    assert sensitivity.independent == (name != "tree")
    assert sensitivity.value == pytest.approx(dense.value)


def test_a_noise_stream_of_another_strategy_is_refused():
    strategy = Strategy(mechanism("blt-b400"), 10)
    strategy.__dict__["dense"] = mechanism("sqrt").strategy(10)
    with pytest.raises(UnsafeState, match="does not invert"):
        strategy.check_noise()


def test_a_too_small_sensitivity_of_the_library_is_detected(monkeypatch):
    strategy = Strategy(mechanism("blt-b400"), 10)
    honest = strategy.sensitivity(Limits(10, 2, 5)).value
    one_participation = mechanism("blt-b400").sensitivity(MinSep(10, 2, 1))
    monkeypatch.setattr(type(strategy.mechanism), "sensitivity", lambda *_: one_participation)
    sensitivity = Strategy(strategy.mechanism, 10).sensitivity(Limits(10, 2, 5))
    assert sensitivity.independent
    assert sensitivity.value == pytest.approx(honest)
    assert sensitivity.claimable < sensitivity.value


@pytest.mark.parametrize("often", [0.0, 0.2, 1.0])
def test_the_largest_client_shift_is_that_of_the_worst_client(monkeypatch, often):
    monkeypatch.setattr("dpftrl.verify.contacts.FREQUENT_SHARE", often)
    monkeypatch.setattr("dpftrl.verify.contacts.CLIENTS_PER_BATCH", 3)
    generator = np.random.default_rng(0)
    dense = np.tril(generator.standard_normal((12, 12)))
    taken = generator.uniform(size=(12, 9)) < generator.uniform(size=9)
    clients, rows = np.nonzero(taken.T)
    contacts = Contacts(clients.astype(np.uint64), rows, rows, np.arange(len(rows)))
    worst = np.linalg.norm(dense @ taken, axis=0).max()
    assert largest_client_shift(dense.T @ dense, contacts) == pytest.approx(worst)


@pytest.mark.parametrize("mu", [1e-3, 0.05, 1.0, 7.0, 40.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_epsilon_agrees_with_exact_arithmetic(mu, delta):
    with mpmath.workdps(60):

        def excess(epsilon):
            first = mpmath.ncdf(mpmath.mpf(mu) / 2 - epsilon / mu)
            return first - mpmath.exp(epsilon) * mpmath.ncdf(-mpmath.mpf(mu) / 2 - epsilon / mu)

        recomputed = epsilon_of(delta, mu)
        if recomputed == 0:
            assert excess(0) <= delta
        else:
            assert excess(recomputed * (1 + 1e-9)) <= delta <= excess(recomputed * (1 - 1e-9))


@pytest.mark.parametrize("mu", [0.5, 3.0, 9.0])
def test_sampler_delta_agrees_with_exact_arithmetic(mu):
    radius = mpmath.sqrt(2 * mpmath.log(2) * 76)
    tail = mpmath.quad(
        lambda r: (
            r * mpmath.exp(-((r - mu) ** 2) / 2) * mpmath.besseli(0, mu * r) / mpmath.exp(mu * r)
        ),
        [radius, radius + 2, radius + 10, radius + 30],
    )
    layers = mu * radius * 2 ** mpmath.mpf(19.5) / 2**76
    assert sampler_delta(mu) == pytest.approx(float(tail + layers), rel=1e-6)
