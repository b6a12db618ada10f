"""Buffered linear Toeplitz (BLT) mechanisms, with closed forms for any number of rounds.

The closed forms are sums of exponentials. Decays are stored as *rates*, one minus the decay, so
that a decay of 1 - 1e-13 loses no digits. For positive weights, all terms of the sums are positive,
so that no digits cancel for any number of rounds.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import all_within, finite_numbers
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.mechanisms.base import (
    ROUNDING_MARGIN,
    DecayingBuffers,
    Matrix,
    Rows,
    StreamState,
    Vector,
)
from dpftrl.mechanisms.toeplitz import ToeplitzMechanism
from dpftrl.participation import Participation

FLOAT64_EPSILON = 2.0**-52  # relative distance between neighboring float64 numbers
NEWTON_STEPS = 20  # more than twice as many as any of the mechanisms of the paper needs


class Exponentials(NamedTuple):
    """The sequence sum_j weights[j] (1 - rates[j])^i, with non-negative weights."""

    rates: Vector
    weights: Vector


class _InverseDecays(NamedTuple):
    """Decays of an inverse BLT, as rates, and the differences from which its weights follow.

    Attributes:
        rates: One minus each decay of the inverse, increasing.
        from_poles: from_poles[i, j] is rate j of the inverse minus rate i of the BLT.
        between: between[i, j] is rate j of the inverse minus rate i of the inverse.
    """

    rates: Vector
    from_poles: Matrix
    between: Matrix


@final
@dataclass(frozen=True)
class BLT(ToeplitzMechanism):
    """BLT(theta, omega): c_0 = 1 and c_i = sum_j omega_j theta_j^(i-1).

    A stream keeps one buffer per decay, whatever the number of rounds. C^-1 is a BLT too, and the
    coefficients of B = A C^-1 are a sum of d + 1 positive exponentials for d decays. Sensitivity
    and error follow in closed form, in time O(d^3 log k) for k participations.

    Attributes:
        theta: Buffer decays, between 0 and 1.
        omega: Output scales, not negative. Their sum is c_1, which should not exceed c_0 = 1.
            Above 1 the theorem behind the exact sensitivity does not apply, and `sensitivity`
            returns an upper bound.

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
                f"theta and omega need one number per buffer, got {len(decays)} and {len(scales)}"
            )
        if not math.fsum(w / (1 + q) for q, w in zip(decays, scales, strict=True)) <= 1:
            raise InvalidInput(
                f"omega sums to {sum(scales):g}, so that the noise would grow without bound; "
                "a sum of at most 1 is safe"
            )
        object.__setattr__(self, "theta", decays)
        object.__setattr__(self, "omega", scales)

    @classmethod
    def from_decays(cls, theta: Sequence[float], theta_hat: Sequence[float]) -> Self:
        """Build the BLT whose decays are `theta` and whose inverse has the decays `theta_hat`.

        They must interlace: theta_1 > theta_hat_1 > theta_2 > ... > theta_d > theta_hat_d. This is
        equivalent to every omega being positive (Lemma 5.2 of McMahan, Moitra and Srebro 2024,
        evaluated in a form without cancellation).

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
        """Name of the preset with these parameters, otherwise `blt`."""
        return next((name for name, preset in PRESETS.items() if preset == self), self.family)

    @property
    def buffers(self) -> int:
        """The number of buffers, d."""
        return len(self.theta)

    @cached_property
    def _distinct(self) -> Exponentials:
        """Rates and scales of C, in order of increasing rate.

        Buffers with equal decays are merged and buffers with scale 0 are left out. Buffers with
        equal decays have the same content, so that this changes no coefficient. (Decays below
        1e-16 count as zero, which changes no coefficient by more than 1e-16.)
        """
        merged: dict[float, list[float]] = {}
        for decay, scale in zip(self.theta, self.omega, strict=True):
            if scale > 0:
                merged.setdefault(1 - decay, []).append(scale)
        rates = sorted(merged)
        scales = [math.fsum(merged[rate]) for rate in rates]
        return Exponentials(np.array(rates), np.array(scales))

    @cached_property
    def _inverse_decays(self) -> _InverseDecays:
        return inverse_decays(*self._distinct)

    @cached_property
    def _inverse(self) -> Exponentials:
        """c_hat_i = -sum_j weights[j] (1 - rates[j])^(i-1), for i > 0."""
        inverse = self._inverse_decays
        size = len(inverse.rates)
        diagonal = np.diag_indices(size)
        ratios = inverse.from_poles / np.where(np.eye(size) == 1, 1.0, inverse.between)
        ratios[diagonal] = inverse.from_poles[diagonal]
        return Exponentials(inverse.rates, ratios.prod(axis=0))

    @cached_property
    def _prefix(self) -> Exponentials:
        """b_i = sum_j weights[j] (1 - rates[j])^i: a constant term, then the decays of C^-1."""
        rates, weights = self._inverse
        constant = float(np.prod(self._distinct.rates / rates))
        rates_from_zero = np.append(np.zeros(1), rates)
        return Exponentials(rates_from_zero, np.append(constant, weights / rates))

    def inverse_parameters(self) -> tuple[Vector, Vector]:
        """theta_hat and omega_hat of the inverse BLT, C^-1 = BLT(theta_hat, omega_hat)."""
        return 1 - self._inverse.rates, -self._inverse.weights

    def coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C: 1, then a sum of exponentials."""
        exponents = np.arange(float(rounds - 1))
        return _after_one(np.power.outer(self.theta, exponents).T, self.omega)

    def inverse_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C^-1: 1, then minus a sum of exponentials."""
        rates, weights = self._inverse
        return _after_one(powers(rates, np.arange(rounds - 1)), -weights)

    def prefix_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of B = A C^-1: a sum of positive exponentials."""
        rates, weights = self._prefix
        return powers(rates, np.arange(rounds)) @ weights

    def max_error(self, rounds: int) -> float:
        """Error of the last prefix sum, which is the largest: sum_i b_i^2 in closed form."""
        rates, weights = self._prefix
        sums = geometric_sum(rates, self.check_rounds(rounds))
        return float(weights @ sums @ weights) ** 0.5

    def rms_error(self, rounds: int) -> float:
        """Root mean square error over n rounds: sum_i (n - i) b_i^2 / n in closed form."""
        rates, weights = self._prefix
        sums = weighted_geometric_sum(rates, self.check_rounds(rounds))
        return (float(weights @ sums @ weights) / rounds) ** 0.5

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Norm of the sum of the columns 0, b, 2b, ... of C, in closed form.

        Guarantees:
            The coefficients are non-negative and non-increasing from c_1 on. If also c_1 <= c_0,
            that is sum(omega) <= 1, the pattern 0, b, 2b, ... is the worst (see
            `toeplitz_sensitivity`) and the result is exact. Otherwise raising c_0 to c_1 gives the
            smallest non-increasing majorant, and with it an upper bound.
        """
        attained = self._shifted_norm(participation, 1.0)
        first = math.fsum(self.omega)
        if first <= 1:
            return Sensitivity.exact(attained)
        return Sensitivity.between(attained, self._shifted_norm(participation, first))

    def sensitivity_by_round(self, min_sep: int, max_participations: int) -> Iterator[float]:
        """Yield the sensitivity of a run of 1, 2, 3, ... rounds, in constant time per round.

        Guarantees:
            If sum(omega) <= 1, the pattern 0, b, 2b, ... is the worst in whichever round the run
            ends (see `sensitivity`). Every value includes a bound on the rounding of its sum.
        """
        if not math.fsum(self.omega) <= 1:
            yield from super().sensitivity_by_round(min_sep, max_participations)
            return
        # `row` is row t of the sum of the columns 0, b, 2b, ... Buffer j holds the sum of
        # theta_j^(t - 1 - s) over the participations s before round t. The code uses plain floats,
        # because one numpy call costs more than all operations of a round.
        buffers = [0.0] * len(self.theta)
        total, lost = 0.0, 0.0
        for t in count():
            participates = t % min_sep == 0 and t // min_sep < max_participations
            row = update = 1.0 if participates else 0.0
            for j, scale in enumerate(self.omega):
                row += scale * buffers[j]
                buffers[j] = self.theta[j] * buffers[j] + update
            # Kahan summation, so that millions of small squares are not lost against the total.
            term = row * row - lost
            following = total + term
            lost = (following - total) - term
            total = following
            yield math.sqrt(total) * (1 + 4 * FLOAT64_EPSILON * min(t + 4, 1e12))

    def _shifted_norm(self, participation: Participation, c_0: float) -> float:
        """Norm of the sum of the shifts of (c_0, c_1, ...) by 0, b, ..., (k-1)b within n rounds.

        Rounds s*b ... (s+1)*b - 1 form segment s. Let g_j(s) = sum_{u <= s} theta_j^(u b). The sum
        of the shifts is c_0 + sum_j omega_j theta_j^(b-1) g_j(s-1) in the first round of segment s,
        and sum_j omega_j theta_j^(r-1) g_j(s) in its round r > 0. So segment s contributes a
        quadratic form in y_s = (1, g(s-1)), and y_{s+1} = F y_s. The sum over segments is computed
        by doubling and adds only positive numbers.
        """
        rounds, gap = participation.rounds, min(participation.min_sep, participation.rounds)
        repeats = participation.max_participations - 1
        rates, scales = self._distinct
        size = len(rates) + 1
        before_last, over_gap = powers(rates, np.array([gap - 1, gap]))
        advance = np.eye(size)  # F: g_j(s) = 1 + theta_j^b g_j(s-1)
        advance[1:, 0] = 1.0
        advance[1:, 1:] *= over_gap
        first = np.append(c_0, scales * before_last)

        def segment(length: int) -> Matrix:
            rest = np.outer(scales, scales) * geometric_sum(rates, length - 1)
            return np.outer(first, first) + advance[1:].T @ rest @ advance[1:]

        whole = segment(gap)
        total, ahead = np.zeros((size, size)), np.eye(size)
        for bit in f"{repeats:b}":
            total, ahead = total + ahead.T @ total @ ahead, ahead @ ahead
            if bit == "1":
                total, ahead = whole + advance.T @ total @ advance, ahead @ advance
        last = whole if rounds == (repeats + 1) * gap else segment(rounds - repeats * gap)
        end = ahead[:, 0]  # y_0 = (1, 0, ..., 0)
        return float(total[0, 0] + end @ last @ end) ** 0.5

    def rounding_gain(self, rounds: int) -> float:
        """Bound in closed form, with every rounding at its largest and with the worst sign.

        Refilling buffer j rounds once, by at most 2^-53 of its content. The content is
        sum_i h_i Z_(t-i), where h has the generating function of C^-1 divided by 1 - theta_j x. The
        factor of theta_j cancels, and h is a sum of exponentials with the decays of C^-1. An error
        in buffer j decays by theta_j per round and enters the noise times omega_j.
        """
        if rounds == 1 or not len(self._distinct.rates):
            return 0.0
        responses = self._responses
        errors = math.fsum(
            scale * _sum_of_powers(rate, rounds - 1) * content
            for rate, scale, content in zip(
                responses.rates, responses.scales, self._contents(rounds), strict=True
            )
        )
        return math.sqrt(rounds) * errors * ROUNDING_MARGIN

    def buffered_noise(self, rounds: int) -> float:
        """Output scales times the largest contents, summed; see `rounding_gain`."""
        if self.check_rounds(rounds) == 1 or not len(self._distinct.rates):
            return 0.0
        contents = self._contents(rounds)
        return math.fsum(map(operator.mul, self._responses.scales, contents)) * ROUNDING_MARGIN

    def _contents(self, rounds: int) -> list[float]:
        """Bounds on the absolute value of each buffer, if all entries of Z are from -1 to 1.

        The code uses plain floats: accounting calls it for every round, and one numpy call would
        cost more than the whole method.
        """
        powers = [_sum_of_powers(rate, rounds) for rate in self._responses.inverse_rates]
        return [math.fsum(map(operator.mul, row, powers)) for row in self._responses.sizes]

    @cached_property
    def _responses(self) -> "_Responses":
        rates, scales = self._distinct
        inverse = self._inverse_decays
        sizes = _buffer_responses(inverse).tolist()
        return _Responses(rates.tolist(), inverse.rates.tolist(), scales.tolist(), sizes)

    def memory(self, rounds: int) -> int:
        """One vector per buffer."""
        return self.buffers if self.check_rounds(rounds) > 1 else 0

    @property
    def decaying_buffers(self) -> DecayingBuffers:
        """Decays theta and output scales omega."""
        return DecayingBuffers(self.theta, self.omega)

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """Algorithm 3 of the paper: subtract the scaled buffers from Z, then decay and refill."""
        buffers = state.buffers
        if state.round == 0:
            buffers = np.zeros((self.buffers, buffers.shape[1]))
        noise = rows(state.next_row) - np.array(self.omega) @ buffers
        buffers = np.array(self.theta)[:, None] * buffers + noise
        return noise, StreamState(state.round + 1, state.next_row + 1, buffers)

    def parameters(self) -> dict[str, Any]:
        """Decays theta and output scales omega."""
        return {"theta": list(self.theta), "omega": list(self.omega)}


class _Responses(NamedTuple):
    """Numbers that `BLT.rounding_gain` needs, as plain floats.

    Attributes:
        rates: Rates of C, one minus each decay.
        inverse_rates: Rates of C^-1.
        scales: Output scales of C.
        sizes: The result of `_buffer_responses`, one list per buffer.
    """

    rates: list[float]
    inverse_rates: list[float]
    scales: list[float]
    sizes: list[list[float]]


def _buffer_responses(inverse: _InverseDecays) -> Matrix:
    """Weight of the exponential with decay k of C^-1 (column) in the content of buffer j (row).

    By partial fractions, its absolute value is that of prod_{m != j} (theta_hat_k - theta_m)
    divided by prod_{m != k} (theta_hat_k - theta_hat_m).
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


