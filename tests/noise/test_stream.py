"""The fast stream against each mechanism's own reference step, and the covariance that is promised.

Rows of Z are made by hand from the public pieces, so that only the mixing is compared.
"""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from noise_pieces import (
    KEY,
    ONE_OF_EACH,
    check_covariance,
    check_white,
    follow,
    released_rounds,
    rows_of,
)

import dpftrl
from conformance import EVERY, Altered, Family, draw_case
from dpftrl.errors import InvalidInput, RoundsExceeded
from dpftrl.noise import Grid, NoiseStream

every = pytest.mark.parametrize("family", EVERY, ids=str)
modes = pytest.mark.parametrize("mode", ["buffered", "regenerating"])
# Rounding that each round may add, against the size of what is summed. Float32 buffers are off by
# 2^-25 each.
ROUNDING = {"float64": 1e-12, "float32": 1e-6}
SIGMA, CLIP = 3.0, 0.5


def make(mechanism, size: int, mode="buffered", dtype="float64", noise_multiplier=SIGMA, threads=2):
    return NoiseStream.unchecked(
        mechanism,
        size,
        noise_multiplier=noise_multiplier,
        clip_norm=CLIP,
        key=KEY,
        mode=mode,
        dtype=dtype,
        threads=threads,
    )


def some_updates(rounds: int, size: int) -> np.ndarray:
    return np.random.default_rng(rounds + size).standard_normal((rounds, size))


# --- The reference -----------------------------------------------------------------------------


def size_of_terms(mechanism, z: np.ndarray, rounds: int) -> np.ndarray:
    """What rounding is measured by: all that is added up for a round, and for those before it.

    An error in an early round comes back as often as the decoder brings back early noise.
    """
    decoder = np.abs(mechanism.decoder(rounds))
    again = np.abs(decoder[:, -rounds:]) if decoder.shape[1] == rounds else np.eye(rounds)
    terms = decoder @ np.abs(z[: decoder.shape[1]])
    return np.maximum.accumulate(1 + terms + again @ terms, axis=0)


def check_reference(mechanism, rounds: int, size: int, mode, dtype, reference=None) -> None:
    scale = SIGMA * CLIP
    found = follow(
        make(mechanism, size, mode, dtype),
        reference or mechanism,
        some_updates(rounds, size),
        scale,
    )
    allowed = ROUNDING[dtype if mode == "buffered" else "float64"]
    bound = allowed * (1 + scale * size_of_terms(mechanism, found.z, rounds))
    assert np.all(np.abs(found.released - found.wanted) <= bound)


@every
@modes
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(max_examples=4)
@given(data=st.data())
def test_the_stream_matches_the_reference(family: Family, mode, dtype, data):
    mechanism, rounds = draw_case(data, family, 17)
    # Mechanisms of which noise grows without end are no use, and show nothing but overflow.
    assume(np.abs(mechanism.decoder(rounds)).max() < 1e6)
    check_reference(mechanism, rounds, 2050, mode, dtype)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_stream_matches_the_reference_over_several_chunks(name):
    check_reference(ONE_OF_EACH[name], 6, 2 * 16384 + 5, "buffered", "float64")


@modes
@pytest.mark.parametrize("name", ["blt", "blt-b400", "band-sqrt", "tree", "inv-sqrt"])
def test_the_stream_matches_the_reference_over_hundreds_of_rounds(name, mode):
    check_reference(ONE_OF_EACH[name], 300 if mode == "buffered" else 80, 40, mode, "float64")


