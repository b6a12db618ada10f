"""Noise in tensor operations, for devices such as CUDA, MPS or TPU: keystream, normals and bounds.

The functions take an `Ops`, which names the few operations that array libraries spell differently,
so that PyTorch, JAX and NumPy run the same code. Nothing here imports them.

Row i of Z comes from the keystream of ChaCha20 (RFC 8439). One block of 16 words gives eight
normals by the method of Box and Muller, as in `dpftrl.noise.normals`: 76 bits for a radius and 52
for an angle.

`split` arithmetic uses pairs of float32 numbers whose sum is the value, since MPS and TPU have no
float64. Additions are those of Joldes, Muller and Popescu (2017), with a relative error of at most
3 * 2^-48. Products follow them too, with at most 16 * 2^-48, but are composed of exact products, so
that it does no harm if a compiler contracts a product and a sum.

The errors of this arithmetic are larger than those of `dpftrl.noise.NoiseStream`. Their bounds are
in `Arithmetic`, and `dpftrl.plan.device` covers them with a little more noise.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms.base import DecayingBuffers
from dpftrl.noise.normals import COS, LOG, SIN

Tensor = Any
ArithmeticName = Literal["float64", "split"]

CONSTANTS: Final = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # of RFC 8439
DOUBLE_ROUNDS: Final = 10
# Normals of one block of 16 words: four words for each pair.
NORMALS_PER_BLOCK: Final = 8
# Pairs of words that one quarter round works on: columns, then diagonals.
QUARTERS: Final = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
# The high 12 of the 24 bits of a float32: products of two such halves are exact.
HIGH_HALF: Final = 0xFFFFF000
# A standard deviation of Z has at least 2^24 steps, and less than 2^25, in what is released.
RELEASED_BITS: Final = 24
# A mechanism that keeps nothing for so many rounds has a diagonal C.
MANY_ROUNDS: Final = 2**20
SQRT_HALF: Final = math.sqrt(0.5)


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are computed on a device, and bounds of their errors.

    Attributes:
        name: `float64` or `split`.
        product: Bound on the relative error of a product, including the rounding of a constant.
        sum: Bound on the relative error of a sum.
        normal: Bound on the error of a standard normal, from given random words.
    """

    name: ArithmeticName
    product: float
    sum: float
    normal: float

    @property
    def rounding(self) -> float:
        """Bound on the relative error of storing a buffer: a product, then a sum.

        It replaces 2^-53, the bound of a `NoiseStream`.
        """
        return self.product + self.sum

    def noise_error(self, mechanism: Mechanism, rounds: int, largest: float) -> float:
        """Bound on the error of the noise of a round, given its buffers and its random words.

        The noise is z minus one product for each buffer, all times a scale. So no partial sum
        exceeds `largest` * (1 + b), where b is the mechanism's `buffered_noise`.

        Args:
            mechanism: The mechanism that correlates the noise.
            rounds: Number of rounds.
            largest: Bound on the absolute values of Z.

        Returns:
            The bound, in standard deviations of Z.
        """
        buffered = mechanism.buffered_noise(rounds)
        sums = len(decaying_buffers(mechanism).scales) * self.sum
        relative = self.product * buffered + (sums + self.product) * (1 + buffered)
        return (self.normal + largest * relative) * SECOND_ORDER


# Rounding errors of rounding errors are smaller than 2^-20 of what is counted.
SECOND_ORDER: Final = 1 + 2.0**-20
# A library for a GPU may be wrong by two units in the last place where a CPU is wrong by one. An
# angle up to a full turn has an error of 2^-49, which counts with a radius of up to 10.3.
FLOAT64: Final = Arithmetic("float64", 2.0**-53, 2.0**-53, 2.0**-44)
# The normals: a radius of up to 10.3 has an error of at most 100 * 2^-48, since its square is twice
# the logarithm; sine and cosine of at most 30 * 2^-48; and their product of 16 * 2^-48 of it.
SPLIT: Final = Arithmetic("split", 17 * 2.0**-48, 3 * 2.0**-48, 2.0**-38)
ARITHMETIC: Final = {"float64": FLOAT64, "split": SPLIT}


