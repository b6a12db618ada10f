"""Clipping and exact sums: updates are put on a grid and added as whole numbers.

In floating point, the last bits of a sum depend on the order of its terms, and the last bits of a
sum plus noise depend on both. These bits can reveal what the noise hides (Mironov 2012). On a grid
there are no such bits. Updates are cut off toward zero, so no norm grows. Their sum is exact, in
any order. The noise is rounded to the same grid. Since the sum is a whole number of steps, adding
rounded noise is the same as rounding the sum plus the noise. That is post-processing, so it costs
no privacy.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from queue import LifoQueue
from threading import Lock
from typing import Any, Self, cast, final

import numba
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import FLOAT_DTYPES, Array
from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.compiled import (
    LANES,
    TILE,
    TILES_AT_ONCE,
    add_copy_and_sum_squares,
    bits_of,
    compiled,
    copy_and_sum_squares,
    sum_squares,
    try_lock,
    unlock,
    yield_core,
)
from dpftrl.errors import InvalidInput

Steps = NDArray[np.int64]

# The largest absolute value of a sum, in steps. In 64 bits, the noise has as much room again.
MOST_STEPS = 2**61
# The largest clip norm and step. Their squares, and those of 1 / LARGEST, are normal floats.
LARGEST = 2.0**400
# A relative margin that exceeds all rounding errors in computing a norm and scaling by it.
SLACK = 1e-12
# The largest share of the bit in adaptive clipping. Up to here, 1 - beta^2 is accurate.
MOST_BETA = 0.9
# Default number of steps per standard deviation of the noise.
FINENESS = 2**24
# Adding SHIFT moves whole numbers below 2^51 to where neighbouring float64 numbers differ by 1.
# There the bits of the float, minus the bits of SHIFT, are the whole number.
SHIFT = 1.5 * 2.0**52
SHIFT_BITS = np.int64(0x4338000000000000)
EXACT_SHIFT = 2.0**51
# Coordinates of a sum that a thread locks at a time: 128 kB, which take some microseconds to add.
# They are whole tiles.
BLOCK = 16_384
# Below this, the errors of a sum of squares may be too small for floats.
SMALLEST_BOUNDED = 2.0**-800
# Instead of the squares of an update that no other thread can change.
NO_SQUARES = np.empty(0)


@final
@dataclass(frozen=True)
class Grid:
    """The multiples of a step, on which updates are summed exactly.

    Attributes:
        step: The distance between neighbouring values; a power of two.
        clip_norm: The largest L2 norm of an update.
    """

    step: float
    clip_norm: float

    def __post_init__(self) -> None:
        for name in ("clip_norm", "step"):
            value = positive_number(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if not 1 / LARGEST <= value <= LARGEST:  # squares must neither vanish nor overflow
                raise InvalidInput(f"{name} must be between 2^-400 and 2^400, got {value!r}")
        if math.frexp(self.step)[0] != 0.5:
            raise InvalidInput(f"step must be a power of two, got {self.step!r}")
        if not self.clip_norm / self.step < MOST_STEPS:
            raise InvalidInput(f"step {self.step:g} is too fine for clip norm {self.clip_norm:g}")

    @classmethod
    def for_noise(cls, noise_multiplier: float, clip_norm: float, fineness: int = FINENESS) -> Self:
        """Create a grid whose step suits the noise.

        Args:
            noise_multiplier: Standard deviation of the noise, in units of the clip norm.
            clip_norm: The largest L2 norm of an update.
            fineness: The smallest number of steps per standard deviation of the noise.
        """
        noise = positive_number("noise_multiplier", noise_multiplier) * positive_number(
            "clip_norm", clip_norm
        )
        finest = positive_number("noise_multiplier times clip_norm", noise) / whole_number(
            "fineness", fineness
        )
        return cls(2.0 ** math.floor(math.log2(positive_number("the step", finest))), clip_norm)

    @property
    def most_updates(self) -> int:
        """The number of updates that always fit into a sum without overflow."""
        return int(MOST_STEPS // math.ceil(self.clip_norm / self.step))

    def values(
        self, steps: Steps, divisor: float = 1.0, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Convert steps to numbers, divided by `divisor`, such as the report goal.

        Args:
            steps: Numbers of steps.
            divisor: The divisor.
            out: Memory for the result, of float64, or of float32 to which the numbers are then
                rounded; by default it is new, of float64.
        """
        if not 0 < divisor < math.inf:
            raise InvalidInput(f"divisor must be a finite number above 0, got {divisor!r:.60}")
        result = np.empty(steps.shape) if out is None else out
        multiply_steps(steps.reshape(-1), self.step / divisor, result.reshape(-1))
        return result


