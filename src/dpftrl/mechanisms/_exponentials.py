"""Sums of exponentials: the arithmetic behind the closed forms of BLTs.

Decays are stored as *rates*, one minus the decay, so that a decay of 1 - 1e-13 loses no digits. For
positive weights every sum here has positive terms, so that nothing cancels for any number of
rounds.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector


class InverseDecays(NamedTuple):
    """Decays of an inverse BLT, as rates, and the differences from which its weights follow.

    Attributes:
        rates: One minus each decay of the inverse, increasing.
        from_poles: from_poles[i, j] is rate j of the inverse minus rate i of the BLT.
        between: between[i, j] is rate j of the inverse minus rate i of the inverse.
    """

    rates: Vector
    from_poles: Matrix
    between: Matrix


def inverse_decays(rates: Vector, omega: Vector) -> InverseDecays:
    """Eigenvalues of diag(1 - theta) + sqrt(omega) sqrt(omega)^T, to full relative accuracy.

    They are the roots of the secular equation 1 = sum_i omega_i / (x - rate_i). There is one root
    in each gap between neighbouring rates and one above the last. Each root is computed as its
    distance from the nearer rate, which keeps all differences accurate even if decays almost
    coincide.

    Args:
        rates: Strictly increasing rates of the BLT.
        omega: Positive output scales.
    """
    if len(rates) == 0:
        return InverseDecays(np.zeros(0), np.zeros((0, 0)), np.zeros((0, 0)))
    index, offset = _secular_roots(rates, omega)
    nearest = rates[index]
    from_poles = (nearest[None, :] - rates[:, None]) + offset[None, :]
    between = (nearest[None, :] - nearest[:, None]) + (offset[None, :] - offset[:, None])
    return InverseDecays(nearest + offset, from_poles, between)


def _secular_roots(rates: Vector, omega: Vector) -> tuple[NDArray[np.intp], Vector]:
    """For each root, the index of the nearer rate and the signed distance from it."""
    half = np.append(np.diff(rates), omega.sum()) / 2
    apart = rates[:, None] - rates[None, :]
    middle = 1 + (omega[:, None] / (apart - half[None, :])).sum(axis=0)
    lower = middle >= 0  # the root is in the lower half of its gap
    lower[-1] = True  # there is no rate above the last gap
    half[-1] *= 2
    index = np.arange(len(rates))
    centre = np.where(lower, index, np.minimum(index + 1, len(rates) - 1))
    sign = np.where(lower, 1.0, -1.0)
    distance = apart[:, centre]
    others = np.where(index[:, None] == centre[None, :], 0.0, omega[:, None])
    low, high = np.full(len(rates), 5e-324), half
    # Bisection on a logarithmic scale. 70 halvings take the range of float64 exponents (about
    # 2^11) below the relative spacing of float64 numbers (2^-52).
    for _ in range(70):
        guess = np.sqrt(low) * np.sqrt(high)
        from_root = np.where(others == 0, 1.0, distance - (sign * guess)[None, :])
        value = guess * (1 + (others / from_root).sum(axis=0)) - sign * omega[centre]
        beyond = sign * value >= 0
        low, high = np.where(beyond, low, guess), np.where(beyond, guess, high)
    return centre, sign * high


def geometric_sum(rates: Vector, terms: int) -> Matrix:
    """Matrix of sum_{i < terms} (q_j q_l)^i for every pair of decays q = 1 - rate."""
    if terms == 0:
        return np.zeros((len(rates), len(rates)))
    gap, power_minus_one = _pair_powers(rates, terms)
    return np.where(gap == 0, float(terms), -power_minus_one / np.where(gap == 0, 1.0, gap))


def weighted_geometric_sum(rates: Vector, terms: int) -> Matrix:
    """Matrix of sum_{i < terms} (terms - i) (q_j q_l)^i for every pair of decays q = 1 - rate.

    For q = q_j q_l with a small terms * (1 - q), the closed form would cancel. There a binomial
    series is used: sum_m (-1)^m C(terms + 1, m + 2) (1 - q)^m.
    """
    gap, power_minus_one = _pair_powers(rates, terms)
    series = np.zeros_like(gap)
    term = np.full_like(gap, terms * (terms + 1) / 2)
    small = np.where(gap * terms < 0.5, gap, 0.0)
    for m in range(14):  # terms shrink faster than 0.5^m / m!, below 1e-16 of the sum after 14
        series += term
        term = -term * small * (terms - 1 - m) / (m + 3)
    safe = np.where(gap * terms < 0.5, 1.0, gap)
    closed = (terms + (1 - safe) * power_minus_one / safe) / safe
    return np.where(gap * terms < 0.5, series, closed)


def powers(rates: Vector, exponents: NDArray[np.int_]) -> Matrix:
    """Matrix of q^i, with one row per exponent i and one column per decay q = 1 - rate."""
    log_size, sign = _log_decay(rates)
    with np.errstate(invalid="ignore"):  # 0 * -inf, replaced below
        size = np.exp(np.where(exponents[:, None] == 0, 0.0, exponents[:, None] * log_size))
    return size * np.where((sign < 0) & (exponents[:, None] % 2 == 1), -1.0, 1.0)


def _pair_powers(rates: Vector, terms: int) -> tuple[Matrix, Matrix]:
    """Matrices of 1 - q_j q_l and of (q_j q_l)^terms - 1, for every pair of decays."""
    gap = rates[:, None] + rates[None, :] * (1 - rates[:, None])
    if np.any(negative := rates > 1):  # the same in a form that does not cancel near decays of -1
        from_two = 2 - rates
        mirrored = from_two[:, None] + from_two[None, :] * (1 - from_two[:, None])
        gap = np.where(negative[:, None] & negative[None, :], mirrored, gap)
    log_size, sign = _log_decay(rates)
    exponent = terms * (log_size[:, None] + log_size[None, :])
    alternates = (sign[:, None] * sign[None, :] < 0) & (terms % 2 == 1)
    return gap, np.where(alternates, -np.exp(exponent) - 1, np.expm1(exponent))


def _log_decay(rates: Vector) -> tuple[Vector, Vector]:
    """The logarithm of |1 - rate| and the sign of 1 - rate."""
    with np.errstate(divide="ignore"):  # a decay of zero has the logarithm -inf, as it should
        below = np.log1p(-np.minimum(rates, 1.0))
        above = np.log1p(-(2 - np.maximum(rates, 1.0)))
    return np.where(rates > 1, above, below), np.where(rates > 1, -1.0, 1.0)
