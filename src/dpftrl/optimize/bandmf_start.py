"""Where optimising a banded strategy starts: from the solution of a smaller problem.

Divided by the square root's coefficients, the best columns change slowly with the round and with
the band, and look alike at every number of rounds. A quarter of the rounds with a quarter of the
bands costs little and, stretched, is within a few 1e-4 of the best loss.
"""

import numpy as np
from numpy.typing import NDArray

from dpftrl.mechanisms.square_root import square_root_series
from dpftrl.optimize.band_toeplitz import optimize_band_toeplitz
from dpftrl.participation import MinSep
from dpftrl.workload import Workload

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]

RATIO = 4
# Below these a smaller problem saves nothing, or its bands are too few to stretch.
FEWEST_ROUNDS, FEWEST_BANDS = 256, 16


def simple_starts(rounds: int, bands: int, workload: Workload) -> list[Matrix]:
    """The square root and the best Toeplitz strategy, the same column in every round."""
    alike = MinSep(rounds, min_sep=bands)
    toeplitz = optimize_band_toeplitz(alike, bands, "rms", workload).mechanism
    return [np.tile(c, (rounds, 1)) for c in (square_root_series(bands), np.array(toeplitz.c))]


def smaller_problem(
    rounds: int, bands: int, workload: Workload
) -> tuple[int, int, Workload] | None:
    """The problem with a quarter of the rounds, where one round stands for four; None if small."""
    if rounds < FEWEST_ROUNDS or bands < FEWEST_BANDS:
        return None
    fewer = -(-rounds // RATIO)
    rates: tuple[float, ...] = ()
    if workload.learning_rates:
        rates = tuple(_stretched(workload.rates(rounds), fewer).tolist())
        rates = rates if max(rates) > 0 else ()
    smaller = Workload(
        workload.momentum**RATIO, 1 - (1 - workload.weight_decay) ** RATIO, learning_rates=rates
    )
    return fewer, -(-bands // RATIO), smaller


def stretched_columns(columns: Matrix, rounds: int, bands: int) -> Matrix:
    """Columns for more rounds and bands, from those of a smaller problem."""
    fewer, narrower = len(columns), len(columns[0])
    ratios = columns / columns[:, :1] / square_root_series(narrower)
    # Beyond the last row C has no entries: what stands there must not pull its neighbours to zero.
    last = np.minimum(narrower, fewer - np.arange(fewer)) - 1
    ratios = np.take_along_axis(
        ratios, np.minimum(np.arange(narrower)[None, :], last[:, None]), axis=1
    )
    wider = _stretched(_stretched(ratios, rounds).T, bands).T
    return wider * square_root_series(bands)


def _stretched(values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Linear interpolation along the first axis to another number of evenly spread points."""
    place = np.clip((np.arange(size) + 0.5) * len(values) / size - 0.5, 0, len(values) - 1)
    low = np.minimum(place.astype(np.intp), max(len(values) - 2, 0))
    high = np.minimum(low + 1, len(values) - 1)
    share = (place - low).reshape(-1, *[1] * (values.ndim - 1))
    return (1 - share) * values[low] + share * values[high]
