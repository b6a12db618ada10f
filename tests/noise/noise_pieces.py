"""What tests of the noise share: one mechanism of each kind, rows of Z by hand, and statistics.

The statistics are functions that raise AssertionError, so that each can be shown to fail on noise
that is wrong.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import dpftrl
from dpftrl import Mechanism
from dpftrl._internal.compiled import TILE
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.noise.key import Keystream, row_key
from dpftrl.noise.normals import TILE_BLOCKS, TILE_WORDS, tile_of_normals

Vector = NDArray[np.float64]
KEY = NoiseKey.insecure_for_tests(20)
OTHER_KEY = NoiseKey.insecure_for_tests(21)


def bands_of_both_signs(rounds: int) -> dpftrl.Banded:
    random = np.random.default_rng(5)
    columns = random.uniform(-0.4, 0.6, (4, rounds))
    columns[0] = random.uniform(0.8, 1.2, rounds)
    columns[np.add.outer(np.arange(4), np.arange(rounds)) >= rounds] = 0.0
    return dpftrl.Banded(columns)


# One of each line of the conformance table, for 16 rounds at least.
ONE_OF_EACH: dict[str, Mechanism] = {
    "independent": dpftrl.Independent(),
    "blt": dpftrl.BLT([0.9, 0.5, 0.99], [0.2, 0.3, 0.1]),
    "blt-above-one": dpftrl.BLT([0.9, 0.2], [0.7, 0.35]),
    "blt-b400": dpftrl.mechanism("blt-b400"),
    "gblt": dpftrl.GeneralBLT([0.7 + 0.2j, 0.9], [0.1 + 0.05j, -0.1]),
    "sqrt": dpftrl.SquareRoot(),
    "band-sqrt": dpftrl.SquareRoot(5),
    "toeplitz-monotone": dpftrl.Toeplitz([1.0, 0.6, 0.4, 0.1]),
    "toeplitz-any": dpftrl.Toeplitz([1.0, 0.2, 0.5, 0.1]),
    "banded-normalised": dpftrl.Banded.square_root(4, 16),
    "banded-mixed-sign": bands_of_both_signs(16),
    "inv-sqrt": dpftrl.BandedInverse.square_root(4),
    "banded-inverse-mixed-sign": dpftrl.BandedInverse([1.0, -0.6, 0.3]),
    "lambda": dpftrl.BandedInverse.one_parameter(0.8),
    "tree": dpftrl.BinaryTree(),
    "tree-vanilla": dpftrl.BinaryTree(refine=False),
    "tree-full": dpftrl.FullTree(16),
    "smooth-tree": dpftrl.SmoothTree.for_rounds(16),
}


# --- Rows of Z, by hand ------------------------------------------------------------------------


def normals_of_key(key: NoiseKey, size: int) -> Vector:
    """The standard normals of one row key, from the keystream and the sampler."""
    tiles = -(-size // TILE)
    room = bytearray(16 * TILE_BLOCKS * tiles + 16)
    Keystream(key).fill(bytes(16 * TILE_BLOCKS * tiles), room)
    words = np.frombuffer(room, np.uint64, TILE_WORDS * tiles)
    made = np.empty(TILE * tiles)
    for tile in range(tiles):
        tile_of_normals(
            words[tile * TILE_WORDS : (tile + 1) * TILE_WORDS], made[tile * TILE :][:TILE]
        )
    return made[:size]


def key_of_row(stream: NoiseStream, row: int) -> NoiseKey:
    """The key of a row of Z that the stream has taken."""
    return row_key(stream._row_keys, row, stream._state.digests[row])


def rows_of(stream: NoiseStream, size: int) -> Callable[[int], Vector]:
    """A source of the rows of Z that the stream has taken, for a mechanism's reference step."""
    return lambda row: normals_of_key(key_of_row(stream, row), size)


class Rounds(NamedTuple):
    """What rounds of a stream gave, and what the mechanism's reference step gives.

    Attributes:
        released: Updates plus noise, one row a round.
        wanted: The updates, plus the noise of the reference times its scale.
        z: All rows of Z.
    """

    released: Vector
    wanted: Vector
    z: Vector


def follow(stream: NoiseStream, mechanism, updates: Vector, scale: float) -> Rounds:
    """Run a stream and, on the same rows of Z, a mechanism's reference step in float64."""
    size = updates.shape[1]
    source, state = rows_of(stream, size), mechanism.init(size)
    released, wanted = [], []
    for update in updates:
        given = update.copy()
        stream.add_to(given)
        noise, state = mechanism.step(state, source)
        released.append(given)
        wanted.append(update + scale * noise)
    z = np.array([source(row) for row in range(state.next_row)])
    return Rounds(np.array(released), np.array(wanted), z)


def released_rounds(stream: NoiseStream, updates: NDArray) -> NDArray:
    """What a stream makes of these updates."""
    made = updates.copy()
    for row in made:
        stream.add_to(row)
    return made


# --- Statistics --------------------------------------------------------------------------------

# Standard errors that nothing right is off by: nine of a million tests, and all are deterministic.
MOST = 5.0


def check_near(found: float, wanted: float, standard_error: float) -> None:
    assert abs(found - wanted) <= MOST * standard_error, (found, wanted, standard_error)


def check_moments(z: Vector) -> None:
    """Mean, variance, skewness and kurtosis of standard normals."""
    for power, wanted, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        check_near(float(np.mean(z**power)), wanted, math.sqrt(variance / z.size))


def check_tails(z: Vector) -> None:
    """How many are beyond 0.5, 1, ... on either side."""
    for end in np.arange(0.0, 6.5, 0.5):
        share = 0.5 * math.erfc(end / math.sqrt(2))
        error = math.sqrt(share * (1 - share) * z.size)
        for side in (z, -z):
            check_near(int(np.count_nonzero(side > end)), share * z.size, max(error, 1.0))


def check_uncorrelated(a: Vector, b: Vector) -> None:
    """Neither values nor sizes of one tell anything about the other, in second moments."""
    for f in (lambda x: x, np.abs, np.sign):
        one, other = f(a) - np.mean(f(a)), f(b) - np.mean(f(b))
        error = float(np.linalg.norm(one) * np.linalg.norm(other)) / math.sqrt(one.size)
        check_near(float(one @ other), 0.0, error)


def check_covariance(noise: Vector, decoder: NDArray[np.float64], noise_multiplier: float) -> None:
    """Whether columns of the noise have covariance sigma^2 D D^T.

    Whitened by its Cholesky factor they are independent standard normals: entries of their sample
    covariance are as good as normal, so that squares over variances add up to a chi-square.
    """
    rounds, size = noise.shape
    factor = np.linalg.cholesky(decoder @ decoder.T)
    white = np.linalg.solve(factor, noise / noise_multiplier)
    check_white(white)
    assert rounds < size


def check_white(white: Vector) -> None:
    """Whether rows are independent standard normals, by their sample covariance."""
    rounds, size = white.shape
    off = white @ white.T / size - np.eye(rounds)
    variance = (1 + np.eye(rounds)) / size
    upper = np.triu_indices(rounds)
    scores = off[upper] ** 2 / variance[upper]
    freedom = len(scores)
    check_near(float(scores.sum()), freedom, math.sqrt(2 * freedom))
    assert scores.max() <= MOST**2
