"""Compiled inner loops that several packages share, and CPU operations that numba lacks."""

# pyright: basic
# ruff: noqa: ARG001
from typing import Any, Final

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from dpftrl._internal.arrays import Array

# Coordinates that an inner loop processes at a time: 16 kB of float64, which fit into the L1 cache.
TILE: Final = 2048
# Options of numba. No fast-math: with it, results would be rounded differently on each machine.
compiled: Final[dict[str, Any]] = {"nogil": True, "cache": True, "error_model": "numpy"}


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
def all_finite(values: Array) -> bool:
    """Whether no value is infinite or NaN."""
    any_not_finite = False
    for i in range(values.shape[0]):
        any_not_finite |= values[i] - values[i] != 0  # NaN for infinities and NaN
    return not any_not_finite
