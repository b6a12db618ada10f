"""BandMF: optimises general banded strategies whose columns all have norm 1.

With at most min_sep bands, the columns of C for the rounds of one client are orthogonal. The
sensitivity is then sqrt(k) for every such C, where k is the number of participations, so that
minimising the error minimises the loss, whatever k is.

Large problems start from the solution of a smaller one, and results are kept in a cache.
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
from dpftrl._internal.progress import Progress
from dpftrl.errors import TooLarge
from dpftrl.mechanisms import Banded
from dpftrl.mechanisms.base import DENSE_LIMIT
from dpftrl.mechanisms.square_root import square_root_series
from dpftrl.optimize._solvers import Watch, minimize_lbfgs
from dpftrl.optimize._toeplitz_error import workload_loss
from dpftrl.optimize.band_toeplitz import optimize_band_toeplitz
from dpftrl.optimize.bandmf_objective import BandedError, rows_reached
from dpftrl.optimize.result import Optimized, check_bands, check_workload
from dpftrl.participation import MinSep, Participation
from dpftrl.workload import PREFIX_SUM, Workload

# Part of the key of cached files. Increase it when the objective or the quality of the search
# changes.
FORMAT = 1


class SearchResult(NamedTuple):
    """What a search reached.

    Attributes:
        columns: The columns of C at norm 1, as an array of n x P numbers (see `BandedError`).
        rms_error: RmsError of C.
        gradient_norm: Largest derivative of the log error; NaN for a checkpoint.
        finished: False if the search was interrupted or ran out of time.
    """

    columns: Matrix
    rms_error: float
    gradient_norm: float
    finished: bool


@final
@dataclass(frozen=True)
class Store:
    """The cache entry of one optimisation problem."""

    folder: Path
    key: str
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, cache: str | os.PathLike[str] | None, rounds: int, bands: int, workload: Workload
    ) -> Self:
        """The entry of a problem; it does not depend on the number of participations."""
        shares = (workload.momentum, workload.weight_decay)
        key = content_key("bandmf", FORMAT, rounds, bands, *shares, workload.rates(rounds))
        return cls(cache_folder(cache), key, (rounds, bands))

    def load(self) -> SearchResult | None:
        """The stored result; None if there is none or if it is damaged."""
        tensors = load_tensors(self.folder, self.key)
        if tensors is None or not {"columns", "state"} <= tensors.keys():
            return None
        columns, state = tensors["columns"], tensors["state"]
        if columns.dtype != np.float64 or columns.shape != self.shape or state.shape != (3,):
            return None
        outside = rows_reached(*self.shape) >= self.shape[0]
        norms = np.linalg.norm(np.where(outside, 0.0, columns), axis=1)
        valid = np.all(np.abs(norms - 1) < 1e-12) and np.all(columns[:, 0] > 0)
        if not valid or np.any(columns[outside]):
            return None
        error, gradient_norm, finished = state.tolist()
        return SearchResult(columns, error, gradient_norm, finished == 1)

    def save(self, result: SearchResult) -> None:
        """Replace the stored result; a folder that cannot be written to is ignored."""
        state = np.array([result.rms_error, result.gradient_norm, float(result.finished)])
        store_tensors(self.folder, self.key, {"columns": result.columns, "state": state})


RATIO = 4  # rounds that one round of the smaller problem stands for
# Smaller problems are solved at once: a start from a still smaller one would save nothing, or would
# have too few bands to interpolate.
FEWEST_ROUNDS, FEWEST_BANDS = 256, 16


def simple_starts(rounds: int, bands: int, workload: Workload) -> list[Matrix]:
    """Columns of the square root and of the best Toeplitz strategy."""
    participation = MinSep(rounds, min_sep=bands)
    toeplitz = optimize_band_toeplitz(participation, bands, "rms", workload).mechanism
    return [np.tile(c, (rounds, 1)) for c in (square_root_series(bands), np.array(toeplitz.c))]


def smaller_problem(
    rounds: int, bands: int, workload: Workload
) -> tuple[int, int, Workload] | None:
    """The rounds, bands and workload of a similar problem of a quarter of the size.

    One of its rounds stands for four. None if the problem is already small.
    """
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
    """Columns for more rounds and bands, interpolated from those of a smaller problem.

    What is interpolated are their ratios to the square root strategy, which vary slowly.
    """
    fewer, narrower = len(columns), len(columns[0])
    ratios = columns / columns[:, :1] / square_root_series(narrower)
    # C has no entries below its last row. Fill them with the last ratio of the column, so that they
    # do not pull their neighbours to zero.
    last_band = np.minimum(narrower, fewer - np.arange(fewer)) - 1
    ratios = np.take_along_axis(
        ratios, np.minimum(np.arange(narrower)[None, :], last_band[:, None]), axis=1
    )
    wider = _stretched(_stretched(ratios, rounds).T, bands).T
    return wider * square_root_series(bands)


def _stretched(values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Interpolate linearly along the first axis, to `size` evenly spaced points."""
    position = np.clip((np.arange(size) + 0.5) * len(values) / size - 0.5, 0, len(values) - 1)
    low = np.minimum(position.astype(np.intp), max(len(values) - 2, 0))
    high = np.minimum(low + 1, len(values) - 1)
    share = (position - low).reshape(-1, *[1] * (values.ndim - 1))
    return (1 - share) * values[low] + share * values[high]


# A search stops when ten steps improve the log error by less than this. Smaller problems are cheap,
# so they are solved more accurately.
WITHIN, WITHIN_SMALLER = 1e-5, 1e-6
SECONDS_BETWEEN_CHECKPOINTS = 10.0
# Most numbers in the past steps that L-BFGS remembers: 160 MB for each of its two sets.
MOST_REMEMBERED = 20_000_000


