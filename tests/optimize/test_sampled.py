"""Optimizers for sampled runs: against the optimum for min-sep, brute force and certificates."""

from pathlib import Path

import numpy as np
import pytest

from dpftrl._internal.cache import load_tensors, store_tensors
from dpftrl.accounting.amplification import calibrate_sampled
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.mechanisms import BLT, Toeplitz
from dpftrl.optimize import sampled
from dpftrl.optimize.blt import optimize_blt
from dpftrl.optimize.sampled import (
    OptimizedForSampling,
    optimize_for_balls_in_bins,
    optimize_for_cyclic_poisson,
)
from dpftrl.participation import BallsInBins, MinSep

SAMPLING = BallsInBins(dataset_size=1_000, batch_size=100, steps=40)
SMALL = BallsInBins(dataset_size=40, batch_size=10, steps=12)
EPSILON, DELTA = 2.0, 1e-6


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    """A cache folder that is empty, and not that of the user."""
    monkeypatch.setenv("DPFTRL_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def one_buffer() -> OptimizedForSampling:
    return optimize_for_balls_in_bins(SAMPLING, EPSILON, DELTA, buffers=1, cache=False)


@pytest.fixture(scope="module")
def certified_noise(one_buffer) -> float:
    """The noise with a certificate from fresh samples."""
    return calibrate_sampled(one_buffer.mechanism, SAMPLING, EPSILON, DELTA).rms_noise


def test_the_estimate_is_close_to_a_certificate(one_buffer, certified_noise):
    assert certified_noise == pytest.approx(one_buffer.rms_noise, rel=0.03)


def test_the_result_has_less_noise_than_the_optimum_for_min_sep(certified_noise):
    other = optimize_blt(MinSep(40, 10), 1).mechanism
    noise = calibrate_sampled(other, SAMPLING, EPSILON, DELTA).rms_noise
    assert certified_noise < 0.95 * noise


def test_the_result_is_a_minimum(one_buffer):
    """BLTs with other parameters have more noise, by the same estimates."""
    search = sampled._Search(SAMPLING, EPSILON, DELTA, None)
    theta, omega = one_buffer.mechanism.theta[0], one_buffer.mechanism.omega[0]
    best = search._noise(BLT([theta], [omega]), sampled.SAMPLES)
    assert best == pytest.approx(one_buffer.rms_noise, rel=1e-3)
    for factors in ((0.8, 1.0), (1.2, 1.0), (1.0, 0.6), (1.0, 1.5)):
        other = BLT([theta * factors[0]], [omega * factors[1]])
        assert search._noise(other, sampled.SAMPLES) > best * 1.001


def test_what_was_optimized_for_is_part_of_the_result(one_buffer):
    assert isinstance(one_buffer.mechanism, BLT)
    assert len(one_buffer.mechanism.theta) == 1
    assert one_buffer.sampling == SAMPLING
    assert (one_buffer.epsilon, one_buffer.delta) == (EPSILON, DELTA)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_a_long_run_has_less_noise_than_other_mechanisms(epsilon):
    sampling = BallsInBins(dataset_size=50_000, batch_size=500, steps=1_000)
    found = optimize_for_balls_in_bins(sampling, epsilon, DELTA, cache=False)
    noise = calibrate_sampled(found.mechanism, sampling, epsilon, DELTA).rms_noise
    assert noise == pytest.approx(found.rms_noise, rel=0.05)
    cyclic = optimize_for_cyclic_poisson(50_000, 500, 1_000, epsilon, DELTA)
    assert noise < cyclic.rms_noise


@pytest.fixture
def cache(cache_folder, monkeypatch) -> Path:
    """The cache folder, for searches that are short."""
    monkeypatch.setattr(sampled, "EVALUATIONS", 5)
    return cache_folder


def search_small(epsilon: float = EPSILON, **options) -> OptimizedForSampling:
    return optimize_for_balls_in_bins(SMALL, epsilon, 1e-4, buffers=1, **options)


def never(*_args, **_options):
    raise AssertionError("a stored result is not computed again")


def test_a_result_is_stored_and_used_again(cache, monkeypatch):
    first = search_small()
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(sampled, "_Search", never)
    again = search_small()
    assert (again.mechanism, again.rms_noise) == (first.mechanism, first.rms_noise)
    assert again.seconds < 0.5
    with pytest.raises(AssertionError, match="not computed again"):
        search_small(epsilon=2.5)  # another question
    with pytest.raises(AssertionError, match="not computed again"):
        search_small(cache=False)


def test_without_the_cache_nothing_is_stored(cache):
    search_small(cache=False)
    assert not list(cache.iterdir())


def damage(path: Path, how: str) -> None:
    tensors = load_tensors(path.parent, path.stem)
    assert tensors is not None
    if how == "no tensors":
        path.write_bytes(b"damaged")
    elif how == "empty":
        path.write_bytes(b"")
    else:
        changes = {
            "theta too large": {"theta": np.array([1.5])},
            "theta nan": {"theta": np.array([np.nan])},
            "lengths": {"theta": np.array([0.5, 0.4])},
            "no numbers": {"rms_noise": np.zeros(0)},
            "matrix": {"theta": np.array([[0.5]]), "omega": np.array([[0.3]])},
            "name": {"other": np.array([1.0])},
        }[how]
        if how == "name":
            del tensors["theta"]
        store_tensors(path.parent, path.stem, tensors | changes)


@pytest.mark.parametrize(
    "how",
    [
        "no tensors",
        "empty",
        "theta too large",
        "theta nan",
        "lengths",
        "no numbers",
        "matrix",
        "name",
    ],
)
def test_a_damaged_cache_file_is_ignored(cache, monkeypatch, how):
    class Search:
        """In place of the search, which takes a second."""

        def __init__(self, *_): ...

        def run(self, most: int, exactly: bool) -> tuple[BLT, float]:  # noqa: ARG002
            searches.append(most)
            return BLT([0.9], [0.2]), 4.2

    searches = list[int]()
    monkeypatch.setattr(sampled, "_Search", Search)
    first = search_small()
    (path,) = cache.iterdir()
    assert search_small().rms_noise == first.rms_noise
    assert len(searches) == 1
    damage(path, how)
    again = search_small()
    assert (again.mechanism, again.rms_noise) == (first.mechanism, first.rms_noise)
    assert len(searches) == 2


def test_a_cache_folder_that_cannot_be_written_to_is_ignored(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("DPFTRL_CACHE", str(cache / "file" / "folder"))
    assert search_small().rms_noise > 0


def test_progress_is_reported(cache):  # noqa: ARG001
    shares = list[float | None]()
    search_small(cache=False, on_progress=lambda share, _: shares.append(share))
    numbers = [share for share in shares if share is not None]
    assert numbers == sorted(numbers)
    assert 0 < numbers[-1] <= 1


@pytest.mark.parametrize("buffers", [2])
def test_the_number_of_buffers_can_be_chosen(cache, buffers):  # noqa: ARG001
    found = optimize_for_balls_in_bins(SMALL, EPSILON, 1e-4, buffers=buffers, cache=False)
    assert isinstance(found.mechanism, BLT)
    assert len(found.mechanism.theta) == buffers


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_epsilon_that_is_not_positive_is_refused(value):
    with pytest.raises(InvalidInput, match="epsilon"):
        optimize_for_balls_in_bins(SMALL, value, DELTA)
    with pytest.raises(InvalidInput, match="epsilon"):
        optimize_for_cyclic_poisson(1_000, 100, 40, value, DELTA)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, float("nan")])
