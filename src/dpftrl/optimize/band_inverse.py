"""BandInvMF: the best mechanism whose noise is a moving average of few rows of Z."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl.mechanisms import BandedInverse
from dpftrl.mechanisms.square_root import inverse_square_root_series
from dpftrl.optimize._solvers import Function, minimize_lbfgs
from dpftrl.optimize._toeplitz_error import (
    ToeplitzError,
    log_majorant_sensitivity,
    reciprocal,
    reciprocal_pull_back,
    workload_loss,
)
from dpftrl.optimize.result import (
    Objective,
    Optimized,
    Progress,
    check_bands,
    check_objective,
    check_workload,
    loss_value,
)
from dpftrl.participation import Participation
from dpftrl.workload import PREFIX_SUM, Workload


def log_loss(error: ToeplitzError, participation: Participation) -> Function:
    """The log loss by the coefficients of C^-1, all of them.

    The sensitivity is the one that `BandedInverse` reports: that of the smallest majorant of |c|
    that does not increase. It has kinks, where the derivatives are those of one side.
    """
    rounds = participation.rounds

    def function(c_hat: Vector) -> tuple[float, Vector]:
        c = reciprocal(c_hat, rounds)
        if not np.isfinite(c @ c):
            return np.inf, np.zeros(len(c_hat))
        padded = np.zeros(rounds)
        padded[: len(c_hat)] = c_hat
        value, by_c_hat = error(padded)
        size, by_c = log_majorant_sensitivity(c, participation)
        slope = reciprocal_pull_back(by_c, c_hat, c)
        return value + size, by_c_hat[: len(c_hat)] + slope

    return function


def by_log_prefixes(function: Function) -> Function:
    """The same function by the logarithms of the sums of the first 2, 3, ... coefficients.

    Those sums are the coefficients of B for prefix sums: the last is what every row of Z leaves
    behind for good, and its inverse is the sum of all of c. On this scale they are all alike,
    and none can turn negative, which would make C grow without bound.
    """

    def changed(free: Vector) -> tuple[float, Vector]:
        value, by_c_hat = function(from_log_prefixes(free))
        by_prefix = by_c_hat - np.append(by_c_hat[1:], 0.0)
        return value, by_prefix[1:] * np.exp(free)

    return changed


def from_log_prefixes(free: Vector) -> Vector:
    """The coefficients of C^-1, the first of which is 1.

    >>> from_log_prefixes(np.log([0.5, 0.375]))
    array([ 1.   , -0.5  , -0.125])
    """
    return np.diff(np.append([0.0, 1.0], np.exp(free)))


# Kinks of the bound on the sensitivity stop a search early: it starts again where it stopped, as
# long as that gains something, and from places nearby.
RESTARTS, WITHIN, STEPS = 3, 1e-8, 200
NEARBY = (0.1, 0.1, 0.03)
# Past steps that shape the next: with all of them, quasi-Newton methods get along kinks best.
MEMORY = 40
# Up to so many bands, a search without derivatives has the last word.
POLISHED = 6


class _Point(NamedTuple):
    free: Vector
    value: float


def optimize_band_inverse(
    participation: Participation,
    bands: int,
    objective: Objective = "rms",
    workload: Workload = PREFIX_SUM,
    progress: Progress | None = None,
) -> Optimized[BandedInverse]:
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
    >>> print(f"{found.error_report.rms_loss:.3f}")
    9.360
    """
    started = time.perf_counter()
    check_objective(objective)
    bands = check_bands(bands, participation.rounds)
    check_workload(workload, participation.rounds)
    error = ToeplitzError(workload, participation.rounds, objective)
    function = log_loss(error, participation)
    searched = _search(by_log_prefixes(function), bands, progress)
    candidates = [*searched, inverse_square_root_series(bands)]

    def value(c_hat: Vector) -> float:
        mechanism = BandedInverse(c_hat.tolist())
        return loss_value(workload_loss(mechanism, participation, workload), objective)

    best = min(candidates, key=value)
    best = min(best, _polished(function, best), key=value)
    mechanism = BandedInverse(best.tolist())
    _, gradient = function(best)
    return Optimized(
        mechanism,
        participation,
        objective,
        workload_loss(mechanism, participation, workload),
        float(np.abs(gradient[1:]).max(initial=0.0)),
        time.perf_counter() - started,
    )


def _search(function: Function, bands: int, progress: Progress | None) -> list[Vector]:
    """The best with 2 bands, with twice as many, ... and with all, each a start for the next."""
    if bands == 1:  # nothing is free
        return [np.ones(1)]
    found: list[Vector] = []
    halvings = range((bands - 1).bit_length() - 1, -1, -1)
    for size in [-(-bands // 2**halving) for halving in halvings]:
        prefixes = np.log(np.cumsum(inverse_square_root_series(size))[1:])
        starts = [prefixes, prefixes - 1, np.full(size - 1, prefixes[-1])]
        if found:
            fewer = found[-1]
            starts.append(np.append(fewer, np.full(size - 1 - len(fewer), fewer[-1])))
        nearby = NEARBY if size in (2, bands) else ()
        found.append(_best_of(function, starts, nearby, progress))
    return [from_log_prefixes(free) for free in found]


def _best_of(
    function: Function, starts: list[Vector], nearby: Sequence[float], progress: Progress | None
) -> Vector:
    """The best that is reached from the starts, and then from around the best."""
    best = _Point(starts[0], np.inf)
    random = np.random.default_rng(len(starts[0]))
    for number in range(len(starts) + len(nearby)):
        around = number - len(starts)
        start = starts[number] if around < 0 else _moved(best.free, nearby[around], random)
        best = min(best, _descend(function, start), key=lambda point: point.value)
        if progress is not None:
            bands, total = len(start) + 1, len(starts) + len(nearby)
            loss = np.exp(best.value)
            progress(None, f"{bands} bands, start {number + 1} of {total}: loss {loss:.6g}")
    return best.free


def _moved(free: Vector, by: float, random: np.random.Generator) -> Vector:
    return free + by * random.standard_normal(len(free))


def _descend(function: Function, start: Vector) -> _Point:
    best = _Point(start, np.inf)
    for _ in range(RESTARTS):
        end = minimize_lbfgs(function, best.free, WITHIN, most_steps=STEPS, memory=MEMORY)
        gained = best.value - end.value
        if gained > 0:
            best = _Point(end.point, end.value)
        if not gained > WITHIN * 10:
            break
    return best


def _polished(function: Function, c_hat: Vector) -> Vector:
    """Few coefficients, by a search without derivatives: kinks do not stop it."""
    if not 2 <= len(c_hat) <= POLISHED:
        return c_hat
    from scipy import optimize

    def value(free: Vector) -> float:
        with np.errstate(all="ignore"):
            found = function(np.append(1.0, free))[0]
        return found if np.isfinite(found) else 1e9

    options = {"maxfev": 150 * len(c_hat), "xatol": 1e-10, "fatol": 1e-12}
    search = cast(Any, optimize).minimize
    found = search(value, c_hat[1:], method="Nelder-Mead", options=options)
    return np.append(1.0, cast(Vector, found.x)) if found.fun < value(c_hat[1:]) else c_hat
