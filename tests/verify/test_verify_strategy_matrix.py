"""The strategy matrix of a run: an independent sensitivity, and a check of the noise stream."""

import pytest
from brute_sensitivity import brute_force

from dpftrl import MinSep, mechanism
from dpftrl.errors import UnsafeState
from dpftrl.verify import sensitivity as sensitivity_module
from dpftrl.verify import strategy_matrix as strategy_module
from dpftrl.verify.sensitivity import Limits
from dpftrl.verify.strategy_matrix import Strategy

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


def test_loose_bounds_fall_back_to_the_library(monkeypatch):
    limits = Limits(40, 3, 9)
    strategy = Strategy(mechanism("tree"), 40)
    assert strategy.sensitivity(limits).independent
    monkeypatch.setattr(sensitivity_module, "MOST_TABLE_WORK", 0)
    sensitivity = Strategy(mechanism("tree"), 40).sensitivity(limits)
    assert (sensitivity.independent, sensitivity.value) == (False, sensitivity.claimable)


@pytest.mark.parametrize("name", ["blt-b400", "toeplitz:1,0.5,0.3", "tree"])
def test_large_toeplitz_strategies_use_their_coefficients(monkeypatch, name):
    limits = Limits(30, 4, 5)
    dense = Strategy(mechanism(name), 30).sensitivity(limits)
    monkeypatch.setattr(strategy_module, "MOST_ROUNDS", 29)
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
