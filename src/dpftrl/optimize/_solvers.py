"""What all optimizers share: their result, checks of their arguments, and three minimizers.

The minimizers are for functions that return their value and their gradient:

- `minimize_projected`: spectral projected gradients, for a convex set with a known projection.
- `minimize_lbfgs`: L-BFGS without constraints, for many parameters.
- `minimize`: damped Newton steps for few parameters, from many starts at once. Functions are
  evaluated in batches, so that a Hessian (by differences of exact gradients) or several step
  lengths cost about as much as one evaluation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar, final

import numpy as np

from dpftrl._internal.arrays import FloatArray, Vector
from dpftrl._internal.checks import whole_number
from dpftrl._internal.progress import Progress
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import ErrorReport, Mechanism
from dpftrl.participation import Participation
from dpftrl.workload import Workload

# The loss to minimize. A loss is error times sensitivity: `max` stands for MaxLoss (the largest
# error of a round), `rms` for RmsLoss (the root mean square error over the rounds).
Objective = Literal["max", "rms"]
MechanismType = TypeVar("MechanismType", bound=Mechanism, covariant=True)


@final
@dataclass(frozen=True)
class Optimized(Generic[MechanismType]):
    """An optimized mechanism, and how well the optimization went.

    Attributes:
        mechanism: The optimized mechanism.
        participation: The participation for which it was optimized.
        objective: The loss that was minimized.
        error_report: Error and sensitivity, recomputed from the final mechanism.
        gradient_norm: The largest derivative of the log loss by a free parameter at the end of the
            search. It is near zero at a local optimum.
        seconds: Duration of the optimization.
    """

    mechanism: MechanismType
    participation: Participation
    objective: Objective
    error_report: ErrorReport
    gradient_norm: float
    seconds: float

    @property
    def value(self) -> float:
        """The loss that was minimized."""
        return loss_value(self.error_report, self.objective)


def loss_value(error_report: ErrorReport, objective: Objective) -> float:
    """MaxLoss or RmsLoss, as the objective says."""
    return error_report.max_loss if objective == "max" else error_report.rms_loss


def check_objective(objective: str) -> Objective:
    """Return the objective, or raise `InvalidInput` if it does not exist."""
    if objective not in ("max", "rms"):
        raise InvalidInput(f"objective must be max or rms, got {objective!r}")
    return objective


def check_bands(bands: int, rounds: int) -> int:
    """Return the number of bands, or raise `InvalidInput` if it is not between 1 and `rounds`.

    >>> check_bands(9, rounds=8)
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: bands must be at most the 8 rounds, got 9
    """
    bands = whole_number("bands", bands)
    if bands > rounds:
        raise InvalidInput(f"bands must be at most the {rounds} rounds, got {bands}")
    return bands


def check_workload(workload: Workload, rounds: int) -> None:
    """Raise `InvalidInput` if all learning rates are zero: no mechanism then has any error."""
    if not workload.rates(rounds).max() > 0:
        raise InvalidInput(
            f"the learning rates of the first {rounds} rounds are all zero: "
            "every mechanism has the same error"
        )


def scipy_optimize() -> Any:
    """Import `scipy.optimize` on first use, since the import is slow.

    It is typed as `Any`, because scipy has few type annotations.
    """
    import scipy.optimize

    return scipy.optimize


# A function that returns the value and the gradient at a point.
Function = Callable[[Vector], tuple[float, Vector]]
# A function that returns the nearest point of the feasible set.
Projection = Callable[[Vector], Vector]

# The line search is non-monotone: the value after a step must be below the largest of this many
# previous values.
REMEMBERED = 10
# Limits of the step length, so that a curvature near zero does not give a useless step.
SMALLEST, LARGEST = 1e-8, 1e8
# The line search halves a step until it is this share of its full length. Shorter steps would be
# lost in rounding.
SMALLEST_SHARE = 1e-10
# Share of the decrease predicted by the gradient that a step must reach (Armijo's condition).
SUFFICIENT_DECREASE = 1e-4


class Projected(NamedTuple):
    """Result of `minimize_projected`.

    Attributes:
        point: The best point.
        value: The function's value at that point.
        gradient_norm: The largest entry of the projected gradient, which is zero at an optimum.
    """

    point: Vector
    value: float
    gradient_norm: float


def minimize_projected(
    function: Function,
    project: Projection,
    start: Vector,
    tolerance: float = 1e-9,
    most_steps: int = 1000,
    on_progress: Progress | None = None,
) -> Projected:
    """Minimize a function over a convex set by spectral projected gradients.

    Args:
        function: The logarithm of a loss, with its gradient.
        project: The projection onto the set.
        start: Where to start; it is projected first.
        tolerance: Stop when the projected gradient is this small.
        most_steps: Stop after this many steps.
        on_progress: Called after each step.
    """
    x = project(start)
    value, gradient = function(x)
    best = Projected(x, value, _residual(project, x, gradient))
    recent = [value]
    length = 1 / max(float(np.abs(gradient).max()), SMALLEST)
    for number in range(1, most_steps + 1):
        if _residual(project, x, gradient) <= tolerance:
            break
        direction = project(x - length * gradient) - x
        accepted = _line_search(function, x, direction, max(recent), float(direction @ gradient))
        if accepted is None:
            break
        next_x, value, next_gradient = accepted
        length = _spectral_step_length(next_x - x, next_gradient - gradient)
        x, gradient = next_x, next_gradient
        recent = [*recent[1 - REMEMBERED :], value]
        if value < best.value:
            best = Projected(x, value, _residual(project, x, gradient))
        if on_progress is not None:
            on_progress(None, f"step {number}: loss {np.exp(best.value):.6g}")
    return best


def _residual(project: Projection, x: Vector, gradient: Vector) -> float:
    """The largest entry of the projected gradient."""
    return float(np.abs(project(x - gradient) - x).max())


def _line_search(
    function: Function, x: Vector, direction: Vector, ceiling: float, slope: float
) -> tuple[Vector, float, Vector] | None:
    """Halve the step until the value is low enough.

    Returns:
        The accepted point with its value and gradient; None if no step is low enough.
    """
    share = 1.0
    while share > SMALLEST_SHARE:
        trial = x + share * direction
        value, gradient = function(trial)
        if np.isfinite(value) and value <= ceiling + SUFFICIENT_DECREASE * share * slope:
            return trial, value, gradient
        share /= 2
    return None


def _spectral_step_length(step: Vector, gradient_change: Vector) -> float:
    """The inverse curvature along the last step (Barzilai and Borwein)."""
    curvature = float(step @ gradient_change)
    if curvature <= 0:
        return LARGEST
    return min(max(float(step @ step) / curvature, SMALLEST), LARGEST)


# A callback after each step, with the number of the step, the point and its value. It returns
# whether to stop.
Watch = Callable[[int, Vector, float], bool]

# Steps over which the improvement is measured.
WINDOW = 10


class LbfgsResult(NamedTuple):
    """The end of a search by `minimize_lbfgs`.

    Attributes:
        point: The last point.
        value: The function's value there.
        gradient: Its gradient there.
        finished: False if `watch` stopped the search.
    """

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
) -> LbfgsResult:
    """Minimize a function without constraints by L-BFGS.

    Args:
        function: The logarithm of a loss, with its gradient; it need not be finite everywhere.
        start: Where to start; if the value there is not finite, the search ends there.
        within: Stop when the last ten steps together improved the value by less than this.
        most_steps: Stop after this many steps.
        memory: Number of past steps from which L-BFGS estimates the curvature.
        watch: Called after each step; the search stops if it returns True.
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

    end = scipy_optimize().minimize(
        _with_finite_values(function),
        start,
        jac=True,
        method="L-BFGS-B",
        callback=after_step,
        options={
            "maxcor": memory,
            "maxiter": most_steps,
            "maxfun": 20 * most_steps,  # generous: most steps take one or two evaluations
            "ftol": 1e-15,  # both tolerances are at rounding level: `after_step` ends the search
            "gtol": 1e-12,
        },
    )
    return LbfgsResult(end.x, float(end.fun), end.jac, finished=not stopped)


