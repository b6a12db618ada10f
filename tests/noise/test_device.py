"""Noise in tensor operations: ChaCha20, normals, split arithmetic and the bounds of its errors."""

import math
from fractions import Fraction

import numpy as np
import pytest
from device_pieces import (
    SUPPORTED,
    NumpyOps,
    check_keystream,
    check_many_normals,
    check_normals,
    check_rounds,
    exact_normals,
    extreme_words,
    random_words,
    value_of,
)
from noise_pieces import ONE_OF_EACH

import dpftrl
from dpftrl.accounting.gaussian import FARTHEST_NORMAL
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms.base import DecayingBuffers
from dpftrl.noise.device import (
    FLOAT64,
    SPLIT,
    Split,
    add,
    chacha20,
    check_block_counter,
    decaying_buffers,
    multiply,
    split_blt_step,
    split_normals,
    split_of,
    split_rounded,
    surplus_bits,
)

OPS = NumpyOps()
RANDOM = np.random.default_rng(22)


def blocks_of(key, counters, nonce):
    return np.stack(chacha20(OPS, list(key), counters, list(nonce)))


def normals_of(words):
    return split_normals(OPS, list(words))


# --- Keystream ------------------------------------------------------------------------------------


def test_the_keystream_is_chacha20():
    check_keystream(blocks_of)


@pytest.mark.parametrize("name", ["DOUBLE_ROUNDS", "QUARTERS", "CONSTANTS"])
def test_another_keystream_is_noticed(name, monkeypatch):
    from dpftrl.noise import device

    known = getattr(device, name)
    changed = known - 1 if name == "DOUBLE_ROUNDS" else known[::-1]
    monkeypatch.setattr(device, name, changed)
    with pytest.raises(AssertionError):
        check_keystream(blocks_of)


# --- Normals --------------------------------------------------------------------------------------


def test_normals_are_within_the_claimed_bound():
    check_normals(normals_of, SPLIT)


def test_extreme_words_give_finite_normals_up_to_the_largest():
    z = value_of(normals_of(extreme_words()))
    assert np.isfinite(z).all()
    assert FARTHEST_NORMAL * 0.999 < np.abs(z).max() <= FARTHEST_NORMAL + SPLIT.normal
    assert np.abs(z).min() > 0.0


def test_many_normals_are_right_and_look_like_normals():
    words = random_words(25_000)
    check_many_normals(normals_of(words), words, SPLIT)


@pytest.mark.parametrize(
    "change",
    [
        lambda z: Split(z.high, z.low * 0),  # float32 is not enough
        lambda z: Split(z.high * np.float32(1.02), z.low),
        lambda z: Split(z.high[::-1], z.low[::-1]),
    ],
)
def test_wrong_normals_are_noticed(change):
    with pytest.raises(AssertionError):
        check_normals(lambda words: change(normals_of(words)), SPLIT)


# --- Split arithmetic -----------------------------------------------------------------------------


def split_numbers(count):
    """Pairs of float32: ordinary numbers, and some with hardly any or with awkward low bits."""
    sizes = 2.0 ** RANDOM.integers(-8, 9, count)
    high = (RANDOM.uniform(1, 2, count) * sizes * RANDOM.choice([-1, 1], count)).astype(np.float32)
    ones = np.uint32(2**12 - 1) | high.view(np.uint32)  # the largest low halves
    high = np.where(RANDOM.random(count) < 0.3, ones.view(np.float32), high)
    low = np.spacing(high) / 2 * RANDOM.uniform(-1, 1, count)
    return Split(high, low.astype(np.float32))


def fractions(numbers):
    return [
        Fraction(float(high)) + Fraction(float(low))
        for high, low in zip(numbers.high, numbers.low, strict=True)
    ]


def relative_errors(found, wanted):
    return [
        float(abs(one - other) / abs(other)) if other else float(one != 0)
        for one, other in zip(fractions(found), wanted, strict=True)
    ]


def test_sums_and_products_are_within_the_claimed_bounds():
    a, b = split_numbers(3000), split_numbers(3000)
    sums = [x + y for x, y in zip(fractions(a), fractions(b), strict=True)]
    products = [x * y for x, y in zip(fractions(a), fractions(b), strict=True)]
    of_sum = max(relative_errors(add(a, b), sums))
    of_product = max(relative_errors(multiply(OPS, a, b), products))
    assert 0 < of_sum <= SPLIT.sum
    assert 2.0**-48 < of_product <= SPLIT.product - 2.0**-48  # which the rounded constant has


