"""The machine operations that numba has no name for."""

# pyright: basic
# ruff: noqa: ARG001
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


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
