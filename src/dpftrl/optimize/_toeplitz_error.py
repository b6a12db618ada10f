"""The logarithms of error and sensitivity of Toeplitz mechanisms, with their derivatives."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any, cast, final

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl.mechanisms import ErrorReport, Mechanism, ToeplitzMechanism
from dpftrl.mechanisms._sensitivity import all_columns_apart, column_sum, non_increasing_majorant
from dpftrl.optimize.result import Objective
from dpftrl.participation import Participation
from dpftrl.workload import Workload


@final
@dataclass(frozen=True, eq=False)
class ScheduleRows:
    """The rows of B. `rates` and `kept` are those of the workload."""

    d: Vector
    rates: Vector
    kept: Vector

    def variances(self) -> Vector:
        """The squared norm of every row."""
        return np.array([row @ row for row in self._rows(np.zeros(len(self.d)), 0, len(self.d))])

    def pull_back(self, weights: Vector) -> Vector:
        """Derivatives by d of the sum of the squared row norms, weighted."""
        rounds = len(self.d)
        starts = range(0, rounds, isqrt(rounds) + 1)
        known = self._kept_rows(starts)
        by_d, later = np.zeros(rounds), np.zeros(rounds)
        for start, first in zip(reversed(starts), reversed(known), strict=True):
            stop = min(start + starts.step, rounds)
            rows = [row.copy() for row in self._rows(first, start, stop)]
            for t in reversed(range(start, stop)):
                if t + 1 < rounds:
                    later *= self.kept[t + 1]
                later[: t + 1] += weights[t] * rows[t - start]
                by_d[: t + 1] += 2 * self.rates[t] * later[t::-1]
        return by_d

    def _rows(self, row: Vector, start: int, stop: int) -> Iterator[Vector]:
        """Rows from start to stop, each valid until the next, from the row before them."""
        row, backwards = row.copy(), self.d[::-1].copy()
        for t in range(start, stop):
            if self.kept[t] != 1:
                row[:t] *= self.kept[t]
            row[: t + 1] += self.rates[t] * backwards[len(row) - 1 - t :]
            yield row[: t + 1]

    def _kept_rows(self, starts: range) -> list[Vector]:
        """The row before each start."""
        row = np.zeros(len(self.d))
        known = [row.copy()]
        for t, made in enumerate(self._rows(row, 0, starts[-1])):
            if t + 1 in starts:
                row[: t + 1] = made
                known.append(row.copy())
        return known


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


@final
@dataclass(frozen=True)
class ToeplitzError:
    """The error of B = A C^-1 as a function of all coefficients of C^-1.

    Attributes:
        workload: A.
        rounds: Rows of B.
        objective: The largest row norm, or their root mean square.
        sharpness: The largest of the row norms has kinks under a learning-rate schedule; a p-norm
            of the squares with this p stands in for it. Otherwise the last row is the largest.
    """

    workload: Workload
    rounds: int
    objective: Objective
    sharpness: float = 1000.0

    def __call__(self, c_hat: Vector) -> tuple[float, Vector]:
        """The log error and its derivatives."""
        d = geometric(c_hat, self.workload.momentum)
        value, by_d = self._alike(d) if self.workload.is_toeplitz else self._scheduled(d)
        return value, geometric_transposed(by_d, self.workload.momentum)

    def _alike(self, d: Vector) -> tuple[float, Vector]:
        """Every round treated alike: B is Toeplitz, and row t has its first t + 1 coefficients."""
        kept = 1 - self.workload.weight_decay
        b = geometric(d, kept)
        rows = np.arange(self.rounds, 0, -1) / self.rounds if self.objective == "rms" else 1.0
        weighted = rows * b
        square = float(weighted @ b)
        return float(np.log(square)) / 2, geometric_transposed(weighted / square, kept)

    def _scheduled(self, d: Vector) -> tuple[float, Vector]:
        rates, kept = self.workload.rates(self.rounds), self.workload.kept(self.rounds)
        rows = ScheduleRows(d, rates, kept)
        variances = rows.variances()
        if self.objective == "rms":
            total = float(variances.sum())
            weights = np.full(self.rounds, 0.5 / total)
            return float(np.log(total / self.rounds)) / 2, rows.pull_back(weights)
        top = variances.max()
        shares = (variances / top) ** (self.sharpness - 1)
        total = float(shares @ (variances / top))
        value = float(np.log(top) + np.log(total) / self.sharpness) / 2
        return value, rows.pull_back(shares / (2 * total * top))


def error_curve(c_hat: Vector, workload: Workload) -> Vector:
    """Row norms of B = A C^-1, from all coefficients of C^-1."""
    rounds = len(c_hat)
    d = geometric(c_hat, workload.momentum)
    if workload.is_toeplitz:
        return np.sqrt(np.cumsum(geometric(d, 1 - workload.weight_decay) ** 2))
    return np.sqrt(ScheduleRows(d, workload.rates(rounds), workload.kept(rounds)).variances())


def log_sensitivity(c: Vector, participation: Participation) -> tuple[float, Vector]:
    """The log norm of the columns 0, b, 2b, ... added up, and its derivatives.

    That is the sensitivity of C where all n coefficients are non-negative and none is larger than
    the one before it, or where they are zero from min_sep on.
    """
    total = column_sum(c, participation)
    square = float(total @ total)
    return float(np.log(square)) / 2, column_sum(total[::-1], participation)[::-1] / square


def log_majorant_sensitivity(c: Vector, participation: Participation) -> tuple[float, Vector]:
    """The log sensitivity that is reported for any c: that of the smallest falling majorant.

    It has kinks, where the derivatives are those of one side.
    """
    if all_columns_apart(c, participation):
        return log_sensitivity(c, participation)
    majorant = non_increasing_majorant(c)
    value, by_majorant = log_sensitivity(majorant, participation)
    # Every entry of the majorant is that of |c| at the first place from there on which reaches it.
    places = np.where(np.abs(c) == majorant, np.arange(len(c)), len(c))
    reached = np.minimum.accumulate(places[::-1])[::-1]
    by_size: Vector = np.zeros(len(c))
    np.add.at(by_size, reached, by_majorant)
    return value, by_size * np.sign(c)


def workload_loss(
    mechanism: Mechanism, participation: Participation, workload: Workload
) -> ErrorReport:
    """Errors of A D and the sensitivity of C: for the prefix sum, `mechanism.error_report`.

    Toeplitz mechanisms need no dense matrix; others are kept to as many rounds as their dense
    decoder is.

    >>> from dpftrl.mechanisms import SquareRoot
    >>> from dpftrl.participation import MinSep
    >>> loss = workload_loss(SquareRoot(), MinSep(64, 8), Workload(momentum=0.9))
    >>> plain = SquareRoot().error_report(MinSep(64, 8))
    >>> print(f"{loss.rms_loss:.1f} instead of {plain.rms_loss:.1f}")
    62.4 instead of 10.2
    """
    if workload.is_prefix_sum:
        return mechanism.error_report(participation)
    curve = _curve(mechanism, mechanism.check_rounds(participation.rounds), workload)
    return ErrorReport(
        max_error=float(curve.max()),
        rms_error=float(np.sqrt(np.mean(curve**2))),
        sensitivity=mechanism.sensitivity(participation),
    )


def _curve(mechanism: Mechanism, rounds: int, workload: Workload) -> Vector:
    if isinstance(mechanism, ToeplitzMechanism):
        mechanism.check_curve(rounds)
        return error_curve(mechanism.inverse_coefficients(rounds), workload)
    return np.linalg.norm(workload.apply(mechanism.decoder(rounds)), axis=1)