class Ops(Protocol):
    """Operations on arrays of 32-bit words and of float32 numbers."""

    def words(self, value: int, like: Tensor) -> Tensor:
        """An array like another one, filled with one word."""
        ...

    def shift_right(self, words: Tensor, count: int) -> Tensor:
        """Words shifted right, filled with zeros."""
        ...

    def low_bits(self, words: Tensor, count: int) -> Tensor:
        """The lowest bits of words."""
        ...

    def to_float(self, words: Tensor) -> Tensor:
        """Words below 2^24 as float32, exactly."""
        ...

    def high_half(self, values: Tensor) -> Tensor:
        """Float32 numbers with the lowest 12 bits set to zero."""
        ...

    def power_of_two(self, exponents: Tensor) -> Tensor:
        """Two to the power of whole numbers, given as float32; exact."""
        ...

    def exponent(self, values: Tensor) -> Tensor:
        """The exponent e of positive float32 numbers x, with 2^e <= x < 2^(e + 1), as float32."""
        ...

    def where(self, condition: Tensor, left: Any, right: Any) -> Tensor:
        """Left where the condition is true, right elsewhere."""
        ...

    def sqrt(self, values: Tensor) -> Tensor:
        """Square roots, up to a few units in the last place."""
        ...

    def round(self, values: Tensor) -> Tensor:
        """The nearest whole numbers."""
        ...

    def stack(self, arrays: list[Tensor]) -> Tensor:
        """Arrays of one shape as one array, with a new first dimension."""
        ...

    def concatenate(self, first: Tensor, second: Tensor) -> Tensor:
        """Two arrays joined along their first dimension."""
        ...

    def barrier(self, numbers: "Split") -> "Split":
        """The same numbers, computed before what uses them: compilers choke on longer chains."""
        ...

    def repeat(
        self, times: int, function: Callable[[list[Tensor]], list[Tensor]], state: list[Tensor]
    ) -> list[Tensor]:
        """Apply a function to a list of arrays several times."""
        ...


# --- ChaCha20 -------------------------------------------------------------------------------------


def chacha20(ops: Ops, key: list[Tensor], counter: Tensor, nonce: list[Tensor]) -> list[Tensor]:
    """Blocks of the keystream: 16 arrays of words, one per word of a block.

    Args:
        ops: The array library.
        key: The eight words of the key.
        counter: The number of each block.
        nonce: The three words of the nonce.
    """
    start = [ops.words(constant, counter) for constant in CONSTANTS]
    start += [word + ops.words(0, counter) for word in key]
    start += [counter, *(word + ops.words(0, counter) for word in nonce)]

    def double_round(state: list[Tensor]) -> list[Tensor]:
        state = list(state)
        for a, b, c, d in QUARTERS:
            state[a] = state[a] + state[b]
            state[d] = _rotated(ops, state[d] ^ state[a], 16)
            state[c] = state[c] + state[d]
            state[b] = _rotated(ops, state[b] ^ state[c], 12)
            state[a] = state[a] + state[b]
            state[d] = _rotated(ops, state[d] ^ state[a], 8)
            state[c] = state[c] + state[d]
            state[b] = _rotated(ops, state[b] ^ state[c], 7)
        return state

    state = ops.repeat(DOUBLE_ROUNDS, double_round, start)
    return [mixed + first for mixed, first in zip(state, start, strict=True)]


def _rotated(ops: Ops, words: Tensor, count: int) -> Tensor:
    return (words << count) | ops.shift_right(words, 32 - count)


# --- Split arithmetic -----------------------------------------------------------------------------


class Split(NamedTuple):
    """A number as the sum of two float32 numbers, of which the first is the rounded sum."""

    high: Tensor
    low: Tensor


