"""Generalised BLTs: gradients, targets, and never worse than a BLT."""

import numpy as np
import pytest

from dpftrl import GeneralBLT, MinSep, load_mechanism, save_mechanism
from dpftrl.errors import InvalidInput
from dpftrl.optimize import optimize_blt, optimize_general_blt
from dpftrl.optimize.generalized_blt import GbltObjective, free_from

BENCHMARK = MinSep(rounds=2052, min_sep=342)


@pytest.mark.parametrize("objective", ["max", "rms"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradient_of_the_generalized_loss_matches_finite_differences(size, objective):
    rates = np.geomspace(1e-3, 0.6, 2 * size)
    free = np.append(free_from(rates[::2]), free_from(rates[1::2]))
    free[1], free[size + 1] = -0.3, -0.5  # a conjugate pair of poles, and one of zeros
    function = GbltObjective(MinSep(300, 50, 4), objective)
    moves = 1e-6 * np.eye(len(free))
    wanted = [(function.value(free + move) - function.value(free - move)) / 2e-6 for move in moves]
    assert function(free)[1] == pytest.approx(np.array(wanted), abs=1e-7)


@pytest.mark.parametrize(
    ("buffers", "objective", "target"),
    [
        (4, "max", 10.66),
        (4, "rms", 9.01),
        (6, "max", 10.59),
        pytest.param(6, "rms", 8.95, marks=pytest.mark.slow),
    ],
)
def test_generalized_targets_hold_by_dense_computation(buffers, objective, target):
    optimized = optimize_general_blt(BENCHMARK, buffers, objective)
    assert optimized.mechanism.buffers <= buffers
    n, b, k = 2052, 342, 6
    c = optimized.mechanism.coefficients(n)
    majorant = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
    shifted = np.zeros(n)
    for i in range(k):
        shifted[i * b :] += majorant[: n - i * b]
    prefix = np.zeros(n)  # the coefficients of A C^-1, by forward substitution
    for t in range(n):
        prefix[t] = 1 - c[1 : t + 1] @ prefix[:t][::-1]
    weight = np.ones(n) if objective == "max" else (n - np.arange(n)) / n
    dense = np.linalg.norm(shifted) * np.sqrt(weight @ prefix**2)
    assert optimized.value == pytest.approx(dense, rel=1e-9)
    assert dense <= target


def test_a_generalized_blt_is_never_worse_than_the_blt():
    for setting in [(64, 64), (50, 1), (9, 3), (1, 1), (100, 7)]:
        for buffers in (1, 2):
            if buffers <= setting[0]:
                general = optimize_general_blt(MinSep(*setting), buffers, "rms").value
                assert general <= optimize_blt(MinSep(*setting), buffers, "rms").value * (1 + 1e-9)


def test_a_generalized_blt_saves_and_loads(tmp_path):
    saved = GeneralBLT([0.9, 0.5 + 0.25j], [0.1, -0.05 + 0.02j])
    save_mechanism(saved, tmp_path / "g.json")
    assert load_mechanism(tmp_path / "g.json") == saved


@pytest.mark.parametrize(
    ("theta", "omega"),
    [
        ([1.5], [0.1]),
        ([0.5 - 0.1j], [0.1]),
        ([0.5], [0.1j]),
        ([0.5], [0.1, 0.2]),
        ([], []),
        ([float("nan")], [0.1]),
        ([0.9], [5.0]),
        (["x"], [0.1]),
    ],
)
def test_invalid_parameters_of_a_generalized_blt_are_refused(theta, omega):
    with pytest.raises(InvalidInput):
        GeneralBLT(theta, omega)
