"""What optimising BandMF keeps in the cache."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.cache import cache_folder, content_key, load_tensors, store_tensors
from dpftrl.optimize.bandmf_objective import rows_reached
from dpftrl.workload import Workload

Matrix = NDArray[np.float64]

# Goes into the names of cached files: a change to what is optimised, or how well, needs a new one.
FORMAT = 1


class Found(NamedTuple):
    """How far a search got: columns of norm 1 (n x P), and whether it had come to its end."""

    columns: Matrix
    rms_error: float
    gradient_norm: float
    finished: bool


@final
@dataclass(frozen=True)
class Store:
    """The place of one request in the cache."""

    folder: Path
    key: str
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, cache: str | os.PathLike[str] | None, rounds: int, bands: int, workload: Workload
    ) -> Self:
        """The number of participations is left out: it does not matter to the search."""
        shares = (workload.momentum, workload.weight_decay)
        key = content_key("bandmf", FORMAT, rounds, bands, *shares, workload.rates(rounds))
        return cls(cache_folder(cache), key, (rounds, bands))

    def load(self) -> Found | None:
        """What is there, unless it is damaged."""
        held = load_tensors(self.folder, self.key)
        if held is None or not {"columns", "state"} <= held.keys():
            return None
        columns, state = held["columns"], held["state"]
        if columns.dtype != np.float64 or columns.shape != self.shape or state.shape != (3,):
            return None
        below = rows_reached(*self.shape) >= self.shape[0]
        norms = np.linalg.norm(np.where(below, 0.0, columns), axis=1)
        sound = np.all(np.abs(norms - 1) < 1e-12) and np.all(columns[:, 0] > 0)
        if not sound or np.any(columns[below]):
            return None
        error, gradient_norm, finished = state.tolist()
        return Found(columns, error, gradient_norm, finished == 1)

    def save(self, found: Found) -> None:
        """Put it there, in place of what was; where that is impossible, do without."""
        state = np.array([found.rms_error, found.gradient_norm, float(found.finished)])
        store_tensors(self.folder, self.key, {"columns": found.columns, "state": state})
