"""Damped Newton steps for many starts at once.

Functions are evaluated in batches, so that a Hessian by differences of exact gradients, or a whole
range of step lengths, costs about as much as one evaluation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpftrl._internal.arrays import FloatArray, Vector
from dpftrl.optimize.result import Progress


def scipy_optimize() -> Any:
    """Imported when needed, since it takes a while; without types, since it ships few."""
    import scipy.optimize

    return scipy.optimize


Function = Callable[[Vector], tuple[float, Vector]]
Projection = Callable[[Vector], Vector]

# A step may end above the last few values, but below the largest of so many.
REMEMBERED = 10
SMALLEST, LARGEST = 1e-8, 1e8


class Projected(NamedTuple):
    """The best point, its value, and how far its projected gradient still is from zero."""

    point: Vector
    value: float
    gradient_norm: float


def minimize_projected(
    function: Function,
    project: Projection,
    start: Vector,
    tolerance: float = 1e-9,
    most_steps: int = 1000,
    progress: Progress | None = None,
) -> Projected:
    """Minimise a log loss with its derivatives over the set that `project` projects to."""
    x = project(start)
    value, gradient = function(x)
    best = Projected(x, value, _residual(project, x, gradient))
    recent = [value]
    length = 1 / max(float(np.abs(gradient).max()), SMALLEST)
    for number in range(1, most_steps + 1):
        if _residual(project, x, gradient) <= tolerance:
            break
        direction = project(x - length * gradient) - x
        found = _search(function, x, direction, max(recent), float(direction @ gradient))
        if found is None:
            break
        ahead, value, slope = found
        length = _spectral(ahead - x, slope - gradient)
        x, gradient = ahead, slope
        recent = [*recent[1 - REMEMBERED :], value]
        if value < best.value:
            best = Projected(x, value, _residual(project, x, gradient))
        if progress is not None:
            progress(None, f"step {number}: loss {np.exp(best.value):.6g}")
    return best


def _residual(project: Projection, x: Vector, gradient: Vector) -> float:
    return float(np.abs(project(x - gradient) - x).max())


def _search(
    function: Function, x: Vector, direction: Vector, ceiling: float, slope: float
) -> tuple[Vector, float, Vector] | None:
    """Halve the step until the loss is low enough; None when rounding hides any progress."""
    share = 1.0
    while share > 1e-10:
        ahead = x + share * direction
        value, gradient = function(ahead)
        if np.isfinite(value) and value <= ceiling + 1e-4 * share * slope:
            return ahead, value, gradient
        share /= 2
    return None


def _spectral(step: Vector, bend: Vector) -> float:
    """The inverse curvature along the last step."""
    curvature = float(step @ bend)
    if curvature <= 0:
        return LARGEST
    return min(max(float(step @ step) / curvature, SMALLEST), LARGEST)


# Sees the number of each step, the point and its value; says whether to stop.
Watch = Callable[[int, Vector, float], bool]

# Steps over which the improvement is measured.
WINDOW = 10


class Reached(NamedTuple):
    """Where the search ended; `finished` unless whoever watched it stopped it."""

    point: Vector
    value: float
    gradient: Vector
    finished: bool


def minimize_lbfgs(
    function: Function,
    start: Vector,
    within: float,
    most_steps: int = 1000,
    memory: int = 10,
    watch: Watch | None = None,
) -> Reached:
    """Minimise a log loss with its derivatives.

    Args:
        function: Gives the value and the derivatives; the value need not be finite everywhere.
        start: Where to start; if the value there is not finite, the search ends there.
        within: Stop when ten steps together have gained less than this.
        most_steps: Stop after so many steps.
        memory: Pairs of past steps that shape the next one.
        watch: Called after each step.
    """
    values: list[float] = []
    stopped = False

    def after_step(intermediate_result: Any) -> None:
        nonlocal stopped
        values.append(float(intermediate_result.fun))
        if watch is not None and watch(len(values), intermediate_result.x, values[-1]):
            stopped = True
            raise StopIteration
        if len(values) > WINDOW and values[-1 - WINDOW] - values[-1] < within:
            raise StopIteration

    found = scipy_optimize().minimize(
        _finite(function),
        start,
        jac=True,
        method="L-BFGS-B",
        callback=after_step,
        options={
            "maxcor": memory,
            "maxiter": most_steps,
            "maxfun": 20 * most_steps,
            "ftol": 1e-15,
            "gtol": 1e-12,
        },
    )
    return Reached(found.x, float(found.fun), found.jac, finished=not stopped)


def _finite(function: Function) -> Function:
    """Put a hill where the function has no finite value: the line search then turns back."""
    last = 1e9  # so that a start without a value never looks like a good end

    def guarded(x: Vector) -> tuple[float, Vector]:
        nonlocal last
        with np.errstate(all="ignore"):
            value, gradient = function(x)
        if np.isfinite(value) and np.all(np.isfinite(gradient)):
            last = value
            return value, gradient
        return last + 1.0, np.zeros(len(x))

    return guarded


# Takes one point a row; gives their values and gradients.
BatchFunction = Callable[[FloatArray], tuple[FloatArray, FloatArray]]

DIFFERENCE = 1e-5
LONGEST = 8.0
# Steps that are tried: how much to damp, and how far to go. An optimum that lies at infinity, where
# the gain falls off exponentially, is reached in steps of 1 by Newton's method itself; hence the 4.
DAMPING = np.array([0.0, 0.0, 1e-2, 1e-1, 1.0])
STRETCH = np.array([1.0, 4.0, 1.0, 1.0, 1.0])


class Minimum(NamedTuple):
    """Where the search ended, for each start."""

    points: FloatArray
    values: FloatArray
    gradients: FloatArray


def minimize(
    function: BatchFunction, starts: FloatArray, steps: int = 100, tolerance: float = 1e-12
) -> Minimum:
    """Go downhill from every start until no damping gives a step that is worth taking."""
    points = starts.copy()
    values, gradients = function(points)
    active = np.arange(len(points))
    for _ in range(steps):
        found = _step(function, points[active], gradients[active])
        gain = values[active] - found.values
        better = gain > 0
        chosen = active[better]
        points[chosen] = found.points[better]
        values[chosen] = found.values[better]
        gradients[chosen] = found.gradients[better]
        active = active[gain > tolerance * np.maximum(1, np.abs(values[active]))]
        if len(active) == 0:
            break
    return Minimum(points, values, gradients)


def _step(function: BatchFunction, points: FloatArray, gradients: FloatArray) -> Minimum:
    """The best of several damped Newton steps from each point."""
    curvature, axes = np.linalg.eigh(_hessian(function, points, gradients))
    slope = (axes.swapaxes(1, 2) @ gradients[:, :, None])[:, :, 0]
    size = np.abs(slope).max(axis=1)[:, None, None]
    damped = np.abs(curvature)[:, None, :] + DAMPING[None, :, None] * size + 1e-14
    along = (-slope[:, None, :] / damped).clip(-LONGEST / 2, LONGEST / 2)
    along = (along * STRETCH[:, None]).clip(-LONGEST, LONGEST)
    trials = points[:, None, :] + along @ axes.swapaxes(1, 2)
    count, choices, size_of_point = trials.shape
    found, slopes = function(trials.reshape(-1, size_of_point))
    found = np.where(np.isfinite(found), found, np.inf).reshape(count, choices)
    best = found.argmin(axis=1)
    row = np.arange(int(count))
    return Minimum(
        trials[row, best],
        found[row, best],
        slopes.reshape(count, choices, size_of_point)[row, best],
    )


def _hessian(function: BatchFunction, points: FloatArray, gradients: FloatArray) -> FloatArray:
    count, size = points.shape
    moved = points[:, None, :] + DIFFERENCE * np.eye(size)
    slopes = function(moved.reshape(-1, size))[1].reshape(count, size, size)
    hessian = (slopes - gradients[:, None, :]) / DIFFERENCE
    return (hessian + hessian.swapaxes(1, 2)) / 2
