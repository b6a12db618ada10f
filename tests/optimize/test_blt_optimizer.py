"""The BLT optimiser: its gradients, its targets, and that nothing beats it by much."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl import BLT, MinSep, mechanism
from dpftrl.errors import InvalidInput
from dpftrl.optimize import best_toeplitz_ratio, optimize_blt, workload_loss
from dpftrl.optimize._solvers import minimize
from dpftrl.optimize.blt import chain, free_function, free_numbers
from dpftrl.optimize.blt_objective import BltObjective, BltWorkloadObjective
from dpftrl.workload import Workload

BENCHMARK = MinSep(rounds=2052, min_sep=342)


def numerical_gradient(function, point: np.ndarray, step: float = 1e-6) -> np.ndarray:
    moved = np.concatenate([point + step * np.eye(len(point)), point - step * np.eye(len(point))])
    values = function(moved)[0]
    return (values[: len(point)] - values[len(point) :]) / (2 * step)


@given(data=st.data(), size=st.integers(1, 4), objective=st.sampled_from(["max", "rms"]))
def test_value_is_the_loss_and_gradient_its_derivative(data, size, objective):
    rounds = data.draw(st.sampled_from([1, 2, 9, 300, 10**6]))
    participation = MinSep(
        rounds, data.draw(st.integers(1, rounds)), data.draw(st.integers(1, rounds))
    )
    free = np.array(data.draw(st.lists(st.floats(-3, 3), min_size=2 * size, max_size=2 * size)))
    function = free_function(BltObjective(participation, objective))
    values, gradients = function(free[None])
    slow, fast = chain(free[None])
    loss = BLT.from_decays(1 - slow[0], 1 - fast[0]).error_report(participation)
    wanted = loss.max_loss if objective == "max" else loss.rms_loss
    assert np.exp(values[0]) == pytest.approx(wanted, rel=1e-7)
    assert gradients[0] == pytest.approx(numerical_gradient(function, free), abs=2e-7)


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=12).filter(lambda x: len(x) % 2 == 0))
def test_every_chain_interlaces_and_keeps_omega_below_one(numbers):
    free = np.array(numbers)[None]
    slow, fast = chain(free)
    rates = np.stack([slow[0], fast[0]], axis=1).ravel()
    assert np.all(np.diff(rates) >= 0)
    assert rates[0] >= 0
    assert slow[0, -1] <= 1
    assert fast.sum() - slow.sum() <= 1 + 1e-12


def test_free_numbers_invert_the_chain():
    free = np.array([[-2.0, 1.0, 0.5, -1.0, 0.0, 2.0]])
    assert free_numbers(*chain(free)) == pytest.approx(free, abs=1e-9)


@pytest.mark.parametrize(
    ("buffers", "objective", "target"),
    [(2, "max", 10.8063), (3, "max", 10.752), (4, "max", 10.7342), (4, "rms", 9.1714)],
)
def test_benchmark_targets(buffers, objective, target):
    optimized = optimize_blt(BENCHMARK, buffers, objective)
    assert optimized.value <= target
    assert optimized.gradient_norm < 1e-6
    assert optimized.error_report.sensitivity.kind == "exact"
    assert sum(optimized.mechanism.omega) <= 1


@pytest.mark.parametrize(
    ("name", "setting"),
    [("blt-b100", (2000, 100, 10)), ("blt-b400", (4000, 400, 5)), ("blt-b1000", (4000, 1000, 2))],
)
def test_never_worse_than_the_appendix(name, setting):
    optimized = optimize_blt(MinSep(*setting), 4)
    printed = mechanism(name).error_report(MinSep(*setting)).max_loss
    assert optimized.error_report.max_loss < printed
    if name == "blt-b100":
        assert optimized.error_report.max_loss < 0.93 * printed


def test_small_min_seps_want_a_negative_decay_of_the_inverse():
    optimized = optimize_blt(MinSep(100, 2, 50), 1, "rms")
    assert optimized.error_report.rms_loss == pytest.approx(36.639, abs=5e-4)
    assert optimized.mechanism.inverse_parameters()[0][0] == pytest.approx(-0.76, abs=5e-3)


def grid() -> list[tuple[int, int, int]]:
    settings = []
    for n in (16, 100, 2000, 100_000):
        for b in sorted({1, 2, 5, max(1, n // 50), max(1, n // 6), n // 2, n}):
            most = -(-n // b)
            settings += [(n, b, k) for k in sorted({1, max(1, most // 3), most})]
    return settings


GRID = grid()


def test_the_grid_is_large_enough():
    assert len(GRID) >= 60


@pytest.mark.parametrize("objective", ["max", "rms"])
@pytest.mark.parametrize("setting", GRID, ids=str)
def test_random_restarts_find_nothing_better_by_a_ten_thousandth(setting, objective):
    """Ten random restarts, each to its end, and every smaller number of buffers."""
    participation = MinSep(*setting)
    random = np.random.default_rng([GRID.index(setting), objective == "rms"])
    buffers = 1 + (GRID.index(setting) + (objective == "rms")) % 6
    optimized = optimize_blt(participation, buffers, objective)
    function = free_function(BltObjective(participation, objective))
    others = minimize(function, random.normal(0, 3, (10, 2 * buffers)), tolerance=1e-9)
    assert optimized.value <= np.exp(others.values.min()) * (1 + 1e-4)
    assert optimized.error_report.sensitivity.kind == "exact"
    if buffers > 1:
        fewer = optimize_blt(participation, buffers - 1, objective)
        assert optimized.value <= fewer.value * (1 + 1e-4)


def test_the_same_input_gives_the_same_bits():
    first, second = (optimize_blt(MinSep(500, 60), 3, "rms").mechanism for _ in range(2))
    assert first == second


def test_auto_takes_the_fewest_buffers_within_a_thousandth():
    optimized = optimize_blt(MinSep(2000, 400), "auto")
    more = optimize_blt(MinSep(2000, 400), 6)
    fewer = optimize_blt(MinSep(2000, 400), optimized.mechanism.buffers - 1)
    assert optimized.value <= more.value * 1.001
    assert fewer.value > more.value * 1.001


def test_the_search_converges_for_any_number_of_rounds():
    for rounds in (2 * 10**3, 10**9):
        optimized = optimize_blt(MinSep(rounds, rounds // 5, 5), 4)
        assert optimized.gradient_norm < 1e-5
        assert (
            optimized.error_report.max_loss
            < mechanism("blt-b400").error_report(optimized.participation).max_loss
        )


def test_best_toeplitz_ratio():
    optimized = optimize_blt(MinSep(60, 10), 2, "rms")
    ratio = best_toeplitz_ratio(optimized)
    assert ratio is not None
    assert 1 - 1e-6 <= ratio <= 1.1
    assert best_toeplitz_ratio(optimize_blt(MinSep(1000, 100), 1)) is None


@pytest.mark.parametrize(
    "workload",
    [
        Workload(momentum=0.9),
        Workload(weight_decay=0.05),
        Workload.with_schedule("cooldown:last-quarter:0.05", 60, momentum=0.5),
    ],
    ids=["momentum", "weight decay", "cool-down"],
)
@pytest.mark.parametrize("objective", ["max", "rms"])
def test_optimising_for_a_workload_reduces_its_loss(workload, objective):
    participation = MinSep(60, 12)
    plain = optimize_blt(participation, 2, objective)
    optimized = optimize_blt(participation, 2, objective, workload)
    before = workload_loss(plain.mechanism, participation, workload)
    assert optimized.value < 0.999 * (before.max_loss if objective == "max" else before.rms_loss)
    dense = workload.matrix(60) @ np.linalg.inv(optimized.mechanism.strategy(60))
    errors = np.linalg.norm(dense, axis=1)
    assert optimized.error_report.max_error == pytest.approx(errors.max(), rel=1e-9)
    assert optimized.error_report.rms_error == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-9)
    function = free_function(BltWorkloadObjective(participation, objective, workload))
    random = np.random.default_rng(3)
    others = minimize(function, random.normal(0, 2, (6, 4)), steps=40, tolerance=1e-8)
    assert optimized.value <= np.exp(others.values.min()) * (1 + 1e-3)


@pytest.mark.parametrize("buffers", [0, -1, 11, 2.5, True, "two"])
def test_impossible_buffers_are_refused(buffers):
    with pytest.raises(InvalidInput, match="buffers"):
        optimize_blt(MinSep(10, 2), buffers)


def test_an_objective_that_does_not_exist_is_refused():
    with pytest.raises(InvalidInput, match="mean"):
        optimize_blt(MinSep(10, 2), 1, "mean")  # type: ignore[arg-type]