def inverse_decays(rates: Vector, omega: Vector) -> _InverseDecays:
    """Eigenvalues of diag(1 - theta) + sqrt(omega) sqrt(omega)^T, to full relative accuracy.

    They are the roots of the secular equation 1 = sum_i omega_i / (x - rate_i). There is one root
    in each gap between neighboring rates and one above the last. Each root is computed as its
    distance from the nearer rate, which keeps all differences accurate even if decays almost
    coincide.

    Args:
        rates: Strictly increasing rates of the BLT.
        omega: Positive output scales.
    """
    if len(rates) == 0:
        return _InverseDecays(np.zeros(0), np.zeros((0, 0)), np.zeros((0, 0)))
    index, offset = _secular_roots(rates, omega)
    nearest = rates[index]
    from_poles = (nearest[None, :] - rates[:, None]) + offset[None, :]
    between = (nearest[None, :] - nearest[:, None]) + (offset[None, :] - offset[:, None])
    return _InverseDecays(nearest + offset, from_poles, between)


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
    # The code uses plain floats: a numpy call would cost more than a whole step of one root.
    columns = apart[:, centre].T.tolist()
    scales, directions = omega.tolist(), sign.tolist()
    distances = [
        _secular_root(
            scales[nearest],
            [(gap, scales[i]) for i, gap in enumerate(column) if i != nearest],
            direction,
            most,
        )
        for nearest, column, direction, most in zip(
            centre.tolist(), columns, directions, half.tolist(), strict=True
        )
    ]
    return centre, sign * np.array(distances)


