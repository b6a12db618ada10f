"""Exact sums of per-example gradients, which Opacus keeps as one tensor per parameter."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpftrl._internal.arrays import Array, Vector
from dpftrl._internal.compiled import TILE, compiled
from dpftrl._internal.threads import parallel_map
from dpftrl.clipping import SLACK, ExactSum, add_clipped, sum_of_squares
from dpftrl.errors import InvalidInput

# Coordinates that one thread adds at a time: enough to be worth a thread.
SHARE = 32 * TILE
# Numbers in float64 that a device holds at a time: 64 MB.
PIECE = 2**23
# The unit roundoff of float64.
ROUNDOFF = 2.0**-53


def add_examples(total: ExactSum, gradients: Sequence[NDArray[Any]], threads: int = 1) -> None:
    """Clip the gradient of every example in L2 norm and add it to an exact sum.

    Args:
        total: The sum.
        gradients: For each parameter, an array with one row per example, in float32 or float64.
        threads: Number of threads.

    Guarantees:
        What an example adds has a norm of at most the clip norm, exactly; see `ExactSum.add`, which
        does the same for one example. An example whose gradient has a NaN, an infinity or a norm
        that overflows adds zero.
    """
    examples = _examples(total, [len(rows) for rows in gradients])
    factors = clipping_factors(gradients, total.grid.clip_norm)
    unit, most = 1 / total.grid.step, total.grid.clip_norm / total.grid.step
    end = 0
    for rows in gradients:
        start, end = end, end + rows.shape[1]
        part = total.steps[start:end]
        add_share = partial(_add_share, rows, factors, unit, most, part)
        parallel_map(add_share, range(0, rows.shape[1], SHARE), threads)
    total.updates += examples


def add_examples_on_device(total: ExactSum, gradients: Sequence[Tensor]) -> None:
    """Do the same as `add_examples`, on the device of the gradients, such as a GPU.

    Only the sums are copied to the CPU. The norm is computed in float64, with a margin for the
    rounding of a sum of so many squares in any order.
    """
    examples = _examples(total, [len(rows) for rows in gradients])
    slack = SLACK + 2 * total.steps.size * ROUNDOFF
    limit = total.grid.clip_norm / (1 + slack)
    device = gradients[0].device
    squares = torch.zeros(examples, dtype=torch.float64, device=device)
    for rows in gradients:
        for columns in _columns(rows):
            squares += rows[:, columns].double().square().sum(1).to(device)
    norms = squares.sqrt()
    factors = torch.where(torch.isfinite(norms), (limit / norms).clamp(max=1), 0.0)[:, None]
    end = 0
    for rows in gradients:
        start, end = end, end + rows.shape[1]
        scale = factors.to(rows.device)
        for columns in _columns(rows):
            clipped = torch.where(scale > 0, rows[:, columns].double() * scale, 0.0)
            steps = (clipped / total.grid.step).trunc().to(torch.int64).sum(0)
            total.steps[start:end][columns] += steps.cpu().numpy()
    total.updates += examples


def _columns(rows: Tensor) -> list[slice]:
    """Slices of columns that fit into memory in float64."""
    width = max(1, PIECE // max(1, len(rows)))
    return [slice(first, first + width) for first in range(0, rows.shape[1], width)]


def _examples(total: ExactSum, counts: list[int]) -> int:
    """The number of examples; raises if it is not the same for all parameters, or too large."""
    if len(set(counts)) != 1:
        raise InvalidInput(
            f"the parameters have gradients of {sorted(set(counts))} examples; all need the same"
        )
    if total.updates + counts[0] > total.grid.most_updates:
        raise InvalidInput(f"a sum on this grid holds {total.grid.most_updates:,} examples")
    return counts[0]


def clipping_factors(gradients: Sequence[NDArray[Any]], clip_norm: float) -> Vector:
    """The factor that clips each example; zero for a gradient that is not finite."""
    limit = clip_norm / (1 + SLACK)
    squares = [squares_of_rows(rows) for rows in gradients]
    factors = np.zeros(len(gradients[0]))
    for example in range(len(factors)):
        norm = _root_of_sum([tiles[example] for tiles in squares])
        if math.isfinite(norm):
            factors[example] = 1.0 if norm <= limit else limit / norm
    return factors


def _root_of_sum(parts: Sequence[Vector]) -> float:
    """The square root of an exact sum; NaN if it is not finite."""
    try:
        return math.sqrt(math.fsum(chain.from_iterable(parts)))
    except (OverflowError, ValueError):  # the sum overflows, or contains inf and NaN
        return math.nan


def _add_share(
    rows: Array, factors: Vector, unit: float, most: float, steps: Array, start: int
) -> None:
    add_rows(rows, factors, unit, most, steps, start, min(start + SHARE, rows.shape[1]))


@numba.njit(**compiled)
def squares_of_rows(rows: Array) -> Array:
    """For every row, the sum of squares of each tile of TILE values."""
    sums = np.zeros((rows.shape[0], -(-rows.shape[1] // TILE)))
    for row in range(rows.shape[0]):
        sums[row] = sum_of_squares(rows[row])
    return sums


@numba.njit(**compiled)
def add_rows(
    rows: Array, factors: Array, unit: float, most: float, steps: Array, start: int, end: int
) -> None:
    """Add all rows to `steps` between two columns, tile by tile; see `add_clipped`.

    A tile of the sum stays in the cache until all rows are added to it.

    Args:
        rows: One row per example.
        factors: A factor for every row. Rows with factor 0 are left out.
        unit: Steps of the grid per 1.0; a power of two.
        most: The largest number of steps that a coordinate can have after scaling.
        steps: The sum, in steps; changed in place.
        start: The first column.
        end: The column after the last.
    """
    for first in range(start, end, TILE):
        last = min(first + TILE, end)
        for row in range(rows.shape[0]):
            if factors[row] > 0:
                add_clipped(rows[row][first:last], factors[row], unit, most, steps[first:last])
