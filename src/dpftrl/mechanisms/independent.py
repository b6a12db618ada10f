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
    """C = I: every round gets fresh noise, and prefix sums add it all up."""

    family = "independent"

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Exact: k orthogonal columns of norm 1."""
        return Sensitivity.exact(participation.max_participations**0.5)

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """One for each participation, squared and added."""
        self.check_rounds(rounds)
        return len(pattern) ** 0.5

    def error_curve(self, rounds: int) -> Vector:
        """The square root of the number of rounds so far."""
        return np.sqrt(np.arange(1.0, self.check_curve(rounds) + 1))

    def max_error(self, rounds: int) -> float:
        """The last prefix sum has all the noise."""
        return self.check_rounds(rounds) ** 0.5

    def rms_error(self, rounds: int) -> float:
        """The variances 1, 2, ..., n average to (n + 1) / 2."""
        return ((self.check_rounds(rounds) + 1) / 2) ** 0.5

    def memory(self, rounds: int) -> int:
        """Nothing to remember."""
        self.check_rounds(rounds)
        return 0

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        noise = rows(state.next_row)
        return noise, StreamState(state.round + 1, state.next_row + 1, state.buffers)

    def strategy(self, rounds: int) -> Matrix:
        """The identity."""
        return np.eye(self.check_dense(rounds))

    def decoder(self, rounds: int) -> Matrix:
        """The identity."""
        return np.eye(self.check_dense(rounds))

    def parameters(self) -> dict[str, Any]:
        """It has none."""
        return {}
