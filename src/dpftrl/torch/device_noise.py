"""Correlated noise in tensor operations of PyTorch, on the device where the sum is.

Keystream, normals and buffers are computed on the device; see `dpftrl.noise.device`. The host reads
the sum once per step, for its digest, from which the key of the noise follows.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (the types of PyTorch are partial)

import math
from collections.abc import Callable
from typing import Any, Final, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.clipping import Grid, norm_of
from dpftrl.errors import InvalidInput, RoundsExceeded
from dpftrl.noise import NoiseKey
from dpftrl.noise.device import (
    ARITHMETIC,
    HIGH_HALF,
    NORMALS_PER_BLOCK,
    ArithmeticName,
    Split,
    chacha20,
    check_block_counter,
    decaying_buffers,
    split_blt_step,
    split_normals,
    split_rounded,
    surplus_bits,
)
from dpftrl.noise.key import DIGEST_BYTES, Secret, digest_of_update, row_key
from dpftrl.noise.stream import MOST_DRAWS, NORM_SLACK, NoisePlan, stream_identity
from dpftrl.plan.device import noise_multiplier_on_device

__all__ = ["DeviceNoise"]

# Coordinates that are computed at a time: a multiple of the normals of a block.
CHUNK: Final = 2**18
# The largest standard deviation of Z in steps of the grid: the noise fits into the words used.
MOST_STEPS: Final = 2.0**36
HAVE_NO_FLOAT64: Final = ("mps", "xla")
TWO_32: Final = 2.0**32


@final
class TorchOps:
    """The operations of `dpftrl.noise.device.Ops`, by PyTorch. Words are numbers of int32."""

    def words(self, value: int, like: Tensor) -> Tensor:
        """A tensor like another one, filled with one word."""
        return torch.full_like(like, value - 2**32 if value >= 2**31 else value)

    def shift_right(self, words: Tensor, count: int) -> Tensor:
        """Words shifted right, filled with zeros."""
        return (words >> count) & (2 ** (32 - count) - 1)

    def low_bits(self, words: Tensor, count: int) -> Tensor:
        """The lowest bits of words."""
        return words & (2**count - 1)

    def to_float(self, words: Tensor) -> Tensor:
        """Words below 2^24 as float32, exactly."""
        return words.to(torch.float32)

    def high_half(self, values: Tensor) -> Tensor:
        """Float32 numbers with the lowest 12 bits set to zero."""
        return (values.view(torch.int32) & (HIGH_HALF - 2**32)).view(torch.float32)

    def power_of_two(self, exponents: Tensor) -> Tensor:
        """Two to the power of whole numbers."""
        return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)

    def exponent(self, values: Tensor) -> Tensor:
        """The exponents of positive float32 numbers."""
        return ((values.view(torch.int32) >> 23) - 127).to(torch.float32)

    def where(self, condition: Tensor, left: Any, right: Any) -> Tensor:
        """Left where the condition is true, right elsewhere."""
        return torch.where(condition, left, right).to(torch.float32)

    def sqrt(self, values: Tensor) -> Tensor:
        """Square roots."""
        return values.sqrt()

    def round(self, values: Tensor) -> Tensor:
        """The nearest whole numbers."""
        return values.round()

    def stack(self, arrays: list[Tensor]) -> Tensor:
        """Tensors of one shape as one tensor, with a new first dimension."""
        return torch.stack(arrays)

    def concatenate(self, first: Tensor, second: Tensor) -> Tensor:
        """Two tensors joined along their first dimension."""
        return torch.cat([first, second])

    def barrier(self, numbers: Split) -> Split:
        """The same numbers."""
        return numbers

    def repeat(self, times: int, function: Any, state: list[Tensor]) -> list[Tensor]:
        """Apply a function to a list of tensors several times."""
        for _ in range(times):
            state = function(state)
        return state


OPS: Final = TorchOps()


@final
class DeviceNoise:
    """A stream of correlated noise whose buffers live on a device.

    Guarantees:
        As for `dpftrl.noise.NoiseStream`: a row of noise never covers two different sums, and the
        same sums get the same noise on devices of one type. The bits are not those of a
        `NoiseStream`. Errors of the arithmetic are larger, so there is a little more noise than
        planned: with it, the guarantee of the plan holds. See
        `dpftrl.plan.device.noise_multiplier_on_device`.

    Attributes:
        arithmetic: How numbers are computed, and bounds of their errors.
        noise_multiplier: The noise multiplier, at least that of the plan.
        round: Number of rounds completed so far.

    Args:
        plan: Mechanism, noise multiplier and number of rounds. The mechanism is a BLT or
            independent noise. The guarantee must not be for sampled batches.
        size: Number of coordinates of the model.
        key: The noise key.
        clip_norm: Norm to which each update was clipped.
        device: The device, such as "cuda" or "mps".
        arithmetic: `float64`, or `split` for pairs of float32; by default `float64` where the
            device has it.

    Raises:
        InvalidInput: An argument is invalid, the mechanism is not supported, or the errors of the
            arithmetic need too much noise.
    """

    def __init__(
        self,
        plan: NoisePlan,
        size: int,
        *,
        key: NoiseKey,
        clip_norm: float,
        device: torch.device | str = "cpu",
        arithmetic: ArithmeticName | None = None,
    ):
        if not isinstance(key, NoiseKey):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(key).__name__
            del key  # it may be secret bytes, which no traceback should show
            raise InvalidInput(f"key must be a NoiseKey, got {kind}")
        if arithmetic is not None and arithmetic not in ARITHMETIC:
            raise InvalidInput(f"arithmetic must be float64 or split, got {arithmetic!r}")
        self._device = torch.device(device)
        has_float64 = self._device.type not in HAVE_NO_FLOAT64
        self.arithmetic = ARITHMETIC[arithmetic or ("float64" if has_float64 else "split")]
        if self.arithmetic.name == "float64" and not has_float64:
            raise InvalidInput(f"{self._device.type} has no float64; use arithmetic='split'")
        self._plan, self._size = plan, whole_number("size", size)
        self._clip_norm = positive_number("clip_norm", clip_norm)
        self._rounds = plan.mechanism.check_rounds(plan.participation.rounds)
        if self._size * self._rounds > MOST_DRAWS:
            raise InvalidInput(
                f"{self._size:,} coordinates over {self._rounds:,} rounds are more than the 2^40 "
                "numbers that a guarantee covers"
            )
        check_block_counter(-(-self._size // NORMALS_PER_BLOCK))
        self._parameters = decaying_buffers(plan.mechanism)
        self.noise_multiplier = noise_multiplier_on_device(plan, self._size, self.arithmetic.name)
        identity = stream_identity(
            plan.mechanism, self._size, self.noise_multiplier, self._clip_norm, self.arithmetic.name
        )
        self._row_keys = key.derive(b"stream on a device", identity)
        self._last = Secret(b"")
        self.round = 0
        self._interrupted = False
        dtype = torch.float64 if self.arithmetic.name == "float64" else torch.float32
        words = 1 if dtype == torch.float64 else 2
        shape = (len(self._parameters.decays), words, self._size)
        self._buffers = torch.zeros(shape, dtype=dtype, device=self._device)
        self._chunk: Callable[..., Tensor] = (
            _float64_chunk if dtype == torch.float64 else _split_chunk
        )

    def __repr__(self) -> str:
        return f"DeviceNoise({self._plan.mechanism.name}, {self._size:,}, {self._device}, secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("correlated noise cannot be pickled or copied")

    @property
    def memory_bytes(self) -> int:
        """Size of the buffers on the device."""
        return self._buffers.numel() * self._buffers.element_size()

    def add_to(self, total: Tensor, grid: Grid, *, updates: int) -> None:
        """Add the noise of the next round to a sum of clipped updates, in place.

        The noisy sum is rounded to a multiple of a power of two steps, if the grid has more than
        2^25 steps per standard deviation of Z.

        Args:
            total: The sum in steps of the grid: a flat tensor of int64 on the device.
            grid: The grid of the sum.
            updates: Number of updates in the sum.
        """
        if total.dtype != torch.int64 or total.shape != (self._size,):
            raise InvalidInput(f"the sum must be a flat tensor of {self._size:,} int64 numbers")
        if total.device.type != self._device.type:
            raise InvalidInput(f"the sum is on {total.device}, the noise on {self._device}")
        if grid.clip_norm != self._clip_norm:
            raise InvalidInput(
                f"the grid clips to {grid.clip_norm!r}, the noise is for {self._clip_norm!r}"
            )
        scale = self.noise_multiplier * self._clip_norm / grid.step
        if not scale <= MOST_STEPS:
            raise InvalidInput(
                f"the noise has {scale:g} steps of the grid per standard deviation, and at most "
                "2^36 fit on the device"
            )
        steps = total.cpu().numpy()
        most = whole_number("updates", updates, 0) * self._clip_norm * (1 + NORM_SLACK)
        if not norm_of([steps]) * grid.step <= most:
            raise InvalidInput(
                f"the sum is too large for {updates:,} updates clipped to {self._clip_norm:g}: "
                "clip each update before summing"
            )
        digest = digest_of_update(self._row_keys, [steps.data], scale, self._last, 1)
        self._run(digest, total, scale)

    def last_digest(self) -> Secret:
        """The digest with which `replay` can repeat the last round; as secret as the noise."""
        return self._last

    def replay(self, digest: Secret) -> None:
        """Repeat a round that was completed before, without its sum."""
        if len(digest.secret_bytes()) != DIGEST_BYTES:
            raise InvalidInput(f"the digest of a round must have {DIGEST_BYTES} bytes")
        self._run(digest, None, 1.0)

    def _run(self, digest: Secret, total: Tensor | None, scale: float) -> None:
        if self._interrupted:
            raise InvalidInput(
                "this stream was interrupted within a round, and its buffers are inconsistent; "
                "begin again, and replay the rounds that were completed"
            )
        if self.round >= self._rounds:
            raise RoundsExceeded(f"all {self._rounds:,} rounds of the plan are done")
        self._interrupted = True
        key = row_key(self._row_keys, self.round, digest).secret_bytes()
        words = torch.from_numpy(np.frombuffer(key, np.int32).copy()).to(self._device)
        for start in range(0, self._size, CHUNK):
            stop = min(start + CHUNK, self._size)
            blocks = -(-(stop - start) // NORMALS_PER_BLOCK)
            first = start // NORMALS_PER_BLOCK
            counter = torch.arange(first, first + blocks, device=self._device).to(torch.int32)
            noise = self._chunk(
                words, counter, self._parameters, self._buffers[..., start:stop], scale
            )
            if total is not None:
                total[start:stop] += noise
                _round_to(surplus_bits(scale), total[start:stop])
        self._last = digest
        self.round += 1
        self._interrupted = False


def _round_to(bits: int, values: Tensor) -> None:
    """Round whole numbers to multiples of a power of two, in place."""
    if bits > 0:
        values.add_(2 ** (bits - 1)).bitwise_right_shift_(bits).bitwise_left_shift_(bits)


def _keystream(key: Tensor, counter: Tensor) -> list[Tensor]:
    zero = torch.zeros((), dtype=torch.int32, device=key.device)
    return chacha20(OPS, list(key), counter, [zero, zero, zero])


def _split_chunk(
    key: Tensor, counter: Tensor, parameters: Any, buffers: Tensor, scale: float
) -> Tensor:
    """The noise of a chunk in steps, with pairs of float32; the buffers change in place."""
    size = buffers.shape[-1]
    normals = split_normals(OPS, _keystream(key, counter))
    z = Split(*(part.T.reshape(-1)[:size].contiguous() for part in normals))
    old = [Split(one[0].clone(), one[1].clone()) for one in buffers]
    noise, new = split_blt_step(OPS, parameters, old, z)
    for place, one in zip(buffers, new, strict=True):
        place[0].copy_(one.high)
        place[1].copy_(one.low)
    high, low = split_rounded(OPS, noise, scale)
    return (high.to(torch.int64) << 16) + low.to(torch.int64)


def _float64_chunk(
    key: Tensor, counter: Tensor, parameters: Any, buffers: Tensor, scale: float
) -> Tensor:
    """The noise of a chunk in steps, in float64; the buffers change in place."""
    z = float64_normals(_keystream(key, counter)).T.reshape(-1)[: buffers.shape[-1]]
    noise = z
    for one, rate in zip(buffers, parameters.scales, strict=True):
        noise = noise - rate * one[0]
    for one, decay in zip(buffers, parameters.decays, strict=True):
        one[0].mul_(decay).add_(noise)
    return (scale * noise).round().to(torch.int64)


def float64_normals(words: list[Tensor]) -> Tensor:
    """The eight normals of each block of 16 words, in float64; they are the first dimension."""
    w0, w1, w2, w3 = (
        torch.stack(words[first::4]).to(torch.int64) & 0xFFFFFFFF for first in range(4)
    )
    rest = (w1 << 12) + (w2 & 0xFFF)
    low = (rest.double() + 0.5) * 2.0**-76
    other_low = ((2**44 - 1 - rest).double() + 0.5) * 2.0**-76
    u = w0.double() / TWO_32 + low
    other = (2**32 - 1 - w0).double() / TWO_32 + other_low  # 1 - u
    log_u = torch.where(u < 0.5, u.log(), torch.log1p(-other))
    radius = (-2.0 * log_u).sqrt()
    angle = (((w2 >> 12) << 32) + w3).double() + 0.5
    angle = angle * (2 * math.pi / 2**52)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])
