"""The loss of a batch of BLTs with its gradient, in closed form at any number of rounds.

A BLT is given by its chain of rates r_1 < s_1 < r_2 < s_2 < ... < r_d < s_d, where 1 - r are the
decays of C and 1 - s those of C^-1. All BLTs of a batch share the same numpy calls, so that a batch
costs little more than one BLT. The formulas are those of `dpftrl.mechanisms.blt`, with their
derivatives. Names that start with `by_` hold derivatives by the named quantity.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import FloatArray
from dpftrl.optimize._solvers import Objective
from dpftrl.participation import Participation
from dpftrl.workload import Workload

# Where terms * p < SERIES_BELOW, sums are computed by a binomial series. Its terms fall about as
# fast as 0.5^m / m!, so that 14 of them reach the precision of float64.
SERIES_TERMS = 14
SERIES_BELOW = 0.5


class Sums(NamedTuple):
    """The sum of weight_i (1 - p)^i over i < terms, and its derivative by p."""

    value: FloatArray
    slope: FloatArray


def geometric(p: FloatArray, terms: int) -> Sums:
    """The sums for the weights weight_i = 1."""
    if terms == 0:
        return Sums(np.zeros_like(p), np.zeros_like(p))
    safe, small = _away_from_zero(p, terms)
    whole, before = _powers(safe, terms)
    value = (1 - whole) / safe
    slope = (terms * before - value) / safe
    return _with_series(Sums(value, slope), p, small, terms, 1)


def weighted(p: FloatArray, terms: int) -> Sums:
    """The sums for the weights weight_i = terms - i."""
    safe, small = _away_from_zero(p, terms)
    whole, before = _powers(safe, terms)
    q = 1 - safe
    plain = (1 - whole) / safe
    plain_slope = (terms * before - plain) / safe
    value = (terms - q * plain) / safe
    slope = (plain - q * plain_slope - value) / safe
    return _with_series(Sums(value, slope), p, small, terms, 2)


def _away_from_zero(p: FloatArray, terms: int) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Return p with its small entries replaced by 1, and a mask of the small entries."""
    small = p < SERIES_BELOW / terms
    return np.where(small, 1.0, p), small


def _powers(p: FloatArray, terms: int) -> tuple[FloatArray, FloatArray]:
    """q^terms and q^(terms - 1) for q = 1 - p, which may be negative."""
    q = 1 - p
    if terms == 1:
        return q, np.ones_like(q)
    log_size = np.log1p(-p.clip(max=1 - 1e-16))
    if (negative := q < 0).any():
        log_size[negative] = np.log(-q[negative])
    before = np.exp((terms - 1) * log_size)
    if terms % 2 == 0:
        before[negative] *= -1
    return before * q, before


def _with_series(
    sums: Sums, p: FloatArray, small: NDArray[np.bool_], terms: int, order: int
) -> Sums:
    """Replace the sums where terms * p is small: the closed form loses digits there.

    `order` selects the weights of the sums: 1 for `geometric`, 2 for `weighted`.
    """
    if not small.any():
        return sums
    small_p = p[small]
    powers = np.empty((SERIES_TERMS, len(small_p)))
    powers[0], powers[1:] = 1.0, small_p
    coefficients = _binomial_series(terms, order)
    sums.value[small], sums.slope[small] = coefficients @ np.multiply.accumulate(powers, out=powers)
    return sums


@lru_cache(maxsize=256)
def _binomial_series(terms: int, order: int) -> FloatArray:
    """Coefficients, in p, of sum_m (-p)^m binomial(terms - 1 + order, m + order) and its slope."""
    value = np.zeros(SERIES_TERMS + 1)
    value[0] = terms if order == 1 else terms * (terms + 1) / 2
    for m in range(SERIES_TERMS):
        value[m + 1] = -value[m] * (terms - 1 - m) / (m + order + 1)
    return np.stack([value[:-1], value[1:] * np.arange(1, SERIES_TERMS + 1)])


