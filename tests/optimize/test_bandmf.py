"""BandMF against dense matrices, and what its cache does."""

import time

import numpy as np
import pytest
from dense_oracle import WORKLOADS, brute_sensitivity, errors, slope

from dpftrl import Banded, MinSep
from dpftrl._internal.cache import cache_folder
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.optimize import bandmf
from dpftrl.optimize.band_toeplitz import optimize_band_toeplitz
from dpftrl.optimize.bandmf import BandedError, optimize_bandmf, smaller_problem, stretched_columns
from dpftrl.workload import Workload

ROUNDS = 24
every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())


@every_workload
@pytest.mark.parametrize("bands", [1, 5, ROUNDS])
def test_derivatives_match_finite_differences(workload, bands):
    error = BandedError(ROUNDS, bands, workload)
    raw = np.random.default_rng(bands).uniform(0.1, 0.5, (ROUNDS, bands))
    raw[:, 0] += 1
    value, gradient = error(raw)
    columns = error.columns(raw)
    C = Banded(columns.T).strategy(ROUNDS)
    assert np.exp(value) == pytest.approx(errors(C, workload)[1], rel=1e-12)
    np.testing.assert_allclose(gradient, slope(error, raw), atol=1e-8)


def test_derivatives_match_differences_with_several_blocks():
    error = BandedError(150, 40, Workload())
    raw = np.random.default_rng(0).uniform(0.0, 0.1, (150, 40))
    raw[:, 0] += 1
    direction = np.random.default_rng(1).standard_normal(raw.shape)
    ahead, behind = error(raw + 1e-6 * direction)[0], error(raw - 1e-6 * direction)[0]
    assert np.vdot(error(raw)[1], direction) == pytest.approx((ahead - behind) / 2e-6, rel=1e-6)


@every_workload
@pytest.mark.parametrize("bands", [1, 3, 8, ROUNDS])
def test_losses_match_dense_matrices(workload, bands, tmp_path):
    participation = MinSep(ROUNDS, min_sep=8, max_participations=3)
    optimized = optimize_bandmf(participation, bands, workload, cache=tmp_path)
    C = optimized.mechanism.strategy(ROUNDS)
    np.testing.assert_allclose(np.linalg.norm(C, axis=0), 1, rtol=1e-12)
    assert (optimized.error_report.max_error, optimized.error_report.rms_error) == pytest.approx(
        errors(C, workload)
    )
    if bands <= 8:
        assert optimized.error_report.sensitivity.value == pytest.approx(3**0.5, rel=1e-12)
        assert optimized.error_report.sensitivity.kind == "exact"
    else:
        assert (
            optimized.error_report.sensitivity.value
            >= brute_sensitivity(np.abs(C), participation) - 1e-9
        )
    toeplitz = optimize_band_toeplitz(MinSep(ROUNDS, ROUNDS), bands, "rms", workload)
    assert optimized.error_report.rms_error <= toeplitz.value * (1 + 1e-9)


def test_the_result_is_near_a_local_optimum(tmp_path):
    optimized = optimize_bandmf(MinSep(96, 24), 24, cache=tmp_path)
    assert optimized.gradient_norm < 1e-2
    error = BandedError(96, 24, Workload())
    columns, random = optimized.mechanism.columns.T, np.random.default_rng(0)
    for size in (1e-2, 1e-3):
        nearby = error(columns + size * random.standard_normal(columns.shape))[0]
        assert np.log(optimized.error_report.rms_error) < nearby


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_one_to_three_rounds(rounds, tmp_path):
    for bands in range(1, rounds + 1):
        optimized = optimize_bandmf(MinSep(rounds, rounds), bands, cache=tmp_path)
        assert optimized.mechanism.columns.shape == (bands, rounds)
        start = Banded.square_root(bands, rounds).error_report(MinSep(rounds, rounds))
        assert optimized.error_report.rms_loss <= start.rms_loss * (1 + 1e-12)


def test_a_smaller_problem_is_a_good_start(tmp_path):
    """Stretched, it beats the best Toeplitz strategy, which is the next best start."""
    participation = MinSep(256, 64)
    smaller = smaller_problem(256, 64, Workload())
    assert smaller is not None
    rounds, bands, workload = smaller
    assert (rounds, bands) == (64, 16)
    small = optimize_bandmf(MinSep(rounds, bands), bands, workload, cache=tmp_path)
    error = BandedError(256, 64, Workload())
    start, _ = error(stretched_columns(small.mechanism.columns.T, 256, 64))
    best = optimize_bandmf(participation, 64, cache=tmp_path)
    toeplitz = np.tile(optimize_band_toeplitz(MinSep(256, 64), 64).mechanism.c, (256, 1))
    assert np.log(best.error_report.rms_error) <= start < error(toeplitz)[0]
    assert start - np.log(best.error_report.rms_error) < 2e-3


