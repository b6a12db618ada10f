"""BandInvMF: optimizes mechanisms whose C^-1 is a banded Toeplitz matrix.

Their noise is a weighted sum of the last few rows of Z.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl._internal.deprecation import renamed_argument
from dpftrl._internal.progress import Progress
from dpftrl.mechanisms import BandedInverse
from dpftrl.mechanisms.square_root import inverse_square_root_series
from dpftrl.optimize._solvers import (
    Function,
    Objective,
    Optimized,
    check_bands,
    check_objective,
    check_workload,
    loss_value,
    minimize_lbfgs,
)
from dpftrl.optimize._toeplitz_error import (
    ToeplitzError,
    log_majorant_sensitivity,
    reciprocal,
    reciprocal_pull_back,
    workload_loss,
)
from dpftrl.participation import Participation
from dpftrl.workload import PREFIX_SUM, Workload


def log_loss(error: ToeplitzError, participation: Participation) -> Function:
    """The log loss as a function of all coefficients of C^-1.

    The sensitivity is the one that `BandedInverse` reports: that of the smallest non-increasing
    majorant of |c|. This bound has kinks. At a kink the derivatives are one-sided.
    """
    rounds = participation.rounds

    def function(c_hat: Vector) -> tuple[float, Vector]:
        c = reciprocal(c_hat, rounds)
        if not np.isfinite(c @ c):
            return np.inf, np.zeros(len(c_hat))
        padded = np.zeros(rounds)
        padded[: len(c_hat)] = c_hat
        value, by_c_hat = error(padded)
        sensitivity, by_c = log_majorant_sensitivity(c, participation)
        sensitivity_by_c_hat = reciprocal_pull_back(by_c, c_hat, c)
        return value + sensitivity, by_c_hat[: len(c_hat)] + sensitivity_by_c_hat

    return function


def by_log_prefixes(function: Function) -> Function:
    """Turn a function of the coefficients of C^-1 into a function of free parameters.

    The free parameters are the logs of the sums of the first 2, 3, ... coefficients. For the prefix
    sum workload, the sums of the first coefficients of C^-1 are the coefficients of B. The last
    sum is the part of every row of Z that stays in the model for good. On the log scale the
    parameters are of similar size, and no sum can turn negative, which would make C grow without
    bound.
    """

    def of_log_prefixes(free: Vector) -> tuple[float, Vector]:
        value, by_c_hat = function(from_log_prefixes(free))
        by_prefix = by_c_hat - np.append(by_c_hat[1:], 0.0)
        return value, by_prefix[1:] * np.exp(free)

    return of_log_prefixes


def from_log_prefixes(free: Vector) -> Vector:
    """The coefficients of C^-1 from the logs of their prefix sums; the first coefficient is 1.

    >>> from_log_prefixes(np.log([0.5, 0.375]))
    array([ 1.   , -0.5  , -0.125])
    """
    return np.diff(np.append([0.0, 1.0], np.exp(free)))


# Kinks of the bound on the sensitivity stop a search early. A search is therefore restarted where
# it stopped, as long as this improves the loss, and from random points near the best.
RESTARTS, WITHIN, STEPS = 3, 1e-8, 200
NEARBY = (0.1, 0.1, 0.03)  # standard deviations of the random moves away from the best point
# Past steps that L-BFGS remembers: many, because that works best along kinks.
MEMORY = 40
# Up to this many bands, a search without derivatives follows at the end.
POLISHED = 6


class _Point(NamedTuple):
    """The free parameters (log prefix sums), and the log loss there."""

    free: Vector
    value: float


@renamed_argument("progress", "on_progress")
def optimize_band_inverse(
    participation: Participation,
    bands: int,
    objective: Objective = "rms",
    workload: Workload = PREFIX_SUM,
    on_progress: Progress | None = None,
) -> Optimized[BandedInverse]:
    """Find the mechanism with `bands` coefficients of C^-1 that has the smallest loss.

    The loss contains the sensitivity that `BandedInverse` reports, which is an upper bound where
    the coefficients of C increase. The loss is never larger than that of `inv-sqrt` with as many
    bands, or, with two or more bands, that of `lambda`. There are many local optima whose losses
    differ by a few parts in ten thousand. The same input gives the same output.

    Args:
        participation: The participation to optimize for.
        bands: Number of coefficients of C^-1 (the first is 1).
        objective: `max` for MaxLoss, `rms` for RmsLoss.
        workload: How the server turns updates into the model.
        on_progress: Called after the search from each start.

    >>> from dpftrl.participation import MinSep
    >>> optimized = optimize_band_inverse(MinSep(rounds=256, min_sep=32), bands=4)
    >>> print(f"{optimized.error_report.rms_loss:.3f}")
    9.360
    """
    started = time.perf_counter()
    check_objective(objective)
    bands = check_bands(bands, participation.rounds)
    check_workload(workload, participation.rounds)
    error = ToeplitzError(workload, participation.rounds, objective)
    function = log_loss(error, participation)
    solutions = _search(by_log_prefixes(function), bands, on_progress)
    candidates = [*solutions, inverse_square_root_series(bands)]

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


def _search(function: Function, bands: int, on_progress: Progress | None) -> list[Vector]:
    """Optimize for about 2 bands, then about twice as many, and so on up to `bands`.

    The solution for fewer bands is one of the starts for the next size.

    Returns:
        The coefficients of C^-1 at each size.
    """
    if bands == 1:  # the only coefficient is 1: there is no free parameter
        return [np.ones(1)]
    solutions: list[Vector] = []
    halvings = range((bands - 1).bit_length() - 1, -1, -1)
    for size in [-(-bands // 2**halving) for halving in halvings]:
        prefixes = np.log(np.cumsum(inverse_square_root_series(size))[1:])
        starts = [prefixes, prefixes - 1, np.full(size - 1, prefixes[-1])]
        if solutions:
            fewer = solutions[-1]
            starts.append(np.append(fewer, np.full(size - 1 - len(fewer), fewer[-1])))
        nearby = NEARBY if size in (2, bands) else ()
        solutions.append(_best_of(function, starts, nearby, on_progress))
    return [from_log_prefixes(free) for free in solutions]


def _best_of(
    function: Function, starts: list[Vector], nearby: Sequence[float], on_progress: Progress | None
) -> Vector:
    """The best end point of searches from the starts, and then from random points near the best."""
    best = _Point(starts[0], np.inf)
    random = np.random.default_rng(len(starts[0]))
    for number in range(len(starts) + len(nearby)):
        move = number - len(starts)
        start = starts[number] if move < 0 else _moved(best.free, nearby[move], random)
        best = min(best, _descend(function, start), key=lambda point: point.value)
        if on_progress is not None:
            bands, total = len(start) + 1, len(starts) + len(nearby)
            loss = np.exp(best.value)
            on_progress(None, f"{bands} bands, start {number + 1} of {total}: loss {loss:.6g}")
    return best.free


def _moved(free: Vector, deviation: float, random: np.random.Generator) -> Vector:
    """The point with normal noise of this standard deviation added."""
    return free + deviation * random.standard_normal(len(free))


def _descend(function: Function, start: Vector) -> _Point:
    """Run L-BFGS from a start, and again from where it stopped while that improves the loss."""
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
    """Improve few coefficients by a search without derivatives, which does not stop at kinks."""
    if not 2 <= len(c_hat) <= POLISHED:
        return c_hat
    from scipy import optimize

    def value(free: Vector) -> float:
        with np.errstate(all="ignore"):
            log_value = function(np.append(1.0, free))[0]
        return log_value if np.isfinite(log_value) else 1e9  # larger than any log loss

    options = {"maxfev": 150 * len(c_hat), "xatol": 1e-10, "fatol": 1e-12}
    minimize = cast(Any, optimize).minimize
    end = minimize(value, c_hat[1:], method="Nelder-Mead", options=options)
    return np.append(1.0, cast(Vector, end.x)) if end.fun < value(c_hat[1:]) else c_hat
