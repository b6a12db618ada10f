"""Figure `faster`: the time of an optimization against the number of rounds."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl import MinSep
from dpftrl._internal.progress import Progress
from dpftrl.optimize import optimize_bandmf, optimize_blt
from dpftrl.paper.item import Findings, Item, Row, column, curves, holds, looks, panels, series_of


@final
@dataclass(frozen=True)
class Sizes:
    """Min-sep, the numbers of rounds for BandMF and for BLTs, and the BLT runs to average."""

    min_sep: int
    bandmf: tuple[int, ...]
    blt: tuple[int, ...]
    runs: int


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """Seconds per optimization: a mean for BLTs; one run with an empty cache for BandMF."""
    rows: list[Row] = []
    for n in sizes.blt:
        on_progress(None, f"BLT, {n:,} rounds")
        runs = [optimize_blt(MinSep(n, sizes.min_sep), 4) for _ in range(sizes.runs)]
        mean = float(np.mean([run.seconds for run in runs]))
        rows.append({"series": "BLT (4 buffers)", "rounds": n, "seconds": mean})
    for n in sizes.bandmf:
        on_progress(None, f"BandMF, {n:,} rounds")
        with tempfile.TemporaryDirectory() as empty:
            run = optimize_bandmf(MinSep(n, sizes.min_sep), sizes.min_sep, cache=empty)
        rows.append({"series": "BandMF", "rounds": n, "seconds": run.seconds})
    parts = series_of(rows)
    bands = dict(zip(sizes.bandmf, column(parts["BandMF"], "seconds"), strict=True))
    quick = dict(zip(sizes.blt, column(parts["BLT (4 buffers)"], "seconds"), strict=True))
    largest, smallest = sizes.bandmf[-1], sizes.bandmf[0]
    growth = quick[sizes.blt[-1]] / quick[sizes.blt[0]]
    claims = [
        holds(
            f"BLTs are optimised substantially faster than BandMF (times, at n = {largest:,})",
            bands[largest] > 10 * quick[largest],
            bands[largest] / quick[largest],
            "substantially",
        ),
        holds(
            f"... but slightly slower at small n, because of compilation (BLT over BandMF, at n = "
            f"{smallest:,})",
            quick[smallest] > bands[smallest],
            quick[smallest] / bands[smallest],
            "above 1",
            "nothing is compiled here, so that it is faster there too",
        ),
        holds(
            f"BLT optimisation scales to much larger n (time at n = {sizes.blt[-1]:,} over that at "
            f"{sizes.blt[0]:,})",
            growth < 10,
            growth,
            "scales",
        ),
    ]
    return Findings(rows, claims)


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    (axes,) = panels(figure, 1)
    curves(axes, rows, "rounds", "seconds", looks(rows))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rounds")
    axes.set_ylabel("seconds to optimise, on 2 cores")
    axes.legend(frameon=False, loc="upper right")


FASTER = Item(
    "fig-faster",
    "Time to optimise BandMF and BLT against n, at min-sep 400",
    Sizes(400, (500, 1000, 2000), (500, 1000, 2000, 10**4, 10**5, 10**6, 10**7, 10**8, 10**9), 3),
    Sizes(20, (40, 80), (40, 80, 10**9), 1),
    compute,
    _draw,
    height=3.8,
)
