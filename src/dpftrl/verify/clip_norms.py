"""The clip norms of adaptive clipping, recomputed from the noisy bits of every released round.

The noisy sum of the bits is in the journal. It must be a sum of bits plus the noise of the round.
The noise of this one coordinate is computed again from the noise key, with code of its own: a clip
norm that follows bits without noise, or with other noise, is found.
"""

import math
from collections.abc import Callable
from hashlib import sha256
from typing import Final, final

import msgspec
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.mechanisms import Mechanism
from dpftrl.verify.journal import Clipping, Journal, derive_key
from dpftrl.verify.run_files import AdaptiveContent, RunFiles
from dpftrl.verify.verdict import Check

AGREEMENT: Final = 1e-9  # exp and log differ a little from one machine to another
STEPS_PER_DEVIATION: Final = 2**24  # of the grid, at least
# The noise of the run, rounded to whole steps, may differ from ours by this number of steps.
TOLERANCE: Final = 2
# With fewer steps per bit, noise that is wrong could look right by chance.
LEAST_BIT: Final = 100 * TOLERANCE
# Coordinates per tile of keystream, and bytes of each of the two runs of words of a tile.
TILE: Final = 2048
RUN_BYTES: Final = 8192
BLOCK_BYTES: Final = 16


def check_clip_norms(journal: Journal, run_files: RunFiles, key: memoryview) -> str | Check:
    """Check the clip norm and the noisy bits of every released round.

    Args:
        journal: The journal of the run.
        run_files: The settings and the plan.
        key: The noise key.

    Raises:
        UnsafeState: A clip norm does not follow from the noisy bits before it, or the bits of a
            round are not a sum of bits plus the noise of that round.
    """
    rounds = [commit.clipping for commit in journal.commits]
    options = run_files.settings.clip_norm
    if not isinstance(options, AdaptiveContent):
        raise UnsafeState("the clip norm is fixed, but the journal has clip norms that move")
    recorded = [one for one in rounds if one is not None]
    if len(recorded) != len(rounds):
        raise UnsafeState("a released round has no clip norm in the journal")
    step = _step(run_files.noise_multiplier)
    _check_rule(recorded, options, run_files.fleet.report_goal, step)
    text = (
        f"{len(recorded):,} clip norms follow from the start {options.start:g} and the noisy bits"
    )
    if not math.floor(options.beta / step) >= LEAST_BIT:
        text += "; the noise of the bits was not recomputed, because a bit is so few steps"
        return Check("clip norms", "warning", text)
    _check_noise(recorded, journal, run_files, options, step, key)
    return f"{text}, and the bits have the noise of their rounds"


def _step(noise_multiplier: float) -> float:
    """Return the step of the grid: a power of two, not above its share of the noise."""
    return 2.0 ** math.floor(math.log2(noise_multiplier / STEPS_PER_DEVIATION))


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
    rounds: list[Clipping],
    journal: Journal,
    run_files: RunFiles,
    options: AdaptiveContent,
    step: float,
    key: memoryview,
) -> None:
    """Check that the bits of each round minus its noise are a sum of as many bits as reports."""
    bit, goal = math.floor(options.beta / step), run_files.fleet.report_goal
    digests = [bytes.fromhex(msgspec.json.decode(one.digest)) for one in journal.commits]
    noise = NoiseOfCoordinate(run_files, run_files.size, key)
    for row, (digest, one) in enumerate(zip(digests, rounds, strict=True)):
        rest = one.bits - round(run_files.noise_multiplier / step * noise.next(digest))
        count = round(rest / bit)
        if not (abs(rest - count * bit) <= TOLERANCE and abs(count) <= goal):
            raise UnsafeState(
                f"the bits of row {row} are not a sum of {goal} bits plus the noise of that row"
            )


@final
class NoiseOfCoordinate:
    """The noise of one coordinate of a run, round by round, in standard deviations of Z.

    Args:
        run_files: The settings and the plan, with adaptive clipping.
        coordinate: The coordinate.
        key: The noise key.
    """

    def __init__(self, run_files: RunFiles, coordinate: int, key: memoryview):
        self._mechanism = run_files.mechanism
        self._state = run_files.mechanism.init(1)
        self._coordinate = coordinate
        # The parameters of the stream: its clip norm is 1, and it has a coordinate for the bits.
        sizes = (run_files.size + 1, run_files.noise_multiplier, 1.0, run_files.buffers)
        identity = repr((_mechanism_digest(run_files.mechanism), *sizes)).encode()
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
