"""Bounds on the sensitivity that `verify` computes, compared with brute force."""

import numpy as np
import pytest
from brute_sensitivity import brute_force
from hypothesis import given
from hypothesis import strategies as st

from dpftrl import MinSep, mechanism
from dpftrl.verify.sensitivity import Limits, bound_sensitivity, nested_sensitivity


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
