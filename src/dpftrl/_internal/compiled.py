"""Compiled inner loops that several packages share, and machine operations that numba lacks."""

# pyright: basic
# ruff: noqa: ARG001
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from dpftrl._internal.arrays import Array

# Coordinates that one pass of an inner loop takes: they fit into the cache.
TILE: Final = 2048
# No fast-math: it would let the compiler round differently from machine to machine.
compiled: Final[dict[str, Any]] = {"nogil": True, "cache": True, "error_model": "numpy"}
# Whole numbers below 2^51, shifted by this, lie where float64 has a step of 1: counting in them is
# counting in their bits.
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
    """The sum of a * b and c, rounded once: the same everywhere, mostly in one instruction."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


@intrinsic
def _pointer_to(_, address):
    """The pointer to an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


# Plain functions, to whoever calls them: numba fills in the first argument.
bits_of: Any = _bits_of
float_of: Any = _float_of
multiply_add: Any = _multiply_add
pointer_to: Any = _pointer_to


@numba.njit(**compiled)
def sum_of_squares(values: Array) -> Array:
    """The sum of squares of each tile, for an exact summation of these few."""
    sums = np.zeros(-(-values.shape[0] // TILE))
    for tile in range(sums.shape[0]):
        part = values[tile * TILE : (tile + 1) * TILE]
        # Four sums beside each other: one would wait for itself.
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
    """Add an update, times a factor, in whole steps cut off toward zero, of which it has `most`."""
    # The factor first: times a power of two is exact, so that one rounding happens, not two.
    if most < EXACT_SHIFT:
        for i in range(update.shape[0]):
            whole = np.trunc(np.float64(update[i]) * factor * steps_per_unit)
            # As np.int64(whole), but in vectors: machines without AVX-512 convert one by one.
            steps[i] += np.int64(bits_of(whole + SHIFT)) - SHIFT_BITS
    else:
        for i in range(update.shape[0]):
            steps[i] += np.int64(np.trunc(np.float64(update[i]) * factor * steps_per_unit))


@numba.njit(**compiled)
def all_finite(values: Array) -> bool:
    """Whether there is no infinity and no NaN."""
    strange = False
    for i in range(values.shape[0]):
        strange |= values[i] - values[i] != 0
    return not strange
