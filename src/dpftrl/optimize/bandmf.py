"""BandMF: the best banded strategy whose columns all have norm 1.

With no more bands than min_sep the columns of one client are orthogonal: the sensitivity is sqrt(k)
whatever C is, and the loss is as small as the error. How often a client takes part is then of no
consequence to the optimisation.
"""

import math
import os
import time
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import TooLarge
from dpftrl.mechanisms import Banded
from dpftrl.mechanisms.base import DENSE_LIMIT
from dpftrl.optimize.bandmf_objective import BandedError, rows_reached
from dpftrl.optimize.bandmf_start import simple_starts, smaller_problem, stretched_columns
from dpftrl.optimize.bandmf_store import Found, Store
from dpftrl.optimize.lbfgs import Watch, minimise_lbfgs
from dpftrl.optimize.requests import Progress, check_bands, check_workload
from dpftrl.optimize.result import Optimised
from dpftrl.optimize.workload_loss import workload_loss
from dpftrl.participation import Participation
from dpftrl.workload import PREFIX_SUM, Workload

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

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
) -> Optimised[Banded]:
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
    >>> print(f"{found.loss.rms_loss:.2f} {found.loss.sensitivity.kind}")
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
    return Optimised(
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
            end = minimise_lbfgs(error.scaled, free, within, memory=memory, watch=watch)
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
