"""The logarithms of error and sensitivity of Toeplitz mechanisms, with their derivatives."""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.optimize.result import Objective
from dpftrl.optimize.schedule_rows import ScheduleRows
from dpftrl.optimize.series import geometric, geometric_transposed
from dpftrl.participation import Participation
from dpftrl.sensitivity.toeplitz import all_columns_apart, column_sum, non_increasing_majorant
from dpftrl.workload import Workload

Vector = NDArray[np.float64]


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
