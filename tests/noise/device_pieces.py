"""What tests of noise on a device share: vectors of RFC 8439, NumPy as a device, exact references.

The references are written with mpmath, with float64 and with the ChaCha20 of `cryptography`. Checks
are functions that raise AssertionError, so that each can be shown to fail on noise that is wrong.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import mpmath
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from noise_pieces import check_moments, check_tails
from numpy.typing import NDArray
from scipy import stats

from dpftrl import BLT, Independent, Mechanism
from dpftrl.accounting.amplification import believe_sampled
from dpftrl.accounting.gaussian import FARTHEST_NORMAL
from dpftrl.noise.device import HIGH_HALF, Arithmetic, Split
from dpftrl.participation import MinSep
from dpftrl.plan import Dataset, DatasetPlan

Words = NDArray[np.uint32]
Vector = NDArray[np.float64]
ROUNDS = 6


@dataclass(frozen=True)
class DevicePlan:
    """A plan of a few rounds for any mechanism."""

    mechanism: Mechanism
    noise_multiplier: float = 2.0
    participation: MinSep = MinSep.once(ROUNDS)  # noqa: RUF009 - an immutable value
    buffers: str = "float64"


def sampled_plan() -> DatasetPlan:
    """A plan whose guarantee is for Poisson sampling; its epsilon is not computed."""
    dataset = Dataset(1000, 100, 2)
    drawn = dataset.sampling("poisson", 1)
    believed = believe_sampled(Independent(), drawn, 1.0, 8.0, 1e-5, failure=0.0)
    return DatasetPlan("poisson", believed, dataset)


SUPPORTED = {
    "independent": Independent(),
    "blt-1": BLT([0.9], [0.25]),
    "blt-2": BLT([0.9, 0.99], [0.3, 0.1]),
    "blt-3": BLT([0.9, 0.5, 0.99], [0.2, 0.3, 0.1]),
    "blt-8": BLT(np.linspace(0.5, 0.999, 8), np.full(8, 0.1)),
}

# --- ChaCha20 -------------------------------------------------------------------------------------

# Key, number of the block, nonce and block, from RFC 8439: 2.3.2, and A.1 with vectors 1 to 5.
RFC_8439 = [
    (
        bytes(range(32)).hex(), 1, "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32, 0, "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32, 1, "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01", 1, "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30, 2, "00" * 12,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "00" * 32, 0, "00" * 11 + "02",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]  # fmt: skip


def words_of(content: bytes) -> Words:
    return np.frombuffer(content, "<u4").astype(np.uint32)


def keystream(key: bytes, counters: Any, nonce: bytes = bytes(12)) -> Words:
    """Blocks by `cryptography`: one row for each of the 16 words, one column per block."""
    blocks = list[Words]()
    for counter in np.asarray(counters).tolist():
        start = int(counter).to_bytes(4, "little") + nonce
        cipher = Cipher(algorithms.ChaCha20(key, start), None)
        blocks.append(words_of(cipher.encryptor().update(bytes(64))))
    return np.stack(blocks, axis=1)


def check_keystream(blocks_of: Any) -> None:
    """Whether `blocks_of(key, counters, nonce)`, in words, is ChaCha20."""
    for key, counter, nonce, block in RFC_8439:
        found = blocks_of(
            words_of(bytes.fromhex(key)),
            np.full(6, counter, np.uint32),  # as many as below: JAX compiles for each number
            words_of(bytes.fromhex(nonce)),
        )
        assert np.asarray(found)[:, 0].tolist() == words_of(bytes.fromhex(block)).tolist()
    random = np.random.default_rng(8439)
    key, nonce = random.bytes(32), random.bytes(12)
    counters = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 77], np.uint32)
    found = blocks_of(words_of(key), counters, words_of(nonce))
    np.testing.assert_array_equal(np.asarray(found), keystream(key, counters, nonce))


# --- Normals --------------------------------------------------------------------------------------


def extreme_words() -> Words:
    """Blocks of pairs of words at the ends of their range, and where formulas change."""
    root_half = round(math.sqrt(0.5) * 2**32)
    ends = (0, 1, root_half, 2**31, 2**32 - 1)
    angles = (0, 0xFFF, 0x1000, 2**29 - 1, 2**31, 2**32 - 1)  # the low 12 bits are of the radius
    pairs = np.array(list(product(ends, (0, 2**32 - 1), angles, (0, 2**32 - 1))), np.uint32)
    pairs = np.concatenate([pairs, pairs[: -len(pairs) % 4]])
    return np.ascontiguousarray(pairs.reshape(-1, 16).T)


def random_words(blocks: int, seed: int = 1) -> Words:
    random = np.random.default_rng(seed)
    return random.integers(0, 2**32, (16, blocks), np.uint32)


def exact_normals(words: Words) -> NDArray[Any]:
    """The eight normals of each block, by mpmath with 40 digits."""
    normals = np.empty((8, words.shape[1]), object)
    with mpmath.workdps(40):
        for block in range(words.shape[1]):
            for pair in range(4):
                w0, w1, w2, w3 = (int(word) for word in words[4 * pair : 4 * pair + 4, block])
                u = (mpmath.mpf(w0 * 2**44 + w1 * 2**12 + w2 % 2**12) + 0.5) / 2**76
                turn = (mpmath.mpf((w2 >> 12) * 2**32 + w3) + 0.5) / 2**52
                radius = mpmath.sqrt(-2 * mpmath.log(u))
                normals[pair, block] = radius * mpmath.cospi(2 * turn)
                normals[4 + pair, block] = radius * mpmath.sinpi(2 * turn)
    return normals


def float64_normals(words: Words) -> Vector:
    """The same in float64 by NumPy, with errors below 2^-46."""
    w0, w1, w2, w3 = (words[first::4].astype(np.int64) for first in range(4))
    rest = w1 * 2**12 + w2 % 2**12
    u = w0 / 2**32 + (rest + 0.5) / 2**76
    other = (2**32 - 1 - w0) / 2**32 + (2**44 - 1 - rest + 0.5) / 2**76
    radius = np.sqrt(-2 * np.where(u < 0.5, np.log(u), np.log1p(-other)))
    turn = (w2 >> 12) * 2**32 + w3  # of 2^52
    quarter, part = turn // 2**50, turn % 2**50
    angle = 2 * math.pi * (part + 0.5) / 2**52
    cosine, sine = np.cos(angle), np.sin(angle)
    for turns in (1, 2, 3):
        cosine, sine = (
            np.where(quarter >= turns, -sine, cosine),
            np.where(quarter >= turns, cosine, sine),
        )
    return np.concatenate([radius * cosine, radius * sine])


def largest_error(found: Any, exact: NDArray[Any]) -> float:
    """The largest error of normals; `found` holds one number, or the sum of several, for each."""
    with mpmath.workdps(40):
        parts = found if isinstance(found, Split) else (found,)
        arrays = [np.asarray(part, np.float64) for part in parts]
        assert all(np.isfinite(part).all() for part in arrays)
        errors = [
            abs(mpmath.fsum(float(part[place]) for part in arrays) - exact[place])
            for place in np.ndindex(exact.shape)
        ]
        return float(max(errors))


@cache
def normals_to_check() -> list[tuple[Words, NDArray[Any]]]:
    """Extreme and random words, and their normals."""
    return [(words, exact_normals(words)) for words in (extreme_words(), random_words(40))]


def check_normals(normals_of: Any, arithmetic: Arithmetic) -> None:
    """Whether normals of extreme and of random words are right, within the claimed bound."""
    for words, exact in normals_to_check():
        assert largest_error(normals_of(words), exact) <= arithmetic.normal


def value_of(numbers: Any) -> Vector:
    """Split numbers, or float64, as float64."""
    if isinstance(numbers, Split):
        return np.asarray(numbers.high, np.float64) + np.asarray(numbers.low, np.float64)
    return np.asarray(numbers, np.float64)


def check_many_normals(normals: Any, words: Words, arithmetic: Arithmetic) -> None:
    """The same for many normals, and whether they look like normals."""
    z = value_of(normals)
    np.testing.assert_allclose(z, float64_normals(words), rtol=0, atol=arithmetic.normal)
    check_moments(z.reshape(-1))
    check_tails(z.reshape(-1))
    assert stats.kstest(z.reshape(-1), "norm").pvalue > 1e-4
    assert stats.kstest(z.reshape(-1) ** 2 + np.roll(z, 4, 0).reshape(-1) ** 2, "chi2", (2,))[1] > (
        1e-4
    )


# --- Streams --------------------------------------------------------------------------------------


def noise_of(mechanism: Mechanism, rows: list[Vector]) -> list[Vector]:
    """D Z by the reference step of the mechanism, in float64."""
    state, noise = mechanism.init(len(rows[0])), list[Vector]()
    for _ in rows:
        row, state = mechanism.step(state, lambda i: rows[i])
        noise.append(row)
    return noise


def check_rounds(
    added: list[NDArray[np.int64]],
    rows: list[Vector],
    mechanism: Mechanism,
    scale: float,
    arithmetic: Arithmetic,
) -> None:
    """Whether rounds added the noise of a mechanism, rounded to steps of the grid.

    Args:
        added: What each round added, in steps.
        rows: The rows of Z, from the keystream.
        mechanism: The mechanism.
        scale: Standard deviation of Z in steps.
        arithmetic: Its bounds give the allowed difference.
    """
    rounds = len(rows)
    stored = arithmetic.rounding * mechanism.rounding_gain(rounds) / math.sqrt(rounds)
    error = arithmetic.noise_error(mechanism, rounds, FARTHEST_NORMAL) + FARTHEST_NORMAL * stored
    tolerance = 0.5 + scale * (error + 1e-13)  # float64 of the reference: 1e-13
    wrong = 0
    for found, noise in zip(added, noise_of(mechanism, rows), strict=True):
        assert float(np.abs(found - scale * noise).max()) <= tolerance
        wrong += int((found != np.rint(scale * noise)).sum())
    assert wrong <= 0.01 * sum(found.size for found in added) + 1


class NumpyOps:
    """NumPy as a device."""

    def words(self, value: int, like: Any) -> Any:
        return np.full(like.shape, value, np.uint32)

    def shift_right(self, words: Any, count: int) -> Any:
        return words >> np.uint32(count)

    def low_bits(self, words: Any, count: int) -> Any:
        return words & np.uint32(2**count - 1)

    def to_float(self, words: Any) -> Any:
        return words.astype(np.float32)

    def high_half(self, values: Any) -> Any:
        return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(HIGH_HALF)).view(
            np.float32
        )

    def power_of_two(self, exponents: Any) -> Any:
        return np.ldexp(np.float32(1.0), exponents.astype(np.int32))

    def exponent(self, values: Any) -> Any:
        return (np.frexp(values)[1] - 1).astype(np.float32)

    def where(self, condition: Any, left: Any, right: Any) -> Any:
        return np.where(condition, np.float32(left), np.float32(right))

    def sqrt(self, values: Any) -> Any:
        return np.sqrt(values)

    def round(self, values: Any) -> Any:
        return np.round(values)

    def stack(self, arrays: list[Any]) -> Any:
        return np.stack(arrays)

    def concatenate(self, first: Any, second: Any) -> Any:
        return np.concatenate([first, second])

    def barrier(self, numbers: Split) -> Split:
        return numbers

    def repeat(self, times: int, function: Any, state: list[Any]) -> list[Any]:
        for _ in range(times):
            state = function(state)
        return state
