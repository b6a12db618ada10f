"""The best banded Toeplitz strategies against dense matrices and numbers from elsewhere."""

import numpy as np
import pytest
from dense_oracle import WORKLOADS, brute_sensitivity, errors, lower_toeplitz, slope

from dpftrl import DpftrlError, FixedEpochs, FullTree, MinSep, SquareRoot, Toeplitz
from dpftrl.optimize._toeplitz_error import ToeplitzError, workload_loss
from dpftrl.optimize.band_toeplitz import falling, log_loss, optimize_band_toeplitz
from dpftrl.workload import Workload

ROUNDS = 24
every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
both_objectives = pytest.mark.parametrize("objective", ["rms", "max"])


@every_workload
@both_objectives
@pytest.mark.parametrize("bands", [1, 5, ROUNDS])
def test_derivatives_match_finite_differences(workload, objective, bands):
    error = ToeplitzError(workload, ROUNDS, objective, sharpness=20.0)
    function = log_loss(error, MinSep(ROUNDS, min_sep=6))
    c = np.linspace(1, 0.2, bands)
    np.testing.assert_allclose(function(c)[1], slope(function, c), atol=1e-8)


@pytest.mark.parametrize("objective", ["rms", "max"])
def test_derivatives_of_many_bands_match_finite_differences(objective):
    """Beyond a few dozen bands they come from Fourier transforms."""
    function = log_loss(ToeplitzError(Workload(0.5), 100, objective), MinSep(100, min_sep=30))
    c = SquareRoot().coefficients(80)
    np.testing.assert_allclose(function(c)[1], slope(function, c), atol=1e-8)


@every_workload
@pytest.mark.parametrize("bands", [1, 3, 8, ROUNDS])
def test_losses_match_dense_matrices(workload, bands):
    participation = MinSep(ROUNDS, min_sep=8, max_participations=3)
    optimized = optimize_band_toeplitz(participation, bands, "rms", workload)
    C = lower_toeplitz(optimized.mechanism.c, ROUNDS)
    sensitivity = brute_sensitivity(C, participation)
    assert optimized.error_report.sensitivity.kind == "exact"
    assert optimized.error_report.sensitivity.value == pytest.approx(sensitivity, rel=1e-12)
    assert (optimized.error_report.max_error, optimized.error_report.rms_error) == pytest.approx(
        errors(C, workload)
    )
    assert optimized.mechanism.c[0] == 1
    assert optimized.seconds > 0


@every_workload
@both_objectives
@pytest.mark.parametrize("bands", [4, ROUNDS])
def test_no_nearby_strategy_is_better(workload, objective, bands):
    participation = MinSep(ROUNDS, min_sep=6)
    optimized = optimize_band_toeplitz(participation, bands, objective, workload)
    c = np.array(optimized.mechanism.c)
    random = np.random.default_rng(1)
    # Where the largest row changes, the optimum is only as sharp as the p-norm that finds it.
    exact = objective == "rms" or workload.is_toeplitz
    for size in np.geomspace(1e-4, 0.1, 30):
        nearby = falling(c + size * random.standard_normal(bands))
        loss = workload_loss(Toeplitz(nearby.tolist()), participation, workload)
        other = loss.max_loss if objective == "max" else loss.rms_loss
        assert optimized.value <= other * (1 + (1e-9 if exact else 1e-3))


def test_the_losses_of_the_paper():
    participation = MinSep(rounds=2052, min_sep=342, max_participations=6)
    optimized = optimize_band_toeplitz(participation, bands=342)
    assert optimized.error_report.rms_loss == pytest.approx(8.8041, abs=1e-4)
    assert optimized.error_report.max_loss == pytest.approx(10.53, abs=0.005)
    assert optimized.gradient_norm < 1e-6
    for_max = optimize_band_toeplitz(participation, bands=342, objective="max")
    assert for_max.error_report.max_loss == pytest.approx(10.4046, abs=1e-4)


def test_as_many_bands_as_rounds_beat_the_square_root_and_every_band():
    participation = MinSep(rounds=100, min_sep=2)
    optimized = optimize_band_toeplitz(participation, bands=100)
    # The best BLT with one buffer is this good (36.639) already.
    assert optimized.error_report.rms_loss == pytest.approx(36.6389, abs=1e-4)
    fewer = optimize_band_toeplitz(participation, bands=10)
    assert optimized.error_report.rms_loss <= fewer.error_report.rms_loss * (1 + 1e-9)
    assert fewer.error_report.rms_loss <= SquareRoot(10).error_report(participation).rms_loss


def test_many_rounds_need_no_dense_matrix():
    optimized = optimize_band_toeplitz(MinSep(50_000, min_sep=500), bands=100)
    assert (
        optimized.error_report.rms_loss
        < SquareRoot(100).error_report(MinSep(50_000, min_sep=500)).rms_loss
    )


@pytest.mark.parametrize("rounds", [1, 2, 3])
@both_objectives
def test_one_to_three_rounds(rounds, objective):
    for bands in range(1, rounds + 1):
        for participation in (MinSep(rounds, 1), MinSep(rounds, 2), FixedEpochs(rounds, 2)):
            optimized = optimize_band_toeplitz(participation, bands, objective)
            assert optimized.value <= SquareRoot(bands).error_report(participation).max_loss * (
                1 + 1e-12
            )


def test_the_result_is_deterministic_and_progress_is_reported():
    progress_calls = []
    first, second = (
        optimize_band_toeplitz(
            MinSep(64, 8),
            8,
            on_progress=lambda done, message: progress_calls.append((done, message)),
        )
        for _ in range(2)
    )
    assert first.mechanism == second.mechanism
    assert progress_calls
    assert progress_calls[0][0] is None
    assert progress_calls[0][1].startswith("step 1: loss ")


def test_a_schedule_that_is_too_short_is_refused():
    with pytest.raises(DpftrlError, match="fewer than the 8 rounds"):
        optimize_band_toeplitz(MinSep(8, 2), 2, workload=Workload(learning_rates=(1.0, 0.5)))


@every_workload
def test_workload_losses_match_dense_matrices(workload):
    participation = MinSep(ROUNDS, min_sep=8)
    tree = FullTree(ROUNDS)
    for mechanism in (SquareRoot(), tree):
        B = workload.matrix(ROUNDS) @ mechanism.decoder(ROUNDS)
        rows = np.linalg.norm(B, axis=1)
        loss = workload_loss(mechanism, participation, workload)
        assert loss.max_error == pytest.approx(rows.max(), rel=1e-10)
        assert loss.rms_error == pytest.approx(np.sqrt(np.mean(rows**2)), rel=1e-10)
        assert loss.sensitivity == mechanism.sensitivity(participation)
