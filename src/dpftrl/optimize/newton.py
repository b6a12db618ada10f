"""Damped Newton steps for many starts at once.

Functions are evaluated in batches, so that a Hessian by differences of exact gradients, or a whole
range of step lengths, costs about as much as one evaluation.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Takes one point a row; gives their values and gradients.
Function = Callable[[Array], tuple[Array, Array]]

DIFFERENCE = 1e-5
LONGEST = 8.0
# Steps that are tried: how much to damp, and how far to go. An optimum that lies at infinity, where
# the gain falls off exponentially, is reached in steps of 1 by Newton's method itself; hence the 4.
DAMPING = np.array([0.0, 0.0, 1e-2, 1e-1, 1.0])
STRETCH = np.array([1.0, 4.0, 1.0, 1.0, 1.0])


class Minimum(NamedTuple):
    """Where the search ended, for each start."""

    points: Array
    values: Array
    gradients: Array


def minimise(
    function: Function, starts: Array, steps: int = 100, tolerance: float = 1e-12
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


def _step(function: Function, points: Array, gradients: Array) -> Minimum:
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


def _hessian(function: Function, points: Array, gradients: Array) -> Array:
    count, size = points.shape
    moved = points[:, None, :] + DIFFERENCE * np.eye(size)
    slopes = function(moved.reshape(-1, size))[1].reshape(count, size, size)
    hessian = (slopes - gradients[:, None, :]) / DIFFERENCE
    return (hessian + hessian.swapaxes(1, 2)) / 2
