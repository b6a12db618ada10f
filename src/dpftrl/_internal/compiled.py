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
# Coordinates by which a loop over numbers that are not in the cache asks for them in advance.
READ_AHEAD: Final = 256
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
def _sum_squares(_, values, sums):
    """Write the sums of squares of the lanes of TILES_AT_ONCE tiles to `sums`.

    Lane k of a tile has its values k, k + LANES, k + 2 LANES, ... Additions of one lane happen in
    the order of its values, whatever the machine.
    """

    def generate(context, builder, signature, arguments):
        source, results = _data_of(context, builder, signature, arguments)
        _loop_over_lanes(builder, source, results, TILES_AT_ONCE, lambda *_: None)
        return context.get_dummy_value()

    return types.void(values, sums), generate


@intrinsic
def _copy_and_sum_squares(_, values, copy, sums):
    """Copy TILES_AT_ONCE tiles to `copy`; write to `sums` what `_sum_squares` writes.

    Each value is read once.
    """

    def generate(context, builder, signature, arguments):
        source, target, results = _data_of(context, builder, signature, arguments)

        def store(position, value, _):
            place = _vector_at(builder, target, position, value.type)
            builder.store(value, place, align=_size_of(target))

        _loop_over_lanes(builder, source, results, TILES_AT_ONCE, store)
        return context.get_dummy_value()

    return types.void(values, copy, sums), generate


@intrinsic
def _add_copy_and_sum_squares(_, values, factor, scale, shift, steps, copy, sums):
    """Add a tile to `steps`, and copy it; write to `sums` what `_sum_squares` writes for a tile.

    Each value is read once, multiplied by `factor` and by `scale`, and cut off toward zero. Adding
    `shift` and subtracting its bits makes a whole number below 2^51 an integer.
    """

    def generate(context, builder, signature, arguments):
        _, factor, scale, shift, *_ = arguments
        arrays = [0, 4, 5, 6]  # positions of the arguments that are arrays
        source, steps, target, results = _data_of(context, builder, signature, arguments, arrays)
        whole = ir.VectorType(ir.IntType(64), LANES)
        shift_bits = builder.bitcast(shift, ir.IntType(64))
        factors, scales, shifts = (_filled(builder, x) for x in (factor, scale, shift))
        bits_of_shifts = _filled(builder, shift_bits)
        kind = ir.FunctionType(factors.type, [factors.type])
        truncate = cgutils.get_or_insert_function(builder.module, kind, f"llvm.trunc.v{LANES}f64")

        def add(position, value, wide_value):
            place = _vector_at(builder, target, position, value.type)
            builder.store(value, place, align=_size_of(target))
            scaled = builder.fmul(builder.fmul(wide_value, factors), scales)
            shifted = builder.fadd(builder.call(truncate, [scaled]), shifts)
            addend = builder.sub(builder.bitcast(shifted, whole), bits_of_shifts)
            place = _vector_at(builder, steps, position, whole)
            total = builder.add(builder.load(place, align=8), addend)
            builder.store(total, place, align=8)

        _loop_over_lanes(builder, source, results, 1, add, (source, steps))
        return context.get_dummy_value()

    number = types.float64
    return types.void(values, number, number, number, steps, copy, sums), generate


def _data_of(context, builder, signature, arguments, positions=None):
    """Pointers to the data of arguments that are arrays, by default of all arguments."""
    return [
        context.make_array(signature.args[i])(context, builder, arguments[i]).data
        for i in (range(len(arguments)) if positions is None else positions)
    ]


def _loop_over_lanes(builder, source, results, tiles, each, read_ahead=()):
    """Sum the squares of the lanes of some tiles, and call `each` for every vector of values.

    Numba does not use vector instructions for such a loop, so it is written for LLVM. `each` gets
    the position of the vector, the vector as it is, and the vector as float64. The numbers of the
    arrays in `read_ahead` are fetched into the cache in advance.
    """
    number = source.type.pointee
    vector = ir.VectorType(number, LANES)
    wide = ir.VectorType(ir.DoubleType(), LANES)

    def index(value):
        return ir.Constant(ir.IntType(64), value)

    zeros = ir.Constant(wide, [0.0] * LANES)
    totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(tiles)]
    unrolled = 4  # a cache line of float32 per tile and step
    step = index(unrolled * LANES)
    with cgutils.for_range_slice(builder, index(0), index(TILE), step) as (start, _):
        for tile, total in enumerate(totals):
            for array in read_ahead:
                line = 64 // _size_of(array)  # numbers per cache line
                for first in range(0, unrolled * LANES, line):
                    ahead = builder.add(start, index(tile * TILE + READ_AHEAD + first))
                    _prefetch(builder, builder.gep(array, [ahead]))
            for part in range(unrolled):
                position = builder.add(start, index(tile * TILE + part * LANES))
                place = _vector_at(builder, source, position, vector)
                value = builder.load(place, align=_size_of(source))
                is_wide = number == ir.DoubleType()
                wide_value = value if is_wide else builder.fpext(value, wide)
                each(position, value, wide_value)
                square = builder.fmul(wide_value, wide_value)
                builder.store(builder.fadd(builder.load(total), square), total)
    for tile, total in enumerate(totals):
        place = _vector_at(builder, results, index(tile * LANES), wide)
        builder.store(builder.load(total), place, align=8)


def _vector_at(builder, array, position, kind):
    """A pointer to the vector that starts at a position of an array."""
    return builder.bitcast(builder.gep(array, [position]), kind.as_pointer())


def _size_of(array):
    """Bytes of a number of an array of float32, float64 or int64."""
    return 4 if array.type.pointee == ir.FloatType() else 8


def _prefetch(builder, pointer):
    """Fetch a cache line in advance. An address outside of any array does no harm."""
    address, option = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [address, option, option, option])
    function = builder.module.declare_intrinsic("llvm.prefetch", [address], kind)
    to_read, keep, data = (ir.Constant(option, value) for value in (0, 3, 1))
    builder.call(function, [builder.bitcast(pointer, address), to_read, keep, data])


def _filled(builder, number):
    """A vector whose lanes all have this number."""
    vector = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    for lane in range(LANES):
        vector = builder.insert_element(vector, number, ir.Constant(ir.IntType(32), lane))
    return vector


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
sum_squares: Any = _sum_squares
copy_and_sum_squares: Any = _copy_and_sum_squares
add_copy_and_sum_squares: Any = _add_copy_and_sum_squares
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
