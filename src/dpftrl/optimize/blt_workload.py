"""Loss of BLTs under a workload other than the prefix sum, by a covariance recursion."""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.optimize.blt_objective import BltObjective, output_scales
from dpftrl.optimize.result import Objective
from dpftrl.participation import Participation
from dpftrl.workload import Workload

Array = NDArray[np.float64]

DIFFERENCE = 1e-5


@final
@dataclass(frozen=True)
class BltWorkloadObjective:
    """log(error x sensitivity), where the error is that of the model under a workload.

    The error costs O(n d^2) and is differentiated numerically, many BLTs at once; the sensitivity
    does not depend on the workload and stays in closed form.
    """

    participation: Participation
    objective: Objective
    workload: Workload

    def __call__(self, slow: Array, fast: Array) -> tuple[Array, Array, Array]:
        """Values, and derivatives by the rates of C and of C^-1, one row a BLT."""
        count, size = slow.shape[0], 2 * slow.shape[1]
        chains = np.concatenate([slow, fast], axis=1)
        steps = np.concatenate([np.zeros((1, size)), np.eye(size), -np.eye(size)])
        moved = chains[:, None, :] * np.exp(DIFFERENCE * steps)
        errors = self._log_error(moved.reshape(-1, size)).reshape(count, -1)
        slopes = (errors[:, 1 : size + 1] - errors[:, size + 1 :]) / (2 * DIFFERENCE) / chains
        plain = BltObjective(self.participation, self.objective)
        moves, by_slow, by_fast = plain.log_sensitivity(slow, fast)
        half = size // 2
        return errors[:, 0] + moves, by_slow + slopes[:, :half], by_fast + slopes[:, half:]

    def _log_error(self, chains: Array) -> Array:
        half = chains.shape[1] // 2
        slow, fast = chains[:, :half], chains[:, half:]
        variances = model_variances(
            1 - slow, output_scales(slow, fast), self.workload, self.participation.rounds
        )
        overall = variances.max(axis=1) if self.objective == "max" else variances.mean(axis=1)
        return 0.5 * np.log(overall)


def model_variances(theta: Array, omega: Array, workload: Workload, rounds: int) -> Array:
    """Variance of the noise in the model after each round, one row a BLT.

    The state is the buffers of the noise (see `BLT`), the momentum and the model; its covariance
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
