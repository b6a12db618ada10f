"""Figure `blt_coeff`: the coefficients of the three production BLTs, and of their inverses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl import BLT, mechanism
from dpftrl.paper.findings import Findings, Item, Row, Say, holds
from dpftrl.paper.pictures import curves, looks, panels

PRESETS = ("blt-b100", "blt-b400", "blt-b1000")


@final
@dataclass(frozen=True)
class Sizes:
    """How many lags, and how many of them to keep."""

    lags: int
    points: int


def compute(sizes: Sizes, say: Say) -> Findings:
    """Both sequences, at lags that are spread evenly on a logarithmic scale."""
    lags = np.unique(np.geomspace(1, sizes.lags - 1, sizes.points).round().astype(int))
    rows: list[Row] = []
    reached: dict[str, int | None] = {}
    for name in PRESETS:
        say(name)
        blt = mechanism(name)
        if not isinstance(blt, BLT):
            raise TypeError("the presets are BLTs")
        strategy = blt.coefficients(sizes.lags)
        inverse = blt.inverse_coefficients(sizes.lags)
        small = np.flatnonzero(strategy[1:] < strategy[1] / 100)
        reached[name] = int(small[0]) + 1 if len(small) else None
        for lag in lags.tolist():
            pair: Row = {"coefficient": float(strategy[lag]), "inverse": float(inverse[lag])}
            rows.append({"series": name, "lag": lag, **pair})
    claim = holds(
        "The coefficients for b = 100 decay faster than those for 400 and 1000 (lags to a "
        "hundredth of the first)",
        reached["blt-b100"] is not None
        and all(later is None for name, later in reached.items() if name != "blt-b100"),
        ", ".join(
            f"{name[4:]}: {lag or f'not in {sizes.lags:,}'}" for name, lag in reached.items()
        ),
        "faster",
    )
    return Findings(rows, [claim])


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes, look = panels(figure, 2), looks(rows)
    curves(axes[0], rows, "lag", "coefficient", look)
    negated = [{**row, "inverse": -float(row["inverse"] or 0)} for row in rows]
    curves(axes[1], negated, "lag", "inverse", look)
    for one, label, floor in (
        (axes[0], "coefficient of C", 1e-5),
        (axes[1], "minus the coefficient of C⁻¹", 1e-8),
    ):
        one.set_xscale("log")
        one.set_yscale("log")
        one.set_ylim(floor, 1)
        one.set_xlabel("lag (rounds)")
        one.set_ylabel(label)
        one.legend(frameon=False)


COEFFICIENTS = Item(
    "fig-blt-coeff",
    "Toeplitz coefficients of the three production BLTs",
    Sizes(4000, 60),
    Sizes(1500, 20),
    compute,
    _draw,
)
