"""The best banded inverses against dense matrices, and against what they must not be worse than."""

import numpy as np
import pytest
from dense_oracle import WORKLOADS, brute_sensitivity, errors, lower_toeplitz, slope

from dpftrl import BandedInverse, FixedEpochs, MinSep
from dpftrl.optimize._solvers import loss_value, minimize_lbfgs
from dpftrl.optimize._toeplitz_error import ToeplitzError, workload_loss
from dpftrl.optimize.band_inverse import (
    by_log_prefixes,
    from_log_prefixes,
    log_loss,
    optimize_band_inverse,
)
from dpftrl.workload import Workload

ROUNDS = 24
every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
both_objectives = pytest.mark.parametrize("objective", ["rms", "max"])


@every_workload
@both_objectives
@pytest.mark.parametrize(
    "c_hat",
    [
        [1.0, -0.5, -0.125],
        [1.0, -0.2, -0.6, 0.1],  # c rises: its majorant counts
        [1.0, 0.4, -0.3],  # c changes its sign
        np.append(1.0, -0.9 / 2 ** np.arange(1, 12)),
    ],
)
def test_derivatives_match_finite_differences(workload, objective, c_hat):
    error = ToeplitzError(workload, ROUNDS, objective, sharpness=20.0)
    c_hat = np.array(c_hat)
    for min_sep in (6, ROUNDS):
        function = log_loss(error, MinSep(ROUNDS, min_sep))
        np.testing.assert_allclose(function(c_hat)[1], slope(function, c_hat), atol=1e-7)


def test_derivatives_by_log_prefixes_match_finite_differences():
    participation = MinSep(ROUNDS, 6)
    function = by_log_prefixes(log_loss(ToeplitzError(Workload(), ROUNDS, "rms"), participation))
    free = np.log([0.6, 0.4, 0.35])
    np.testing.assert_allclose(function(free)[1], slope(function, free), atol=1e-8)
    np.testing.assert_allclose(np.cumsum(from_log_prefixes(free)), [1, 0.6, 0.4, 0.35])


@both_objectives
@pytest.mark.parametrize("participation", [MinSep(ROUNDS, 6), MinSep(ROUNDS, ROUNDS)])
def test_the_function_is_the_loss_that_the_library_reports(objective, participation):
    for c_hat in ([1.0, -0.5], [1.0, -0.2, -0.6, 0.1], [1.0, 0.4, -0.3]):
        error = ToeplitzError(Workload(), ROUNDS, objective)
        value, _ = log_loss(error, participation)(np.array(c_hat))
        reported = BandedInverse(c_hat).error_report(participation)
        assert np.exp(value) == pytest.approx(loss_value(reported, objective), rel=1e-10)


@every_workload
def test_losses_match_dense_matrices(workload):
    participation = MinSep(ROUNDS, min_sep=8)
    optimized = optimize_band_inverse(participation, 4, "rms", workload)
    C = np.linalg.inv(lower_toeplitz(optimized.mechanism.c_hat, ROUNDS))
    assert (optimized.error_report.max_error, optimized.error_report.rms_error) == pytest.approx(
        errors(C, workload)
    )
    truth = brute_sensitivity(np.abs(C), participation)
    assert optimized.error_report.sensitivity.value >= truth * (1 - 1e-9)
    if optimized.error_report.sensitivity.kind == "exact":
        assert optimized.error_report.sensitivity.value == pytest.approx(truth, rel=1e-9)


@both_objectives
@pytest.mark.parametrize("bands", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("participation", "workload"),
    [
        (MinSep(200, 40), Workload()),
        (MinSep(200, 2), Workload()),
        (MinSep(100, 100), Workload(momentum=0.9)),
        (FixedEpochs(40, 8), Workload.with_schedule("cooldown:last-half:0.1", 40)),
    ],
    ids=["separated", "often", "once with momentum", "epochs with cooldown"],
)
def test_the_loss_is_never_larger_than_that_of_known_mechanisms(
    participation, workload, bands, objective
):
    optimized = optimize_band_inverse(participation, bands, objective, workload)
    known = [BandedInverse.square_root(bands)]
    if bands > 1:
        known += [BandedInverse.one_parameter(x) for x in np.linspace(0, 1, 51)]
    for mechanism in known:
        other = loss_value(workload_loss(mechanism, participation, workload), objective)
        assert optimized.value <= other * (1 + 1e-9)
    assert len(optimized.mechanism.c_hat) <= bands


def test_a_start_that_overflows_gives_a_huge_value():
    function = log_loss(ToeplitzError(Workload(), 2000, "rms"), MinSep(2000, 500))
    end = minimize_lbfgs(function, np.array([1.0, 5.0]), within=1e-6)
    assert end.value > 1e8


def test_losses_at_the_size_of_the_paper():
    participation = MinSep(rounds=2052, min_sep=342, max_participations=6)
    losses = [optimize_band_inverse(participation, bands).value for bands in (2, 4, 8)]
    assert losses == pytest.approx([13.970, 11.716, 10.445], abs=5e-3)


@pytest.mark.parametrize("rounds", [1, 2, 3])
@both_objectives
def test_one_to_three_rounds(rounds, objective):
    for bands in range(1, rounds + 1):
        optimized = optimize_band_inverse(MinSep(rounds, 1), bands, objective)
        independent = BandedInverse([1.0]).error_report(MinSep(rounds, 1))
        assert optimized.value <= loss_value(independent, objective) * (1 + 1e-9)


def test_the_result_is_deterministic_and_progress_is_reported():
    progress_calls = []
    first, second = (
        optimize_band_inverse(
            MinSep(64, 8),
            4,
            on_progress=lambda done, message: progress_calls.append((done, message)),
        )
        for _ in range(2)
    )
    assert first.mechanism == second.mechanism
    assert progress_calls[0][0] is None
    assert progress_calls[0][1].startswith("2 bands, start 1 of ")
