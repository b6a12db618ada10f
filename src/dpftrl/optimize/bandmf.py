"""BandMF: the best banded strategy whose columns all have norm 1.

With no more bands than min_sep the columns of one client are orthogonal: the sensitivity is sqrt(k)
whatever C is, and the loss is as small as the error. How often a client takes part is then of no
consequence to the optimisation.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.cache import cache_folder, content_key, load_tensors, store_tensors
from dpftrl.errors import TooLarge
from dpftrl.mechanisms import Banded
from dpftrl.mechanisms.base import DENSE_LIMIT
from dpftrl.mechanisms.square_root import square_root_series
from dpftrl.optimize._solvers import Watch, minimize_lbfgs
from dpftrl.optimize._toeplitz_error import workload_loss
from dpftrl.optimize.band_toeplitz import optimize_band_toeplitz
from dpftrl.optimize.bandmf_objective import BandedError, rows_reached
from dpftrl.optimize.result import Optimized, Progress, check_bands, check_workload
from dpftrl.participation import MinSep, Participation
from dpftrl.workload import PREFIX_SUM, Workload

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


# What ten steps must gain, at the size asked for and at the smaller ones, which are cheap.
WITHIN, WITHIN_SMALLER = 1e-5, 1e-6
SECONDS_BETWEEN_CHECKPOINTS = 10.0
# Numbers in the past steps that L-BFGS remembers.
MOST_REMEMBERED = 20_000_000


def optimize_bandmf(
    participation: Participation,
    bands: int,
    workload: Workload = PREFIX_SUM,
    progress: Progress | None = None,
    cache: str | os.PathLike[str] | None = None,
    seconds: float | None = None,
) -> Optimized[Banded]:
    """The strategy with `bands` bands and columns of norm 1 that has the smallest RmsError.

    What it reaches is kept in the cache: the same request is answered from there, and one that was
    interrupted goes on where it stopped.

    Args:
        participation: What to optimise for; bands beyond its min_sep raise the sensitivity, which
            the loss counts but the search does not.
        bands: Number of bands.
        workload: What the server does with the updates.
        progress: Called after each step.
        cache: Folder for results; otherwise DPFTRL_CACHE, or `dpftrl` in the user's cache folder.
        seconds: Stop after so long, at a result that a later call improves on.

    >>> import tempfile
    >>> from dpftrl.participation import MinSep
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = optimize_bandmf(MinSep(rounds=64, min_sep=16), bands=16, cache=folder)
    >>> print(f"{found.error_report.rms_loss:.2f} {found.error_report.sensitivity.kind}")
    4.59 exact
    """
    started = time.perf_counter()
    rounds = participation.rounds
    bands = check_bands(bands, rounds)
    check_workload(workload, rounds)
    if rounds > DENSE_LIMIT:
        raise TooLarge(
            f"optimising general bands is kept to {DENSE_LIMIT} rounds, got {rounds}; "
            "band-toeplitz or blt are nearly as good and run at any size"
        )
    search = _Search(progress, None if seconds is None else started + seconds, started)
    store = Store.of(cache, rounds, bands, workload)
    found = store.load()
    if found is None or not found.finished:
        found = search.run(rounds, bands, workload, store, found)
        store.save(found)
    mechanism = Banded(found.columns.T)
    return Optimized(
        mechanism,
        participation,
        "rms",
        workload_loss(mechanism, participation, workload),
        found.gradient_norm,
        time.perf_counter() - started,
    )


@final
@dataclass
class _Latest:
    """The last step of a search, for checkpoints."""

    point: Vector
    value: float = math.nan

    def found(self, error: BandedError) -> Found:
        """As a result that is not finished."""
        columns = error.columns(self.point.reshape(error.scale.shape) * error.scale)
        return Found(_diagonal_positive(columns), math.exp(self.value), math.nan, finished=False)


@final
@dataclass(frozen=True)
class _Search:
    """One call: whom to tell, and until when."""

    progress: Progress | None
    deadline: float | None
    started: float

    def run(
        self,
        rounds: int,
        bands: int,
        workload: Workload,
        store: Store | None = None,
        resumed: Found | None = None,
    ) -> Found:
        """Search at this size, from the solution at a smaller one."""
        error = BandedError(rounds, bands, workload)
        start = self._start(error) if resumed is None else resumed.columns
        free = (start / error.scale).ravel()
        latest = _Latest(free)
        watch = self._watch(error, store, latest)
        within = WITHIN_SMALLER if store is None else WITHIN
        memory = min(max(MOST_REMEMBERED // free.size, 3), 10)
        try:
            end = minimize_lbfgs(error.scaled, free, within, memory=memory, watch=watch)
        except KeyboardInterrupt:
            if store is not None:
                store.save(latest.found(error))
            raise
        raw = end.point.reshape(rounds, bands) * error.scale
        size = np.linalg.norm(np.where(error.reaches, raw, 0.0), axis=1, keepdims=True)
        by_columns = end.gradient.reshape(rounds, bands) / error.scale * size
        columns = _diagonal_positive(error.columns(raw))
        return Found(columns, math.exp(end.value), float(np.abs(by_columns).max()), end.finished)

    def _start(self, error: BandedError) -> Matrix:
        """The best of what can be had cheaply, at norm 1."""
        shape = error.rounds, error.bands
        starts = simple_starts(*shape, error.workload)
        if (smaller := smaller_problem(*shape, error.workload)) is not None:
            starts.append(stretched_columns(self.run(*smaller).columns, *shape))
        return error.columns(min(starts, key=lambda start: error(start)[0]))

    def _watch(self, error: BandedError, store: Store | None, latest: _Latest) -> Watch:
        saved = time.perf_counter()

        def watch(step: int, point: Vector, value: float) -> bool:
            nonlocal saved
            latest.point, latest.value = point.copy(), value
            now = time.perf_counter()
            if store is not None and now - saved > SECONDS_BETWEEN_CHECKPOINTS:
                store.save(latest.found(error))
                saved = now
            self._tell(error.rounds, step, value, now)
            return self.deadline is not None and now > self.deadline

        return watch

    def _tell(self, rounds: int, step: int, value: float, now: float) -> None:
        if self.progress is None:
            return
        done = None
        if self.deadline is not None:
            done = min(1.0, (now - self.started) / max(self.deadline - self.started, 1e-9))
        self.progress(done, f"{rounds} rounds, step {step}: RmsError {math.exp(value):.6g}")


def _diagonal_positive(columns: Matrix) -> Matrix:
    """The same strategy up to the sign of rows, which changes no error and no column norm."""
    rounds, bands = len(columns), len(columns[0])
    sign = np.ones(rounds + bands)
    sign[:rounds][columns[:, 0] < 0] = -1.0
    return columns * sign[rows_reached(rounds, bands)]
