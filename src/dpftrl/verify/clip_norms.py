"""The clip norms of adaptive clipping, recomputed from the noisy bits of every released round.

The noisy sum of the bits is in the journal. It must be a sum of bits plus the noise of the round.
The noise of this one coordinate is computed again from the noise key, with code of its own: a clip
norm that follows bits without noise, or with other noise, is found.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, final

import msgspec
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.mechanisms import Mechanism
from dpftrl.verify.journal import Clipping, derive_key
from dpftrl.verify.run_files import AdaptiveContent
from dpftrl.verify.verdict import Check

AGREEMENT: Final = 1e-9  # exp and log differ a little from one machine to another
# The noise of the run, rounded to whole steps, may differ from ours by this number of steps.
TOLERANCE: Final = 2
# With fewer steps per bit, noise that is wrong could look right by chance.
LEAST_BIT: Final = 100 * TOLERANCE
# Coordinates per tile of keystream, and bytes of each of the two runs of words of a tile.
TILE: Final = 2048
RUN_BYTES: Final = 8192
BLOCK_BYTES: Final = 16


@final
@dataclass(frozen=True)
class AdaptiveRun:
    """What the files of a run say about its adaptive clipping.

    Attributes:
        options: The options of adaptive clipping; the clip norm itself if it is fixed.
        rounds: The record of every released round; None where the journal has none.
        digests: The keyed digest of every released round, in hexadecimal and in quotes.
        goal: The number by which sums are divided.
        most: The largest number of updates in a sum.
        step: The step of the grid.
        mechanism: The mechanism that correlates the noise.
        noise_multiplier: The noise multiplier.
        size: Number of coordinates of an update.
        buffers: The precision of the noise buffers.
    """

    options: AdaptiveContent | float
    rounds: Sequence[Clipping | None]
    digests: Sequence[msgspec.Raw]
    goal: int
    most: int
    step: float
    mechanism: Mechanism
    noise_multiplier: float
    size: int
    buffers: str


def check_clip_norms(run: AdaptiveRun, key: memoryview) -> str | Check:
    """Check the clip norm and the noisy bits of every released round.

    Args:
        run: What the files of the run say.
        key: The noise key.

    Raises:
        UnsafeState: A clip norm does not follow from the noisy bits before it, or the bits of a
            round are not a sum of bits plus the noise of that round.
    """
    options = run.options
    if not isinstance(options, AdaptiveContent):
        raise UnsafeState("the clip norm is fixed, but the journal has clip norms that move")
    recorded = [one for one in run.rounds if one is not None]
    if len(recorded) != len(run.rounds):
        raise UnsafeState("a released round has no clip norm in the journal")
    _check_rule(recorded, options, run.goal, run.step)
    text = (
        f"{len(recorded):,} clip norms follow from the start {options.start:g} and the noisy bits"
    )
    if not math.floor(options.beta / run.step) >= LEAST_BIT:
        text += "; the noise of the bits was not recomputed, because a bit is so few steps"
        return Check("clip norms", "warning", text)
    _check_noise(recorded, run, options, key)
    return f"{text}, and the bits have the noise of their rounds"


def grid_step(noise_multiplier: float, fineness: int) -> float:
    """Return the step of a grid: a power of two, not above its share of the noise."""
    return 2.0 ** math.floor(math.log2(noise_multiplier / fineness))


def _check_rule(rounds: list[Clipping], options: AdaptiveContent, goal: int, step: float) -> None:
    low, high = options.minimum, options.maximum
    if not (
        0 < low <= options.start <= high < math.inf
        and 0 < options.beta < 1
        and 0 < options.quantile < 1
        and 0 < options.learning_rate < math.inf
    ):
        raise InvalidInput("the options of adaptive clipping in run.json make no sense")
    expected, settled = options.start, 0
    for row, (state, bits) in enumerate((one.state, one.bits) for one in rounds):
        if not math.isclose(state.clip_norm, expected, rel_tol=AGREEMENT):
            raise UnsafeState(
                f"row {row} clipped to {state.clip_norm:.10g}, but {expected:.10g} follows from "
                "the rounds before it"
            )
        if state.settled != settled:
            raise UnsafeState(f"row {row} says {state.settled} rounds since the search ended")
        too_many = bits * step / (2 * options.beta * goal) + 0.5 - options.quantile
        side = state.clip_norm - options.start
        if settled or (side > 0 and too_many > 0) or (side < 0 and too_many < 0):
            settled += 1
        # math.pow(e, x) could overflow, and the bounds could not.
        exponent = -too_many * options.learning_rate * (settled + 1) ** -0.5
        within = sorted(
            (math.log(low / state.clip_norm), exponent, math.log(high / state.clip_norm))
        )[1]
        if within != exponent and not settled:
            settled = 1
        exponent = within
        expected = sorted((low, state.clip_norm * math.exp(exponent), high))[1]


def _check_noise(
    rounds: list[Clipping], run: AdaptiveRun, options: AdaptiveContent, key: memoryview
) -> None:
    """Check that the bits of each round minus its noise are a sum of as many bits as reports."""
    bit = math.floor(options.beta / run.step)
    noise = NoiseOfCoordinate(run, run.size, key)
    for row, (digest, one) in enumerate(zip(run.digests, rounds, strict=True)):
        own = noise.next(bytes.fromhex(msgspec.json.decode(digest)))
        rest = one.bits - round(run.noise_multiplier / run.step * own)
        count = round(rest / bit)
        if not (abs(rest - count * bit) <= TOLERANCE and abs(count) <= run.most):
            raise UnsafeState(
                f"the bits of row {row} are not a sum of up to {run.most:,} bits plus the noise of "
                "that row"
            )


@final
class NoiseOfCoordinate:
    """The noise of one coordinate of a run, round by round, in standard deviations of Z.

    Args:
        run: A run with adaptive clipping.
        coordinate: The coordinate.
        key: The noise key.
    """

    def __init__(self, run: AdaptiveRun, coordinate: int, key: memoryview):
        self._mechanism = run.mechanism
        self._state = run.mechanism.init(1)
        self._coordinate = coordinate
        # The parameters of the stream: its clip norm is 1, and it has a coordinate for the bits.
        sizes = (run.size + 1, run.noise_multiplier, 1.0, run.buffers)
        identity = repr((_mechanism_digest(run.mechanism), *sizes)).encode()
        self._key = derive_key(key, b"stream", identity)

    def __repr__(self) -> str:
        return "NoiseOfCoordinate(secret)"

    def next(self, digest: bytes) -> float:
        """Return the noise of the next round, whose sums have this digest."""
        noise, self._state = self._mechanism.step(self._state, self._rows(digest))
        return float(noise[0])

    def _rows(self, digest: bytes) -> Callable[[int], NDArray[np.float64]]:
        def row(index: int) -> NDArray[np.float64]:
            key = derive_key(self._key, b"row", index.to_bytes(8, "big"), digest)
            return np.array([_normal(key, self._coordinate)])

        return row


def _mechanism_digest(mechanism: Mechanism) -> str:
    """Return the SHA-256 of the family and the parameters of a mechanism."""
    digest = sha256(mechanism.family.encode())
    parameters = mechanism.parameters()
    for name in sorted(parameters):
        value = parameters[name]
        content = value.tobytes() if isinstance(value, np.ndarray) else msgspec.json.encode(value)
        digest.update(b"\0%s\0%d\0" % (name.encode(), len(content)) + content)
    return digest.hexdigest()


def _normal(key: memoryview, coordinate: int) -> float:
    """Return one coordinate of a row of Z: Box and Muller, from two words of the keystream."""
    tile, within = divmod(coordinate, TILE)
    second_of_pair, pair = divmod(within, TILE // 2)
    at = tile * 2 * RUN_BYTES + 8 * pair
    first, second = (_word(key, at), _word(key, at + RUN_BYTES))
    # 76 bits for the radius, all of the first word and 12 bits of the second; 52 for the angle.
    uniform = (first * 2**12 + second % 2**12 + 0.5) / 2**76
    angle = 2 * math.pi * ((second >> 12) + 0.5) / 2**52
    return math.sqrt(-2 * math.log(uniform)) * (
        math.sin(angle) if second_of_pair else math.cos(angle)
    )


def _word(key: memoryview, at: int) -> int:
    """Return the 64 bits of a keystream from a byte on."""
    block, start = divmod(at, BLOCK_BYTES)
    counter = block.to_bytes(BLOCK_BYTES, "big")
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()
    return int.from_bytes(encryptor.update(bytes(BLOCK_BYTES))[start : start + 8], "little")
