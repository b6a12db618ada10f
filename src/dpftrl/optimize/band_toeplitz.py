"""BandToep: optimizes banded Toeplitz strategies."""

import time

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl._internal.deprecation import renamed_argument
from dpftrl._internal.progress import Progress
from dpftrl.mechanisms import BLT, Toeplitz
from dpftrl.mechanisms.square_root import square_root_series
from dpftrl.optimize._solvers import (
    Function,
    Objective,
    Optimized,
    Projected,
    check_bands,
    check_objective,
    check_workload,
    minimize_projected,
    scipy_optimize,
)
from dpftrl.optimize._toeplitz_error import (
    ToeplitzError,
    log_sensitivity,
    reciprocal,
    reciprocal_pull_back,
    workload_loss,
)
from dpftrl.participation import Participation
from dpftrl.workload import PREFIX_SUM, Workload

# Under a learning-rate schedule, p-norms with these p approximate the largest row norm, which is
# not smooth. Each search starts at the solution for the previous p.
SHARPNESS = (30.0, 300.0, 3000.0)
# Up to this many rounds, optimizing as many bands as rounds takes a second or so.
MOST_ROUNDS = 256


@renamed_argument("progress", "on_progress")
def optimize_band_toeplitz(
    participation: Participation,
    bands: int,
    objective: Objective = "rms",
    workload: Workload = PREFIX_SUM,
    on_progress: Progress | None = None,
) -> Optimized[Toeplitz]:
    """Find the Toeplitz strategy with `bands` non-negative coefficients and the smallest loss.

    The sensitivity is always exact. With at most min_sep bands it is known for every such strategy.
    With more bands, the search is restricted to coefficients that do not increase, for which it is
    known too. With as many bands as rounds, no Toeplitz mechanism with such coefficients has a
    smaller loss.

    Args:
        participation: The participation to optimize for.
        bands: Number of coefficients. The first is 1, and the last ones may be zero.
        objective: `max` for MaxLoss, `rms` for RmsLoss.
        workload: How the server turns updates into the model.
        on_progress: Called after each step.

    >>> from dpftrl.participation import MinSep
    >>> optimized = optimize_band_toeplitz(MinSep(rounds=256, min_sep=32), bands=32)
    >>> report = optimized.error_report
    >>> print(f"{report.rms_loss:.3f} {report.sensitivity.kind}")
    8.731 exact
    """
    started = time.perf_counter()
    check_objective(objective)
    bands = check_bands(bands, participation.rounds)
    check_workload(workload, participation.rounds)
    end = _search(participation, bands, objective, workload, on_progress)
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
    on_progress: Progress | None,
) -> Projected:
    """Minimize the log loss, for increasing sharpness where the objective is not smooth."""
    project = falling if bands > participation.min_sep else non_negative
    smooth = objective == "rms" or workload.is_toeplitz
    end = Projected(square_root_series(bands), np.inf, np.inf)
    for sharpness in SHARPNESS[-1:] if smooth else SHARPNESS:
        error = ToeplitzError(workload, participation.rounds, objective, sharpness)
        function = log_loss(error, participation)
        end = minimize_projected(function, project, end.point, on_progress=on_progress)
    return end


def log_loss(error: ToeplitzError, participation: Participation) -> Function:
    """The log loss as a function of the first coefficients of C, at any scale of C."""

    def function(c: Vector) -> tuple[float, Vector]:
        padded = np.zeros(participation.rounds)
        padded[: len(c)] = c
        with np.errstate(all="ignore"):  # an inverse that overflows makes the value infinite
            if not c[0] > 0:
                return np.inf, np.zeros(len(c))
            inverse = reciprocal(c, participation.rounds)
            if not np.isfinite(inverse @ inverse):
                return np.inf, np.zeros(len(c))
            value, by_inverse = error(inverse)
            sensitivity, by_c = log_sensitivity(padded, participation)
            error_by_c = reciprocal_pull_back(by_inverse, c, inverse)
        return value + sensitivity, error_by_c + by_c[: len(c)]

    return function


def non_negative(c: Vector) -> Vector:
    """The nearest non-negative coefficients."""
    return np.maximum(c, 0.0)


def falling(c: Vector) -> Vector:
    """The nearest non-negative coefficients that do not increase."""
    nearest: Vector = scipy_optimize().isotonic_regression(c, increasing=False).x
    return np.maximum(np.minimum.accumulate(nearest), 0.0)


@renamed_argument("found", "optimized")
def best_toeplitz_ratio(optimized: Optimized[BLT], workload: Workload = PREFIX_SUM) -> float | None:
    """The loss of an optimized BLT divided by that of the best Toeplitz mechanism.

    A BLT is a Toeplitz mechanism whose coefficients do not increase. The ratio is thus the price of
    having few parameters.

    Returns:
        The ratio; None for more than 256 rounds, where the optimization would be slow.
    """
    participation = optimized.participation
    if participation.rounds > MOST_ROUNDS:
        return None
    best = optimize_band_toeplitz(
        participation, participation.rounds, optimized.objective, workload=workload
    )
    return optimized.value / best.value