def test_a_stream_that_is_not_the_reference_is_noticed():
    right = dpftrl.BLT([0.9, 0.5], [0.2, 0.3])
    wrong = dpftrl.BLT([0.9 + 1e-6, 0.5], [0.2, 0.3])
    check_reference(right, 20, 100, "buffered", "float64")

    def skips(state, rows):
        return right.step(state, lambda row: rows(max(0, row - 1)))

    def turned(state, rows):
        return right.step(state, lambda row: np.roll(rows(row), 1))

    for reference in (wrong, Altered(right, step=skips), Altered(right, step=turned)):
        with pytest.raises(AssertionError):
            check_reference(right, 20, 100, "buffered", "float64", reference)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_float32_buffer_is_noticed_where_float64_was_asked_for(dtype):
    stream = make(ONE_OF_EACH["blt"], 500, dtype=dtype)
    found = follow(stream, ONE_OF_EACH["blt"], some_updates(30, 500), SIGMA * CLIP)
    off = np.abs(found.released - found.wanted).max()
    assert off < 1e-6 if dtype == "float32" else off < 1e-13
    assert (off > 1e-9) == (dtype == "float32")


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_what_is_released_is_the_sum_plus_scaled_noise_rounded_once(dtype):
    size, mechanism = 5000, ONE_OF_EACH["blt"]
    stream = make(mechanism, size)
    grid = Grid.for_noise(SIGMA, CLIP) if dtype == "int64" else None
    state = mechanism.init(size)
    for given_update in (some_updates(4, size) * 100).astype(dtype):
        released = given_update.copy()
        stream.add_to(released, grid)
        noise, state = mechanism.step(state, rows_of(stream, size))
        noise = noise.astype(np.longdouble) * (SIGMA * CLIP / (grid.step if grid else 1.0))
        if dtype == "int64":
            assert np.array_equal(released, given_update + np.rint(noise).astype(np.int64))
        else:
            unit = np.spacing(np.abs(released))
            assert np.all(np.abs(released - (given_update + noise)) <= 0.51 * unit + 1e-14)


def test_noise_multiplier_and_clip_norm_only_scale_the_noise():
    for noise_multiplier, clip in ((1e-3, 1.0), (40.0, 0.25), (1.0, 1e6)):
        stream = NoiseStream.unchecked(
            ONE_OF_EACH["tree"], 300, noise_multiplier=noise_multiplier, clip_norm=clip, key=KEY
        )
        scale = noise_multiplier * clip
        found = follow(stream, ONE_OF_EACH["tree"], np.zeros((5, 300)), scale)
        assert np.abs(found.released - found.wanted).max() < 1e-6 * scale
        assert found.released.std() == pytest.approx(scale, rel=0.5)


def test_auto_mode_never_keeps_one_vector_per_round():
    for name, mechanism in ONE_OF_EACH.items():
        wanted = "regenerating" if name in ("sqrt", "tree-full") else "buffered"
        assert (
            NoiseStream.unchecked(mechanism, 10, clip_norm=1.0, noise_multiplier=1, key=KEY).mode
            == wanted
        )
    huge = NoiseStream.unchecked(
        ONE_OF_EACH["blt"], 2**33, clip_norm=1.0, noise_multiplier=1, key=KEY
    )
    assert huge.mode == "regenerating"
    assert huge.memory_bytes == 0


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_number_of_buffers_is_the_memory_of_the_mechanism(name):
    mechanism, size = ONE_OF_EACH[name], 100
    stream = make(mechanism, size, dtype="float32")
    for made in range(1, 16):
        stream.add_to(np.zeros(size))
        assert stream.memory_bytes <= 4 * size * mechanism.memory(made + 1)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@modes
def test_every_round_uses_new_rows_of_z(name, mode):
    """Which carries the digest of its sum on to all that follow."""
    stream, digests = make(ONE_OF_EACH[name], 10, mode), set()
    for made in range(16):
        before = stream._state.next_row
        stream.add_to(np.zeros(10))
        assert stream._state.next_row > before
        digests.add(stream._state.digests[before].secret_bytes())
        assert len(digests) == made + 1