@final
@dataclass(frozen=True)
class JointClip:
    """The clip norm of one round of adaptive clipping, and the share of the bit.

    An update is clipped to the clip norm, divided by it and multiplied by sqrt(1 - beta^2). One
    further coordinate is +beta if the norm of the update is at most the clip norm, and -beta if it
    was clipped. The two together have norm at most 1; docs/adaptive_clipping.md has the proof.

    Attributes:
        clip_norm: The clip norm of this round.
        beta: The size of the further coordinate.
    """

    clip_norm: float
    beta: float

    def __post_init__(self) -> None:
        if not 1 / LARGEST <= self.clip_norm <= LARGEST:  # squares must neither vanish nor overflow
            raise InvalidInput(f"clip_norm must be between 2^-400 and 2^400, got {self.clip_norm}")
        if not 0 < self.beta <= MOST_BETA:
            raise InvalidInput(f"beta must be above 0 and at most {MOST_BETA}, got {self.beta!r}")

    @property
    def scale(self) -> float:
        """The factor by which an update that is not clipped is multiplied."""
        return math.sqrt(1 - self.beta * self.beta) / self.clip_norm

    def factor(self, norm: float) -> float:
        """The factor by which an update of this norm is multiplied."""
        return math.sqrt(1 - self.beta * self.beta) / (1 + SLACK) / max(norm, self.clip_norm)

    def bit(self, norm: float, step: float) -> int:
        """The further coordinate of an update of this norm, in steps of a grid."""
        size = math.floor(self.beta / step)  # exact: step is a power of two
        return size if norm <= self.clip_norm else -size


