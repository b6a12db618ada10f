"""Compiled inner loops that several packages share, and CPU operations that numba lacks."""

# pyright: basic
# ruff: noqa: ARG001
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from dpftrl._internal.arrays import Array

# Coordinates that an inner loop processes at a time: 16 kB of float64, which fit into the L1 cache.
TILE: Final = 2048
# Options of numba. No fast-math: with it, results would be rounded differently on each machine.
compiled: Final[dict[str, Any]] = {"nogil": True, "cache": True, "error_model": "numpy"}
# Adding SHIFT moves whole numbers below 2^51 to where neighbouring float64 numbers differ by 1.
# There the bits of the float, minus the bits of SHIFT, are the whole number.
SHIFT: Final = 1.5 * 2.0**52
SHIFT_BITS: Final = np.int64(0x4338000000000000)
EXACT_SHIFT: Final = 2.0**51


@intrinsic
def _bits_of(_, number):
    """The bits of a float64, as a uint64."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.uint64(types.float64), generate


@intrinsic
def _float_of(_, bits):
    """The float64 with these bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.uint64), generate


@intrinsic
def _multiply_add(_, a, b, c):
    """Compute a * b + c, rounded once: the same on all machines, mostly in one instruction."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


@intrinsic
def _pointer_to(_, address):
    """An address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


# Compiled code calls these like plain functions, without the first argument: numba provides it.
bits_of: Any = _bits_of
float_of: Any = _float_of
multiply_add: Any = _multiply_add
pointer_to: Any = _pointer_to


@numba.njit(**compiled)
def sum_of_squares(values: Array) -> Array:
    """The sum of squares of each tile of TILE values. The caller adds these few sums exactly."""
    sums = np.zeros(-(-values.shape[0] // TILE))
    for tile in range(sums.shape[0]):
        part = values[tile * TILE : (tile + 1) * TILE]
        # Four independent sums, so that an addition need not wait for the one before.
        a = b = c = d = 0.0
        whole = part.shape[0] // 4 * 4
        for i in range(0, whole, 4):
            a += np.float64(part[i]) ** 2
            b += np.float64(part[i + 1]) ** 2
            c += np.float64(part[i + 2]) ** 2
            d += np.float64(part[i + 3]) ** 2
        for i in range(whole, part.shape[0]):
            a += np.float64(part[i]) ** 2
        sums[tile] = (a + b) + (c + d)
    return sums


@numba.njit(**compiled)
def add_clipped(
    update: Array, factor: float, steps_per_unit: float, most: float, steps: Array
) -> None:
    """Scale an update, cut it off toward zero to whole steps, and add it to `steps`.

    Args:
        update: The update.
        factor: What to multiply it by.
        steps_per_unit: Steps of the grid per 1.0; a power of two.
        most: The largest number of steps that a coordinate can have after scaling.
        steps: The sum, in steps; changed in place.
    """
    # Multiply by the factor first: multiplying by a power of two is exact, so only one product is
    # rounded.
    if most < EXACT_SHIFT:
        for i in range(update.shape[0]):
            whole = np.trunc(np.float64(update[i]) * factor * steps_per_unit)
            # The same as np.int64(whole), but vectorized: without AVX-512, CPUs convert to int64
            # one number at a time.
            steps[i] += np.int64(bits_of(whole + SHIFT)) - SHIFT_BITS
    else:
        for i in range(update.shape[0]):
            steps[i] += np.int64(np.trunc(np.float64(update[i]) * factor * steps_per_unit))


@numba.njit(**compiled)
def all_finite(values: Array) -> bool:
    """Whether no value is infinite or NaN."""
    any_not_finite = False
    for i in range(values.shape[0]):
        any_not_finite |= values[i] - values[i] != 0  # NaN for infinities and NaN
    return not any_not_finite