def split_of(value: float) -> tuple[float, float]:
    """A float64 as two float32 numbers, up to 2^-48 of it."""
    high = struct.unpack("f", struct.pack("f", value))[0]
    return high, struct.unpack("f", struct.pack("f", value - high))[0]


def _two_sum(a: Tensor, b: Tensor) -> Split:
    total = a + b
    from_a = total - b
    from_b = total - from_a
    return Split(total, (a - from_a) + (b - from_b))


def _fast_two_sum(a: Tensor, b: Tensor) -> Split:
    total = a + b
    return Split(total, b - (total - a))


def _product(ops: Ops, a: Tensor, b: Tensor) -> Split:
    """The product of two float32 numbers, with an error of at most 8 * 2^-48 of it.

    All four products are exact: their factors have 12 bits each. So a compiler may contract any of
    them with a sum, and the result stays the same. Two sums are rounded: one of at most 2^-23, and
    one of at most 1.5 * 2^-22, since a low half is below 2^-11 of its number.
    """
    a_high, b_high = ops.high_half(a), ops.high_half(b)
    a_low, b_low = a - a_high, b - b_high
    first = _two_sum(a_high * b_high, a_high * b_low)
    second = _two_sum(first.high, a_low * b_high)
    return _fast_two_sum(second.high, (first.low + second.low) + a_low * b_low)


def add(a: Split, b: Split) -> Split:
    """The sum (AccurateDWPlusDW): a relative error of at most 3 * 2^-48."""
    high, low = _two_sum(a.high, b.high), _two_sum(a.low, b.low)
    first = _fast_two_sum(high.high, high.low + low.high)
    return _fast_two_sum(first.high, low.low + first.low)


def multiply(ops: Ops, a: Split, b: Split) -> Split:
    """The product (DWTimesDW1, with `_product`): a relative error of at most 16 * 2^-48.

    Beside 8 * 2^-48 of the first product there are two rounded products (1 each), their sum (2),
    the last sum (3), and the product of the low parts, which is left out (1).
    """
    product = _product(ops, a.high, b.high)
    return _fast_two_sum(product.high, product.low + (a.high * b.low + a.low * b.high))


def _divide(ops: Ops, a: Split, b: Split) -> Split:
    quotient = a.high / b.high
    rest = add(a, _negative(multiply(ops, b, Split(quotient, quotient * 0.0))))
    second = rest.high / b.high
    rest = add(rest, _negative(multiply(ops, b, Split(second, second * 0.0))))
    return add(_fast_two_sum(quotient, second), Split(rest.high / b.high, second * 0.0))


def _sqrt(ops: Ops, a: Split) -> Split:
    is_zero = a.high <= 0.0
    safe = Split(ops.where(is_zero, 1.0, a.high), ops.where(is_zero, 0.0, a.low))
    root = ops.sqrt(safe.high)
    rest = add(safe, _negative(_product(ops, root, root)))
    result = _fast_two_sum(root, (rest.high + rest.low) / (root + root))
    rest = add(safe, _negative(multiply(ops, result, result)))
    result = add(result, Split(rest.high / (root + root), rest.low * 0.0))
    return Split(ops.where(is_zero, 0.0, result.high), ops.where(is_zero, 0.0, result.low))


def _negative(a: Split) -> Split:
    return Split(-a.high, -a.low)


def _constant(value: float, like: Tensor) -> Split:
    high, low = split_of(value)
    return Split(like * 0.0 + high, like * 0.0 + low)


def _scaled(a: Split, factor: Any) -> Split:
    """The product with a power of two, which is exact."""
    return Split(a.high * factor, a.low * factor)


def _polynomial(ops: Ops, x: Split, coefficients: tuple[float, ...]) -> Split:
    total = _constant(coefficients[-1], x.high)
    for coefficient in reversed(coefficients[:-1]):
        total = add(multiply(ops, total, x), _constant(coefficient, x.high))
    return total


