"""Buffered linear Toeplitz (BLT) mechanisms, with closed forms at any number of rounds."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self, final

import numpy as np

from dpftrl._internal.checks import all_within, finite_numbers
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms._exponentials import (
    InverseDecays,
    geometric_sum,
    inverse_decays,
    powers,
    weighted_geometric_sum,
)
from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.mechanisms.base import ROUNDING_MARGIN, Matrix, Rows, StreamState, Vector
from dpftrl.mechanisms.toeplitz import ToeplitzMechanism
from dpftrl.participation import Participation


class Exponentials(NamedTuple):
    """A sequence sum_j weights[j] (1 - rates[j])^i with non-negative weights."""

    rates: Vector
    weights: Vector


@final
@dataclass(frozen=True)
class BLT(ToeplitzMechanism):
    """BLT(theta, omega): c_0 = 1 and c_i = sum_j omega_j theta_j^(i-1).

    One buffer a decay, at any number of rounds. C^-1 is a BLT too, and B = A C^-1 is a sum of d + 1
    positive exponentials; sensitivity and error follow in closed form, in time O(d^3 log k).

    Attributes:
        theta: Buffer decays, between 0 and 1.
        omega: Output scales, not negative. Their sum is c_1, which should not exceed c_0 = 1: above
            that the theorem behind the sensitivity does not hold and a bound takes its place.

    >>> BLT([0.5], [0.25]).coefficients(4)
    array([1.    , 0.25  , 0.125 , 0.0625])
    """

    family = "blt"
    rounds_buffers_once = True

    theta: tuple[float, ...]
    omega: tuple[float, ...]

    def __init__(self, theta: Sequence[float], omega: Sequence[float]):
        decays, scales = finite_numbers("theta", theta), finite_numbers("omega", omega)
        all_within("theta", decays, 0, 1)
        all_within("omega", scales, 0, float("inf"))
        if len(decays) != len(scales):
            raise InvalidInput(
                f"theta and omega need one number a buffer, got {len(decays)} and {len(scales)}"
            )
        if not math.fsum(w / (1 + q) for q, w in zip(decays, scales, strict=True)) <= 1:
            raise InvalidInput(
                f"omega sums to {sum(scales):g}, so large that the noise would grow for ever; "
                "a sum of at most 1 is safe"
            )
        object.__setattr__(self, "theta", decays)
        object.__setattr__(self, "omega", scales)

    @classmethod
    def from_decays(cls, theta: Sequence[float], theta_hat: Sequence[float]) -> Self:
        """The BLT whose decays are `theta` and whose inverse has the decays `theta_hat`.

        They must interlace: theta_1 > theta_hat_1 > theta_2 > ... > theta_d > theta_hat_d. This is
        equivalent to every omega being positive (Lemma 5.2 of McMahan, Moitra and Srebro 2024, in
        a form that does not cancel).

        >>> BLT.from_decays([0.75], [0.5])
        BLT(theta=(0.75,), omega=(0.25,))
        """
        decays, inverse = finite_numbers("theta", theta), finite_numbers("theta_hat", theta_hat)
        chain = np.ravel(list(zip(decays, inverse, strict=False)))
        if len(decays) != len(inverse) or not np.all(np.diff(chain) < 0):
            raise InvalidInput(
                "theta and theta_hat must interlace, theta_1 > theta_hat_1 > theta_2 > ..., "
                f"got {decays} and {inverse}"
            )
        omega = [
            (q - inverse[i])
            * math.prod((q - inverse[j]) / (q - decays[j]) for j in range(len(decays)) if j != i)
            for i, q in enumerate(decays)
        ]
        return cls(decays, omega)

    @property
    def name(self) -> str:
        """The name of a preset, or just `blt`."""
        return next((name for name, preset in PRESETS.items() if preset == self), self.family)

    @property
    def buffers(self) -> int:
        """The number of buffers, d."""
        return len(self.theta)

    @cached_property
    def _distinct(self) -> Exponentials:
        """Rates and scales with coinciding buffers merged and idle ones left out, slowest first.

        Buffers of equal decay carry the same content, so that this changes no coefficient (decays
        below 1e-16 count as zero, which changes none by more than that).
        """
        merged: dict[float, list[float]] = {}
        for decay, scale in zip(self.theta, self.omega, strict=True):
            if scale > 0:
                merged.setdefault(1 - decay, []).append(scale)
        rates = sorted(merged)
        scales = [math.fsum(merged[rate]) for rate in rates]
        return Exponentials(np.array(rates), np.array(scales))

    @cached_property
    def _inverse(self) -> Exponentials:
        """c_hat_i = -sum_j weights[j] (1 - rates[j])^(i-1), for i > 0."""
        found = inverse_decays(*self._distinct)
        own = np.diag_indices(len(found.rates))
        ratios = found.from_poles / np.where(np.eye(len(found.rates)) == 1, 1.0, found.between)
        ratios[own] = found.from_poles[own]
        return Exponentials(found.rates, ratios.prod(axis=0))

    @cached_property
    def _prefix(self) -> Exponentials:
        """b_i = sum_j weights[j] (1 - rates[j])^i: a constant, then the decays of the inverse."""
        rates, weights = self._inverse
        constant = float(np.prod(self._distinct.rates / rates))
        rates_from_zero = np.append(np.zeros(1), rates)
        return Exponentials(rates_from_zero, np.append(constant, weights / rates))

    def inverse_parameters(self) -> tuple[Vector, Vector]:
        """theta_hat and omega_hat of the inverse BLT, C^-1 = BLT(theta_hat, omega_hat)."""
        return 1 - self._inverse.rates, -self._inverse.weights

    def coefficients(self, rounds: int) -> Vector:
        """c_0 = 1, then a sum of exponentials."""
        exponents = np.arange(float(rounds - 1))
        return _after_one(np.power.outer(self.theta, exponents).T, self.omega)

    def inverse_coefficients(self, rounds: int) -> Vector:
        """c_hat_0 = 1, then minus a sum of exponentials."""
        rates, weights = self._inverse
        return _after_one(powers(rates, np.arange(rounds - 1)), -weights)

    def prefix_coefficients(self, rounds: int) -> Vector:
        """A sum of positive exponentials."""
        rates, weights = self._prefix
        return powers(rates, np.arange(rounds)) @ weights

    def max_error(self, rounds: int) -> float:
        """The last prefix sum has the largest error: sum_i b_i^2 in closed form."""
        rates, weights = self._prefix
        sums = geometric_sum(rates, self.check_rounds(rounds))
        return float(weights @ sums @ weights) ** 0.5

    def rms_error(self, rounds: int) -> float:
        """sum_i (n - i) b_i^2 / n in closed form."""
        rates, weights = self._prefix
        sums = weighted_geometric_sum(rates, self.check_rounds(rounds))
        return (float(weights @ sums @ weights) / rounds) ** 0.5

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """The norm of the first k shifts by b of c, added up, in closed form.

        Guarantees:
            Coefficients are non-negative and fall from c_1 on. If also c_1 <= c_0, that is
            sum(omega) <= 1, the pattern 0, b, 2b, ... is the worst (see `toeplitz_sensitivity`) and
            the result is exact. Otherwise raising c_0 to c_1 gives the smallest non-increasing
            majorant, and with it an upper bound.
        """
        attained = self._shifted_norm(participation, 1.0)
        first = math.fsum(self.omega)
        if first <= 1:
            return Sensitivity.exact(attained)
        return Sensitivity.between(attained, self._shifted_norm(participation, first))

    def _shifted_norm(self, participation: Participation, c_0: float) -> float:
        """Norm of the shifts of (c_0, c_1, ...) by 0, b, ..., (k-1)b within n rounds.

        Rounds s*b ... (s+1)*b - 1 make up segment s. With g_j(s) = sum_{u <= s} theta_j^(u b) the
        shifts add up to c_0 + sum_j omega_j theta_j^(b-1) g_j(s-1) in the first round of it and to
        sum_j omega_j theta_j^(r-1) g_j(s) in its round r > 0. So segment s contributes a quadratic
        form in y_s = (1, g(s-1)), and y_{s+1} = F y_s. Summing over segments by doubling adds only
        positive numbers.
        """
        rounds, gap = participation.rounds, min(participation.min_sep, participation.rounds)
        repeats = participation.max_participations - 1
        rates, scales = self._distinct
        size = len(rates) + 1
        advance = np.eye(size)  # F: g_j(s) = 1 + theta_j^b g_j(s-1)
        advance[1:, 0] = 1.0
        advance[1:, 1:] *= powers(rates, np.array([gap]))
        first = np.append(c_0, scales * powers(rates, np.array([gap - 1]))[0])

        def segment(length: int) -> Matrix:
            rest = np.outer(scales, scales) * geometric_sum(rates, length - 1)
            return np.outer(first, first) + advance[1:].T @ rest @ advance[1:]

        whole = segment(gap)
        total, ahead = np.zeros((size, size)), np.eye(size)
        for bit in f"{repeats:b}":
            total, ahead = total + ahead.T @ total @ ahead, ahead @ ahead
            if bit == "1":
                total, ahead = whole + advance.T @ total @ advance, ahead @ advance
        last = segment(rounds - repeats * gap)
        end = ahead[:, 0]  # y_0 = (1, 0, ..., 0)
        return float(total[0, 0] + end @ last @ end) ** 0.5

    def rounding_gain(self, rounds: int) -> float:
        """In closed form, with every rounding at its largest and of the worst sign.

        Refilling buffer j rounds once, by at most 2^-53 of what it holds. What it holds is
        sum_i h_i Z_(t-i), where h has the generating function of C^-1 over 1 - theta_j x: the decay
        theta_j cancels, and h is a sum of exponentials with the decays of C^-1. An error in buffer
        j decays by theta_j and enters the noise times omega_j.
        """
        if self.check_rounds(rounds) == 1 or not len(self._distinct.rates):
            return 0.0
        # Plain floats: this is asked for every round, and numpy's smallest step costs more.
        slow, fast, scales, responses = self._responses
        held = [_sum_of_powers(rate, rounds) for rate in fast]
        errors = math.fsum(
            scale * _sum_of_powers(rate, rounds - 1) * math.fsum(map(operator.mul, row, held))
            for rate, scale, row in zip(slow, scales, responses, strict=True)
        )
        return math.sqrt(rounds) * errors * ROUNDING_MARGIN

    @cached_property
    def _responses(self) -> tuple[list[float], list[float], list[float], list[list[float]]]:
        """Rates of C and of C^-1, scales, and `_buffer_responses`."""
        rates, scales = self._distinct
        inverse = inverse_decays(rates, scales)
        responses = _buffer_responses(inverse).tolist()
        return rates.tolist(), inverse.rates.tolist(), scales.tolist(), responses

    def memory(self, rounds: int) -> int:
        """One vector a buffer."""
        return self.buffers if self.check_rounds(rounds) > 1 else 0

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """Algorithm 3 of the paper: subtract what the buffers hold, then decay and refill them."""
        buffers = state.buffers
        if state.round == 0:
            buffers = np.zeros((self.buffers, buffers.shape[1]))
        noise = rows(state.next_row) - np.array(self.omega) @ buffers
        buffers = np.array(self.theta)[:, None] * buffers + noise
        return noise, StreamState(state.round + 1, state.next_row + 1, buffers)

    def parameters(self) -> dict[str, Any]:
        """Decays and scales."""
        return {"theta": list(self.theta), "omega": list(self.omega)}


def _buffer_responses(inverse: InverseDecays) -> Matrix:
    """Size of the exponential with decay k of C^-1 (across) in what buffer j holds (down).

    By partial fractions: prod_{m != j} (theta_hat_k - theta_m) over
    prod_{m != k} (theta_hat_k - theta_hat_m).
    """
    count = len(inverse.rates)
    between = np.where(np.eye(count) == 1, 1.0, inverse.between)
    ratios = inverse.from_poles / between
    sizes = np.empty((count, count))
    for j in range(count):
        without = ratios.copy()
        without[j] = 1 / between[j]
        sizes[j] = np.abs(without.prod(axis=0))
    return sizes


def _sum_of_powers(rate: float, terms: int) -> float:
    """sum_{i < terms} |1 - rate|^i."""
    rate = 2 - rate if rate > 1 else rate
    if rate == 0:
        return float(terms)
    if rate == 1:
        return float(terms > 0)
    return -math.expm1(terms * math.log1p(-rate)) / rate


def _after_one(decays: Matrix, weights: Sequence[float] | Vector) -> Vector:
    return np.append(1.0, decays @ np.asarray(weights))


# Appendix A of the paper: BLTs of its production runs, for (n, b, k) = (2000, 100, 10),
# (4000, 400, 5) and (4000, 1000, 2). The one for b = 400 is the paper's default.
PRESETS = {
    "blt-b100": BLT(
        theta=(0.989739971007307, 0.7352001759538236, 0.16776199983448145, 0.1677619998016191),
        omega=(0.20502892852480875, 0.23357939425278557, 0.03479503245420878, 0.03479509876050538),
    ),
    "blt-b400": BLT(
        theta=(0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778),
        omega=(0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748073734),
    ),
    "blt-b1000": BLT(
        theta=(0.9999999999983397, 0.9973412136664378, 0.9584629472313878, 0.6581796870749317),
        omega=(0.008657392263671862, 0.05890891298180163, 0.14548176930698697, 0.2770117005326523),
    ),
}
