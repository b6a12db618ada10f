"""Compiled inner loops for per-unit gradients: squared norms, and exact sums on a grid."""

# pyright: basic
import numba
import numpy as np

from dpftrl._internal.arrays import Array
from dpftrl._internal.compiled import TILE, bits_of, compiled
from dpftrl.clipping import EXACT_SHIFT, SHIFT, SHIFT_BITS

# Whole numbers up to here, and their sums if they stay below, are exact in float64.
LARGEST_EXACT = 2.0**53
# Independent sums of squares: enough for vector instructions, and quickly added up at the end.
LANES = 64


@numba.njit(**compiled)
def add_squares(gradients: Array, start: int, stop: int, totals: Array) -> None:
    """Add the sum of squares of each row from `start` to `stop` to `totals`, in float64."""
    sums = np.empty(LANES)
    size = gradients.shape[1]
    for unit in range(start, stop):
        sums[:] = 0
        for low in range(0, size - LANES + 1, LANES):
            part = gradients[unit, low : low + LANES]
            for i in range(LANES):  # independent sums, so that they are vectorized
                sums[i] += np.float64(part[i]) * np.float64(part[i])
        for i in range(size // LANES * LANES, size):
            sums[i % LANES] += np.float64(gradients[unit, i]) ** 2
        totals[unit] += sums.sum()


@numba.njit(**compiled)
def add_units(
    gradients: Array,
    factors: Array,
    steps_per_unit: float,
    most: float,
    start: int,
    stop: int,
    steps: Array,
) -> None:
    """Add scaled gradients to `steps`, each cut off toward zero to whole steps of the grid.

    Args:
        gradients: One row per unit.
        factors: The factor of each row. Rows with factor 0 are skipped, whatever they contain.
        steps_per_unit: Steps of the grid per 1.0; a power of two.
        most: The largest number of steps that a coordinate can have after scaling.
        start: The first coordinate to add.
        stop: The end of the coordinates to add.
        steps: The sum, in steps; changed in place.
    """
    exact = most * gradients.shape[0] < LARGEST_EXACT
    sums = np.empty(TILE)
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        if exact:
            sums[:] = 0
            for unit in range(gradients.shape[0]):
                factor = factors[unit]
                if factor != 0:
                    part = gradients[unit, low:high]
                    for i in range(high - low):
                        # The factor first: multiplying by a power of two is exact.
                        sums[i] += np.trunc(np.float64(part[i]) * factor * steps_per_unit)
            for i in range(high - low):
                steps[low + i] += np.int64(sums[i])
        else:
            for unit in range(gradients.shape[0]):
                factor = factors[unit]
                if factor != 0:
                    for i in range(low, high):
                        scaled = np.float64(gradients[unit, i]) * factor
                        steps[i] += np.int64(np.trunc(scaled * steps_per_unit))


@numba.njit(**compiled)
def merge_rows(tokens: Array, rows: Array, start: int, stop: int, totals: Array) -> None:
    """Add up the rows of equal tokens of each unit, and add the sum of squares to `totals`.

    The sum replaces the row of the token's first position. The tokens of its other positions
    become -1. Positions with a negative token are left out.
    """
    for unit in range(start, stop):
        order = np.argsort(tokens[unit], kind="mergesort")  # stable: the first position comes first
        first = -1
        for k in range(order.shape[0]):
            position = order[k]
            token = tokens[unit, position]
            if token < 0:
                continue
            if first >= 0 and tokens[unit, first] == token:
                for j in range(rows.shape[2]):
                    rows[unit, first, j] += rows[unit, position, j]
                tokens[unit, position] = -1
            else:
                first = position
        for position in range(tokens.shape[1]):
            if tokens[unit, position] >= 0:
                total = 0.0
                for j in range(rows.shape[2]):
                    total += np.float64(rows[unit, position, j]) ** 2
                totals[unit] += total


@numba.njit(**compiled)
def add_rows(
    tokens: Array,
    rows: Array,
    factors: Array,
    steps_per_unit: float,
    start: int,
    stop: int,
    steps: Array,
) -> None:
    """Add the columns `start` to `stop` of scaled rows to the rows `tokens` of `steps`.

    Each value is cut off toward zero to whole steps. Units with factor 0 are skipped.
    """
    for unit in range(tokens.shape[0]):
        factor = factors[unit]
        if factor != 0:
            for position in range(tokens.shape[1]):
                token = tokens[unit, position]
                if token >= 0:
                    for j in range(start, stop):
                        scaled = np.float64(rows[unit, position, j]) * factor
                        steps[token, j] += np.int64(np.trunc(scaled * steps_per_unit))


@numba.njit(**compiled)
def add_rounded(
    values: Array,
    steps_per_unit: float,
    most: float,
    is_first: bool,
    start: int,
    stop: int,
    steps: Array,
) -> None:
    """Round the values from `start` to `stop` to whole steps and add them to `steps`.

    Args:
        values: The values.
        steps_per_unit: Steps of the grid per 1.0; a power of two.
        most: An upper bound on the absolute values, in steps.
        is_first: Whether `steps` has no value yet, and is overwritten.
        start: The first value to add.
        stop: The end of the values to add.
        steps: The sum, in steps; changed in place.
    """
    if most < EXACT_SHIFT:  # adding SHIFT rounds to a whole number, which its bits then show
        if is_first:
            for i in range(start, stop):
                steps[i] = np.int64(bits_of(values[i] * steps_per_unit + SHIFT)) - SHIFT_BITS
        else:
            for i in range(start, stop):
                steps[i] += np.int64(bits_of(values[i] * steps_per_unit + SHIFT)) - SHIFT_BITS
    else:
        if is_first:
            steps[start:stop] = 0
        for i in range(start, stop):
            steps[i] += np.int64(np.rint(values[i] * steps_per_unit))


@numba.njit(**compiled)
def widen(rows: Array, factors: Array, start: int, stop: int, scaled: Array) -> None:
    """Write the rows from `start` to `stop` times their factors to `scaled`, in float64.

    Rows with factor 0 become 0, whatever they contain.
    """
    for unit in range(start, stop):
        factor = factors[unit]
        if factor == 0:
            scaled[unit] = 0
        else:
            for i in range(rows.shape[1]):
                scaled[unit, i] = np.float64(rows[unit, i]) * factor
