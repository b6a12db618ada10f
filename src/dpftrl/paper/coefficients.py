"""Figure `blt_coeff`: the coefficients of the three production BLTs, and of their inverses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl import BLT, mechanism
from dpftrl._internal.progress import Progress
from dpftrl.paper.findings import Findings, Item, Row, holds
from dpftrl.paper.pictures import curves, looks, panels

PRESETS = ("blt-b100", "blt-b400", "blt-b1000")


@final
@dataclass(frozen=True)
class Sizes:
    """The number of lags to compute, and of lags to keep as points of the curves."""

    lags: int
    points: int


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """The coefficients of C and C^-1 at lags that are spread evenly on a logarithmic scale."""
    lags = np.unique(np.geomspace(1, sizes.lags - 1, sizes.points).round().astype(int))
    rows: list[Row] = []
    small_from: dict[str, int | None] = {}  # the first lag with a coefficient below a hundredth
    for name in PRESETS:
        on_progress(None, name)
        blt = mechanism(name)
        if not isinstance(blt, BLT):
            raise TypeError("the presets are BLTs")
        strategy = blt.coefficients(sizes.lags)
        inverse = blt.inverse_coefficients(sizes.lags)
        small = np.flatnonzero(strategy[1:] < strategy[1] / 100)
        small_from[name] = int(small[0]) + 1 if len(small) else None
        for lag in lags.tolist():
            pair: Row = {"coefficient": float(strategy[lag]), "inverse": float(inverse[lag])}
            rows.append({"series": name, "lag": lag, **pair})
    claim = holds(
        "The coefficients for b = 100 decay faster than those for 400 and 1000 (lags to a "
        "hundredth of the first)",
        small_from["blt-b100"] is not None
        and all(later is None for name, later in small_from.items() if name != "blt-b100"),
        ", ".join(
            f"{name[4:]}: {lag or f'not in {sizes.lags:,}'}" for name, lag in small_from.items()
        ),
        "faster",
    )
    return Findings(rows, [claim])


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes, look = panels(figure, 2), looks(rows)
    curves(axes[0], rows, "lag", "coefficient", look)
    negated = [{**row, "inverse": -float(row["inverse"] or 0)} for row in rows]
    curves(axes[1], negated, "lag", "inverse", look)
    for panel, label, floor in (
        (axes[0], "coefficient of C", 1e-5),
        (axes[1], "minus the coefficient of C⁻¹", 1e-8),
    ):
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_ylim(floor, 1)
        panel.set_xlabel("lag (rounds)")
        panel.set_ylabel(label)
        panel.legend(frameon=False)


COEFFICIENTS = Item(
    "fig-blt-coeff",
    "Toeplitz coefficients of the three production BLTs",
    Sizes(4000, 60),
    Sizes(1500, 20),
    compute,
    _draw,
)