@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
def test_rounds_past_the_last_are_refused_and_change_nothing(mode):
    stream = make(dpftrl.FullTree(4), 10, mode)
    released_rounds(stream, np.zeros((4, 10)))
    update = np.ones(10)
    for _ in range(2):
        with pytest.raises(RoundsExceeded, match="4 rounds"):
            stream.add_to(update)
    assert stream.round == 4
    assert np.array_equal(update, np.ones(10))


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": 2.5},
        {"size": True},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"dtype": "float16"},
        {"dtype": "int64"},
        {"dtype": "no such"},
        {"mode": "fast"},
        {"threads": 0},
        {"threads": -1},
        {"key": bytes(32)},
        {"key": None},
    ],
    ids=str,
)
def test_invalid_stream_arguments_are_refused(wrong):
    with pytest.raises(InvalidInput):
        NoiseStream.unchecked(
            dpftrl.Independent(),
            **{"clip_norm": 1.0, "size": 3, "noise_multiplier": 1.0, "key": KEY, **wrong},
        )


def test_a_scale_that_is_not_a_number_is_refused():
    """The product of two positive numbers can be zero: no noise at all."""
    for noise_multiplier, clip_norm in ((1e-200, 1e-200), (1e200, 1e200)):
        update = np.zeros(100)
        with pytest.raises(InvalidInput):
            NoiseStream.unchecked(
                dpftrl.Independent(),
                100,
                noise_multiplier=noise_multiplier,
                clip_norm=clip_norm,
                key=KEY,
            ).add_to(update)


# --- Covariance --------------------------------------------------------------------------------

COORDINATES, ROUNDS = 200_000, 8


def noise_of(mechanism, mode="buffered", dtype="float32", noise_multiplier=SIGMA):
    stream = make(mechanism, COORDINATES, mode, dtype, noise_multiplier)
    return released_rounds(stream, np.zeros((ROUNDS, COORDINATES)))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_covariance_is_that_of_the_decoder(name):
    mechanism = ONE_OF_EACH[name]
    noise = noise_of(mechanism)
    check_covariance(noise, mechanism.decoder(ROUNDS), SIGMA * CLIP)
    strategy = mechanism.strategy(ROUNDS)
    if strategy.shape[0] == ROUNDS:
        check_white(strategy @ noise / (SIGMA * CLIP))


def test_noise_with_another_covariance_is_noticed():
    right = dpftrl.BLT([0.9, 0.5], [0.3, 0.3])
    decoder, scale = right.decoder(ROUNDS), SIGMA * CLIP
    noise = noise_of(right)
    check_covariance(noise, decoder, scale)
    repeated = noise.copy()
    repeated[5] = noise[4]
    exchanged = noise[[0, 1, 2, 4, 3, 5, 6, 7]]
    others = [noise_of(dpftrl.BLT([0.9 * 0.98, 0.5 * 0.98], [0.3, 0.3])), repeated, exchanged]
    others += [noise * 1.01, noise * 0.99, noise_of(dpftrl.Independent())]
    for wrong in others:
        with pytest.raises(AssertionError):
            check_covariance(wrong, decoder, scale)
        with pytest.raises(AssertionError):
            check_white(right.strategy(ROUNDS) @ wrong / scale)


# --- Long runs ---------------------------------------------------------------------------------


def drift(rounds: int, size: int) -> float:
    """How far float32 buffers of blt-b400 get from float64 ones, in standard deviations."""
    blt = dpftrl.mechanism("blt-b400")
    stream = NoiseStream.unchecked(
        blt, size, clip_norm=1.0, noise_multiplier=1.0, key=KEY, dtype="float32", threads=1
    )
    theta, omega = np.array(blt.theta), np.array(blt.omega)
    buffers, furthest = np.zeros((len(theta), size)), 0.0
    for row in range(rounds):
        update = np.zeros(size)
        stream.add_to(update)
        noise = rows_of(stream, size)(row) - omega @ buffers
        buffers = theta[:, None] * buffers + noise
        furthest = max(furthest, float(np.abs(update - noise).max()))
    return furthest


def test_float32_buffers_do_not_drift():
    assert max(dpftrl.mechanism("blt-b400").theta) > 1 - 1e-11
    assert 1e-9 < drift(2000, 64) < 1e-6


@pytest.mark.slow
def test_float32_buffers_do_not_drift_over_a_hundred_thousand_rounds():
    assert drift(100_000, 64) < 1e-5
