"""Standard normals from random words, by the method of Box and Muller.

Coordinates are generated in tiles of 2,048. A tile uses 1,024 blocks of keystream, read as two runs
of 1,024 words of 64 bits. Word i of the first run and the low 12 bits of word i of the second run
give the radius of pair i. The high 52 bits of word i of the second run give its angle. The two
normals of the pair are coordinates i and 1,024 + i. An angle of few bits would be unsafe: the noise
of a pair would lie on few rays, and an attacker who knows all updates but one could confirm a
guess of the missing update by the ray on which the remaining noise lies.

The code uses only basic operations on float64 (including fused multiply-add), each rounded as
IEEE 754 requires, in a fixed order. So every machine computes the same bits. Only whole tiles are
computed, so that the bits do not depend on how the work is divided.
"""

# pyright: basic
import math
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.compiled import TILE, bits_of, compiled, float_of
from dpftrl._internal.compiled import multiply_add as fma

Tile = NDArray[Any]

PAIRS: Final = TILE // 2
TILE_WORDS: Final = 2 * PAIRS
TILE_BLOCKS: Final = PAIRS

# A float64 with this exponent and a 52-bit integer n as its mantissa is 2^52 + n.
INTEGER: Final = np.uint64(0x4330000000000000)
TWO_52: Final = 2.0**52
# Adding GAP to the bits of x carries into the exponent if the mantissa is at least sqrt(2).
ROOT_HALF_BITS: Final = np.uint64(0x3FE6A09E667F3BCD)
GAP: Final = np.uint64(0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
MANTISSA: Final = np.uint64(0x000FFFFFFFFFFFFF)
MANTISSA_BITS: Final = np.uint64(52)
EXPONENT_0: Final = np.uint64(0x3FF0000000000000)  # exponent bits of numbers from 1 up to 2
ZERO: Final = np.uint64(0)
ONE: Final = np.uint64(1)
SIGN: Final = np.uint64(2**63)
TO_SIGN: Final = np.uint64(62)
# A word of the second run has 12 bits of the radius at the low end, and the angle above them.
LOW: Final = np.uint64(2**12 - 1)
LOW_BITS: Final = np.uint64(12)
# A full turn in radians per unit of the angle, and parts of a turn in units of the angle.
TURN: Final = 2 * math.pi / 2**52
QUARTER_BITS: Final = np.uint64(50)
QUARTER: Final = np.uint64(2**50)
EIGHTH: Final = np.uint64(2**49)
LOG_2: Final = math.log(2)

# Polynomials that interpolate at Chebyshev nodes, computed with 60 digits. LOG is for
# (log((1 + s) / (1 - s)) / s - 2) / s^2 as a function of s^2, up to (3 - 2 sqrt(2))^2. SIN and COS
# are for (sin(x) / x - 1) / x^2 and (cos(x) - 1 + x^2 / 2) / x^4 as functions of x^2, up to
# (pi / 4)^2. All errors are below 4e-16.
LOG: Final = (
    0.666666666666667,
    0.39999999999899505,
    0.28571428625975487,
    0.2222221113479508,
    0.18182889125261723,
    0.15331721600556042,
    0.14616449685043406,
)
SIN: Final = (
    -0.16666666666666666,
    0.008333333333330948,
    -0.00019841269836758574,
    2.755731610255244e-06,
    -2.5051131845003624e-08,
    1.5918129294866608e-10,
)
COS: Final = (
    0.041666666666666664,
    -0.0013888888888887398,
    2.480158729876569e-05,
    -2.7557317271729793e-07,
    2.08761462684032e-09,
    -1.1382632425521717e-11,
)


@numba.njit(**compiled)
def tile_of_normals(words: Tile, normals: Tile) -> None:
    """Convert the random words of one tile to its normals.

    Three short loops take a fifth less time than one long loop, and give the same bits. Divisions
    and square roots are slow, but the processor overlaps them with other work; each is in a loop
    with enough other work.
    """
    _reduce(words, normals)
    _squared_radii(normals)
    _rotate(words, normals)


@numba.njit(**compiled)
def _reduce(words: Tile, reduced: Tile) -> None:
    """Write the uniform number u of each pair as (1 + s) / (1 - s) * 2^k.

    u has 76 bits. It is never 0, and 1 only by rounding. The first half of `reduced` becomes s, the
    second half k.
    """
    for i in range(PAIRS):
        word = words[i]
        rest = ((word & LOW) << LOW_BITS) | (words[PAIRS + i] & LOW)
        low = fma(float_of(rest | INTEGER) - TWO_52, 2.0**-76, 2.0**-77)
        bits = bits_of(low + (float_of((word >> LOW_BITS) | EXPONENT_0) - 1.0)) + GAP
        mantissa = float_of((bits & MANTISSA) + ROOT_HALF_BITS)
        reduced[i] = (mantissa - 1.0) / (mantissa + 1.0)
        reduced[PAIRS + i] = float_of((bits >> MANTISSA_BITS) | INTEGER) - (TWO_52 + 1023.0)


@numba.njit(**compiled)
def _squared_radii(reduced: Tile) -> None:
    """Replace s by the squared radius of each pair, -2 log u."""
    for i in range(PAIRS):
        s = reduced[i]
        v = s * s
        p = fma(v, fma(v, LOG[6], LOG[5]), LOG[4])
        p = fma(v, fma(v, p, LOG[3]), LOG[2])
        p = fma(v, fma(v, p, LOG[1]), LOG[0])
        log_u = fma(s, fma(v, p, 2.0), reduced[PAIRS + i] * LOG_2)
        reduced[i] = max(-2.0 * log_u, 0.0)


@numba.njit(**compiled)
def _rotate(words: Tile, normals: Tile) -> None:
    """Replace the squared radius of each pair by the two normals: radius times cosine and sine."""
    for i in range(PAIRS):
        # The angle is the nearest quarter turn plus x, which is between -pi / 4 and pi / 4.
        angle = (words[PAIRS + i] >> LOW_BITS) + EIGHTH
        quarter = angle >> QUARTER_BITS
        rest = float_of((angle & (QUARTER - ONE)) | INTEGER) - (TWO_52 + 2.0**49)
        x = (rest + 0.5) * TURN
        y = x * x
        p = fma(y, fma(y, SIN[5], SIN[4]), SIN[3])
        p = fma(y, fma(y, fma(y, p, SIN[2]), SIN[1]), SIN[0])
        sine = fma(x * y, p, x)
        p = fma(y, fma(y, COS[5], COS[4]), COS[3])
        p = fma(y, fma(y, fma(y, p, COS[2]), COS[1]), COS[0])
        cosine = fma(y, fma(y, p, -0.5), 1.0)
        odd = (quarter & ONE) != ZERO
        first = sine if odd else cosine
        second = cosine if odd else sine
        # Bit 1 of `quarter` is the sign of the sine, bit 1 of `quarter + 1` that of the cosine.
        first_sign, second_sign = (quarter + ONE) << TO_SIGN, quarter << TO_SIGN
        radius = math.sqrt(normals[i])
        normals[i] = radius * float_of(bits_of(first) ^ (first_sign & SIGN))
        normals[PAIRS + i] = radius * float_of(bits_of(second) ^ (second_sign & SIGN))
