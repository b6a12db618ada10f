"""Optimizers for training on secret random batches: the smallest noise for an epsilon.

With sampling, sensitivity times error is not what counts: what matters is the noise multiplier that
the sampling needs, times the error. These optimizers estimate it. An estimate is no guarantee, and
an optimizer overfits its samples: `calibrate_sampled` certifies the result with samples of its own.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl._internal.cache import cache_folder, content_key, load_tensors, store_tensors
from dpftrl._internal.checks import fraction, positive_number, whole_number
from dpftrl._internal.progress import Progress
from dpftrl.accounting.amplification import calibrate_sampled
from dpftrl.accounting.balls_in_bins import estimated_delta, gram_matrix
from dpftrl.accounting.gaussian import mu_of
from dpftrl.errors import DpftrlError
from dpftrl.mechanisms import BLT, Mechanism, Toeplitz
from dpftrl.optimize._solvers import scipy_optimize
from dpftrl.optimize.band_toeplitz import optimize_band_toeplitz
from dpftrl.optimize.blt import optimize_blt
from dpftrl.participation import BallsInBins, CyclicPoisson, MinSep, Sampling

# Samples per direction for one noise multiplier: at the starts of a search, and in it.
START_SAMPLES: Final = 2**12
SAMPLES: Final = 2**13
# BLTs that are optimal for these min-seps, as shares of an epoch, are the starts of a search.
START_MIN_SEPS: Final = (0.03, 0.1, 0.2, 0.5, 1.0)
# Evaluations per parameter of a BLT, and the first step in each, of a logarithm.
EVALUATIONS: Final = 30
FIRST_STEP: Final = 0.3
# A second buffer that is added to a BLT: its decay, and its weight relative to the first one.
ADDED_DECAY: Final = 0.3
ADDED_WEIGHT: Final = 0.3
# The version of the search: a cached result of another version is not used.
VERSION: Final = 1


@final
@dataclass(frozen=True)
class OptimizedForSampling:
    """A mechanism that was optimized for a sampling and a privacy target.

    Attributes:
        mechanism: The mechanism.
        sampling: The sampling, with the number of groups that goes with the mechanism.
        epsilon: The epsilon it was optimized for.
        delta: The delta it was optimized for.
        rms_noise: An estimate of the root mean square noise on prefix sums. It is no guarantee.
        seconds: Duration of the search; nearly zero if the result was in the cache.
    """

    mechanism: Mechanism
    sampling: Sampling
    epsilon: float
    delta: float
    rms_noise: float
    seconds: float


def optimize_for_cyclic_poisson(
    dataset_size: int,
    batch_size: int,
    steps: int,
    epsilon: float,
    delta: float,
    *,
    bands: int | None = None,
    cache: bool = True,
    on_progress: Progress | None = None,
) -> OptimizedForSampling:
    """Find the banded Toeplitz strategy with the smallest noise under cyclic Poisson sampling.

    For a number of bands, the best coefficients have the smallest error times column norm. The
    number of bands is found by comparing, first in large steps, and stored in the cache folder.

    Args:
        dataset_size: Number of examples.
        batch_size: Expected number of examples per batch.
        steps: Number of steps.
        epsilon: The target epsilon.
        delta: The target delta.
        bands: The number of bands, and of groups; by default the best one.
        cache: Whether to use a number of bands that was stored, and to store this one.
        on_progress: Called after each number of bands.
    """
    started = time.perf_counter()
    CyclicPoisson(dataset_size, batch_size, steps)  # checks the numbers
    epsilon, delta = positive_number("epsilon", epsilon), fraction("delta", delta)
    most = min(steps, dataset_size // batch_size)
    tried = dict[int, tuple[float, Toeplitz, CyclicPoisson]]()

    def try_bands(count: int) -> float:
        if count not in tried:
            sampling = CyclicPoisson(dataset_size, batch_size, steps, groups=count)
            mechanism = optimize_band_toeplitz(MinSep.once(steps), count).mechanism
            noise = calibrate_sampled(mechanism, sampling, epsilon, delta).rms_noise
            tried[count] = noise, mechanism, sampling
            if on_progress is not None:
                on_progress(None, f"{count} band(s): rms noise {noise:.4g}")
        return tried[count][0]

    numbers = (VERSION, dataset_size, batch_size, steps, epsilon, delta)
    key = content_key("cyclic-bands", *numbers)
    stored = load_tensors(cache_folder(), key) if cache and bands is None else None
    best = bands if stored is None else _count_in(stored, most)
    if best is None:
        best = _best_count(try_bands, most)
        if cache:
            store_tensors(cache_folder(), key, {"bands": np.array([best], dtype=np.int64)})
    try_bands(whole_number("bands", best))
    noise, mechanism, sampling = tried[best]
    seconds = time.perf_counter() - started
    return OptimizedForSampling(mechanism, sampling, epsilon, delta, noise, seconds)


def _count_in(stored: dict[str, Any], most: int) -> int | None:
    """The number of bands in a cached file, if it is one."""
    try:
        count = int(stored["bands"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return count if 1 <= count <= most else None


def _best_count(value: Callable[[int], float], most: int) -> int:
    """The whole number from 1 to `most` with the smallest value, which has one minimum."""
    best, step = 1, 2.0
    while best * 2 <= most and value(best * 2) < value(best):
        best *= 2
    while step > 1.05:
        step = math.sqrt(step)
        around = {max(1, round(best / step)), best, min(most, round(best * step))}
        best = min(around, key=value)
    return best


def optimize_for_balls_in_bins(
    sampling: BallsInBins,
    epsilon: float,
    delta: float,
    *,
    buffers: int | None = None,
    cache: bool = True,
    on_progress: Progress | None = None,
) -> OptimizedForSampling:
    """Find the BLT with the smallest noise under balls-in-bins sampling.

    Every noise multiplier in the search is estimated with the same random numbers. The result is
    stored in the cache folder, since the search takes up to a minute.

    Args:
        sampling: The sampling.
        epsilon: The target epsilon.
        delta: The target delta.
        buffers: Number of buffers; by default one or two, whichever is better.
        cache: Whether to use results that were stored, and to store this one.
        on_progress: Called after each evaluation.
    """
    started = time.perf_counter()
    epsilon, delta = positive_number("epsilon", epsilon), fraction("delta", delta)
    most = 2 if buffers is None else whole_number("buffers", buffers)
    key = content_key(
        "sampled-blt", VERSION, sampling.steps, sampling.bins, epsilon, delta, most, buffers is None
    )
    stored = load_tensors(cache_folder(), key) if cache else None
    found = None if stored is None else _from_cache(stored)
    if found is None:
        search = _Search(sampling, epsilon, delta, on_progress)
        found = search.run(most, exactly=buffers is not None)
        if cache:
            tensors = {
                "theta": np.array(found[0].theta),
                "omega": np.array(found[0].omega),
                "rms_noise": np.array([found[1]]),
            }
            store_tensors(cache_folder(), key, tensors)
    seconds = time.perf_counter() - started
    return OptimizedForSampling(found[0], sampling, epsilon, delta, found[1], seconds)


def _from_cache(stored: dict[str, Any]) -> tuple[BLT, float] | None:
    try:
        blt = BLT(stored["theta"].tolist(), stored["omega"].tolist())
        return blt, float(stored["rms_noise"][0])
    except (KeyError, IndexError, TypeError, DpftrlError):
        return None


@final
class _Search:
    """Estimates of the noise of BLTs, and the search for the smallest."""

    def __init__(
        self, sampling: BallsInBins, epsilon: float, delta: float, on_progress: Progress | None
    ):
        self._steps, self._bins = sampling.steps, sampling.bins
        self._epsilon, self._delta = epsilon, delta
        self._on_progress = on_progress
        self._enough = 1 / mu_of(epsilon, delta)  # noise without sampling, at sensitivity 1
        self._share = 0.5  # of that, the noise that the last BLT needed
        self._done, self._planned = 0, 1

    def run(self, most: int, exactly: bool) -> tuple[BLT, float]:
        """The best BLT with up to (or exactly) so many buffers, and its noise."""
        self._planned = len(START_MIN_SEPS) + 2 * EVALUATIONS * most * (most + 1) // 2
        starts = [self._single_buffer(share) for share in START_MIN_SEPS]
        best = min(
            ((self._noise(blt, START_SAMPLES), blt) for blt in starts), key=lambda pair: pair[0]
        )[1]
        best, noise = self._descend(best)
        for _ in range(1, most):
            added, added_noise = self._descend(_with_one_more(best))
            if not exactly and added_noise > noise * (1 - 1e-3):
                break
            best, noise = added, added_noise
        return best, noise

    def _single_buffer(self, share: float) -> BLT:
        min_sep = max(1, round(share * self._bins))
        return optimize_blt(MinSep(self._steps, min(min_sep, self._steps)), 1).mechanism

    def _descend(self, start: BLT) -> tuple[BLT, float]:
        point = _free_numbers(start)
        simplex = np.vstack([point, point + FIRST_STEP * np.eye(len(point))])

        def log_noise(free: Vector) -> float:
            return math.log(self._noise(_blt(free), SAMPLES))

        result = scipy_optimize().minimize(
            log_noise,
            point,
            method="Nelder-Mead",
            options={
                "maxfev": EVALUATIONS * len(point),
                "initial_simplex": simplex,
                "xatol": 1e-2,
                "fatol": 2e-4,
            },
        )
        return _blt(result.x), math.exp(result.fun)

    def _noise(self, blt: BLT, samples: int) -> float:
        """An estimate of the root mean square noise of a BLT."""
        gram = gram_matrix(blt, self._steps, self._bins)
        enough = self._enough * math.sqrt(float(np.diag(gram).max()))
        target = math.log(self._delta)

        def excess(log_share: float) -> float:
            scale = enough * math.exp(log_share)
            delta = estimated_delta(gram, scale, self._epsilon, pilot=samples)
            return math.log(max(delta, 1e-300)) - target

        share = _root_nearby(excess, math.log(self._share))
        self._share = math.exp(share)
        self._done += 1
        noise = enough * self._share * blt.rms_error(self._steps)
        if self._on_progress is not None:
            self._on_progress(min(1.0, self._done / self._planned), f"rms noise {noise:.4g}")
        return noise


def _root_nearby(function: Callable[[float], float], start: float) -> float:
    """A root of a smooth falling function near `start`, by secants, to about 1e-4."""
    x, slope = start, -12.0
    value = function(x)
    for _ in range(8):
        if abs(value) < 1e-3:
            break
        step = min(0.5, max(-0.5, -value / slope))
        x, before = x + step, value
        value = function(x)
        slope = min(-1.0, max(-1e3, (value - before) / step))
    return min(0.0, x - value / slope)


def _free_numbers(blt: BLT) -> Vector:
    """The parameters of a BLT as unbounded numbers: log-odds of theta, logarithms of omega."""
    theta = np.clip(blt.theta, 1e-6, 1 - 1e-9)
    return np.concatenate([np.log(theta / (1 - theta)), np.log(np.maximum(blt.omega, 1e-6))])


def _blt(free: Vector) -> BLT:
    numbers = np.clip(free, -16.0, 16.0)
    count = len(numbers) // 2
    theta = 1 / (1 + np.exp(-numbers[:count]))
    omega = np.exp(numbers[count:])
    omega /= max(1.0, float(omega.sum()) * (1 + 1e-9))  # a larger sum makes the noise grow
    return BLT(theta.tolist(), omega.tolist())


def _with_one_more(blt: BLT) -> BLT:
    """The BLT with one more buffer, which decays faster than the others."""
    return BLT(
        [*blt.theta, min(blt.theta) * ADDED_DECAY], [*blt.omega, min(blt.omega) * ADDED_WEIGHT]
    )