def test_sums_that_cancel_are_within_the_claimed_bound():
    a = split_numbers(3000)
    b = Split(-a.high, (a.low * np.float32(0.7)).astype(np.float32))
    sums = [x + y for x, y in zip(fractions(a), fractions(b), strict=True)]
    assert max(relative_errors(add(a, b), sums)) <= SPLIT.sum


def test_constants_are_rounded_to_48_bits():
    for value in RANDOM.uniform(-2, 2, 500).tolist():
        high, low = split_of(value)
        assert abs(Fraction(high) + Fraction(low) - Fraction(value)) <= Fraction(abs(value)) / 2**48


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999999, 1 / 3])
def test_storing_a_buffer_is_within_the_claimed_rounding(decay):
    """`Arithmetic.rounding` bounds the error relative to what the buffer holds before or after."""
    old, noise = split_numbers(1000), split_numbers(1000)
    parameters = DecayingBuffers((decay,), (0.0,))
    released, (new,) = split_blt_step(OPS, parameters, [old], noise)
    worst = 0.0
    for before, given, after in zip(
        fractions(old), fractions(released), fractions(new), strict=True
    ):
        exact = Fraction(decay) * before + given
        worst = max(worst, float(abs(after - exact) / max(abs(before), abs(exact))))
    assert 2.0**-49 < worst <= SPLIT.rounding


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_noise_of_a_round_is_within_the_claimed_error(name):
    """The buffers of the stream are given; the noise is compared with exact numbers."""
    mechanism, rounds, blocks = SUPPORTED[name], 12, 3
    parameters = decaying_buffers(mechanism)
    zeros = np.zeros(8 * blocks, np.float32)
    buffers = [Split(zeros, zeros) for _ in parameters.decays]
    scale, worst = 2.0**24 * 1.3, 0.0
    bound = SPLIT.noise_error(mechanism, rounds, FARTHEST_NORMAL)
    for step in range(rounds):
        words = random_words(blocks, seed=step)
        exact_z = exact_normals(words).reshape(-1)
        z = Split(*(part.reshape(-1) for part in normals_of(words)))
        before = [fractions(buffer) for buffer in buffers]
        noise, buffers = split_blt_step(OPS, parameters, buffers, z)
        x = multiply(OPS, noise, Split(*(zeros + np.float32(part) for part in split_of(scale))))
        for place, found in enumerate(fractions(x)):
            exact = _fraction(exact_z[place])
            for omega, buffer in zip(parameters.scales, before, strict=True):
                exact -= Fraction(omega) * buffer[place]
            worst = max(worst, float(abs(found / Fraction(scale) - exact)))
    assert 0 < worst <= bound
    assert bound <= 2.0**-35, "the bound says little"


def _fraction(number):
    sign, mantissa, exponent, _ = number._mpf_
    return Fraction((-1) ** sign * int(mantissa)) * Fraction(2) ** int(exponent)


def test_a_bound_that_is_too_small_is_noticed():
    """Negative control: float32 without low parts is far from the claimed bounds."""
    a, b = split_numbers(200), split_numbers(200)
    products = [x * y for x, y in zip(fractions(a), fractions(b), strict=True)]
    plain = Split(a.high * b.high, a.low * 0)
    assert max(relative_errors(plain, products)) > 1000 * SPLIT.product


@pytest.mark.parametrize("scale", [1.0, 2.0**24, 2.0**24 * 1.9, 2.0**36])
def test_rounding_to_whole_numbers(scale):
    numbers = split_numbers(2000)
    high, low = split_rounded(OPS, numbers, scale)
    assert high.dtype == low.dtype == np.float32
    found = high.astype(np.int64) * 2**16 + low.astype(np.int64)
    for whole, number in zip(found.tolist(), fractions(numbers), strict=True):
        exact = number * Fraction(scale)
        assert abs(whole - exact) <= Fraction(1, 2) + abs(exact) * Fraction(SPLIT.product)


# --- Whole streams --------------------------------------------------------------------------------


