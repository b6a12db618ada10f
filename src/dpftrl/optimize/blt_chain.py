"""The interlaced chain of rates from free numbers: no bounds, no barrier.

Each rate below the top pair is a fraction of the one above it, r_d a fraction of 1; the fractions
are logistic functions of free numbers. s_d, alone, may pass 1 (a negative decay of the inverse), up
to where sum(omega) = sum(s) - sum(r) reaches 1.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def chain(free: Array) -> tuple[Array, Array]:
    """Rates r and s, one row a BLT, from free numbers ordered as r_1, s_1, ..., r_d, s_d."""
    _, slow, lower_fast = _below_top(free)
    share = _logistic(free[:, -1:])
    most = 1 + slow.sum(axis=1, keepdims=True) - lower_fast.sum(axis=1, keepdims=True)
    top = slow[:, -1:] * (1 - share) + most * share
    return slow, np.concatenate([lower_fast, top], axis=1)


def pull_back(free: Array, by_slow: Array, by_fast: Array) -> Array:
    """The gradient by the free numbers, from those by r and s."""
    below, slow, lower_fast = _below_top(free)
    share = _logistic(free[:, -1:])
    most = 1 + slow.sum(axis=1, keepdims=True) - lower_fast.sum(axis=1, keepdims=True)
    by_top = by_fast[:, -1:]
    by_rate = np.empty_like(below)
    by_rate[:, ::2] = by_slow + share * by_top
    by_rate[:, 1::2] = by_fast[:, :-1] - share * by_top
    by_rate[:, -1:] += (1 - share) * by_top
    gradient = np.empty_like(free)
    reach = np.cumsum(by_rate * below, axis=1)  # a fraction scales every rate below it
    gradient[:, :-1] = reach * _logistic(-free[:, :-1])
    gradient[:, -1:] = by_top * (most - slow[:, -1:]) * share * (1 - share)
    return gradient


def free_numbers(slow: Array, fast: Array) -> Array:
    """The free numbers of a chain (the inverse of `chain`), for starts."""
    rates = np.empty((len(slow), 2 * slow.shape[1] - 1))
    rates[:, ::2], rates[:, 1::2] = slow, fast[:, :-1]
    above = np.concatenate([rates[:, 1:], np.ones((len(slow), 1))], axis=1)
    most = 1 + slow.sum(axis=1, keepdims=True) - fast[:, :-1].sum(axis=1, keepdims=True)
    share = (fast[:, -1:] - slow[:, -1:]) / (most - slow[:, -1:])
    fractions = np.concatenate([rates / above, share], axis=1)
    return np.log(fractions / (1 - fractions))


def _below_top(free: Array) -> tuple[Array, Array, Array]:
    log_fraction = -np.logaddexp(0.0, -free[:, :-1])
    rates = np.exp(np.cumsum(log_fraction[:, ::-1], axis=1)[:, ::-1])
    return rates, rates[:, ::2], rates[:, 1::2]


def _logistic(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))