def test_a_finished_result_comes_from_the_cache(tmp_path):
    messages = []
    first = optimize_bandmf(MinSep(64, 8, 2), 8, cache=tmp_path)
    again = optimize_bandmf(
        MinSep(64, 16, 3), 8, cache=tmp_path, on_progress=lambda *line: messages.append(line)
    )
    assert again.mechanism == first.mechanism  # how often clients take part does not matter
    assert again.gradient_norm == first.gradient_norm
    assert not messages
    other = optimize_bandmf(MinSep(64, 8), 8, Workload(momentum=0.5), cache=tmp_path)
    assert other.mechanism != first.mechanism
    assert len(list(tmp_path.iterdir())) == 2


def test_the_same_input_gives_the_same_output(tmp_path):
    first, second = (
        optimize_bandmf(MinSep(64, 8), 8, cache=tmp_path / name) for name in ("a", "b")
    )
    assert first.mechanism == second.mechanism


@pytest.mark.parametrize("kind", ["truncated", "empty", "noise", "changed", "folder"])
def test_a_damaged_file_is_replaced(tmp_path, kind):
    first = optimize_bandmf(MinSep(64, 8), 8, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    if kind == "folder":
        file.unlink()
        file.mkdir()
    else:
        damaged = {
            "truncated": content[:-100],
            "empty": b"",
            "noise": np.random.default_rng(0).bytes(len(content)),
            "changed": content[:-2000] + bytes(8) + content[-1992:],
        }
        file.write_bytes(damaged[kind])
    again = optimize_bandmf(MinSep(64, 8), 8, cache=tmp_path)
    assert again.mechanism == first.mechanism
    if kind != "folder":
        assert file.read_bytes() == content


def test_an_interrupted_search_is_resumed(tmp_path):
    lines = []

    def interrupt(_, message):
        lines.append(message)
        if len(lines) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimize_bandmf(MinSep(64, 16), 16, cache=tmp_path, on_progress=interrupt)
    reached = float(lines[-1].split()[-1])
    later = []
    resumed = optimize_bandmf(
        MinSep(64, 16), 16, cache=tmp_path, on_progress=lambda _, message: later.append(message)
    )
    assert float(later[0].split()[-1]) <= reached
    whole = optimize_bandmf(MinSep(64, 16), 16, cache=tmp_path / "other")
    assert resumed.error_report.rms_loss == pytest.approx(whole.error_report.rms_loss, rel=1e-4)


def test_a_search_that_ran_out_of_time_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(bandmf, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    shares = []
    short = optimize_bandmf(
        MinSep(128, 32),
        32,
        cache=tmp_path,
        seconds=0.0,
        on_progress=lambda share, _: shares.append(share),
    )
    assert shares == [1.0]
    longer = optimize_bandmf(MinSep(128, 32), 32, cache=tmp_path)
    assert longer.error_report.rms_loss < short.error_report.rms_loss
    started = time.perf_counter()
    assert optimize_bandmf(MinSep(128, 32), 32, cache=tmp_path).mechanism == longer.mechanism
    assert time.perf_counter() - started < 5


def test_a_cache_folder_that_cannot_be_written_to_is_ignored(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    optimized = optimize_bandmf(MinSep(16, 4), 4, cache=tmp_path / "file")
    assert optimized.error_report.rms_loss > 0


def test_location_of_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFTRL_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    assert cache_folder(tmp_path) == tmp_path
    assert cache_folder() == tmp_path / "ours"
    monkeypatch.delenv("DPFTRL_CACHE")
    assert cache_folder() == tmp_path / "users" / "dpftrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "dpftrl"


@pytest.mark.parametrize(
    ("bands", "message"),
    [
        (0, "bands must be a whole number of at least 1, got 0"),
        (9, "bands must be at most the 8 rounds, got 9"),
    ],
)
def test_invalid_arguments_are_refused(bands, message, tmp_path):
    with pytest.raises(InvalidInput, match=message):
        optimize_bandmf(MinSep(8, 2), bands, cache=tmp_path)


def test_too_many_rounds_are_refused(tmp_path):
    with pytest.raises(TooLarge, match="limited to 10000 rounds"):
        optimize_bandmf(MinSep(10_001, 2), 2, cache=tmp_path)


@pytest.mark.slow
def test_the_loss_of_the_paper(tmp_path):
    optimized = optimize_bandmf(MinSep(2052, 342, 6), 342, cache=tmp_path)
    assert optimized.error_report.rms_loss <= 8.600
    assert optimized.error_report.max_loss == pytest.approx(10.2, abs=0.05)
    assert optimized.error_report.sensitivity.kind == "exact"
