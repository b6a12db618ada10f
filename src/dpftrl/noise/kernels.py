"""The compiled inner loops of the noise: draw normals, mix them with the buffers, add the result.

The work is done tile by tile, and a tile fits into the cache. Sums and products are computed in
float64 whatever the type of the buffers, in a fixed order and without fast-math. The result has the
same bits on every machine and for every division of the work.

Common arguments: `words` is a part of the keystream, `addresses` are the memory addresses of
buffers with `size` coordinates each, `start` is the first coordinate to work on, and `like` is an
array with the type of the buffers.
"""

# pyright: basic
from typing import Final

import numba
import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from dpftrl._internal.arrays import Array
from dpftrl._internal.compiled import TILE, bits_of, compiled, pointer_to
from dpftrl._internal.compiled import multiply_add as fma
from dpftrl.clipping import SHIFT, SHIFT_BITS
from dpftrl.noise.normals import MANTISSA_BITS, TILE_WORDS, ZERO, tile_of_normals

# Number of coordinates that are processed for all buffers before the next coordinates. 128 was the
# fastest of 32 to 512 in measurements.
STRIP: Final = 128
SHIFT_WORD: Final = np.uint64(SHIFT_BITS)


@numba.njit(**compiled)
def blt_step(
    words: Array,
    theta: Array,
    omega: Array,
    addresses: Array,
    size: int,
    start: int,
    like: Array,
    noise: Array,
) -> None:
    """Compute the noise of one round of a BLT for whole tiles, and write it to `noise`."""
    for tile in range(noise.shape[0] // TILE):
        z = noise[tile * TILE : (tile + 1) * TILE]
        tile_of_normals(words[tile * TILE_WORDS : (tile + 1) * TILE_WORDS], z)
        _blt_tile(theta, omega, addresses, size, start + tile * TILE, like, z)


@numba.njit(**compiled)
def blt_step_onto(
    words: Array,
    theta: Array,
    omega: Array,
    addresses: Array,
    size: int,
    start: int,
    like: Array,
    z: Array,
    scale: float,
    rounded: bool,
    update: Array,
) -> None:
    """Compute the noise of one round of a BLT, and add it to `update` while it is in the cache.

    Args:
        words: The part of the keystream for these tiles.
        theta: Decays.
        omega: Output scales.
        addresses: Addresses of the buffers.
        size: Number of coordinates of a buffer.
        start: First coordinate to work on.
        like: An array with the type of the buffers.
        z: Memory for one tile.
        scale: Factor by which the noise is multiplied.
        rounded: Whether `update` counts grid steps, so that the noise is rounded to integers.
        update: The part of the sum that the noise is added to.
    """
    for tile in range(-(-update.shape[0] // TILE)):
        tile_of_normals(words[tile * TILE_WORDS : (tile + 1) * TILE_WORDS], z)
        _blt_tile(theta, omega, addresses, size, start + tile * TILE, like, z)
        part = update[tile * TILE : (tile + 1) * TILE]
        if rounded:
            add_rounded(z, scale, part)
        else:
            add_scaled(z, scale, part)


@numba.njit(**compiled)
def _blt_tile(
    theta: Array, omega: Array, addresses: Array, size: int, start: int, like: Array, z: Array
) -> None:
    """Compute one round of a BLT for one tile. `z` holds a part of a row of Z, and then the noise.

    Every buffer is used twice: it is subtracted to compute the noise, and then it is refilled with
    the noise. A fused loop over the last four, two or one buffers reads each of them only once. The
    buffers before them are read twice, in strips that stay in the cache.
    """
    count = theta.shape[0]
    fused = 4 if count >= 4 else 2 if count >= 2 else 1
    before = count - fused
    stop = min(start + TILE, size)
    strip = STRIP if before else TILE
    for first in range(start, stop, strip):
        last = min(first + strip, stop)
        out = z[first - start : last - start]
        _subtract(before, omega, addresses, size, first, last, like, out)
        if fused == 4:
            _fused_four(before, theta, omega, addresses, size, first, last, like, out)
        elif fused == 2:
            _fused_two(before, theta, omega, addresses, size, first, last, like, out)
        else:
            _fused_one(theta, omega, addresses, size, first, last, like, out)
        _refill(before, theta, addresses, size, first, last, like, out)


@numba.njit(**compiled)
def _subtract(
    count: int,
    omega: Array,
    addresses: Array,
    size: int,
    first: int,
    last: int,
    like: Array,
    out: Array,
) -> None:
    """Subtract the first `count` buffers, times their scales, from `out`.

    Each pass subtracts two buffers, because every pass reads and writes all of `out`.
    """
    pairs = count // 2
    for pair in range(pairs):
        left, right = omega[2 * pair], omega[2 * pair + 1]
        left_buffer = _row(addresses, 2 * pair, size, like)[first:last]
        right_buffer = _row(addresses, 2 * pair + 1, size, like)[first:last]
        for i in range(last - first):
            partial = fma(-left, np.float64(left_buffer[i]), out[i])
            out[i] = fma(-right, np.float64(right_buffer[i]), partial)
    for j in range(2 * pairs, count):
        scale = omega[j]
        buffer = _row(addresses, j, size, like)[first:last]
        for i in range(last - first):
            out[i] = fma(-scale, np.float64(buffer[i]), out[i])


@numba.njit(**compiled)
def _refill(
    count: int,
    theta: Array,
    addresses: Array,
    size: int,
    first: int,
    last: int,
    like: Array,
    out: Array,
) -> None:
    """Multiply the first `count` buffers by their decays, and add the noise to each of them."""
    pairs = count // 2
    for pair in range(pairs):
        left, right = theta[2 * pair], theta[2 * pair + 1]
        left_buffer = _row(addresses, 2 * pair, size, like)[first:last]
        right_buffer = _row(addresses, 2 * pair + 1, size, like)[first:last]
        for i in range(last - first):
            noise = out[i]
            left_buffer[i] = fma(left, np.float64(left_buffer[i]), noise)
            right_buffer[i] = fma(right, np.float64(right_buffer[i]), noise)
    for j in range(2 * pairs, count):
        decay = theta[j]
        buffer = _row(addresses, j, size, like)[first:last]
        for i in range(last - first):
            buffer[i] = fma(decay, np.float64(buffer[i]), out[i])


@numba.njit(**compiled)
def _fused_one(
    theta: Array,
    omega: Array,
    addresses: Array,
    size: int,
    first: int,
    last: int,
    like: Array,
    out: Array,
) -> None:
    """Subtract and refill the buffer of a BLT with a single buffer, in one loop."""
    decay, scale = theta[0], omega[0]
    buffer = _row(addresses, 0, size, like)[first:last]
    for i in range(last - first):
        held = np.float64(buffer[i])
        noise = fma(-scale, held, out[i])
        out[i] = noise
        buffer[i] = fma(decay, held, noise)


@numba.njit(**compiled)
def _fused_two(
    j: int,
    theta: Array,
    omega: Array,
    addresses: Array,
    size: int,
    first: int,
    last: int,
    like: Array,
    out: Array,
) -> None:
    """Subtract and refill the last two buffers, numbers j and j + 1, in one loop."""
    decay_0, decay_1 = theta[j], theta[j + 1]
    scale_0, scale_1 = omega[j], omega[j + 1]
    buffer_0 = _row(addresses, j, size, like)[first:last]
    buffer_1 = _row(addresses, j + 1, size, like)[first:last]
    for i in range(last - first):
        held_0, held_1 = np.float64(buffer_0[i]), np.float64(buffer_1[i])
        noise = fma(-scale_1, held_1, fma(-scale_0, held_0, out[i]))
        out[i] = noise
        buffer_0[i] = fma(decay_0, held_0, noise)
        buffer_1[i] = fma(decay_1, held_1, noise)


@numba.njit(**compiled)
def _fused_four(
    j: int,
    theta: Array,
    omega: Array,
    addresses: Array,
    size: int,
    first: int,
    last: int,
    like: Array,
    out: Array,
) -> None:
    """Subtract and refill the last four buffers, numbers j to j + 3, in one loop."""
    decay_0, decay_1, decay_2, decay_3 = theta[j], theta[j + 1], theta[j + 2], theta[j + 3]
    scale_0, scale_1, scale_2, scale_3 = omega[j], omega[j + 1], omega[j + 2], omega[j + 3]
    buffer_0 = _row(addresses, j, size, like)[first:last]
    buffer_1 = _row(addresses, j + 1, size, like)[first:last]
    buffer_2 = _row(addresses, j + 2, size, like)[first:last]
    buffer_3 = _row(addresses, j + 3, size, like)[first:last]
    for i in range(last - first):
        held_0, held_1 = np.float64(buffer_0[i]), np.float64(buffer_1[i])
        held_2, held_3 = np.float64(buffer_2[i]), np.float64(buffer_3[i])
        noise = fma(-scale_1, held_1, fma(-scale_0, held_0, out[i]))
        noise = fma(-scale_3, held_3, fma(-scale_2, held_2, noise))
        out[i] = noise
        buffer_0[i] = fma(decay_0, held_0, noise)
        buffer_1[i] = fma(decay_1, held_1, noise)
        buffer_2[i] = fma(decay_2, held_2, noise)
        buffer_3[i] = fma(decay_3, held_3, noise)


@numba.njit(**compiled)
def add_normals(words: Array, weights: Array, sums: Array) -> None:
    """Generate a row of Z, and add it to each row of `sums`, times the weight for that row."""
    z = np.empty(TILE)
    for tile in range(sums.shape[1] // TILE):
        tile_of_normals(words[tile * TILE_WORDS : (tile + 1) * TILE_WORDS], z)
        for row in range(sums.shape[0]):
            weight = weights[row]
            if weight != 0.0:
                out = sums[row, tile * TILE : (tile + 1) * TILE]
                for i in range(TILE):
                    out[i] = fma(weight, z[i], out[i])


@numba.njit(**compiled)
def mix_buffers(
    weights: Array, inputs: Array, outputs: Array, size: int, start: int, like: Array, sums: Array
) -> None:
    """Add weighted old buffers to `sums`, and copy its rows after the first to the new buffers.

    A new buffer may use the memory of an old one: a tile is read completely before it is written.

    Args:
        weights: One row for each row of `sums`, one column for each old buffer.
        inputs: Addresses of the old buffers.
        outputs: Addresses of the new buffers.
        size: Number of coordinates of a buffer.
        start: First coordinate to work on.
        like: An array with the type of the buffers.
        sums: Row 0 becomes the noise, the other rows the new buffers.
    """
    for first in range(0, min(sums.shape[1], size - start), TILE):
        a = start + first
        b = min(a + TILE, size)
        for j in range(inputs.shape[0]):
            buffer = _row(inputs, j, size, like)[a:b]
            for row in range(sums.shape[0]):
                weight = weights[row, j]
                if weight != 0.0:
                    out = sums[row, first : first + b - a]
                    for i in range(b - a):
                        out[i] = fma(weight, np.float64(buffer[i]), out[i])
        for row in range(1, sums.shape[0]):
            buffer = _row(outputs, row - 1, size, like)[a:b]
            out = sums[row, first : first + b - a]
            for i in range(b - a):
                buffer[i] = out[i]


@numba.njit(**compiled)
def add_scaled(noise: Array, scale: float, update: Array) -> None:
    """Add `scale` times the noise to a part of a sum, in floating point."""
    for i in range(update.shape[0]):
        update[i] = fma(scale, noise[i], np.float64(update[i]))


@numba.njit(**compiled)
def add_rounded(noise: Array, scale: float, update: Array) -> None:
    """Add `scale` times the noise, rounded to integers, to a part of a sum in grid steps.

    For numbers below 2^51, adding SHIFT rounds as `np.rint` does, and the bits of the sum show the
    integer. CPUs without AVX-512 have no vector instruction that converts to int64.
    """
    too_large = ZERO
    for i in range(update.shape[0]):
        too_large |= bits_of(scale * noise[i] + SHIFT) ^ SHIFT_WORD
    if too_large >> MANTISSA_BITS == ZERO:  # all have sign and exponent of SHIFT
        for i in range(update.shape[0]):
            update[i] += np.int64(bits_of(scale * noise[i] + SHIFT)) - SHIFT_BITS
    else:
        for i in range(update.shape[0]):
            update[i] += np.int64(np.rint(scale * noise[i]))


@numba.njit(**compiled)
def _row(addresses: Array, j: int, size: int, like: Array) -> Array:
    """The buffer at `addresses[j]`, as an array with the type of `like`."""
    return carray(pointer_to(addresses[j]), (size,), like.dtype)
