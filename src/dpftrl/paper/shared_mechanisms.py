"""Mechanisms that several items use; each is optimized only once."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from dpftrl import BLT, Banded, FullTree, Mechanism, MinSep, Toeplitz
from dpftrl._internal.progress import Progress
from dpftrl.optimize import (
    Objective,
    optimize_band_toeplitz,
    optimize_bandmf,
    optimize_blt,
)
from dpftrl.paper.item import Row


@lru_cache
def blt(participation: MinSep, buffers: int, objective: Objective) -> BLT:
    """The best BLT for a participation."""
    return optimize_blt(participation, min(buffers, participation.rounds), objective).mechanism


@lru_cache(maxsize=16)
def bandmf(rounds: int, bands: int) -> Banded:
    """BandMF for a min-sep that is equal to the number of bands."""
    return optimize_bandmf(MinSep(rounds, bands), bands).mechanism


@lru_cache
def band_toeplitz(participation: MinSep, bands: int) -> Toeplitz:
    """BandToep, optimized for RmsLoss."""
    return optimize_band_toeplitz(participation, bands).mechanism


# The rows of the paper's StackOverflow table, in its order. As in the paper, BLTs are optimized for
# MaxLoss.
TABLE_MECHANISMS: dict[str, Callable[[MinSep], Mechanism]] = {
    "BandMF": lambda clients: bandmf(clients.rounds, clients.min_sep),
    "TreeAgg-Full": lambda clients: FullTree(clients.rounds),
    **{
        f"BLT(d={d}, k=1)": lambda clients, d=d: blt(MinSep.once(clients.rounds), d, "max")
        for d in (2, 5)
    },
    **{f"BLT(d={d}, k=6)": lambda clients, d=d: blt(clients, d, "max") for d in (2, 3, 4, 5)},
}


def losses(
    mechanisms: Mapping[str, Mechanism], points: Sequence[MinSep], on_progress: Progress
) -> dict[str, list[Row]]:
    """MaxLoss and RmsLoss of each mechanism at each point, by the name of the mechanism.

    All points must have the same number of rounds.
    """
    return {
        name: _losses_of(name, mechanism, points, on_progress)
        for name, mechanism in mechanisms.items()
    }


def _losses_of(
    name: str, mechanism: Mechanism, points: Sequence[MinSep], on_progress: Progress
) -> list[Row]:
    curve = mechanism.error_curve(points[0].rounds)
    max_error, rms_error = float(curve.max()), float(np.sqrt(np.mean(curve**2)))
    rows: list[Row] = []
    for point in points:
        on_progress(None, f"{name} at min-sep {point.min_sep}")
        sensitivity = mechanism.sensitivity(point)
        row: Row = {
            "participations": point.max_participations,
            "series": name,
            "min_sep": point.min_sep,
            "max_loss": max_error * sensitivity.value,
            "rms_loss": rms_error * sensitivity.value,
            "sensitivity": sensitivity.kind,
        }
        rows.append(row)
    return rows
