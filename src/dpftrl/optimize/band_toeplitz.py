"""BandToep: the best Toeplitz strategy with so many bands."""

import time

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl.mechanisms import BLT, Toeplitz
from dpftrl.mechanisms.square_root import square_root_series
from dpftrl.optimize._solvers import Function, Projected, minimize_projected, scipy_optimize
from dpftrl.optimize._toeplitz_error import (
    ToeplitzError,
    log_sensitivity,
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
)
from dpftrl.participation import Participation
from dpftrl.workload import PREFIX_SUM, Workload

# The largest row norm under a learning-rate schedule is approached by p-norms that get sharper.
SHARPNESS = (30.0, 300.0, 3000.0)


def optimize_band_toeplitz(
    participation: Participation,
    bands: int,
    objective: Objective = "rms",
    workload: Workload = PREFIX_SUM,
    progress: Progress | None = None,
) -> Optimized[Toeplitz]:
    """The Toeplitz strategy with `bands` non-negative coefficients that has the smallest loss.

    With as many bands as min_sep at most, every such strategy has an exact sensitivity; with more,
    the search is over coefficients that do not increase, whose sensitivity is exact too. With as
    many bands as rounds this is the best that any such Toeplitz mechanism can do.

    Args:
        participation: What to optimise for.
        bands: Number of coefficients (the first is 1; the best may end in zeros).
        objective: `max` for MaxLoss, `rms` for RmsLoss.
        workload: What the server does with the updates.
        progress: Called after each step.

    >>> from dpftrl.participation import MinSep
    >>> found = optimize_band_toeplitz(MinSep(rounds=256, min_sep=32), bands=32)
    >>> print(f"{found.error_report.rms_loss:.3f} {found.error_report.sensitivity.kind}")
    8.731 exact
    """
    started = time.perf_counter()
    check_objective(objective)
    bands = check_bands(bands, participation.rounds)
    check_workload(workload, participation.rounds)
    end = _search(participation, bands, objective, workload, progress)
    mechanism = Toeplitz((end.point / end.point[0]).tolist())
    return Optimized(
        mechanism,
        participation,
        objective,
        workload_loss(mechanism, participation, workload),
        end.gradient_norm,
        time.perf_counter() - started,
    )


def _search(
    participation: Participation,
    bands: int,
    objective: Objective,
    workload: Workload,
    progress: Progress | None,
) -> Projected:
    project = falling if bands > participation.min_sep else non_negative
    smooth = objective == "rms" or workload.is_toeplitz
    end = Projected(square_root_series(bands), np.inf, np.inf)
    for sharpness in SHARPNESS[-1:] if smooth else SHARPNESS:
        error = ToeplitzError(workload, participation.rounds, objective, sharpness)
        function = log_loss(error, participation)
        end = minimize_projected(function, project, end.point, progress=progress)
    return end


def log_loss(error: ToeplitzError, participation: Participation) -> Function:
    """The log loss by the first coefficients of C, which need not be scaled."""

    def function(c: Vector) -> tuple[float, Vector]:
        padded = np.zeros(participation.rounds)
        padded[: len(c)] = c
        with np.errstate(all="ignore"):  # an inverse that overflows is no step to take
            if not c[0] > 0:
                return np.inf, np.zeros(len(c))
            inverse = reciprocal(c, participation.rounds)
            if not np.isfinite(inverse @ inverse):
                return np.inf, np.zeros(len(c))
            value, by_inverse = error(inverse)
            size, by_c = log_sensitivity(padded, participation)
            slope = reciprocal_pull_back(by_inverse, c, inverse)
        return value + size, slope + by_c[: len(c)]

    return function


def non_negative(c: Vector) -> Vector:
    """The nearest non-negative coefficients."""
    return np.maximum(c, 0.0)


def falling(c: Vector) -> Vector:
    """The nearest non-negative coefficients of which none is larger than the one before it."""
    nearest: Vector = scipy_optimize().isotonic_regression(c, increasing=False).x
    return np.maximum(np.minimum.accumulate(nearest), 0.0)


MOST_ROUNDS = 256


def best_toeplitz_ratio(found: Optimized[BLT], workload: Workload = PREFIX_SUM) -> float | None:
    """The BLT's loss over that of the best Toeplitz mechanism found; None above 256 rounds.

    A BLT is a Toeplitz mechanism whose coefficients do not rise, so that the ratio says what having
    few parameters costs.
    """
    participation = found.participation
    if participation.rounds > MOST_ROUNDS:
        return None
    best = optimize_band_toeplitz(
        participation, participation.rounds, found.objective, workload=workload
    )
    return found.value / best.value