# --- Normals --------------------------------------------------------------------------------------


def split_normals(ops: Ops, words: list[Tensor]) -> Split:
    """The eight normals of each block of 16 words; they are the first dimension."""
    w0, w1, w2, w3 = (ops.stack(words[first::4]) for first in range(4))
    radius = ops.barrier(_radius(ops, w0, w1, ops.low_bits(w2, 12)))
    cosine, sine = map(ops.barrier, _cosine_and_sine(ops, ops.shift_right(w2, 12), w3))
    pairs = zip(multiply(ops, radius, cosine), multiply(ops, radius, sine), strict=True)
    return ops.barrier(Split(*(ops.concatenate(first, second) for first, second in pairs)))


def _fraction(ops: Ops, w0: Tensor, w1: Tensor, w2: Tensor) -> Split:
    """(w0 * 2^44 + w1 * 2^12 + w2 + 1/2) / 2^76, with a relative error of a few times 2^-48."""
    total = Split((ops.to_float(w2) + 0.5) * 2.0**-76, ops.to_float(w2) * 0.0)
    for word, exponent in ((w1, -64), (w0, -32)):
        low, high = ops.low_bits(word, 16), ops.shift_right(word, 16)
        for half, place in ((low, exponent), (high, exponent + 16)):
            value = ops.to_float(half) * 2.0**place
            total = add(Split(value, value * 0.0), total)
    return total


def _radius(ops: Ops, w0: Tensor, w1: Tensor, w2: Tensor) -> Split:
    """sqrt(-2 log u) for the u of 76 bits of `_fraction`."""
    u = ops.barrier(_fraction(ops, w0, w1, w2))
    ones = ops.words(0xFFFFFFFF, w0)
    rest = _fraction(ops, w0 ^ ones, w1 ^ ones, w2 ^ ops.low_bits(ones, 12))  # 1 - u
    rest = ops.barrier(rest)
    exponent = ops.exponent(u.high)
    mantissa = u.high * ops.power_of_two(-exponent)
    exponent = exponent + ops.where(mantissa > 2 * SQRT_HALF, 1.0, 0.0)
    m = _scaled(u, ops.power_of_two(-exponent))  # between sqrt(1 / 2) and sqrt(2)
    difference = add(m, _constant(-1.0, m.high))
    near_one = exponent == 0.0
    difference = Split(
        ops.where(near_one, -rest.high, difference.high),
        ops.where(near_one, -rest.low, difference.low),
    )
    s = ops.barrier(_divide(ops, difference, add(m, _constant(1.0, m.high))))
    v = multiply(ops, s, s)
    series = add(multiply(ops, v, _polynomial(ops, v, LOG)), _constant(2.0, v.high))
    log_m = multiply(ops, s, series)
    log_2 = _constant(math.log(2), exponent)
    log_u = add(multiply(ops, Split(exponent, exponent * 0.0), log_2), log_m)
    return _sqrt(ops, ops.barrier(_scaled(log_u, -2.0)))


