"""BandInvMF: the best mechanism whose noise is a moving average of few rows of Z."""

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpftrl.mechanisms import BandedInverse
from dpftrl.mechanisms.square_root import inverse_square_root_series
from dpftrl.optimize.band_inverse_objective import by_log_prefixes, from_log_prefixes, log_loss
from dpftrl.optimize.lbfgs import Function, minimise_lbfgs
from dpftrl.optimize.requests import Progress, check_bands
from dpftrl.optimize.result import Objective, Optimised, check_objective, loss_value
from dpftrl.optimize.toeplitz_error import ToeplitzError
from dpftrl.optimize.workload_loss import workload_loss
from dpftrl.participation import Participation
from dpftrl.workload import Workload

Vector = NDArray[np.float64]

PREFIX_SUM = Workload()
# Kinks of the bound on the sensitivity stop a search early: it starts again where it stopped, as
# long as that gains something, and from places nearby.
RESTARTS, WITHIN, STEPS = 3, 1e-8, 200
NEARBY = (0.1, 0.1, 0.03)
# Past steps that shape the next: with all of them, quasi-Newton methods get along kinks best.
MEMORY = 40


class _Point(NamedTuple):
    free: Vector
    value: float
    gradient_norm: float


def optimize_band_inverse(
    participation: Participation,
    bands: int,
    objective: Objective = "rms",
    workload: Workload = PREFIX_SUM,
    progress: Progress | None = None,
) -> Optimised[BandedInverse]:
    """The mechanism with `bands` coefficients of C^-1 that has the smallest loss.

    Its loss counts the sensitivity as `BandedInverse` reports it, which is a bound where C does not
    fall. It is never above that of `inv-sqrt` with as many bands, or of `lambda` with two or more.

    Args:
        participation: What to optimise for.
        bands: Number of coefficients of C^-1 (the first is 1).
        objective: `max` for MaxLoss, `rms` for RmsLoss.
        workload: What the server does with the updates.
        progress: Called after each search from one start.

    The same input gives the same output. The loss has many local optima within a few 1e-4.

    >>> from dpftrl.participation import MinSep
    >>> found = optimize_band_inverse(MinSep(rounds=256, min_sep=32), bands=4)
    >>> print(f"{found.loss.rms_loss:.3f}")
    9.826
    """
    started = time.perf_counter()
    check_objective(objective)
    bands = check_bands(bands, participation.rounds)
    error = ToeplitzError(workload, participation.rounds, objective)
    function = by_log_prefixes(log_loss(error, participation))
    found = [_search(function, size, progress) for size in ([bands] if bands < 3 else [2, bands])]
    candidates = [from_log_prefixes(point.free) for point in found]
    candidates.append(inverse_square_root_series(bands))
    mechanisms = [BandedInverse(c_hat.tolist()) for c_hat in candidates]
    losses = [workload_loss(mechanism, participation, workload) for mechanism in mechanisms]
    best = min(range(len(losses)), key=lambda i: loss_value(losses[i], objective))
    return Optimised(
        mechanisms[best],
        participation,
        objective,
        losses[best],
        found[min(best, len(found) - 1)].gradient_norm,
        time.perf_counter() - started,
    )


def _search(function: Function, bands: int, progress: Progress | None) -> _Point:
    """From simple starts, from the best with half as many bands, and from around the best."""
    if bands == 1:  # nothing is free
        return _Point(np.zeros(0), 0.0, 0.0)
    prefixes = np.log(np.cumsum(inverse_square_root_series(bands))[1:])
    starts = [prefixes, np.full(bands - 1, prefixes[-1])]
    if bands > 2:
        fewer = _search(function, (bands + 1) // 2, progress).free
        starts.append(np.append(fewer, np.full(bands - 1 - len(fewer), fewer[-1])))
    total, best = len(starts) + len(NEARBY), _Point(prefixes, np.inf, np.inf)
    random = np.random.default_rng(bands)
    for number in range(total):
        around = number - len(starts)
        start = starts[number] if around < 0 else _moved(best.free, NEARBY[around], random)
        best = min(best, _descend(function, start), key=lambda point: point.value)
        if progress is not None:
            message = f"{bands} bands, start {number + 1} of {total}: loss {np.exp(best.value):.6g}"
            progress(None, message)
    return best


def _moved(free: Vector, by: float, random: np.random.Generator) -> Vector:
    return free + by * random.standard_normal(len(free))


def _descend(function: Function, start: Vector) -> _Point:
    best = _Point(start, np.inf, np.inf)
    for _ in range(RESTARTS):
        end = minimise_lbfgs(function, best.free, WITHIN, most_steps=STEPS, memory=MEMORY)
        gained = best.value - end.value
        if gained > 0:
            best = _Point(end.point, end.value, float(np.abs(end.gradient).max()))
        if not gained > WITHIN * 10:
            break
    return best
