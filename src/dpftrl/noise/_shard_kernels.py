"""The compiled inner loops of the noise for some of the coordinates of a model.

A shard may begin and end anywhere, but normals are generated in whole tiles. So a tile is generated
as a whole, and the coordinates of the shard are taken from it. Every coordinate is computed as in
`dpftrl.noise.kernels`, by the same operations in the same order, so it has the same bits.

Common arguments: `words` is a part of the keystream that begins at tile `first`. Each row of
`cuts` says which coordinates of a tile belong to the shard: the tile, the first coordinate in it,
their number, and the place of the first one in the arrays of the shard.
"""

# pyright: basic
import numba

from dpftrl._internal.arrays import Array
from dpftrl._internal.compiled import TILE, compiled
from dpftrl.noise.kernels import _blt_tile, add_rounded, add_scaled, mix_buffers
from dpftrl.noise.normals import TILE_WORDS, tile_of_normals


@numba.njit(**compiled)
def blt_step_of_shard(
    words: Array,
    first: int,
    cuts: Array,
    theta: Array,
    omega: Array,
    addresses: Array,
    like: Array,
    z: Array,
    scale: float,
    rounded: bool,
    update: Array,
) -> None:
    """Compute the noise of one round of a BLT, and add it to `update` unless that is empty."""
    generated = -1
    for row in range(cuts.shape[0]):
        tile, offset, length, start = cuts[row, 0], cuts[row, 1], cuts[row, 2], cuts[row, 3]
        if tile != generated:
            place = (tile - first) * TILE_WORDS
            tile_of_normals(words[place : place + TILE_WORDS], z)
            generated = tile
        noise = z[offset : offset + length]
        _blt_tile(theta, omega, addresses, start + length, start, like, noise)
        if update.shape[0]:
            _add(noise, scale, rounded, update[start : start + length])


@numba.njit(**compiled)
def mix_buffers_of_shard(
    first: int,
    cuts: Array,
    weights: Array,
    inputs: Array,
    outputs: Array,
    like: Array,
    sums: Array,
) -> None:
    """Add weighted old buffers to `sums`, and copy its rows after the first to the new buffers.

    The columns of `sums` are the coordinates of whole tiles from `first` on. The other arguments
    are those of `dpftrl.noise.kernels.mix_buffers`.
    """
    for row in range(cuts.shape[0]):
        length, start = cuts[row, 2], cuts[row, 3]
        place = (cuts[row, 0] - first) * TILE + cuts[row, 1]
        own = sums[:, place : place + length]
        mix_buffers(weights, inputs, outputs, start + length, start, like, own)


@numba.njit(**compiled)
def add_to_shard(
    first: int, cuts: Array, noise: Array, scale: float, rounded: bool, update: Array
) -> None:
    """Add the noise of whole tiles to the coordinates of the shard in them."""
    for row in range(cuts.shape[0]):
        length, start = cuts[row, 2], cuts[row, 3]
        place = (cuts[row, 0] - first) * TILE + cuts[row, 1]
        _add(noise[place : place + length], scale, rounded, update[start : start + length])


@numba.njit(**compiled)
def _add(noise: Array, scale: float, rounded: bool, update: Array) -> None:
    if rounded:
        add_rounded(noise, scale, update)
    else:
        add_scaled(noise, scale, update)