@final
class ExactSum:
    """The exact sum of clipped updates, in any order.

    >>> total = ExactSum(Grid(step=2**-20, clip_norm=1.0), size=2)
    >>> total.add(np.array([3.0, 4.0]))
    >>> total.add(np.array([0.0, -0.25]))
    >>> total.grid.values(total.steps).round(5).tolist()
    [0.6, 0.55]
    """

    def __init__(self, grid: Grid, size: int, joint: JointClip | None = None):
        """Start with a sum of zero.

        Args:
            grid: The grid, with the clip norm.
            size: Number of coordinates of an update.
            joint: For adaptive clipping: the clip norm of the round. The sum then has one further
                coordinate, the last one, and the clip norm of the grid is 1.
        """
        size = whole_number("size", size) + (joint is not None)
        self._start(grid, np.zeros(size, dtype=np.int64), 0, joint)

    @classmethod
    def of(cls, grid: Grid, steps: Steps, updates: int, joint: JointClip | None = None) -> Self:
        """The sum of updates that were clipped and added elsewhere, in steps of the grid."""
        total = cls.__new__(cls)
        total._start(grid, steps, updates, joint)
        return total

    def _start(
        self, grid: Grid, steps: Steps, updates: int, joint: JointClip | None = None
    ) -> None:
        if joint is not None and grid.clip_norm != 1:
            raise InvalidInput(f"adaptive clipping needs a grid with clip norm 1, got {grid}")
        self.grid = grid
        self.joint = joint
        # What the digest of the sum covers beside the steps.
        self.covered = b"" if joint is None else repr(("joint", *astuple(joint))).encode()
        self.steps = steps
        self.updates = updates
        self._count_lock = Lock()
        self._block_locks = np.zeros(-(-steps.size // BLOCK), dtype=np.int64)
        # Memory for private copies, one per core: a thread takes one out while it adds.
        self._copies = LifoQueue[_Copy]()
        threads = min(os.cpu_count() or 1, max(1, self._block_locks.size))
        for thread in range(threads):
            self._copies.put(_Copy(self._block_locks.size * thread // threads))

    def __repr__(self) -> str:
        return f"ExactSum({self.updates} updates of {self.steps.size:,} coordinates)"

    def add(self, *update: NDArray[Any]) -> None:
        """Clip an update in L2 norm and add it. The update may be given in several parts.

        Several threads may add at the same time, at most one per core: a further thread waits. Only
        one copy of the sum is in memory. An update of one contiguous array is not copied.

        Guarantees:
            What is added has a norm of at most the clip norm of the grid, exactly: scaling leaves
            room for the rounding of the norm, and cutting off toward zero makes nothing larger. In
            adaptive clipping this holds for update and bit together. It also holds if another
            thread changes the update at the same time: what differs from what the norm was computed
            of is left out (see `add_unchanged`). An update is added in one call of compiled code,
            which no exception interrupts: all of it is in the sum, or nothing.
        """
        parts, grid, joint = self._checked(update), self.grid, self.joint
        copy = self._copies.get()
        try:
            if len(parts) == 1 and _is_plain(parts[0]):
                values = parts[0].reshape(-1)
                squares = squares_of_tiles(values)
                norm = _root_of_sum(squares)
            else:
                norm = copy.fill(parts)
                values, squares = copy.values, NO_SQUARES
            if not math.isfinite(norm):
                raise InvalidInput("an update and its norm must be finite")
            if joint is None:
                limit = grid.clip_norm / (1 + SLACK)
                factor, bit = 1.0 if norm <= limit else limit / norm, 0
            else:
                factor, bit = joint.factor(norm), joint.bit(norm, grid.step)
            self._count(1, bit)
            # The sum is not kept in a local variable, which a traceback may show.
            add_in_blocks(
                values,
                squares,
                factor,
                1 / grid.step,
                grid.clip_norm / grid.step,
                self.steps,
                self._block_locks,
                copy.first_block,
            )
        finally:
            self._copies.put(copy)

    def check_steps(self, steps: memoryview, updates: int) -> None:
        """Refuse what cannot be the sum of this many clipped updates on this grid.

        Args:
            steps: A sum of int64, in steps, as a memoryview: no traceback shows what is in it.
            updates: The number of updates in it.

        Raises:
            InvalidInput: The type, the size or the norm is wrong.
        """
        if np.asarray(steps).dtype != np.int64 or steps.shape != self.steps.shape:
            raise InvalidInput(f"a sum has {self.steps.size:,} coordinates of int64")
        # Each update has at most the clip norm; so has their sum, times their number.
        most = updates * (self.grid.clip_norm / self.grid.step) * (1 + SLACK)
        if not math.sqrt(math.fsum(sum_of_squares(np.asarray(steps)))) <= most:
            raise InvalidInput(f"the norm is too large for a sum of {updates:,} clipped updates")

    def add_steps(self, steps: memoryview, updates: int) -> None:
        """Add the sum of updates that were clipped and added elsewhere, on the same grid.

        Several threads may add at the same time. The caller calls `check_steps` before, and vouches
        for what it cannot check: that each of the updates was clipped.

        Args:
            steps: As for `check_steps`.
            updates: The number of updates in it.

        Raises:
            InvalidInput: The sum would hold too many updates.
        """
        self._count(updates)
        add_steps_in_blocks(np.asarray(steps), self.steps, self._block_locks, 0)

    def _count(self, updates: int, bit: int = 0) -> None:
        """Count updates that are about to be added; raises InvalidInput if they do not fit.

        With adaptive clipping this also adds the bit, in steps: only this method changes the last
        coordinate, and no update reaches it.
        """
        with self._count_lock:
            if self.updates + updates > self.grid.most_updates:
                raise InvalidInput(
                    f"a sum on this grid holds {self.grid.most_updates:,} updates; use a larger "
                    "step"
                )
            self.updates += updates
            if self.joint is not None:
                self.steps[-1] += bit

    def _checked(self, update: tuple[Any, ...]) -> list[NDArray[Any]]:
        """The parts as plain arrays; raises InvalidInput if they are not a valid update."""
        wanted = self.steps.size - (self.joint is not None)
        expected = f"an update has {wanted:,} coordinates of float32 or float64, got"
        for part in update:
            if not isinstance(part, np.ndarray):
                raise InvalidInput(f"{expected} {type(part).__name__}")
        parts = [np.asarray(part) for part in cast("tuple[NDArray[Any], ...]", update)]
        size = sum(part.size for part in parts)
        if any(part.dtype not in FLOAT_DTYPES for part in parts) or size != wanted:
            dtypes = " and ".join(sorted({str(part.dtype) for part in parts}))
            raise InvalidInput(f"{expected} {size:,} of {dtypes or 'nothing'}")
        return parts


@final
class _Copy:
    """Memory for a private copy of an update that has several parts, or is not contiguous.

    Attributes:
        values: The copy, contiguous and aligned, as the inner loops need it.
        first_block: The block of the sum to which a thread with this copy adds first. Threads that
            begin in different places seldom wait for each other.
    """

    def __init__(self, first_block: int):
        self.values: NDArray[Any] = np.empty(0, np.float32)
        self.first_block = first_block

    def fill(self, parts: Sequence[NDArray[Any]]) -> float:
        """Copy the parts of an update; return the L2 norm of the copy."""
        dtype, size = np.result_type(*parts), sum(part.size for part in parts)
        if self.values.dtype != dtype or self.values.size != size:
            self.values = np.empty(size, dtype)
        ends = accumulate(part.size for part in parts)
        targets = [
            self.values[end - part.size : end] for part, end in zip(parts, ends, strict=True)
        ]
        return _root_of_sum(np.concatenate([*map(_copied, parts, targets)]))


def _is_plain(part: NDArray[Any]) -> bool:
    """Whether compiled loops can read an array as it is."""
    return part.flags.c_contiguous and part.flags.aligned


def _copied(part: NDArray[Any], target: NDArray[Any]) -> NDArray[np.float64]:
    """Copy a part of an update; return the sums of squares of the tiles of the copy."""
    if _is_plain(part) and part.dtype == target.dtype:
        return copied_sum_of_squares(part.reshape(-1), target)
    np.copyto(target.reshape(part.shape), part)
    return squares_of_tiles(target)


def norm_of(parts: Sequence[NDArray[Any]]) -> float:
    """The L2 norm of the concatenated arrays; infinity if the squares overflow."""
    return _root_of_sum(np.concatenate([NO_SQUARES, *map(sum_of_squares, parts)]))


def _root_of_sum(squares: NDArray[np.float64]) -> float:
    """The root of the sum of squares, which is rounded once; infinity if it overflows."""
    low, high = bounds_of_sum(squares)
    if low == high:
        return math.sqrt(low)
    try:
        return math.sqrt(math.fsum(squares.tolist()))
    except OverflowError:  # each square is finite, but their sum is not
        return math.inf


@numba.njit(**compiled)
def bounds_of_sum(squares: Array) -> tuple[float, float]:
    """Two floats; if they are equal, they are what `math.fsum` returns.

    The rounding error of each addition is itself a float (Knuth's TwoSum). With u = 2^-53, each of
    these n errors is at most u times the total, so their sum has a rounding error of at most
    n u (n u total), to first order. The exact sum is between two numbers that are four times as far
    apart. If both are rounded to the same float, so is the exact sum.
    """
    total = error = 0.0
    for square in squares:
        larger = total + square
        added = larger - total
        error += (total - (larger - added)) + (square - added)
        total = larger
    if not SMALLEST_BOUNDED < total < math.inf:  # too small for the bound, too large, or NaN
        return 0.0, 1.0
    doubt = 4 * (squares.shape[0] * 2.0**-53) ** 2 * total
    return total + (error - doubt), total + (error + doubt)


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
def squares_of_tiles(values: Array) -> Array:
    """Return what `sum_of_squares` returns for floats, to the same bits, but faster."""
    sums = np.empty(-(-values.shape[0] // TILE))
    lanes = np.empty(TILES_AT_ONCE * LANES)
    tiles = values.shape[0] // TILE // TILES_AT_ONCE * TILES_AT_ONCE
    for first in range(0, tiles, TILES_AT_ONCE):
        sum_squares(values[first * TILE : (first + TILES_AT_ONCE) * TILE], lanes)
        add_lanes(lanes, sums[first : first + TILES_AT_ONCE])
    sums[tiles:] = sum_of_squares(values[tiles * TILE :])
    return sums


@numba.njit(**compiled)
def add_lanes(lanes: Array, sums: Array) -> None:
    """Add the sums of the lanes of each tile, in the order of `sum_of_squares`."""
    for tile in range(sums.shape[0]):
        a, b, c, d = lanes[tile * LANES : (tile + 1) * LANES]
        sums[tile] = (a + b) + (c + d)


@numba.njit(**compiled)
def multiply_steps(steps: Array, factor: float, out: Array) -> None:
    """Write `steps` times `factor` to `out`, computed in float64."""
    for i in range(steps.shape[0]):
        out[i] = np.float64(steps[i]) * factor


@numba.njit(**compiled)
def copied_sum_of_squares(values: Array, copy: Array) -> Array:
    """Copy `values` and return what `squares_of_tiles` returns for the copy.

    Each value is read once, so that the squares are those of the copy even if another thread
    changes `values` at the same time.
    """
    sums = np.empty(-(-values.shape[0] // TILE))
    lanes = np.empty(TILES_AT_ONCE * LANES)
    tiles = values.shape[0] // TILE // TILES_AT_ONCE * TILES_AT_ONCE
    for first in range(0, tiles, TILES_AT_ONCE):
        start, end = first * TILE, (first + TILES_AT_ONCE) * TILE
        copy_and_sum_squares(values[start:end], copy[start:end], lanes)
        add_lanes(lanes, sums[first : first + TILES_AT_ONCE])
    copy[tiles * TILE :] = values[tiles * TILE :]
    sums[tiles:] = sum_of_squares(copy[tiles * TILE :])
    return sums


@numba.njit(**compiled)
def add_in_blocks(
    update: Array,
    squares: Array,
    factor: float,
    steps_per_unit: float,
    most: float,
    steps: Array,
    locks: Array,
    first: int,
) -> None:
    """Do what `add_clipped` does, while other threads add to the same sum.

    Args:
        update: The update.
        squares: What `squares_of_tiles` returned for the update, or NO_SQUARES if no other thread
            can change it.
        factor: The factor by which the update is multiplied.
        steps_per_unit: Steps of the grid per 1.0.
        most: The largest number of steps that a coordinate can have after scaling.
        steps: The sum, in steps; changed in place.
        locks: One lock per block of BLOCK coordinates. No thread waits while it holds one.
        first: The block to begin with.
    """
    done = np.zeros(locks.shape[0], dtype=np.bool_)
    copy = np.empty(TILE, update.dtype)
    block = first
    for _ in range(done.shape[0]):
        block = lock_next(locks, done, block)
        start, end = block * BLOCK, (block + 1) * BLOCK
        part, total = update[start:end], steps[start:end]
        if squares.shape[0] == 0:
            add_clipped(part, factor, steps_per_unit, most, total)
        else:
            sums = squares[start // TILE : end // TILE]
            add_unchanged(part, sums, factor, steps_per_unit, most, total, copy)
        unlock(locks, block)


@numba.njit(**compiled)
def add_unchanged(
    update: Array,
    squares: Array,
    factor: float,
    steps_per_unit: float,
    most: float,
    steps: Array,
    copy: Array,
) -> None:
    """Do what `add_clipped` does, but leave out what has other squares than before.

    Another thread may change the update after its norm was computed. So each tile is copied, and
    the squares of the copy are summed again, in the same order. If the sum is the same as before,
    what is added has the norm that was computed. If not, the tile is left out, and the norm of what
    is added is smaller.

    Args:
        update: As for `add_clipped`, as are the following arguments up to `steps`.
        squares: The sum of squares of each tile, of which the norm was computed.
        factor: The factor by which the update is multiplied.
        steps_per_unit: Steps of the grid per 1.0.
        most: The largest number of steps that a coordinate can have after scaling.
        steps: The sum, in steps; changed in place.
        copy: Memory for a tile.
    """
    lanes, sums = np.empty(LANES), np.empty(1)
    for tile in range(squares.shape[0]):
        start, end = tile * TILE, (tile + 1) * TILE
        part, total = update[start:end], steps[start:end]
        if most < EXACT_SHIFT and part.shape[0] == TILE:
            # To add before comparing is faster: the copy is not read again. The sum is locked, so
            # no other thread sees a change that is taken back.
            add_copy_and_sum_squares(part, factor, steps_per_unit, SHIFT, total, copy, lanes)
            add_lanes(lanes, sums)
            if sums[0] != squares[tile]:
                for i in range(TILE):
                    total[i] -= steps_by_shift(copy[i], factor, steps_per_unit)
        else:
            rest = copy[: part.shape[0]]
            rest[:] = part
            if sum_of_squares(rest)[0] == squares[tile]:
                add_clipped(rest, factor, steps_per_unit, most, total)


@numba.njit(**compiled)
def steps_by_shift(value: float, factor: float, steps_per_unit: float) -> np.int64:
    """Scale a value and cut it off toward zero to whole steps, fewer than 2^51.

    The result is that of a conversion to int64, but vectorized: without AVX-512, CPUs convert to
    int64 one number at a time.
    """
    whole = np.trunc(np.float64(value) * factor * steps_per_unit)
    return np.int64(bits_of(whole + SHIFT)) - SHIFT_BITS


@numba.njit(**compiled)
def add_steps_in_blocks(addend: Array, steps: Array, locks: Array, first: int) -> None:
    """Add a sum to another, while other threads add to it; see `add_in_blocks`."""
    done = np.zeros(locks.shape[0], dtype=np.bool_)
    block = first
    for _ in range(done.shape[0]):
        block = lock_next(locks, done, block)
        for i in range(block * BLOCK, min(steps.shape[0], (block + 1) * BLOCK)):
            steps[i] += addend[i]
        unlock(locks, block)


@numba.njit(**compiled)
def lock_next(locks: Array, done: Array, first: int) -> int:
    """Take the lock of a block that is not done, the next one from `first` that is free."""
    while True:
        for position in range(first, first + done.shape[0]):
            block = position % done.shape[0]
            if not done[block] and try_lock(locks, block):
                done[block] = True
                return block
        yield_core()


@numba.njit(**compiled)
def add_clipped(
    update: Array, factor: float, steps_per_unit: float, most: float, steps: Array
) -> None:
    """Scale an update, cut it off toward zero to whole steps, and add it to `steps`.

    Args:
        update: The update.
        factor: The factor by which the update is multiplied.
        steps_per_unit: Steps of the grid per 1.0; a power of two.
        most: The largest number of steps that a coordinate can have after scaling.
        steps: The sum, in steps; changed in place.
    """
    # Multiply by the factor first: multiplying by a power of two is exact, so only one product is
    # rounded.
    if most < EXACT_SHIFT:
        for i in range(update.shape[0]):
            steps[i] += steps_by_shift(update[i], factor, steps_per_unit)
    else:
        for i in range(update.shape[0]):
            steps[i] += np.int64(np.trunc(np.float64(update[i]) * factor * steps_per_unit))