def optimize_bandmf(
    participation: Participation,
    bands: int,
    workload: Workload = PREFIX_SUM,
    progress: Progress | None = None,
    cache: str | os.PathLike[str] | None = None,
    seconds: float | None = None,
) -> Optimized[Banded]:
    """Find the strategy with `bands` bands and columns of norm 1 that has the smallest RmsError.

    Results are kept in a cache. A finished result is returned from there, and an interrupted search
    is resumed where it stopped.

    Args:
        participation: The participation to optimise for. With more bands than its min_sep the
            sensitivity is larger; the reported loss includes this, but the search ignores it.
        bands: Number of bands.
        workload: How the server turns updates into the model.
        progress: Called after each step.
        cache: Folder for results. By default the environment variable DPFTRL_CACHE, or `dpftrl` in
            the user's cache folder.
        seconds: Stop after this time. A later call resumes the search.

    Raises:
        TooLarge: There are too many rounds for dense matrices.

    >>> import tempfile
    >>> from dpftrl.participation import MinSep
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     optimized = optimize_bandmf(MinSep(rounds=64, min_sep=16), bands=16, cache=folder)
    >>> print(f"{optimized.error_report.rms_loss:.2f} {optimized.error_report.sensitivity.kind}")
    4.59 exact
    """
    started = time.perf_counter()
    rounds = participation.rounds
    bands = check_bands(bands, rounds)
    check_workload(workload, rounds)
    if rounds > DENSE_LIMIT:
        raise TooLarge(
            f"BandMF is limited to {DENSE_LIMIT} rounds, got {rounds}; "
            "use band-toeplitz or blt: their loss is nearly as small and they have no such limit"
        )
    search = _Search(progress, None if seconds is None else started + seconds, started)
    store = Store.of(cache, rounds, bands, workload)
    result = store.load()
    if result is None or not result.finished:
        result = search.run(rounds, bands, workload, store, result)
        store.save(result)
    mechanism = Banded(result.columns.T)
    return Optimized(
        mechanism,
        participation,
        "rms",
        workload_loss(mechanism, participation, workload),
        result.gradient_norm,
        time.perf_counter() - started,
    )


@final
@dataclass
class _Latest:
    """The last step of a search, from which checkpoints are written."""

    point: Vector
    value: float = math.nan

    def checkpoint(self, error: BandedError) -> SearchResult:
        """The last step as a result that is not finished."""
        columns = error.columns(self.point.reshape(error.scale.shape) * error.scale)
        return SearchResult(
            _diagonal_positive(columns), math.exp(self.value), math.nan, finished=False
        )


@final
@dataclass(frozen=True)
class _Search:
    """One call of `optimize_bandmf`: its progress callback and its deadline."""

    progress: Progress | None
    deadline: float | None
    started: float

    def run(
        self,
        rounds: int,
        bands: int,
        workload: Workload,
        store: Store | None = None,
        resumed: SearchResult | None = None,
    ) -> SearchResult:
        """Optimise at this size.

        Args:
            rounds: Number of rounds.
            bands: Number of bands.
            workload: The workload.
            store: Where to write checkpoints; None for a smaller problem, which has none.
            resumed: The result to resume from. Without one, the search starts from the best of a
                few simple strategies and the solution of a smaller problem.
        """
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
                store.save(latest.checkpoint(error))
            raise
        raw = end.point.reshape(rounds, bands) * error.scale
        norms = np.linalg.norm(np.where(error.reaches, raw, 0.0), axis=1, keepdims=True)
        by_columns = end.gradient.reshape(rounds, bands) / error.scale * norms
        columns = _diagonal_positive(error.columns(raw))
        return SearchResult(
            columns, math.exp(end.value), float(np.abs(by_columns).max()), end.finished
        )

    def _start(self, error: BandedError) -> Matrix:
        """The best of the starts that are cheap to compute, with columns of norm 1."""
        shape = error.rounds, error.bands
        starts = simple_starts(*shape, error.workload)
        if (smaller := smaller_problem(*shape, error.workload)) is not None:
            starts.append(stretched_columns(self.run(*smaller).columns, *shape))
        return error.columns(min(starts, key=lambda start: error(start)[0]))

    def _watch(self, error: BandedError, store: Store | None, latest: _Latest) -> Watch:
        """A callback that records each step, writes checkpoints, and stops at the deadline."""
        saved = time.perf_counter()

        def watch(step: int, point: Vector, value: float) -> bool:
            nonlocal saved
            latest.point, latest.value = point.copy(), value
            now = time.perf_counter()
            if store is not None and now - saved > SECONDS_BETWEEN_CHECKPOINTS:
                store.save(latest.checkpoint(error))
                saved = now
            self._show_progress(error.rounds, step, value, now)
            return self.deadline is not None and now > self.deadline

        return watch

    def _show_progress(self, rounds: int, step: int, value: float, now: float) -> None:
        """Call the progress callback; the fraction done is that of the time until the deadline."""
        if self.progress is None:
            return
        fraction = None
        if self.deadline is not None:
            fraction = min(1.0, (now - self.started) / max(self.deadline - self.started, 1e-9))
        self.progress(fraction, f"{rounds} rounds, step {step}: RmsError {math.exp(value):.6g}")


def _diagonal_positive(columns: Matrix) -> Matrix:
    """Flip the signs of rows of C so that its diagonal is positive.

    This changes neither the error nor the norms of the columns.
    """
    rounds, bands = len(columns), len(columns[0])
    sign = np.ones(rounds + bands)
    sign[:rounds][columns[:, 0] < 0] = -1.0
    return columns * sign[rows_reached(rounds, bands)]