def _cosine_and_sine(ops: Ops, high: Tensor, low: Tensor) -> tuple[Split, Split]:
    """Cosine and sine of the angle (high * 2^32 + low + 1/2) / 2^52 of a turn; high has 20 bits."""
    # The angle is the nearest quarter turn plus x. An eighth of a turn is 2^17 in the high word.
    shifted = high + ops.words(2**17, high)
    quarter = ops.low_bits(ops.shift_right(shifted, 18), 2)
    rest = ops.to_float(ops.low_bits(shifted, 18)) - 2.0**17  # in units of 2^32
    x = Split(rest * 2.0**-20, rest * 0.0)
    for half, place in ((ops.shift_right(low, 16), -36), (ops.low_bits(low, 16), -52)):
        value = ops.to_float(half) * 2.0**place
        x = add(x, Split(value, value * 0.0))
    x = add(x, Split(rest * 0.0 + 2.0**-53, rest * 0.0))
    x = ops.barrier(multiply(ops, x, _constant(2 * math.pi, rest)))
    y = multiply(ops, x, x)
    sine = add(multiply(ops, multiply(ops, x, y), _polynomial(ops, y, SIN)), x)
    inner = add(multiply(ops, y, _polynomial(ops, y, COS)), _constant(-0.5, rest))
    cosine = add(multiply(ops, y, inner), _constant(1.0, rest))
    number = ops.to_float(quarter)
    odd = (number == 1.0) | (number == 3.0)
    first = Split(*(ops.where(odd, s, c) for s, c in zip(sine, cosine, strict=True)))
    second = Split(*(ops.where(odd, c, s) for s, c in zip(sine, cosine, strict=True)))
    cosine_sign = ops.where((number == 1.0) | (number == 2.0), -1.0, 1.0)
    sine_sign = ops.where(number >= 2.0, -1.0, 1.0)
    return _scaled(first, cosine_sign), _scaled(second, sine_sign)


# --- A round of a BLT -----------------------------------------------------------------------------


def split_blt_step(
    ops: Ops, parameters: DecayingBuffers, buffers: list[Split], z: Split
) -> tuple[Split, list[Split]]:
    """The noise of a round, and the buffers after it."""
    noise = z
    for scale, buffer in zip(parameters.scales, buffers, strict=True):
        noise = ops.barrier(add(noise, multiply(ops, buffer, _constant(-scale, z.high))))
    return noise, [
        add(multiply(ops, buffer, _constant(decay, z.high)), noise)
        for decay, buffer in zip(parameters.decays, buffers, strict=True)
    ]


def split_rounded(ops: Ops, noise: Split, scale: float) -> tuple[Tensor, Tensor]:
    """The noise times a scale, rounded to whole numbers, as high and low words of 16 bits.

    Returns:
        Two arrays of float32 whole numbers. The result is high * 2^16 + low, where low may be
        negative or larger than 2^16.
    """
    x = multiply(ops, noise, _constant(scale, noise.high))
    high = ops.round(x.high * 2.0**-16)
    rest = _two_sum(x.high - high * 2.0**16, x.low)  # the difference is exact
    low = ops.round(rest.high)
    left = (rest.high - low) + rest.low
    return high, low + ops.where(left > 0.5, 1.0, 0.0) - ops.where(left < -0.5, 1.0, 0.0)


def surplus_bits(scale: float) -> int:
    """The number of low bits by which a noisy sum is rounded, so that they are not released.

    A grid may be finer than the arithmetic of the noise. Bits below 2^-24 standard deviations of Z
    are of no use for training.

    Args:
        scale: Standard deviation of Z in steps of the grid.
    """
    return max(0, math.floor(math.log2(scale)) - RELEASED_BITS)


def decaying_buffers(mechanism: Mechanism) -> DecayingBuffers:
    """The buffers of a mechanism that devices support: those of BLTs, and none if C = I.

    Raises:
        InvalidInput: The mechanism is neither a BLT nor independent noise.
    """
    if mechanism.decaying_buffers is not None:
        return mechanism.decaying_buffers
    column = mechanism.first_column(1) if mechanism.rounds is None else None
    if column is not None and column[0] == 1.0 and mechanism.memory(MANY_ROUNDS) == 0:
        return DecayingBuffers((), ())
    raise InvalidInput(
        f"noise on a device supports BLTs and independent noise, not {mechanism.name}; use the "
        "noise on the CPU, or a BLT"
    )


def check_block_counter(blocks: int) -> None:
    """Refuse more blocks of keystream than their 32-bit counter has: blocks would repeat."""
    if blocks > 2**32:
        raise InvalidInput(
            f"an array that needs {blocks:,} blocks of keystream is too large for noise on a "
            "device, which counts up to 2^32 of them; divide it into several arrays"
        )
