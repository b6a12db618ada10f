"""Optimizes generalized BLTs, whose decays may be complex, from fixed starts.

The rates are one minus the decays: the rates r of C are called poles and the rates s of C^-1 zeros.
Names that start with `by_` hold derivatives by the named quantity.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import FloatArray
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import GeneralBLT
from dpftrl.optimize._solvers import (
    Objective,
    Optimized,
    check_objective,
    loss_value,
    scipy_optimize,
)
from dpftrl.optimize._toeplitz_error import log_majorant_sensitivity
from dpftrl.optimize.blt import Chain, check_buffers, finished, search
from dpftrl.participation import Participation

Complex = NDArray[np.complex128]

# Largest absolute output scale. Larger scales cancel each other so much that float32 buffers would
# lose digits.
LARGEST_SCALE = 10.0


class Rates(NamedTuple):
    """Complex rates, and their derivatives by the free numbers."""

    values: Complex
    slopes: Complex


def rates(free: FloatArray) -> Rates:
    """Complex rates from free numbers.

    Two free numbers give two rates. The first number is the mean of the two log rates, the second
    is the square of half their difference. If the second is negative, the rates are a conjugate
    pair. If the number of free numbers is odd, the last one is the log of a real rate.
    """
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


def free_from(real_rates: FloatArray) -> FloatArray:
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
    """log(error x sensitivity of the majorant), as a function of the free numbers."""

    participation: Participation
    objective: Objective

    def __call__(self, free: FloatArray) -> tuple[float, FloatArray]:
        """The value and the gradient; infinite if a decay is not inside the unit circle."""
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

    def value(self, free: FloatArray) -> float:
        """The value without the gradient, as a sort key."""
        return self(free)[0]

    def _value(self, r: Complex, s: Complex) -> tuple[float, Complex, Complex]:
        """The value and its derivatives by the rates r and s."""
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
        sensitivity, by_c = log_majorant_sensitivity(c, self.participation)

        sums_c, bent_c = of_c @ by_c[1:], of_c @ (by_c[1:] * lags[:-1])
        by_log_omega = omega * sums_c
        by_r = -omega * bent_c / (1 - r)
        sums_b, bent_b = of_b @ by_b, of_b @ (by_b * lags)
        by_log_weight = weights * sums_b
        by_s = -weights * bent_b / (1 - s)
        by_log_constant = constant * by_b.sum()

        inverse_apart = 1 / apart
        inverse_r, inverse_s = 1 / among_r - np.eye(len(r)), 1 / among_s - np.eye(len(s))
        by_r += by_log_omega * (inverse_r.sum(axis=1) - inverse_apart.sum(axis=1))
        by_r -= inverse_r.T @ by_log_omega + inverse_apart @ by_log_weight
        by_r += by_log_constant / r
        by_s += by_log_weight * (inverse_apart.sum(axis=0) - inverse_s.sum(axis=0) - 1 / s)
        by_s += inverse_s @ by_log_weight + inverse_apart.T @ by_log_omega
        by_s -= by_log_constant / s
        return error + sensitivity, by_r, by_s

    def _error(self, b: FloatArray) -> tuple[float, FloatArray]:
        """The log error, and its derivatives by the coefficients b of B = A C^-1."""
        share = np.ones(len(b))
        if self.objective == "rms":
            share = 1 - np.arange(len(b)) / len(b)
        square = float(share @ b**2)
        return 0.5 * float(np.log(square)), share * b / square


def _differences(values: Complex) -> Complex:
    """values_j - values_i at [i, j], with ones on the diagonal."""
    return values[None, :] - values[:, None] + np.eye(len(values))


# Starts with a wave, that is a conjugate pair of rates, whose period is min_sep rounds or a
# fraction of it. The wave of the pole decays faster than that of the zero. Both are given relative
# to the frequency of the wave.
POLES = (0.5 + 0.85j, 0.15 + 1.0j)
ZEROS = (0.27 + 0.98j, 0.05 + 1.0j)
SLOWEST = 1e-9  # smallest rate of a start, so that its logarithm is finite
MOST_ROUNDS = 200_000  # the objective takes O(rounds) time and memory per evaluation
ROUGH = 60  # steps from every start
POLISHED = 6  # number of the best end points that are optimized further
RESTARTS = 8  # largest number of restarts from each of these end points


def optimize_general_blt(
    participation: Participation, buffers: int = 4, objective: Objective = "max"
) -> Optimized[GeneralBLT]:
    """Find a generalized BLT with a small loss, never larger than that of `optimize_blt`.

    The loss has kinks, where the majorant of the sensitivity changes, and several local optima. The
    search takes quasi-Newton steps from fixed starts (BLTs with waves of period min_sep added), and
    is restarted where a kink stops it. The same input gives the same output, bit for bit.

    Args:
        participation: The participation to optimize for.
        buffers: Number of real buffers; a conjugate pair of decays takes two.
        objective: `max` for MaxLoss, `rms` for RmsLoss.
    """
    started = time.perf_counter()
    check_objective(objective)
    buffers = check_buffers(buffers, participation)
    if participation.rounds > MOST_ROUNDS:
        raise InvalidInput(
            f"gblt is optimised for at most {MOST_ROUNDS:,} rounds, got {participation.rounds:,}; "
            "optimise it for fewer rounds: it can run for more rounds than it was optimised for"
        )
    function = GbltObjective(participation, objective)
    starts = (s for s in _starts(participation, objective, buffers) if function(s)[0] < np.inf)
    ends = sorted((_descend(function, start, ROUGH) for start in starts), key=function.value)
    candidates = [_candidate(_polish(function, end), function) for end in ends[:POLISHED]]
    best, gradient_norm = min(
        [_from_blt(search(participation, objective, buffers)), *candidates],
        key=lambda pair: loss_value(pair[0].error_report(participation), objective),
    )
    return Optimized(
        best,
        participation,
        objective,
        best.error_report(participation),
        gradient_norm,
        time.perf_counter() - started,
    )


def _from_blt(chain: Chain) -> tuple[GeneralBLT, float]:
    """A BLT as a generalized BLT, and its gradient norm."""
    blt = finished(chain.slow, chain.fast)
    return GeneralBLT(blt.theta, blt.omega), chain.gradient_norm


def _candidate(free: FloatArray, function: GbltObjective) -> tuple[GeneralBLT, float]:
    """The generalized BLT with these free numbers, and its gradient norm."""
    return _finished(free), float(np.abs(function(free)[1]).max())


def _starts(
    participation: Participation, objective: Objective, buffers: int
) -> Iterator[FloatArray]:
    """Yield starts as free numbers: the best BLT, and BLTs with one or more waves added."""
    for waves in range(buffers // 2 + 1):
        real = buffers - 2 * waves
        chain = search(participation, objective, real) if real else None
        if chain is not None and len(chain.slow) != real:
            continue
        for pole, zero in zip(POLES, ZEROS, strict=True) if waves else [(0j, 0j)]:
            yield _with_waves(participation, chain, waves, pole, zero)


def _with_waves(
    participation: Participation, chain: Chain | None, waves: int, pole: complex, zero: complex
) -> FloatArray:
    """The free numbers of a BLT with waves added; wave h has the frequency of harmonic h."""
    poles: list[float] = []
    zeros: list[float] = []
    for harmonic in range(1, waves + 1):
        frequency = 2 * np.pi * harmonic / max(participation.min_sep, 8 * harmonic)
        for free, rate in ((poles, frequency * pole), (zeros, frequency * zero)):
            free += [float(np.log(abs(rate))), -(float(np.angle(rate)) ** 2)]
    if chain is not None:
        poles += free_from(np.maximum(chain.slow, SLOWEST)).tolist()
        zeros += free_from(chain.fast).tolist()
    return np.array(poles + zeros)


def _descend(function: GbltObjective, start: FloatArray, steps: int) -> FloatArray:
    """The end point of BFGS, or the start if the end point is not better."""
    result = scipy_optimize().minimize(
        function, start, jac=True, method="BFGS", options={"maxiter": steps, "gtol": 1e-9}
    )
    end: FloatArray = result.x
    return end if function(end)[0] < function(start)[0] else start


def _polish(function: GbltObjective, point: FloatArray) -> FloatArray:
    """Restart BFGS while that helps: a kink invalidates the curvature estimated before it."""
    for _ in range(RESTARTS):
        further = _descend(function, point, 400)
        if function(further)[0] > function(point)[0] - 1e-7:
            return further
        point = further
    return point


def _finished(free: FloatArray) -> GeneralBLT:
    """The generalized BLT with these free numbers."""
    half = len(free) // 2
    r, s = rates(free[:half]).values, rates(free[half:]).values
    omega = ((s[None, :] - r[:, None]) / _differences(r)).prod(axis=1)
    theta: list[complex] = []
    scales: list[complex] = []
    for decay, scale in zip((1 - r).tolist(), omega.tolist(), strict=True):
        if decay.imag >= 0:
            theta.append(decay)
            scales.append(scale if decay.imag else complex(scale.real))
    return GeneralBLT(theta, scales)