@final
@dataclass(frozen=True)
class BltObjective:
    """The log loss, log(error x sensitivity), of BLTs for one participation."""

    participation: Participation
    objective: Objective

    def __call__(
        self, slow: FloatArray, fast: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Compute values and gradients.

        Args:
            slow: The rates r of C, one row per BLT.
            fast: The rates s of C^-1, one row per BLT.

        Returns:
            The log loss of each BLT, and its derivatives by r and by s.
        """
        apart = _apart(slow, fast)
        error, error_slow, error_fast = self._error(slow, fast, apart)
        sens, sens_slow, sens_fast = self._sensitivity(slow, apart)
        by_slow = error_slow / error[:, None] + sens_slow / sens[:, None]
        by_fast = error_fast / error[:, None] + sens_fast / sens[:, None]
        return 0.5 * np.log(error * sens), 0.5 * by_slow, 0.5 * by_fast

    def log_sensitivity(
        self, slow: FloatArray, fast: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The log sensitivity, and its derivatives by r and by s."""
        sens, by_slow, by_fast = self._sensitivity(slow, _apart(slow, fast))
        scale = 0.5 / sens[:, None]
        return 0.5 * np.log(sens), scale * by_slow, scale * by_fast

    def _error(
        self, slow: FloatArray, fast: FloatArray, apart: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The squared error, and its derivatives by r and by s.

        The coefficients of B = A C^-1 are a weighted sum of exponentials (see `BLT`), and the
        squared error is a quadratic form in the weights.
        """
        rounds, batch = self.participation.rounds, len(slow)
        within, inverse_within = _differences(fast)  # s_j - s_i at [i, j]
        inverse_apart = 1 / apart
        weights = np.empty((batch, slow.shape[1] + 1))
        weights[:, 0] = (slow / fast).prod(axis=1)
        weights[:, 1:] = (apart / within).prod(axis=1) / fast
        rates = np.zeros_like(weights)
        rates[:, 1:] = fast
        decays = 1 - rates
        p = rates[:, :, None] + rates[:, None, :] * decays[:, :, None]
        sums = geometric(p, rounds) if self.objective == "max" else weighted(p, rounds)
        scale = 1.0 if self.objective == "max" else 1 / rounds
        by_log_weight = (2 * scale) * weights * _times(sums.value, weights)
        value = by_log_weight.sum(axis=1) / 2
        bent = (2 * scale) * weights * _times(sums.slope, weights * decays)
        constant, by_log = by_log_weight[:, :1], by_log_weight[:, 1:]
        by_slow = constant / slow - _times(inverse_apart, by_log)
        own = (inverse_apart - inverse_within).sum(axis=1) - 1 / fast
        by_fast = bent[:, 1:] + by_log * own + _times(inverse_within, by_log) - constant / fast
        return value, by_slow, by_fast

    def _sensitivity(
        self, slow: FloatArray, apart: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The squared sensitivity, and its derivatives by r and by s.

        The squared sensitivity is a sum over segments of min_sep rounds (see `BLT._shifted_norm`).
        """
        rounds, gap = self.participation.rounds, self.participation.min_sep
        repeats = self.participation.max_participations - 1
        batch, count = slow.shape
        within, inverse_within = _differences(slow)  # r_j - r_i at [i, j]
        inverse_apart = 1 / apart
        omega = (apart / within).prod(axis=2)
        decay = 1 - slow
        log_decay = np.log1p(-slow)
        carried = np.exp((gap - 1) * log_decay)  # theta^(b-1)
        ahead = carried * decay  # theta^b
        moments, last = _moments(ahead, repeats)
        p = slow[:, :, None] + slow[:, None, :] * decay[:, :, None]
        first = np.ones((batch, count + 1))
        first[:, 1:] = omega * carried
        moment = last[:, :, None] * last[:, None, :]
        last_length = rounds - repeats * gap
        all_moments = moments + moment
        if not repeats or last_length == gap:  # the last segment is like the others
            segments = ((all_moments, last_length),)
        else:
            segments = ((moment, last_length), (moments, gap))
        # The first round of each segment, and then its other rounds.
        pulled = 2 * _times(all_moments[:, :, : count + 1], first)
        value = (first * pulled[:, : count + 1]).sum(axis=1)
        by_first = pulled[:, 1 : count + 1]
        by_carried = omega * by_first
        by_ahead = first[:, 1:] * pulled[:, count + 1 :]
        form, by_sums, by_bent = (np.zeros_like(p) for _ in range(3))
        for one, length in segments:
            sums = geometric(p, length - 1)
            both, bent = _next_moments(one, ahead)
            form += sums.value * both
            by_bent += sums.value * bent
            by_sums += sums.slope * both
        doubled = 2 * omega
        by_omega = _times(form, doubled)
        value += (omega * by_omega).sum(axis=1)
        by_omega += carried * by_first
        by_ahead += doubled * _times(by_bent.swapaxes(1, 2), omega)
        by_slow = doubled * _times(by_sums, omega * decay)
        by_slow -= gap * by_ahead * carried + (gap - 1) * by_carried * carried / decay
        by_log = by_omega * omega
        by_slow += by_log * (inverse_within - inverse_apart).sum(axis=2)
        by_slow -= _times(inverse_within.swapaxes(1, 2), by_log)
        by_fast = _times(inverse_apart.swapaxes(1, 2), by_log)
        return value / 2, by_slow, by_fast


def output_scales(slow: FloatArray, fast: FloatArray) -> FloatArray:
    """The output scales omega of each BLT, from its rates."""
    return (_apart(slow, fast) / _differences(slow)[0]).prod(axis=2)


def _apart(slow: FloatArray, fast: FloatArray) -> FloatArray:
    """The matrix of each BLT with s_j - r_i at [i, j]."""
    return fast[:, None, :] - slow[:, :, None]


def _times(matrices: FloatArray, vectors: FloatArray) -> FloatArray:
    """The product of each matrix with its vector."""
    return (matrices @ vectors[:, :, None])[:, :, 0]


def _differences(rates: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Two matrices per BLT: rate_j - rate_i at [i, j], and the reciprocals of these entries.

    The diagonals hold ones and zeros, respectively.
    """
    identity = np.eye(rates.shape[1])
    apart = rates[:, None, :] - rates[:, :, None] + identity
    return apart, 1 / apart - identity


def _next_moments(moment: FloatArray, ahead: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Matrices of sum_s g_i(s) g_j(s) and of sum_s g_i(s) g'_j(s), from the result of `_moments`.

    `_moments` defines g and g', and sums the products of g(s-1) and g'(s-1).
    """
    count = ahead.shape[1]
    g, slope = slice(1, count + 1), slice(count + 1, None)
    down, across = ahead[:, :, None], ahead[:, None, :]
    half = moment[:, :1, g] + down * moment[:, g, g]  # g_i(s) g_j(s-1)
    both = moment[:, :1, :1] + down * moment[:, g, :1] + across * half
    bent = half + across * (moment[:, :1, slope] + down * moment[:, g, slope])
    return both, bent


def _moments(ahead: FloatArray, repeats: int) -> tuple[FloatArray, FloatArray]:
    """sum_{s < repeats} a_s a_s^T and a_repeats, for a_s = (1, g(s-1), g'(s-1)).

    g_j(s) = 1 + x_j g_j(s-1) are the geometric sums of x = theta^b, and g' their derivatives by x.
    The moments are computed by repeated doubling. All terms are non-negative, so no digits cancel.
    """
    batch, count = ahead.shape
    size = 2 * count + 1
    diagonal = np.arange(int(count))
    step = np.zeros((batch, size, size))  # a_s = step @ a_(s-1)
    step[:, : count + 1, 0] = 1.0
    step[:, 1 + diagonal, 1 + diagonal] = ahead
    step[:, 1 + count + diagonal, 1 + diagonal] = 1.0
    step[:, 1 + count + diagonal, 1 + count + diagonal] = ahead
    total = np.zeros((batch, size, size))
    jump = np.zeros((batch, size, size))
    jump[:] = np.eye(size)
    for position, bit in enumerate(f"{repeats:b}"):
        if position:
            total = total + jump @ total @ jump.swapaxes(1, 2)
            jump = jump @ jump
        if bit == "1":
            total = step @ total @ step.swapaxes(1, 2)
            total[:, 0, 0] += 1.0
            jump = jump @ step
    return total, jump[:, :, 0]


DIFFERENCE = 1e-5  # step of the log rates, for numerical derivatives of the error


@final
@dataclass(frozen=True)
class BltWorkloadObjective:
    """The log loss of BLTs, where the error is that of the model under a workload.

    Computing the error takes O(n d^2) operations for n rounds and d buffers. The derivatives of the
    error are numerical, for all BLTs of the batch at once. The sensitivity does not depend on the
    workload and has a closed form.
    """

    participation: Participation
    objective: Objective
    workload: Workload

    def __call__(
        self, slow: FloatArray, fast: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The log losses, and their derivatives by the rates r and s, one row per BLT."""
        count, size = slow.shape[0], 2 * slow.shape[1]
        chains = np.concatenate([slow, fast], axis=1)
        steps = np.concatenate([np.zeros((1, size)), np.eye(size), -np.eye(size)])
        moved = chains[:, None, :] * np.exp(DIFFERENCE * steps)
        errors = self._log_error(moved.reshape(-1, size)).reshape(count, -1)
        slopes = (errors[:, 1 : size + 1] - errors[:, size + 1 :]) / (2 * DIFFERENCE) / chains
        plain = BltObjective(self.participation, self.objective)
        sensitivity, by_slow, by_fast = plain.log_sensitivity(slow, fast)
        half = size // 2
        values = errors[:, 0] + sensitivity
        return values, by_slow + slopes[:, :half], by_fast + slopes[:, half:]

    def _log_error(self, chains: FloatArray) -> FloatArray:
        """The log error of each BLT; a row holds the rates r and then the rates s."""
        half = chains.shape[1] // 2
        slow, fast = chains[:, :half], chains[:, half:]
        variances = model_variances(
            1 - slow, output_scales(slow, fast), self.workload, self.participation.rounds
        )
        overall = variances.max(axis=1) if self.objective == "max" else variances.mean(axis=1)
        return 0.5 * np.log(overall)


def model_variances(
    theta: FloatArray, omega: FloatArray, workload: Workload, rounds: int
) -> FloatArray:
    """Variance of the noise in the model after each round, one row per BLT.

    The state consists of the noise buffers (see `BLT`), the momentum and the model. Its covariance
    follows a linear recursion.
    """
    count, buffers = theta.shape
    size = buffers + 2
    advance = np.zeros((count, size, size))
    diagonal = np.arange(int(buffers))
    advance[:, : buffers + 1, :buffers] = -omega[:, None, :]
    advance[:, diagonal, diagonal] += theta
    advance[:, buffers, buffers] = workload.momentum
    fresh = np.ones(size)
    covariance = np.zeros((count, size, size))
    variances = np.empty((count, rounds))
    rates, kept = workload.rates(rounds), workload.kept(rounds)
    for t in range(rounds):
        advance[:, -1] = rates[t] * advance[:, buffers]
        advance[:, -1, -1] = kept[t]
        fresh[-1] = rates[t]
        covariance = advance @ covariance @ advance.swapaxes(1, 2) + np.outer(fresh, fresh)
        variances[:, t] = covariance[:, -1, -1]
    return variances
