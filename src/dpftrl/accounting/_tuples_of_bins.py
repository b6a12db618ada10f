"""The compiled loop of `balls_in_bins`: it draws tuples of bins."""

# pyright: basic
import numba
import numpy as np

from dpftrl._internal.arrays import Array, Matrix, Vector
from dpftrl._internal.compiled import compiled


@numba.njit(**compiled)
def add_tuples(products: Matrix, uniforms: Matrix, gram: Matrix, ratios: Matrix) -> Vector:
    """Draw one tuple of bins per row, and add the rows of `gram` of its bins to `products`.

    The first bin is uniform. Each further bin j is drawn in proportion to exp(sum of gram[i, j]
    over the bins i before it).

    Args:
        products: One row per tuple.
        uniforms: One uniform number per tuple and bin of the tuple.
        gram: The Gram matrix, divided by sigma^2.
        ratios: exp(gram).

    Returns:
        For each tuple, the logarithm of the product of the means over j of those exponentials.
    """
    count, order = uniforms.shape
    bins = gram.shape[0]
    log_ratio = np.zeros(count)
    chances = np.empty(bins)
    for row in range(count):
        chosen = min(int(uniforms[row, 0] * bins), bins - 1)
        products[row] += gram[chosen]
        chances[:] = 1.0
        for k in range(1, order):
            chances *= ratios[chosen]
            total = _sum(chances)
            log_ratio[row] += np.log(total / bins)
            chosen = _find(chances, uniforms[row, k] * total)
            products[row] += gram[chosen]
    return log_ratio


@numba.njit(**compiled)
def _sum(values: Array) -> float:
    """The sum, in four parts that a processor adds at the same time."""
    a = b = c = d = 0.0
    whole = values.shape[0] // 4 * 4
    for i in range(0, whole, 4):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
    for i in range(whole, values.shape[0]):
        a += values[i]
    return (a + b) + (c + d)


@numba.njit(**compiled)
def _find(values: Array, target: float) -> int:
    """The first position at which the running sum exceeds `target`; else the last one."""
    running = 0.0
    for i in range(values.shape[0] - 1):
        running += values[i]
        if running > target:
            return i
    return values.shape[0] - 1
