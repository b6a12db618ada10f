"""The logarithms of the error and of the sensitivity of Toeplitz mechanisms, with derivatives.

A is the workload, C the strategy, and B = A C^-1. A series holds the coefficients of a lower
triangular Toeplitz matrix, so that products and inverses of matrices are those of power series.
Names that start with `by_` hold derivatives by the named quantity; `pull_back` functions turn
derivatives by a result into derivatives by its argument.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any, cast, final

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl.mechanisms import ErrorReport, Mechanism, ToeplitzMechanism
from dpftrl.mechanisms._sensitivity import all_columns_apart, column_sum, non_increasing_majorant
from dpftrl.optimize._solvers import Objective
from dpftrl.participation import Participation
from dpftrl.workload import Workload


@final
@dataclass(frozen=True, eq=False)
class ScheduleRows:
    """The rows of B under a learning-rate schedule, where B is not Toeplitz.

    Attributes:
        d: The coefficients of C^-1 with the momentum applied.
        rates: The learning rate of each round.
        kept: The share of the model that weight decay keeps in each round.
    """

    d: Vector
    rates: Vector
    kept: Vector

    def variances(self) -> Vector:
        """The squared norm of every row."""
        return np.array([row @ row for row in self._rows(np.zeros(len(self.d)), 0, len(self.d))])

    def pull_back(self, weights: Vector) -> Vector:
        """Derivatives by d of the weighted sum of the squared row norms.

        Rows are recomputed from every sqrt(rounds)-th row, so that memory is O(rounds^1.5).
        """
        rounds = len(self.d)
        starts = range(0, rounds, isqrt(rounds) + 1)
        rows_before = self._rows_before(starts)
        by_d, later = np.zeros(rounds), np.zeros(rounds)
        for start, row_before in zip(reversed(starts), reversed(rows_before), strict=True):
            stop = min(start + starts.step, rounds)
            rows = [row.copy() for row in self._rows(row_before, start, stop)]
            for t in reversed(range(start, stop)):
                if t + 1 < rounds:
                    later *= self.kept[t + 1]
                later[: t + 1] += weights[t] * rows[t - start]
                by_d[: t + 1] += 2 * self.rates[t] * later[t::-1]
        return by_d

    def _rows(self, row: Vector, start: int, stop: int) -> Iterator[Vector]:
        """Yield the rows from `start` up to `stop`, computed from the `row` before them.

        Each row is a view that the next row overwrites.
        """
        row, backwards = row.copy(), self.d[::-1].copy()
        for t in range(start, stop):
            if self.kept[t] != 1:
                row[:t] *= self.kept[t]
            row[: t + 1] += self.rates[t] * backwards[len(row) - 1 - t :]
            yield row[: t + 1]

    def _rows_before(self, starts: range) -> list[Vector]:
        """Return the row before each round in `starts`; the row before round 0 is zero."""
        row = np.zeros(len(self.d))
        rows_before = [row.copy()]
        for t, entries in enumerate(self._rows(row, 0, starts[-1])):
            if t + 1 in starts:
                row[: t + 1] = entries
                rows_before.append(row.copy())
        return rows_before


# Up to this many coefficients, sums of products are faster than Fourier transforms.
SHORT = 64
LARGE_BAND = 4_000_000  # entries of the band of a system that is solved by a filter


def reciprocal(c: Vector, terms: int) -> Vector:
    """The first `terms` coefficients of the series 1 / c."""
    unit = np.zeros(terms)
    unit[0] = 1.0
    return divide(unit, c)


def reciprocal_pull_back(by_inverse: Vector, c: Vector, inverse: Vector) -> Vector:
    """Derivatives by c, from derivatives by the series 1 / c, since d(1/c) = -(1/c)^2 dc."""
    if len(c) > SHORT:
        return -correlate(by_inverse, multiply(inverse, inverse))[: len(c)]
    # Dividing by a short c costs less than multiplying by its long inverse.
    divided = divide(by_inverse[::-1], c)[::-1]
    rounds = len(inverse)
    return np.array([-divided[lag:] @ inverse[: rounds - lag] for lag in range(len(c))])


def divide(values: Vector, c: Vector) -> Vector:
    """The series `values` divided by the series c: y[t] = (values[t] - sum_i c[i] y[t-i]) / c[0].

    This is a triangular system with the band c, for BLAS. Importing `scipy.signal`, which has such
    filters, takes more than a second; it is worth it if the band is large.
    """
    c = c[: len(values)]
    if len(c) * len(values) > LARGE_BAND:
        from scipy import signal

        return cast(Vector, cast(Any, signal).lfilter([1.0], c, values))
    from scipy.linalg import blas

    band = np.empty((len(c), len(values)), order="F")
    band[:] = c[:, None]
    return cast(Vector, cast(Any, blas).dtbsv(len(c) - 1, band, values, lower=1))


def multiply(left: Vector, right: Vector) -> Vector:
    """The product of two series of equal length, cut to that length."""
    size = 1 << (2 * len(left)).bit_length()
    return np.fft.irfft(np.fft.rfft(left, size) * np.fft.rfft(right, size), size)[: len(left)]


def correlate(values: Vector, series: Vector) -> Vector:
    """The transpose of multiplication by a series: entry j is sum_i values[i] series[i - j]."""
    return multiply(values[::-1], series)[::-1]


def geometric(values: Vector, decay: float) -> Vector:
    """The series `values` divided by 1 - decay * x: y[t] = decay * y[t - 1] + values[t]."""
    if decay == 0:
        return values
    if decay == 1:
        return np.cumsum(values)
    return divide(values, np.array([1.0, -decay]))


def geometric_transposed(values: Vector, decay: float) -> Vector:
    """The transpose of `geometric`: y[t] = decay * y[t + 1] + values[t]."""
    return geometric(values[::-1], decay)[::-1]


@final
@dataclass(frozen=True)
class ToeplitzError:
    """The log error of B = A C^-1 as a function of all coefficients of C^-1.

    Attributes:
        workload: The workload A.
        rounds: Number of rows of B.
        objective: `max` for the largest row norm, `rms` for the root mean square of the row norms.
        sharpness: Used for `max` under a learning-rate schedule, where the largest row norm is not
            smooth: a p-norm of the squared row norms with this p replaces it. Without a schedule
            the last row has the largest norm.
    """

    workload: Workload
    rounds: int
    objective: Objective
    sharpness: float = 1000.0

    def __call__(self, c_hat: Vector) -> tuple[float, Vector]:
        """The log error, and its derivatives by the coefficients of C^-1."""
        d = geometric(c_hat, self.workload.momentum)
        value, by_d = self._toeplitz(d) if self.workload.is_toeplitz else self._scheduled(d)
        return value, geometric_transposed(by_d, self.workload.momentum)

    def _toeplitz(self, d: Vector) -> tuple[float, Vector]:
        """The log error where B is Toeplitz: row t of B holds the first t + 1 coefficients of B."""
        kept = 1 - self.workload.weight_decay
        b = geometric(d, kept)
        rows = np.arange(self.rounds, 0, -1) / self.rounds if self.objective == "rms" else 1.0
        weighted = rows * b
        square = float(weighted @ b)
        return float(np.log(square)) / 2, geometric_transposed(weighted / square, kept)

    def _scheduled(self, d: Vector) -> tuple[float, Vector]:
        """The log error under a learning-rate schedule, where B is not Toeplitz."""
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
    """The log norm of the sum of the columns 0, b, 2b, ... of C, and its derivatives by c.

    Here b is min-sep. The result is the log sensitivity of C in two cases: all n coefficients are
    non-negative and do not increase, or they are non-negative and zero from index b on.
    """
    total = column_sum(c, participation)
    square = float(total @ total)
    return float(np.log(square)) / 2, column_sum(total[::-1], participation)[::-1] / square


def log_majorant_sensitivity(c: Vector, participation: Participation) -> tuple[float, Vector]:
    """The log sensitivity that Toeplitz mechanisms report for any c, and its derivatives by c.

    Where the sensitivity is not known exactly, mechanisms report that of the smallest
    non-increasing majorant of |c|, which is an upper bound. The bound has kinks. At a kink the
    derivatives are one-sided.
    """
    if all_columns_apart(c, participation):
        return log_sensitivity(c, participation)
    majorant = non_increasing_majorant(c)
    value, by_majorant = log_sensitivity(majorant, participation)
    # Entry i of the majorant equals |c| at the first index from i on where the two are equal.
    equal_at = np.where(np.abs(c) == majorant, np.arange(len(c)), len(c))
    source = np.minimum.accumulate(equal_at[::-1])[::-1]
    by_magnitude: Vector = np.zeros(len(c))
    np.add.at(by_magnitude, source, by_majorant)
    return value, by_magnitude * np.sign(c)


def workload_loss(
    mechanism: Mechanism, participation: Participation, workload: Workload
) -> ErrorReport:
    """Error and sensitivity of a mechanism under a workload.

    The error consists of the row norms of A D, where D = C^-1 is the decoder. For the prefix sum,
    the result is that of `mechanism.error_report`. Toeplitz mechanisms need no dense matrix. Others
    use their dense decoder, which limits the number of rounds.

    >>> from dpftrl.mechanisms import SquareRoot
    >>> from dpftrl.participation import MinSep
    >>> momentum = workload_loss(SquareRoot(), MinSep(64, 8), Workload(momentum=0.9))
    >>> prefix_sum = SquareRoot().error_report(MinSep(64, 8))
    >>> print(f"{momentum.rms_loss:.1f} instead of {prefix_sum.rms_loss:.1f}")
    62.4 instead of 10.2
    """
    if workload.is_prefix_sum:
        return mechanism.error_report(participation)
    curve = _error_curve(mechanism, mechanism.check_rounds(participation.rounds), workload)
    return ErrorReport(
        max_error=float(curve.max()),
        rms_error=float(np.sqrt(np.mean(curve**2))),
        sensitivity=mechanism.sensitivity(participation),
    )


def _error_curve(mechanism: Mechanism, rounds: int, workload: Workload) -> Vector:
    """The row norms of A D: the error after each round."""
    if isinstance(mechanism, ToeplitzMechanism):
        mechanism.check_curve(rounds)
        return error_curve(mechanism.inverse_coefficients(rounds), workload)
    return np.linalg.norm(workload.apply(mechanism.decoder(rounds)), axis=1)
