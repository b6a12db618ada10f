"""Row norms of B = A D for a learning-rate schedule and D = LtToep(d), and their derivatives.

Round t makes row t of B out of the one before it: B[t] = kept[t] * B[t - 1] + rate[t] * (d[t], ...,
d[0]). That takes n^2 operations and one row of memory; derivatives run over the rows backwards, for
which every sqrt(n)-th row is kept and those between are made again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import final

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


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