def _with_finite_values(function: Function) -> Function:
    """Return a large value where the function is not finite, so that the search turns back."""
    last = 1e9  # larger than any log loss: a start that is not finite never looks like a good end

    def guarded(x: Vector) -> tuple[float, Vector]:
        nonlocal last
        with np.errstate(all="ignore"):
            value, gradient = function(x)
        if np.isfinite(value) and np.all(np.isfinite(gradient)):
            last = value
            return value, gradient
        return last + 1.0, np.zeros(len(x))

    return guarded


# A function of one point per row, which returns the values and the gradients at these points.
BatchFunction = Callable[[FloatArray], tuple[FloatArray, FloatArray]]

DIFFERENCE = 1e-5  # step of the differences of gradients that give the Hessian
LONGEST = 8.0  # longest step along one axis of the Hessian
# The steps that are tried, as pairs of a damping and a factor of the length. Some optima lie at
# infinity, where the gain decreases exponentially. There Newton's method only takes steps of length
# 1, so that a step of four times the length is tried too.
DAMPING = np.array([0.0, 0.0, 1e-2, 1e-1, 1.0])
STRETCH = np.array([1.0, 4.0, 1.0, 1.0, 1.0])


class Minimum(NamedTuple):
    """The end point of the search from each start, one row per start."""

    points: FloatArray
    values: FloatArray
    gradients: FloatArray


