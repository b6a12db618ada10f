"""Loss of a generalised BLT with its gradient.

C(x) is a ratio of polynomials, with the decays of C^-1 as zeros and those of C as poles. As for
BLTs it is given by rates, one minus each decay: r for the poles, s for the zeros. Rates come in
twos, exp(mean + root) and exp(mean - root) where root^2 is a free real number: positive for two
real rates, negative for a conjugate pair, so that one turns into the other without a seam.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.optimize.result import Objective
from dpftrl.optimize.toeplitz_error import log_majorant_sensitivity
from dpftrl.participation import Participation

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]

# Scales beyond this cancel one another so much that float32 buffers would lose digits.
LARGEST_SCALE = 10.0


class Rates(NamedTuple):
    """Rates, and their derivatives by the free numbers."""

    values: Complex
    slopes: Complex


def rates(free: Array) -> Rates:
    """Complex rates from free numbers: mean and squared root, two by two."""
    size = len(free)
    values, slopes = np.zeros(size, complex), np.zeros((size, size), complex)
    for place in range(0, size - 1, 2):
        mean, square = free[place], free[place + 1]
        root = np.sqrt(complex(square)) or 1e-12
        for own, sign in ((place, 1), (place + 1, -1)):
            values[own] = np.exp(mean + sign * root)
            slopes[own, place] = values[own]
            slopes[own, place + 1] = values[own] * sign / (2 * root)
    if size % 2:
        values[-1] = slopes[-1, -1] = np.exp(free[-1])
    return Rates(values, slopes)


def free_from(real_rates: Array) -> Array:
    """The free numbers of real rates, in the order given."""
    logs = np.log(real_rates)
    free = logs.copy()
    pairs = len(logs) // 2
    first, second = logs[: 2 * pairs : 2], logs[1 : 2 * pairs : 2]
    free[: 2 * pairs : 2] = (first + second) / 2
    free[1 : 2 * pairs : 2] = ((first - second) / 2) ** 2
    return free


@final
@dataclass(frozen=True)
class GbltObjective:
    """log(error x sensitivity of the majorant), and its gradient by the free numbers."""

    participation: Participation
    objective: Objective

    def __call__(self, free: Array) -> tuple[float, Array]:
        """Value and gradient; infinite where a decay leaves the unit circle."""
        half = len(free) // 2
        poles, zeros = rates(free[:half]), rates(free[half:])
        r, s = poles.values, zeros.values
        if not max(np.abs(1 - r).max(), np.abs(1 - s).max()) < 1:
            return np.inf, np.zeros(len(free))
        with np.errstate(all="ignore"):
            value, by_r, by_s = self._value(r, s)
        gradient = np.concatenate([by_r @ poles.slopes, by_s @ zeros.slopes]).real
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return np.inf, np.zeros(len(free))
        return value, gradient

    def value(self, free: Array) -> float:
        """The value alone, to sort by."""
        return self(free)[0]

    def _value(self, r: Complex, s: Complex) -> tuple[float, Complex, Complex]:
        rounds = self.participation.rounds
        apart = s[None, :] - r[:, None]  # s_j - r_i at [i, j]
        among_r, among_s = _differences(r), _differences(s)
        omega = (apart / among_r).prod(axis=1)
        if np.abs(omega).max() > LARGEST_SCALE:
            return np.inf, r, s
        weights = (apart / among_s).prod(axis=0) / s
        constant = (r / s).prod()
        lags = np.arange(float(rounds))
        of_c = np.exp(np.outer(np.log1p(-r), lags[:-1]))
        of_b = np.exp(np.outer(np.log1p(-s), lags))
        c = np.append(1.0, (omega @ of_c).real)
        b = (constant + weights @ of_b).real
        error, by_b = self._error(b)
        moved, by_c = log_majorant_sensitivity(c, self.participation)

        sums_c, bent_c = of_c @ by_c[1:], of_c @ (by_c[1:] * lags[:-1])
        by_log_omega = omega * sums_c
        by_r = -omega * bent_c / (1 - r)
        sums_b, bent_b = of_b @ by_b, of_b @ (by_b * lags)
        by_log_weight = weights * sums_b
        by_s = -weights * bent_b / (1 - s)
        by_log_constant = constant * by_b.sum()

        one_apart = 1 / apart
        one_r, one_s = 1 / among_r - np.eye(len(r)), 1 / among_s - np.eye(len(s))
        by_r += by_log_omega * (one_r.sum(axis=1) - one_apart.sum(axis=1))
        by_r -= one_r.T @ by_log_omega + one_apart @ by_log_weight
        by_r += by_log_constant / r
        by_s += by_log_weight * (one_apart.sum(axis=0) - one_s.sum(axis=0) - 1 / s)
        by_s += one_s @ by_log_weight + one_apart.T @ by_log_omega
        by_s -= by_log_constant / s
        return error + moved, by_r, by_s

    def _error(self, b: Array) -> tuple[float, Array]:
        """The log error and its derivatives by b."""
        share = np.ones(len(b))
        if self.objective == "rms":
            share = 1 - np.arange(len(b)) / len(b)
        square = float(share @ b**2)
        return 0.5 * float(np.log(square)), share * b / square


def _differences(values: Complex) -> Complex:
    """values_j - values_i at [i, j], with ones on the diagonal."""
    return values[None, :] - values[:, None] + np.eye(len(values))
