"""The loss of a mechanism with a banded inverse, with its derivatives."""

import numpy as np
from numpy.typing import NDArray

from dpftrl.optimize.lbfgs import Function
from dpftrl.optimize.series import reciprocal, reciprocal_pull_back
from dpftrl.optimize.toeplitz_error import ToeplitzError, log_majorant_sensitivity
from dpftrl.participation import Participation

Vector = NDArray[np.float64]


def log_loss(error: ToeplitzError, participation: Participation) -> Function:
    """The log loss by the coefficients of C^-1, all of them.

    The sensitivity is the one that `BandedInverse` reports: that of the smallest majorant of |c|
    that does not increase. It has kinks, where the derivatives are those of one side.
    """
    rounds = participation.rounds

    def function(c_hat: Vector) -> tuple[float, Vector]:
        c = reciprocal(c_hat, rounds)
        if not np.isfinite(c @ c):
            return np.inf, np.zeros(len(c_hat))
        padded = np.zeros(rounds)
        padded[: len(c_hat)] = c_hat
        value, by_c_hat = error(padded)
        size, by_c = log_majorant_sensitivity(c, participation)
        slope = reciprocal_pull_back(by_c, c_hat, c)
        return value + size, by_c_hat[: len(c_hat)] + slope

    return function


def by_log_prefixes(function: Function) -> Function:
    """The same function by the logarithms of the sums of the first 2, 3, ... coefficients.

    Those sums are the coefficients of B for prefix sums: the last is what every row of Z leaves
    behind for good, and its inverse is the sum of all of c. On this scale they are all alike,
    and none can turn negative, which would make C grow without bound.
    """

    def changed(free: Vector) -> tuple[float, Vector]:
        value, by_c_hat = function(from_log_prefixes(free))
        by_prefix = by_c_hat - np.append(by_c_hat[1:], 0.0)
        return value, by_prefix[1:] * np.exp(free)

    return changed


def from_log_prefixes(free: Vector) -> Vector:
    """The coefficients of C^-1, the first of which is 1.

    >>> from_log_prefixes(np.log([0.5, 0.375]))
    array([ 1.   , -0.5  , -0.125])
    """
    return np.diff(np.append([0.0, 1.0], np.exp(free)))