def run_numpy(mechanism, words, scale, parameters=None):
    """What rounds with these words add, in steps, and the rows of Z."""
    parameters = parameters or decaying_buffers(mechanism)
    zeros = np.zeros(8 * words[0].shape[1], np.float32)
    buffers = [Split(zeros, zeros) for _ in parameters.decays]
    added, rows = [], []
    for some in words:
        z = Split(*(part.T.reshape(-1) for part in normals_of(some)))
        noise, buffers = split_blt_step(OPS, parameters, buffers, z)
        high, low = split_rounded(OPS, noise, scale)
        added.append(high.astype(np.int64) * 2**16 + low.astype(np.int64))
        rows.append(value_of(z))
    return added, rows


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_stream_is_the_reference_of_the_mechanism(name):
    scale = 1.7 * 2**24
    words = [random_words(300, seed) for seed in range(12)]
    added, rows = run_numpy(SUPPORTED[name], words, scale)
    check_rounds(added, rows, SUPPORTED[name], scale, SPLIT)


def test_a_wrong_decay_a_halved_scale_or_shifted_words_are_noticed():
    mechanism, scale = SUPPORTED["blt-3"], 1.7 * 2**24
    words = [random_words(50, seed) for seed in range(4)]
    added, rows = run_numpy(mechanism, words, scale)
    decays, scales = decaying_buffers(mechanism)
    wrong = DecayingBuffers((decays[0] * (1 + 1e-6), *decays[1:]), scales)
    bad, _ = run_numpy(mechanism, words, scale, wrong)
    for changed, factor in ((bad, 1.0), (added, 0.5), ([np.roll(a, 1) for a in added], 1.0)):
        with pytest.raises(AssertionError):
            check_rounds(changed, rows, mechanism, factor * scale, SPLIT)


def test_a_standard_deviation_has_24_bits_in_what_is_released():
    for scale in (0.1, 2.0**24, 2.0**25 * 0.99):
        assert surplus_bits(scale) == 0
    assert surplus_bits(2.0**25) == 1
    assert surplus_bits(2.0**36) == 12


# --- Bounds of mechanisms -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in SUPPORTED if n != "independent"])
@pytest.mark.parametrize("rounds", [1, 2, 30, 400])
def test_the_bound_on_buffers_is_that_of_the_worst_signs(name, rounds):
    """Brute force: responses of every buffer to one row of Z, with all signs at their worst."""
    mechanism = SUPPORTED[name]
    decays, scales = map(np.array, decaying_buffers(mechanism))
    buffers, total = np.zeros(len(decays)), np.zeros(len(decays))
    for step in range(rounds - 1):
        noise = (step == 0) - scales @ buffers
        buffers = decays * buffers + noise
        total += np.abs(buffers)
    worst = float(scales @ total)
    bound = mechanism.buffered_noise(rounds)
    assert worst <= bound <= 3 * worst + 1.0
    assert dpftrl.Independent().buffered_noise(rounds) == 0.0


def test_the_error_grows_with_buffers_and_with_the_largest_normal():
    small, large = SUPPORTED["blt-1"], SUPPORTED["blt-8"]
    for kind in (FLOAT64, SPLIT):
        assert kind.noise_error(small, 100, 10.0) < kind.noise_error(large, 100, 10.0)
        assert kind.noise_error(small, 100, 0.0) == pytest.approx(kind.normal)
        step = kind.noise_error(large, 100, 2.0) - kind.noise_error(large, 100, 1.0)
        again = kind.noise_error(large, 100, 3.0) - kind.noise_error(large, 100, 2.0)
        assert step == pytest.approx(again, rel=1e-3)
    assert FLOAT64.rounding == 2.0**-52
    assert math.isclose(SPLIT.rounding, 20 * 2.0**-48)


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in ONE_OF_EACH if "blt" not in n or n == "gblt"])
def test_other_mechanisms_are_refused_by_name(name):
    mechanism = ONE_OF_EACH[name]
    if name == "independent":
        assert decaying_buffers(mechanism) == DecayingBuffers((), ())
        return
    with pytest.raises(InvalidInput, match=f"not {mechanism.name}"):
        decaying_buffers(mechanism)


@pytest.mark.parametrize(
    "mechanism",
    [
        dpftrl.Toeplitz([0.5]),  # keeps nothing, but its noise is twice Z
        dpftrl.Toeplitz([1.0, 0.0, 0.5]),
        dpftrl.Banded([[0.5, 0.5, 0.5]]),
        dpftrl.Banded.square_root(2, 2),
    ],
)
def test_a_mechanism_without_buffers_that_is_not_independent_is_refused(mechanism):
    with pytest.raises(InvalidInput, match="BLTs and independent noise, not"):
        decaying_buffers(mechanism)


def test_more_blocks_than_the_counter_has_are_refused():
    check_block_counter(2**32)
    with pytest.raises(InvalidInput, match="counts up to 2\\^32"):
        check_block_counter(2**32 + 1)
