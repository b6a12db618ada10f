"""BandMF: optimizes general banded strategies whose columns all have norm 1.

With at most min_sep bands, the columns of C for the rounds of one client are orthogonal. The
sensitivity is then sqrt(k) for every such C, where k is the number of participations, so that
minimizing the error minimizes the loss, whatever k is. `BandedError` computes that error and its
gradient.

Large problems start from the solution of a smaller one, and results are kept in a cache.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.cache import cache_folder, content_key, load_tensors, store_tensors
from dpftrl._internal.deprecation import renamed_argument
from dpftrl._internal.progress import Progress
from dpftrl.errors import TooLarge
from dpftrl.mechanisms import Banded
from dpftrl.mechanisms.base import DENSE_LIMIT
from dpftrl.mechanisms.square_root import square_root_series
from dpftrl.optimize._solvers import Optimized, Watch, check_bands, check_workload, minimize_lbfgs
from dpftrl.optimize._toeplitz_error import workload_loss
from dpftrl.optimize.band_toeplitz import optimize_band_toeplitz
from dpftrl.participation import MinSep, Participation
from dpftrl.workload import PREFIX_SUM, Workload

SMALLEST_BLOCK = 64  # rows per matrix product: smaller products are not worth their overhead


def rows_reached(rounds: int, bands: int) -> NDArray[np.intp]:
    """The row of C, from 0, to which each entry of an array of columns belongs.

    Rows from `rounds` on lie outside C.
    """
    return np.arange(rounds)[:, None] + np.arange(bands)[None, :]


@final
class BandedError:
    """The log RmsError of B = A C^-1 as a function of the columns of C.

    The columns are scaled to norm 1 first. They are given as an array of n x P numbers, whose
    entry (j, p) is C[j + p, j]; entries below the last row of C are ignored. With D = C^-1, the
    derivatives of ||B||^2 by C are -2 (B^T B) D^T, of which only the bands are computed. All
    products are computed by scipy: numpy may have its own thread pool, and two thread pools that
    wait for each other on few cores are many times slower.

    Attributes:
        reaches: Which entries of the array lie inside C.
        scale: A preconditioner: how far a step moves each entry relative to the others. Early
            rounds and the diagonal have more influence on the error and move less.
    """

    def __init__(self, rounds: int, bands: int, workload: Workload):
        self.rounds, self.bands, self.workload = rounds, bands, workload
        self.reaches = rows_reached(rounds, bands) < rounds
        weight = np.linalg.norm(workload.matrix(rounds), axis=0)
        # The constants of the preconditioner are empirical.
        self.scale = np.ones((rounds, bands))
        self.scale[:, 0] = 0.3
        self.scale *= np.maximum(weight / weight.max(), 1e-2)[:, None] ** -0.6

    def columns(self, raw: Matrix) -> Matrix:
        """The columns of C, at norm 1."""
        inside = np.where(self.reaches, raw, 0.0)
        return inside / np.linalg.norm(inside, axis=1, keepdims=True)

    def scaled(self, free: Vector) -> tuple[float, Vector]:
        """The log RmsError and its derivatives as a function of the columns divided by `scale`."""
        value, gradient = self(free.reshape(self.scale.shape) * self.scale)
        return value, (gradient * self.scale).ravel()

    def __call__(self, raw: Matrix) -> tuple[float, Matrix]:
        """The log RmsError and its derivatives by the columns before they are scaled to norm 1."""
        from scipy.linalg import lapack

        columns = self.columns(raw)
        strategy, bands = self._blank()
        bands[:] = columns
        # LAPACK is column-major: it sees the transpose of a row-major upper triangle as a lower
        # one.
        decoder, fault = cast(Any, lapack).dtrtri(strategy.T, lower=1, overwrite_c=1)
        if fault:
            return np.inf, np.zeros(raw.shape)
        gram = _lower_gram(self._applied(decoder))
        square = float(np.trace(gram))
        by_columns = self._bands_of_product(decoder, gram) / -square
        along = np.einsum("jp,jp->j", by_columns, columns)[:, None]
        norms = np.linalg.norm(np.where(self.reaches, raw, 0.0), axis=1, keepdims=True)
        return np.log(square / self.rounds) / 2, (by_columns - columns * along) / norms

    def _blank(self) -> tuple[Matrix, Matrix]:
        """A matrix of zeros, and a view of its bands: entry (j, p) of the view is entry (j, j + p).

        Entries of the view that lie outside C fall below the diagonal of the matrix, so they must
        stay zero.
        """
        n, size = self.rounds, np.dtype(np.float64).itemsize
        memory = np.zeros(n * n + self.bands)
        bands = np.lib.stride_tricks.as_strided(
            memory, (n, self.bands), ((n + 1) * size, size), writeable=True
        )
        return memory[: n * n].reshape(n, n), bands

    def _applied(self, decoder: Matrix) -> Matrix:
        """B = A D, in column-major order."""
        if self.workload.is_prefix_sum:
            return np.cumsum(decoder.T, axis=1).T  # rows are contiguous; .T makes it column-major
        return np.asfortranarray(self.workload.apply(np.ascontiguousarray(decoder)))

    def _bands_of_product(self, decoder: Matrix, gram: Matrix) -> Matrix:
        """The bands of (B^T B) D^T, from the lower triangle of B^T B, block by block."""
        from scipy.linalg import blas

        product, bands = self._blank()
        width = max(SMALLEST_BLOCK, self.bands // 2)
        for start in range(0, self.rounds, width):
            stop = min(start + width, self.rounds)
            reach = min(stop + self.bands - 1, self.rounds)
            corner = gram[start:stop, start:stop]
            corner += np.tril(corner, -1).T
            product[start:stop, start:reach] = cast(Any, blas).dgemm(
                1.0, decoder[start:stop, :stop], gram[start:reach, :stop], trans_b=1
            )
        return np.where(self.reaches, bands, 0.0)


def _lower_gram(noise: Matrix) -> Matrix:
    """The lower triangle of B^T B, with zeros above it, for a lower triangular B."""
    from scipy.linalg import blas, lapack

    if len(noise) <= SMALLEST_BLOCK:  # too small for the threads of dlauum
        return np.tril(cast(Any, blas).dgemm(1.0, noise, noise, trans_a=1))
    return cast(Any, lapack).dlauum(noise, lower=1, overwrite_c=1)[0]


# Part of the key of cached files. Increase it when the objective or the quality of the search
# changes.
FORMAT = 1


class SearchResult(NamedTuple):
    """The result of a search.

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
    """The cache entry of one optimization problem."""

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

    The ratios of the columns to those of the square root strategy are interpolated, because they
    vary slowly.
    """
    fewer, narrower = len(columns), len(columns[0])
    ratios = columns / columns[:, :1] / square_root_series(narrower)
    # C has no entries below its last row. Fill them with the last ratio of the column, so that they
    # do not pull their neighbors to zero.
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
# Largest count of numbers in the past steps that L-BFGS remembers: 160 MB for each of its two sets.
MOST_REMEMBERED = 20_000_000


@renamed_argument("progress", "on_progress")
def optimize_bandmf(
    participation: Participation,
    bands: int,
    workload: Workload = PREFIX_SUM,
    on_progress: Progress | None = None,
    cache: str | os.PathLike[str] | None = None,
    seconds: float | None = None,
) -> Optimized[Banded]:
    """Find the strategy with `bands` bands and columns of norm 1 that has the smallest RmsError.

    Results are kept in a cache. A finished result is returned from there, and an interrupted search
    is resumed where it stopped.

    Args:
        participation: The participation to optimize for. With more bands than its min_sep the
            sensitivity is larger; the reported loss includes this, but the search ignores it.
        bands: Number of bands.
        workload: How the server turns updates into the model.
        on_progress: Called after each step.
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
    search = _Search(on_progress, None if seconds is None else started + seconds, started)
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

    on_progress: Progress | None
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
        """Optimize at this size.

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
        if self.on_progress is None:
            return
        fraction = None
        if self.deadline is not None:
            fraction = min(1.0, (now - self.started) / max(self.deadline - self.started, 1e-9))
        self.on_progress(fraction, f"{rounds} rounds, step {step}: RmsError {math.exp(value):.6g}")


def _diagonal_positive(columns: Matrix) -> Matrix:
    """Flip the signs of rows of C so that its diagonal is positive.

    This changes neither the error nor the norms of the columns.
    """
    rounds, bands = len(columns), len(columns[0])
    sign = np.ones(rounds + bands)
    sign[:rounds][columns[:, 0] < 0] = -1.0
    return columns * sign[rows_reached(rounds, bands)]
