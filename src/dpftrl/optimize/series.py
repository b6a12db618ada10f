"""Power series with their derivatives: what optimising Toeplitz matrices comes down to.

A lower-triangular Toeplitz matrix is a power series: products and inverses of matrices are those of
series. scipy is imported where it is used, so that importing the library stays light.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

# Up to so many coefficients, sums of products beat Fourier transforms.
SHORT = 64


def reciprocal(c: Vector, terms: int) -> Vector:
    """The first terms of 1 / c."""
    from scipy import signal

    unit = np.zeros(terms)
    unit[0] = 1.0
    return cast(Vector, cast(Any, signal).lfilter([1.0], c, unit))


def reciprocal_pull_back(by_inverse: Vector, c: Vector, inverse: Vector) -> Vector:
    """From derivatives by the inverse, 1 / c, to those by c: d(1/c) = -(1/c)^2 dc."""
    if len(c) > SHORT:
        return -correlate(by_inverse, multiply(inverse, inverse))[: len(c)]
    from scipy import signal

    # Dividing by a short c costs less than multiplying by its long inverse.
    once = cast(Vector, cast(Any, signal).lfilter([1.0], c, by_inverse[::-1]))[::-1]
    rounds = len(inverse)
    return np.array([-once[lag:] @ inverse[: rounds - lag] for lag in range(len(c))])


def multiply(one: Vector, other: Vector) -> Vector:
    """The product of two series of equal length, cut to that length."""
    size = 1 << (2 * len(one)).bit_length()
    return np.fft.irfft(np.fft.rfft(one, size) * np.fft.rfft(other, size), size)[: len(one)]


def correlate(values: Vector, series: Vector) -> Vector:
    """The transpose of multiplying by a series: entry j is sum_i values[i] series[i - j]."""
    return multiply(values[::-1], series)[::-1]


def geometric(values: Vector, decay: float) -> Vector:
    """The series divided by 1 - decay x: y[t] = decay * y[t - 1] + values[t]."""
    if decay == 0:
        return values
    if decay == 1:
        return np.cumsum(values)
    from scipy import signal

    return cast(Vector, cast(Any, signal).lfilter([1.0], [1.0, -decay], values))


def geometric_transposed(values: Vector, decay: float) -> Vector:
    """The transpose of `geometric`: y[t] = decay * y[t + 1] + values[t]."""
    return geometric(values[::-1], decay)[::-1]