def test_a_delta_that_is_no_fraction_is_refused(value):
    with pytest.raises(InvalidInput, match="delta must be between 0 and 1"):
        optimize_for_balls_in_bins(SMALL, EPSILON, value)
    with pytest.raises(InvalidInput, match="delta must be between 0 and 1"):
        optimize_for_cyclic_poisson(1_000, 100, 40, EPSILON, value)


@pytest.mark.parametrize("buffers", [0, -1, 1.5])
def test_a_number_of_buffers_that_is_none_is_refused(buffers):
    with pytest.raises(InvalidInput, match="buffers"):
        optimize_for_balls_in_bins(SMALL, EPSILON, DELTA, buffers=buffers)


def test_too_many_bins_are_refused():
    with pytest.raises(InvalidInput, match="bins"):
        optimize_for_balls_in_bins(BallsInBins(10**4, 1, 10**4), EPSILON, DELTA, cache=False)


@pytest.mark.parametrize(
    "epsilon", [2.0, *(pytest.param(e, marks=pytest.mark.slow) for e in (0.5, 8.0))]
)
def test_the_number_of_bands_agrees_with_brute_force(epsilon):
    found = optimize_for_cyclic_poisson(1_000, 100, 40, epsilon, DELTA)
    noises = {
        bands: optimize_for_cyclic_poisson(1_000, 100, 40, epsilon, DELTA, bands=bands).rms_noise
        for bands in range(1, 11)
    }
    assert found.rms_noise <= 1.01 * min(noises.values())
    bands = found.sampling.groups  # pyright: ignore[reportAttributeAccessIssue]
    assert found.rms_noise == noises[bands]
    assert isinstance(found.mechanism, Toeplitz)
    assert len(found.mechanism.c) == bands
    again = calibrate_sampled(found.mechanism, found.sampling, epsilon, DELTA)
    assert again.rms_noise == found.rms_noise


def test_the_number_of_bands_is_stored_and_a_damaged_file_is_ignored(cache_folder, monkeypatch):
    def optimize(**options) -> OptimizedForSampling:
        return optimize_for_cyclic_poisson(100, 20, 12, EPSILON, 1e-4, **options)

    first = optimize()
    (path,) = cache_folder.iterdir()
    for count in (0, 6, -1):
        store_tensors(cache_folder, path.stem, {"bands": np.array([count])})
        assert optimize().mechanism == first.mechanism
    path.write_bytes(b"damaged")
    assert optimize().mechanism == first.mechanism
    monkeypatch.setattr(sampled, "_best_count", never)
    assert (again := optimize()).mechanism == first.mechanism
    assert (again.rms_noise, again.sampling) == (first.rms_noise, first.sampling)
    with pytest.raises(AssertionError, match="not computed again"):
        optimize(cache=False)


def test_full_batches_leave_one_band():
    found = optimize_for_cyclic_poisson(100, 100, 8, EPSILON, DELTA)
    assert found.sampling.groups == 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("bands", "message"), [(0, "bands"), (11, "at most 10 groups"), (-2, "bands")]
)
def test_a_number_of_bands_that_is_impossible_is_refused(bands, message):
    with pytest.raises(InvalidInput, match=message):
        optimize_for_cyclic_poisson(1_000, 100, 40, EPSILON, DELTA, bands=bands)


def test_more_bands_than_steps_are_refused():
    with pytest.raises(DpftrlError):
        optimize_for_cyclic_poisson(1_000, 10, 5, EPSILON, DELTA, bands=6)


def test_batches_larger_than_the_data_set_are_refused():
    with pytest.raises(InvalidInput, match="larger than the data set"):
        optimize_for_cyclic_poisson(100, 200, 5, EPSILON, DELTA)
