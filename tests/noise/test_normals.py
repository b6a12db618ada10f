"""The sampler: every kind of word against exact arithmetic, and the shape of what comes out.

Each check of the shape is a function that wrong noise is shown to fail.
"""

import hashlib
import itertools
import math

import mpmath
import numpy as np
import pytest
from noise_pieces import (
    KEY,
    MOST,
    OTHER_KEY,
    check_moments,
    check_tails,
    check_uncorrelated,
    normals_of_key,
)
from scipy import special, stats

import dpftrl
from dpftrl._internal.compiled import TILE
from dpftrl.accounting.gaussian import RADIUS_BITS, largest_normal
from dpftrl.noise import Grid, NoiseStream
from dpftrl.noise.key import Secret, row_key
from dpftrl.noise.normals import PAIRS, tile_of_normals
from dpftrl.noise.round_noise import CHUNK

# Bits of the angle; those below it in its word, and a word before, are the radius.
ANGLE_BITS = 52
ONES = 2**64 - 1
LOW = 64 - ANGLE_BITS
MILLION = 10**6


def word_of(u: int, angle: int = 0) -> tuple[int, int]:
    """The two words of 64 bits for a radius and an angle in whole numbers."""
    assert 0 <= u < 2**RADIUS_BITS
    assert 0 <= angle < 2**ANGLE_BITS
    return u >> LOW, angle << LOW | u & (2**LOW - 1)


def parts_of(word) -> tuple[int, int]:
    """The other way around."""
    first, second = (int(part) for part in word)
    return first << LOW | second & (2**LOW - 1), second >> LOW


def sampler(words):
    """Pairs of normals from pairs of words."""
    words = np.array(words, np.uint64).reshape(-1, 2)
    made = []
    for first in range(0, len(words), PAIRS):
        some = words[first : first + PAIRS]
        tile, normals = np.zeros((2, PAIRS), np.uint64), np.empty(TILE)
        tile[:, : len(some)] = some.T
        tile_of_normals(tile.reshape(-1), normals)
        made.append(normals.reshape(2, PAIRS)[:, : len(some)].T)
    return np.concatenate(made)


def exactly(word):
    """The pair that the words stand for, and its radius, to 40 digits."""
    u, angle = parts_of(word)
    with mpmath.workdps(40):
        radius = mpmath.sqrt(-2 * mpmath.log((mpmath.mpf(u) + 0.5) / 2**RADIUS_BITS))
        turn = 2 * mpmath.pi * (mpmath.mpf(angle) + 0.5) / 2**ANGLE_BITS
        return radius * mpmath.cos(turn), radius * mpmath.sin(turn), radius


def radii(words) -> np.ndarray:
    return np.hypot(*sampler(words).T)


def random_words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), dtype=np.uint64)


# --- Accuracy ----------------------------------------------------------------------------------


def check_accuracy(make, words) -> None:
    """Within 2e-15, or two units in the last place of the radius if it is large.

    Close to the centre, where u is rounded to a float64 near 1, within 1.2e-16 over the radius.
    """
    for word, made in zip(words, make(words), strict=True):
        *wanted, radius = exactly(word)
        bound = max(2e-15, 4e-16 * radius) + 1.2e-16 / max(radius, 1e-8)
        for found, truth in zip(made, wanted, strict=True):
            assert abs(mpmath.mpf(float(found)) - truth) <= bound, (word, found, truth)


