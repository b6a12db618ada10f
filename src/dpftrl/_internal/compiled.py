"""Compiled inner loops that several packages share, and CPU operations that numba lacks."""

# pyright: basic
# ruff: noqa: ARG001
from typing import Any, Final

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from dpftrl._internal.arrays import Array

# Coordinates that an inner loop processes at a time: 16 kB of float64, which fit into the L1 cache.
TILE: Final = 2048
# Tiles whose squares are summed at the same time: one addition need not wait for another, and eight
# sums fit into the vector registers of any CPU.
TILES_AT_ONCE: Final = 8
# Independent sums per tile, which fill one vector of float64.
LANES: Final = 4
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


@intrinsic
def _copy_and_sum_squares(_, values, copy, sums):
    """Copy TILES_AT_ONCE tiles to `copy`; write the sums of squares of their lanes to `sums`.

    Lane k of a tile has its values k, k + LANES, k + 2 LANES, ... Each value is read once. Numba
    does not use vector instructions for this loop, so it is written for LLVM: additions of one lane
    happen in the order of its values, whatever the machine.
    """

    def generate(context, builder, signature, arguments):
        source, target, results = (
            context.make_array(array)(context, builder, argument).data
            for array, argument in zip(signature.args, arguments, strict=True)
        )
        number = source.type.pointee
        vector = ir.VectorType(number, LANES)
        wide = ir.VectorType(ir.DoubleType(), LANES)
        align = context.get_abi_sizeof(number)

        def index(value):
            return ir.Constant(ir.IntType(64), value)

        def vector_at(array, position, kind):
            return builder.bitcast(builder.gep(array, [position]), kind.as_pointer())

        zeros = ir.Constant(wide, [0.0] * LANES)
        totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(TILES_AT_ONCE)]
        unrolled = 4  # a cache line of float32 per tile and step
        step = index(unrolled * LANES)
        with cgutils.for_range_slice(builder, index(0), index(TILE), step) as (start, _):
            for tile, total in enumerate(totals):
                for part in range(unrolled):
                    position = builder.add(start, index(tile * TILE + part * LANES))
                    value = builder.load(vector_at(source, position, vector), align=align)
                    builder.store(value, vector_at(target, position, vector), align=align)
                    if number != ir.DoubleType():
                        value = builder.fpext(value, wide)
                    square = builder.fmul(value, value)
                    builder.store(builder.fadd(builder.load(total), square), total)
        for tile, total in enumerate(totals):
            place = vector_at(results, index(tile * LANES), wide)
            builder.store(builder.load(total), place, align=8)
        return context.get_dummy_value()

    return types.void(values, copy, sums), generate


def _flag_at(context, builder, signature, arguments):
    """A pointer to one element of an array of int64, from the arguments (array, index)."""
    flags = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(flags.data, [arguments[1]])


@intrinsic
def _try_lock(_, locks, index):
    """Take a lock, which is an int64 that is 0 if it is free; whether it was free."""

    def generate(context, builder, signature, arguments):
        flag = _flag_at(context, builder, signature, arguments)
        free, taken = ir.Constant(ir.IntType(64), 0), ir.Constant(ir.IntType(64), 1)
        swapped = builder.cmpxchg(flag, free, taken, "acquire", "monotonic")
        return builder.extract_value(swapped, 1)

    return types.boolean(locks, types.int64), generate


@intrinsic
def _unlock(_, locks, index):
    """Free a lock that `_try_lock` has taken."""

    def generate(context, builder, signature, arguments):
        flag = _flag_at(context, builder, signature, arguments)
        builder.store_atomic(ir.Constant(ir.IntType(64), 0), flag, "release", 8)
        return context.get_dummy_value()

    return types.void(locks, types.int64), generate


# Compiled code calls these like plain functions, without the first argument: numba provides it.
bits_of: Any = _bits_of
float_of: Any = _float_of
multiply_add: Any = _multiply_add
pointer_to: Any = _pointer_to
copy_and_sum_squares: Any = _copy_and_sum_squares
try_lock: Any = _try_lock
unlock: Any = _unlock
# Let another thread run; of POSIX.
yield_core: Any = types.ExternalFunction("sched_yield", types.int32())


@numba.njit(**compiled)
def all_finite(values: Array) -> bool:
    """Whether no value is infinite or NaN."""
    any_not_finite = False
    for i in range(values.shape[0]):
        any_not_finite |= values[i] - values[i] != 0  # NaN for infinities and NaN
    return not any_not_finite