def minimize(
    function: BatchFunction, starts: FloatArray, steps: int = 100, tolerance: float = 1e-12
) -> Minimum:
    """Minimize from every start by damped Newton steps.

    Args:
        function: The function to minimize, for a batch of points.
        starts: One start per row.
        steps: Largest number of steps per start.
        tolerance: A search ends when a step improves the value by less than this share of its
            absolute value, or of 1 if the absolute value is below 1.
    """
    points = starts.copy()
    values, gradients = function(points)
    active = np.arange(len(points))
    for _ in range(steps):
        step = _newton_step(function, points[active], gradients[active])
        gain = values[active] - step.values
        better = gain > 0
        improved = active[better]
        points[improved] = step.points[better]
        values[improved] = step.values[better]
        gradients[improved] = step.gradients[better]
        active = active[gain > tolerance * np.maximum(1, np.abs(values[active]))]
        if len(active) == 0:
            break
    return Minimum(points, values, gradients)


def _newton_step(function: BatchFunction, points: FloatArray, gradients: FloatArray) -> Minimum:
    """The best of several damped Newton steps from each point."""
    curvature, axes = np.linalg.eigh(_hessian(function, points, gradients))
    slope = (axes.swapaxes(1, 2) @ gradients[:, :, None])[:, :, 0]
    size = np.abs(slope).max(axis=1)[:, None, None]
    damped = np.abs(curvature)[:, None, :] + DAMPING[None, :, None] * size + 1e-14
    along = (-slope[:, None, :] / damped).clip(-LONGEST / 2, LONGEST / 2)
    along = (along * STRETCH[:, None]).clip(-LONGEST, LONGEST)
    trials = points[:, None, :] + along @ axes.swapaxes(1, 2)
    count, choices, size_of_point = trials.shape
    values, trial_gradients = function(trials.reshape(-1, size_of_point))
    values = np.where(np.isfinite(values), values, np.inf).reshape(count, choices)
    best = values.argmin(axis=1)
    row = np.arange(int(count))
    return Minimum(
        trials[row, best],
        values[row, best],
        trial_gradients.reshape(count, choices, size_of_point)[row, best],
    )


def _hessian(function: BatchFunction, points: FloatArray, gradients: FloatArray) -> FloatArray:
    """The Hessian at each point, by forward differences of the gradient, made symmetric."""
    count, size = points.shape
    moved = points[:, None, :] + DIFFERENCE * np.eye(size)
    moved_gradients = function(moved.reshape(-1, size))[1].reshape(count, size, size)
    hessian = (moved_gradients - gradients[:, None, :]) / DIFFERENCE
    return (hessian + hessian.swapaxes(1, 2)) / 2