FULL = 2**ANGLE_BITS
EDGES = sorted({eighth * FULL // 8 + step for eighth in range(8) for step in (0, 1, FULL // 8 - 1)})
FARTHEST, NEAREST = 0, 2**RADIUS_BITS - 1


def test_normals_of_extreme_words_match_the_reference():
    radial = [FARTHEST, 1, 2, 2**LOW - 1, 2**LOW, 2**24 - 1, 2**24, NEAREST // 2, NEAREST]
    check_accuracy(sampler, [word_of(u, angle) for u in radial for angle in EDGES])
    check_accuracy(sampler, [(0, 0), (0, ONES), (ONES, 0), (ONES, ONES)])


def test_normals_of_random_words_match_the_reference():
    check_accuracy(sampler, random_words(2000))


def test_normals_at_every_scale_of_the_radius_match_the_reference():
    """Including both sides of every power of two, and of the root of a half in between."""
    edges = [2**bit + step for bit in range(1, RADIUS_BITS) for step in (-1, 0, 1)]
    edges += [math.isqrt(2 ** (2 * bit + 1)) + step for bit in range(75) for step in (0, 1)]
    check_accuracy(sampler, [word_of(u, u * 977 % FULL) for u in edges])


def test_a_sampler_with_a_wrong_sign_or_a_swap_is_noticed():
    """Each of these is as normal as the right one, so that no statistic would show it."""

    def swapped(words):
        return sampler(words)[:, ::-1]

    def flipped(words):
        return sampler(words) * [1, -1]

    def flipped_in_odd_quarters(words):
        made = sampler(words)
        odd = [(parts_of(word)[1] + FULL // 8) // (FULL // 4) % 2 == 1 for word in words]
        made[odd, 1] *= -1
        return made

    def of_fewer_bits(words):
        """Angles of 32 bits."""
        return sampler([word_of(u, angle >> 20 << 20) for u, angle in map(parts_of, words)])

    words = random_words(50)
    check_accuracy(sampler, words)
    for wrong in (swapped, flipped, flipped_in_odd_quarters, of_fewer_bits):
        with pytest.raises(AssertionError):
            check_accuracy(wrong, words)


def test_every_quadrant_has_its_signs():
    for quadrant, signs in enumerate([(1, 1), (-1, 1), (-1, -1), (1, -1)]):
        start = quadrant * FULL // 4
        angles = [start, start + 1, start + FULL // 8 - 1, start + FULL // 8, start + FULL // 4 - 1]
        made = sampler([word_of(2**74, angle) for angle in angles])
        assert np.array_equal(np.sign(made), [signs] * 5)


def test_angles_increase_with_their_bits():
    random = np.random.default_rng(2).integers(0, FULL, 500)
    angles = np.sort(np.append(random, EDGES))
    made = sampler([word_of(2**74, int(angle)) for angle in angles])
    turns = np.mod(np.arctan2(made[:, 1], made[:, 0]), 2 * np.pi)
    wanted = (angles + 0.5) / FULL * 2 * np.pi
    np.testing.assert_allclose(turns, wanted, rtol=0, atol=1e-14)


def test_the_radius_falls_as_the_word_grows():
    random = np.random.default_rng(3)
    values = {int(random.integers(1, 2**62)) << int(random.integers(0, 14)) for _ in range(2000)}
    values |= {int(random.integers(1, 2**62)) >> int(random.integers(0, 60)) for _ in range(500)}
    values |= {2**bit + step for bit in range(2, RADIUS_BITS) for step in (-1, 0, 1)}
    ordered = sorted(values)
    sizes = radii([word_of(value) for value in ordered])
    assert np.all(np.diff(sizes) <= 2e-15)
    apart = np.diff(np.array(ordered, dtype=float)) > 1e-12 * np.array(ordered[1:], dtype=float)
    assert np.all(np.diff(sizes)[apart & (sizes[1:] > 1e-2)] < 0)


def test_the_farthest_and_nearest_words_give_the_expected_normals():
    end = math.sqrt(2 * (RADIUS_BITS + 1) * math.log(2))
    assert end > 10
    assert radii([word_of(FARTHEST, 7)])[0] == pytest.approx(end, rel=1e-14)
    assert sampler([word_of(FARTHEST)])[0, 0] > 10
    assert sampler([word_of(FARTHEST, FULL // 2)])[0, 0] < -10
    assert sampler([word_of(FARTHEST, FULL // 4)])[0, 1] > 10
    nearest = sampler([word_of(NEAREST, angle) for angle in EDGES])
    assert np.all(np.isfinite(nearest))
    assert np.all(np.abs(nearest) < 2e-8)


def test_every_bit_of_the_radius_changes_the_normal():
    """Far out, so that normals beyond 9 occur and each has its own size."""
    sizes = radii([word_of(u) for u in range(1000)])
    assert len(set(sizes)) == 1000
    assert np.all(sizes > 9)
    for bit in range(RADIUS_BITS):
        assert radii([word_of(0)])[0] > radii([word_of(1 << bit)])[0]


def test_the_largest_normal_of_the_accountant_is_that_of_the_sampler():
    assert largest_normal(RADIUS_BITS) <= radii([word_of(FARTHEST)])[0]
    # Nor of one that is shorter by more than one value of u.
    assert largest_normal(RADIUS_BITS) >= radii([word_of(1)])[0]
    assert largest_normal(RADIUS_BITS + 2) > radii([word_of(FARTHEST)])[0]


def test_the_same_bits_on_every_machine():
    """Pinned: a stream that was saved on one machine goes on with the same noise on another."""
    found = hashlib.sha256(normals_of_key(KEY, TILE).astype("<f8").tobytes()).hexdigest()
    assert found == "5fd7b4e622d6d8df7ca9b96f62f948ac00e1d339c9219bae1484b0a384965600"


# --- The far tail ------------------------------------------------------------------------------


def check_far_tail(make_radii) -> None:
    """Given that u is below 2^-20, ..., half the squared radius goes on as an exponential."""
    for zeros in (20, 32, 52, 60):
        words = random_words(20_000, seed=zeros)
        words[:, 0] >>= np.uint64(zeros)
        beyond = make_radii(words) ** 2 / 2 - zeros * math.log(2)
        assert stats.kstest(beyond, "expon").pvalue > 1e-6
        assert beyond.mean() == pytest.approx(1, abs=MOST / math.sqrt(len(words)))


def test_the_far_tail_is_that_of_a_normal():
    check_far_tail(radii)


def test_a_radius_of_fewer_bits_is_noticed():
    def of_bits(bits):
        def cut(words):
            """All bits below the highest few are those of one half."""
            kept = [parts_of(word)[0] >> (RADIUS_BITS - bits) for word in words]
            return radii([word_of((2 * u + 1) << (RADIUS_BITS - bits - 1)) for u in kept])

        return cut

    for bits in (32, 53, 64):
        with pytest.raises(AssertionError):
            check_far_tail(of_bits(bits))


# --- Shape -------------------------------------------------------------------------------------


def check_normal(z) -> None:
    z = np.asarray(z, dtype=np.float64)
    check_moments(z)
    check_tails(z)
    uniform = np.sort(special.ndtr(z))
    at = np.arange(z.size) / z.size
    off = max(float((uniform - at).max()), float((at + 1 / z.size - uniform).max()))
    assert special.kolmogorov(off * math.sqrt(z.size)) > 1e-6


def noise_of(dtype, noise_multiplier: float = 1.0, size: int = MILLION):
    """Independent noise on a sum of zeros."""
    update = np.zeros(size, dtype)
    NoiseStream.unchecked(
        dpftrl.Independent(), size, clip_norm=1.0, noise_multiplier=noise_multiplier, key=KEY
    ).add_to(update)
    return update


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_million_draws_are_normal(dtype):
    check_normal(noise_of(dtype))
    check_normal(noise_of(dtype, noise_multiplier=7.0) / 7)


def test_rounded_draws_are_normal():
    grid, update = Grid.for_noise(2.0, 1.0), np.zeros(MILLION, np.int64)
    NoiseStream.unchecked(
        dpftrl.Independent(), MILLION, clip_norm=1.0, noise_multiplier=2.0, key=KEY
    ).add_to(update, grid)
    check_normal(grid.values(update) / 2.0)


def test_draws_that_are_not_normal_are_noticed():
    z = noise_of("float64")
    random = np.random.default_rng(0)
    words = random.integers(0, 2**32, (MILLION // 2, 2))
    radius = np.sqrt(-2 * np.log((words[:, 0] + 0.5) / 2**32))
    few_angles = (words[:, 1] // 2**29 + 0.5) * (2 * math.pi / 8)
    half_turn = words[:, 1] / 2**32 * math.pi
    for wrong in (
        z * 1.01,
        z * 0.99,
        z + 0.01,
        np.abs(z),
        np.clip(z, -4, 4),
        np.where(np.abs(z) < 0.01, 0.01, z),
        z.round(1),
        random.standard_t(100, MILLION),
        random.uniform(-(3**0.5), 3**0.5, MILLION),
        radius * np.cos(few_angles),
        radius * np.sin(half_turn),
    ):
        with pytest.raises(AssertionError):
            check_normal(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_hundred_million_draws_are_normal(dtype):
    z = noise_of(dtype, size=10**8)
    check_moments(z.astype(np.float64))
    check_tails(z)
    ends = special.ndtri(np.arange(1, 10_000) / 10_000)
    counts = np.histogram(z, [-np.inf, *ends, np.inf])[0]
    assert stats.chisquare(counts).pvalue > 1e-6
    with pytest.raises(AssertionError):
        check_moments(z.astype(np.float64) * 1.001)


# --- Independence ------------------------------------------------------------------------------

LAGS = [1, 2, 7, 511, 512, 1023, 1024, 1025, 2047, 2048, 4096, CHUNK - 1, CHUNK, CHUNK + 1]


def check_lags(z) -> None:
    for lag in LAGS:
        check_uncorrelated(z[lag:], z[:-lag])


def test_coordinates_are_independent():
    check_lags(noise_of("float64", size=20 * CHUNK + 77))


def test_both_of_a_pair_are_independent():
    """They share a radius: the angle alone makes them so."""
    pairs = noise_of("float64", size=400 * TILE).reshape(-1, 2, PAIRS)
    first, second = pairs[:, 0].reshape(-1), pairs[:, 1].reshape(-1)
    check_uncorrelated(first, second)
    check_uncorrelated(first**2, second**2)
    together = np.histogram2d(special.ndtr(first), special.ndtr(second), bins=20)[0]
    assert stats.chisquare(together.reshape(-1)).pvalue > 1e-6
    with pytest.raises(AssertionError):
        check_uncorrelated(first**2, first**2 + second**2)


def test_noise_that_repeats_a_block_is_noticed():
    size = 20 * CHUNK
    z = noise_of("float64", size=size)
    for lag in (1024, 2048, CHUNK):
        repeated = z.copy()
        # One coordinate in twenty is that from so far before.
        for start in range(lag, size - lag, 20 * lag):
            repeated[start : start + lag] = z[start - lag : start]
        with pytest.raises(AssertionError):
            check_lags(repeated)


def test_rows_and_keys_are_independent():
    size, digest = 100_000, Secret(bytes(16))
    rows = [normals_of_key(row_key(KEY, row, digest), size) for row in range(4)]
    rows.append(normals_of_key(row_key(OTHER_KEY, 0, digest), size))
    rows.append(normals_of_key(row_key(KEY, 0, Secret(bytes(15) + b"\1")), size))
    for one, other in itertools.combinations(rows, 2):
        check_uncorrelated(one, other)
        for lag in (1, 1024, 2048):
            check_uncorrelated(one[lag:], other[:-lag])
    with pytest.raises(AssertionError):
        check_uncorrelated(rows[0], normals_of_key(row_key(KEY, 0, digest), size))


# --- Directions --------------------------------------------------------------------------------

TURN = 2 * math.pi / 2**32


def share_between_directions(first, second) -> float:
    """How far directions are from being spread evenly between those of 2^32 a turn."""
    between = np.mod(np.arctan2(second, first) / TURN, 1.0)
    return float(stats.kstest(between, "uniform").pvalue)


def test_directions_are_as_fine_as_the_numbers():
    """A sum that is moved by one step must not leave the directions that are possible.

    Who knows all updates but one can test each direction of the release minus a guess of the sum:
    if only 2^32 of them are possible, one pair in float64 tells the right guess from a wrong one.
    """
    pairs = noise_of("float64", size=4 * TILE).reshape(-1, 2, PAIRS)
    first, second = pairs[:, 0].reshape(-1), pairs[:, 1].reshape(-1)
    assert share_between_directions(first + 1e-3, second) > 1e-6
    assert share_between_directions(first, second) > 1e-6


def rays_in_cells(noise) -> tuple[float, float]:
    """The mean of how many more rays than usual meet a cell of the grid, and its standard error.

    Rays are those of 2^32 directions. Only cells close to an axis, where rays run along the sides
    and the number in a cell is easy to tell.
    """
    pairs = noise[: noise.size // TILE * TILE].reshape(-1, 2, PAIRS)
    excess = []
    for along, across in ((0, 1), (1, 0)):
        x, y = pairs[:, along].reshape(-1), pairs[:, across].reshape(-1)
        near = np.abs(y) < 0.004 * np.abs(x)
        far, off = np.abs(x[near]).astype(float), y[near].astype(float)
        low, high = np.arctan2(off - 0.5, far) / TURN, np.arctan2(off + 0.5, far) / TURN
        rays = np.floor(high - 0.5) - np.floor(low - 0.5)
        excess.append(rays / (high - low) - 1)
    found = np.concatenate(excess)
    return float(found.mean()), float(found.std()) / math.sqrt(found.size)


@pytest.mark.slow
def test_directions_do_not_show_through_the_grid():
    """The same on the grid of `Grid.for_noise`, where it takes more coordinates.

    A cell that more rays meet is likelier by a few percent. Over 40 million coordinates that tells
    the right guess of the sum from every other.
    """
    size, noise_multiplier = 4 * 10**7, 1.99
    grid, released = Grid.for_noise(noise_multiplier, 1.0), np.zeros(size, np.int64)
    NoiseStream.unchecked(
        dpftrl.Independent(), size, clip_norm=1.0, noise_multiplier=noise_multiplier, key=KEY
    ).add_to(released, grid)
    for wrong_guess in (2, 1000):
        excess, error = rays_in_cells(released + wrong_guess)
        assert abs(excess) < MOST * error
    excess, error = rays_in_cells(released)
    assert abs(excess) < MOST * error
