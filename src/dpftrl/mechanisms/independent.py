"""Independent noise: DP-SGD and DP-FedAvg."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.mechanisms.base import Matrix, Mechanism, Rows, StreamState, Vector
from dpftrl.participation import Participation, Pattern


@final
@dataclass(frozen=True)
class Independent(Mechanism):
    """C = I: every round gets fresh noise, and the noise of all rounds adds up in prefix sums."""

    family = "independent"

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Square root of the number of participations: their columns are orthogonal, of norm 1."""
        return Sensitivity.exact(participation.max_participations**0.5)

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """Square root of the number of participations in the pattern."""
        self.check_rounds(rounds)
        return len(pattern) ** 0.5

    def error_curve(self, rounds: int) -> Vector:
        """Square root of the number of rounds in each prefix."""
        return np.sqrt(np.arange(1.0, self.check_curve(rounds) + 1))

    def max_error(self, rounds: int) -> float:
        """Error of the last prefix sum, which contains the noise of every round."""
        return self.check_rounds(rounds) ** 0.5

    def rms_error(self, rounds: int) -> float:
        """Square root of (n + 1) / 2, the mean of the variances 1, 2, ..., n."""
        return ((self.check_rounds(rounds) + 1) / 2) ** 0.5

    def memory(self, rounds: int) -> int:
        """Zero: rounds are independent, so that a stream keeps no vectors."""
        self.check_rounds(rounds)
        return 0

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        noise = rows(state.next_row)
        return noise, StreamState(state.round + 1, state.next_row + 1, state.buffers)

    def first_column(self, rounds: int) -> Vector:
        """A 1, and zeros."""
        column = np.zeros(self.check_curve(rounds))
        column[0] = 1.0
        return column

    def strategy(self, rounds: int) -> Matrix:
        """The identity."""
        return np.eye(self.check_dense(rounds))

    def decoder(self, rounds: int) -> Matrix:
        """The identity."""
        return np.eye(self.check_dense(rounds))

    def parameters(self) -> dict[str, Any]:
        """An empty dict: the family has no parameters."""
        return {}
