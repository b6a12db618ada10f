"""Minimising over a convex set: spectral projected gradients (Birgin, Martinez and Raydan 2000).

The loss of a Toeplitz mechanism is so well conditioned in its coefficients that a few dozen steps
reach the last digits, while substitutions that remove the constraints (exponentials, tail sums)
spoil that and take thousands.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpftrl.optimize.requests import Progress

Vector = NDArray[np.float64]
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


def minimise_projected(
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