def _secular_root(
    scale: float, others: Sequence[tuple[float, float]], sign: float, most: float
) -> float:
    """Distance of one root of the secular equation from the nearest rate.

    It is the root x of x (1 + sum_i scale_i / (gap_i - sign x)) - sign scale.

    Args:
        scale: Output scale that belongs to the nearest rate.
        others: For all other rates, the gap to the nearest rate (negative if below), and the scale.
        sign: 1.0 if the root is above the nearest rate, otherwise -1.0.
        most: Upper bound on the distance.
    """
    low, high, guess = 5e-324, most, most
    # Newton's method. A step that leaves the bracket is replaced by bisection on a logarithmic
    # scale, of which 70 steps take the range of float64 exponents (about 2^11) below the relative
    # spacing of float64 numbers (2^-52). Half a gap away from all other rates, the function is
    # close to linear, so that Newton's method alone needs about eight steps.
    for _ in range(70 + NEWTON_STEPS):
        total = derivative = 0.0
        for gap, other_scale in others:
            from_root = gap - sign * guess
            ratio = other_scale / from_root
            total += ratio
            derivative += ratio / from_root
        value = guess * (1 + total) - sign * scale
        low, high = (low, guess) if sign * value >= 0 else (guess, high)
        slope = 1 + total + sign * guess * derivative
        following = guess - value / slope if slope else math.nan
        if abs(following - guess) <= 4 * FLOAT64_EPSILON * guess:
            return following
        guess = following if low < following < high else math.sqrt(low) * math.sqrt(high)
    return guess


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


# The BLTs of the paper's production runs (Appendix A), optimized for (n, b, k) = (2000, 100, 10),
# (4000, 400, 5) and (4000, 1000, 2). The BLT for b = 400 is the paper's default.
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
