"""What the kernels round when they store a buffer: the operations that the bound in mu counts."""

from fractions import Fraction

import numpy as np
import pytest
from noise_pieces import KEY, ONE_OF_EACH, rows_of

from dpftrl import BLT, Mechanism
from dpftrl._internal.compiled import TILE
from dpftrl.accounting.gaussian import FARTHEST_NORMAL
from dpftrl.noise import NoiseStream
from dpftrl.noise.normals import TILE_WORDS, tile_of_normals
from rounded_streams import Arithmetic, Plain, float32, float64

ROUNDS, SIZE = 12, 5
STORING = {name for name, m in ONE_OF_EACH.items() if m.rounding_gain(ROUNDS) > 0}
STORED = {"float32": float32, "float64": float64}


def stream_of(mechanism: Mechanism, dtype: str = "float64") -> NoiseStream:
    return NoiseStream.unchecked(
        mechanism, SIZE, noise_multiplier=1.0, clip_norm=1.0, key=KEY, dtype=dtype, mode="buffered"
    )


def test_the_families_that_round_are_blts_and_refined_trees():
    assert {"blt", "blt-above-one", "blt-b400", "gblt", "tree"} == STORING


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_buffers_have_the_bits_of_the_operations_that_are_counted(name: str, dtype: str):
    """One fused multiply-add a buffer in a BLT, one a product elsewhere, all of them in float64."""
    mechanism = ONE_OF_EACH[name]
    stream = stream_of(mechanism, dtype)
    arithmetic = Arithmetic(noise=float64, buffer=float64, stored=STORED[dtype])
    by_hand, source = [Plain(mechanism, arithmetic) for _ in range(SIZE)], rows_of(stream, SIZE)
    for _ in range(ROUNDS):
        released = np.zeros(SIZE)
        stream.add_to(released)
        for i, plain in enumerate(by_hand):
            z = [Fraction(float(source(plain.next_row + k)[i])) for k in range(plain.fresh)]
            noise = plain.noise(z)
            assert noise == Fraction(float(released[i]))
            plain.advance(z, noise)
            held = [Fraction(float(buffer.array[i])) for buffer in stream._state.buffers]
            assert held == plain.buffers


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("buffers", range(1, 10))
def test_any_number_of_buffers_has_the_reference_bits_over_several_tiles(buffers: int, dtype: str):
    """Some buffers are done in one loop and others in strips: nobody can tell from the bits."""
    size = 2 * TILE + 77
    decays = np.linspace(0.05, 0.999, buffers)
    mechanism = BLT(decays.tolist(), [0.8 / buffers] * buffers)
    stream = NoiseStream.unchecked(
        mechanism, size, noise_multiplier=1.0, clip_norm=1.0, key=KEY, dtype=dtype, mode="buffered"
    )
    arithmetic = Arithmetic(noise=float64, buffer=float64, stored=STORED[dtype])
    places = (0, 127, 128, TILE - 1, TILE, size - 78, size - 1)
    by_hand, source = [Plain(mechanism, arithmetic) for _ in places], rows_of(stream, size)
    for row in range(4):
        released = np.zeros(size)
        stream.add_to(released)
        z = source(row)
        for place, plain in zip(places, by_hand, strict=True):
            noise = plain.noise([Fraction(float(z[place]))])
            assert noise == Fraction(float(released[place]))
            plain.advance([], noise)
            held = [Fraction(float(buffer.array[place])) for buffer in stream._state.buffers]
            assert held == plain.buffers


@pytest.mark.parametrize("name", sorted(set(ONE_OF_EACH) - STORING))
def test_other_families_store_rows_of_noise_or_of_z_and_nothing_else(name: str):
    """Storing a float64 number that was there before rounds nothing."""
    stream = stream_of(ONE_OF_EACH[name])
    source, rows = rows_of(stream, SIZE), set[bytes]()
    for _ in range(ROUNDS):
        released = np.zeros(SIZE)
        before = stream._state.next_row
        stream.add_to(released)
        rows |= {released.tobytes()}
        rows |= {source(row).tobytes() for row in range(before, stream._state.next_row)}
        assert {buffer.array.tobytes() for buffer in stream._state.buffers} <= rows


@pytest.mark.parametrize("name", sorted(STORING))
def test_families_that_round_store_neither_noise_nor_z(name: str):
    stream = stream_of(ONE_OF_EACH[name])
    source, rows = rows_of(stream, SIZE), set[bytes]()
    for _ in range(ROUNDS):
        released = np.zeros(SIZE)
        stream.add_to(released)
        rows |= {released.tobytes()}
    rows |= {source(row).tobytes() for row in range(stream._state.next_row)}
    assert not {buffer.array.tobytes() for buffer in stream._state.buffers} <= rows


@pytest.mark.parametrize("angle", [0, 1, 2**40, 2**51, 2**52 - 1])
def test_no_normal_is_larger_than_the_bound_says(angle: int):
    words = np.zeros(TILE_WORDS, np.uint64)  # the smallest uniform, and so the largest radius
    words[TILE_WORDS // 2 :] = np.uint64(angle << 12)
    normals = np.empty(TILE)
    tile_of_normals(words, normals)
    radius = np.hypot(normals[: TILE // 2], normals[TILE // 2 :]).max()
    assert radius == pytest.approx(FARTHEST_NORMAL, rel=1e-14)
    assert np.abs(normals).max() <= FARTHEST_NORMAL * (1 + 1e-14)
