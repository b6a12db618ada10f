"""The inner loops: normals are made, mixed with the buffers and added, a tile at a time in cache.

Sums and products are in float64 whatever the buffers are kept in, in a fixed order, without fast
maths: the same bits on every machine and for every division of the work.
"""

# pyright: basic
from typing import Any, Final

import numba
import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]
from numpy.typing import NDArray

from dpftrl.noise.machine import bits_of, pointer_to
from dpftrl.noise.machine import multiply_add as fma
from dpftrl.noise.normals import TILE, TILE_WORDS, compiled, tile_of_normals

Array = NDArray[Any]

# Coordinates that are taken through all buffers before the next ones: the fastest of 32 to 512.
STRIP: Final = 128
# Whole numbers below 2^51, shifted by this, lie where float64 has a step of 1: counting in them is
# counting in their bits.
SHIFT: Final = 1.5 * 2.0**52
SHIFT_BITS: Final = np.int64(0x4338000000000000)
EXACT_SHIFT: Final = 2.0**51


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
    """One round of a BLT over some tiles: subtract what the buffers hold, decay and refill them."""
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
    """The same, added to a part of the update at once, so that no noise leaves the cache."""
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
    """One round over one tile: z becomes the noise.

    Each buffer is read twice, for the noise and to be refilled with it. The last ones are done in
    one loop that reads them once; those before them go through the cache in strips.
    """
    count = theta.shape[0]
    together = 4 if count >= 4 else 2 if count >= 2 else 1
    before = count - together
    stop = min(start + TILE, size)
    strip = STRIP if before else TILE
    for first in range(start, stop, strip):
        last = min(first + strip, stop)
        out = z[first - start : last - start]
        _subtract(before, omega, addresses, size, first, last, like, out)
        if together == 4:
            _four_at_once(before, theta, omega, addresses, size, first, last, like, out)
        elif together == 2:
            _two_at_once(before, theta, omega, addresses, size, first, last, like, out)
        else:
            _one_at_once(theta, omega, addresses, size, first, last, like, out)
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
    """Take off z what the first buffers hold; two at a time, since each pass goes over z."""
    pairs = count // 2
    for pair in range(pairs):
        left, right = omega[2 * pair], omega[2 * pair + 1]
        left_buffer = _row(addresses, 2 * pair, size, like)[first:last]
        right_buffer = _row(addresses, 2 * pair + 1, size, like)[first:last]
        for i in range(last - first):
            once = fma(-left, np.float64(left_buffer[i]), out[i])
            out[i] = fma(-right, np.float64(right_buffer[i]), once)
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
    """Decay the first buffers, and add the noise to each; two at a time, too."""
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
def _one_at_once(
    theta: Array,
    omega: Array,
    addresses: Array,
    size: int,
    first: int,
    last: int,
    like: Array,
    out: Array,
) -> None:
    """Subtract and refill the only buffer."""
    decay, scale = theta[0], omega[0]
    buffer = _row(addresses, 0, size, like)[first:last]
    for i in range(last - first):
        held = np.float64(buffer[i])
        noise = fma(-scale, held, out[i])
        out[i] = noise
        buffer[i] = fma(decay, held, noise)


@numba.njit(**compiled)
def _two_at_once(
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
    """Subtract and refill the last two buffers, from number j on."""
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
def _four_at_once(
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
    """Subtract and refill the last four buffers, from number j on."""
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
def add_normals(words: Array, weights: Array, made: Array) -> None:
    """Add a row of Z, times a weight for each, to several sums."""
    z = np.empty(TILE)
    for tile in range(made.shape[1] // TILE):
        tile_of_normals(words[tile * TILE_WORDS : (tile + 1) * TILE_WORDS], z)
        for row in range(made.shape[0]):
            weight = weights[row]
            if weight != 0.0:
                out = made[row, tile * TILE : (tile + 1) * TILE]
                for i in range(TILE):
                    out[i] = fma(weight, z[i], out[i])


@numba.njit(**compiled)
def mix_buffers(
    weights: Array, inputs: Array, outputs: Array, size: int, start: int, like: Array, made: Array
) -> None:
    """Add weighted buffers to several sums, and keep all but the first of them as new buffers.

    A new buffer may lie where an old one was: a tile is read whole before any of it is written.
    """
    for first in range(0, min(made.shape[1], size - start), TILE):
        a = start + first
        b = min(a + TILE, size)
        for j in range(inputs.shape[0]):
            buffer = _row(inputs, j, size, like)[a:b]
            for row in range(made.shape[0]):
                weight = weights[row, j]
                if weight != 0.0:
                    out = made[row, first : first + b - a]
                    for i in range(b - a):
                        out[i] = fma(weight, np.float64(buffer[i]), out[i])
        for row in range(1, made.shape[0]):
            buffer = _row(outputs, row - 1, size, like)[a:b]
            out = made[row, first : first + b - a]
            for i in range(b - a):
                buffer[i] = out[i]


@numba.njit(**compiled)
def add_scaled(noise: Array, scale: float, update: Array) -> None:
    """Add noise to a part of an update, in floating point."""
    for i in range(update.shape[0]):
        update[i] = fma(scale, noise[i], np.float64(update[i]))


@numba.njit(**compiled)
def add_rounded(noise: Array, scale: float, update: Array) -> None:
    """Add noise, rounded to the grid, to a part of a sum that counts steps of the grid."""
    for i in range(update.shape[0]):
        update[i] += np.int64(np.rint(scale * noise[i]))


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


@numba.njit(**compiled)
def _row(addresses: Array, j: int, size: int, like: Array) -> Array:
    """The array like `like` at one of several addresses."""
    return carray(pointer_to(addresses[j]), (size,), like.dtype)
