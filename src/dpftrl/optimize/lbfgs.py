"""L-BFGS from scipy, with a rule for stopping that suits losses and a way to watch it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpftrl.optimize.scipy_door import scipy_optimize

Vector = NDArray[np.float64]
Function = Callable[[Vector], tuple[float, Vector]]
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


def minimise_lbfgs(
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
