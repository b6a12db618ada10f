"""Figure `varyn`: the guarantee of the production mechanisms by number of rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from dpftrl import MinSep, mechanism
from dpftrl._internal.progress import Progress
from dpftrl.paper.extrapolation import GOAL, Rival
from dpftrl.paper.findings import Findings, Item, Row, holds
from dpftrl.paper.pictures import curves, legend_below, log_ticks, looks, panels
from dpftrl.paper.shared_mechanisms import bandmf

# The BLT for min-sep 100 (model pt-PT) was run with a report goal of 3,000. Its noise multiplier is
# scaled to the report goal of the others.
PT_PT = GOAL / 3000


@final
@dataclass(frozen=True)
class Sizes:
    """Most rounds, how many numbers of rounds to try, and the rounds that BandMF is built for."""

    longest: int
    steps: int
    bandmf_rounds: int


def _rivals(sizes: Sizes, on_progress: Progress) -> dict[int, list[Rival]]:
    """The mechanisms to compare, by min-sep."""
    on_progress(None, "BandMF")
    n = sizes.bandmf_rounds
    bandmf_400, bandmf_1000 = bandmf(n, n // 5), bandmf(n, n // 2)  # for n = 2000
    tree = mechanism("tree")
    scale = bandmf_400.sensitivity(MinSep(n, n // 5)).value  # see `extrapolation._rivals`
    return {
        100: [
            Rival("TreeAgg", tree, 7),
            Rival("BLT", mechanism("blt-b100"), 3.12 * PT_PT),
        ],
        400: [
            Rival("TreeAgg", tree, 7),
            Rival("BLT", mechanism("blt-b400"), 7.379),
            Rival("BandMF", bandmf_400, 1.411 * scale),
        ],
        1000: [
            Rival("TreeAgg", tree, 7),
            Rival("BLT", mechanism("blt-b1000"), 8.681),
            Rival("BandMF", bandmf_1000, 4.523),
        ],
    }


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """Rho by number of rounds, with as many participations as min-sep allows."""
    rows: list[Row] = []
    for min_sep, rivals in _rivals(sizes, on_progress).items():
        for step in range(1, sizes.steps + 1):
            rounds = step * sizes.longest // sizes.steps
            on_progress(None, f"min-sep {min_sep}, {rounds:,} rounds")
            rows += [
                {
                    "min_sep": min_sep,
                    "series": rival.name,
                    "rounds": rounds,
                    "rho": rival.rho(MinSep(rounds, min_sep)),
                }
                for rival in rivals
            ]
    table = {(row["min_sep"], row["series"], row["rounds"]): row["rho"] for row in rows}
    worst = max(
        float(rho or 0) / float(table[b, "TreeAgg", n] or 0)
        for (b, name, n), rho in table.items()
        if name == "BLT"
    )
    claims = [
        holds(
            "BLTs have the stronger guarantee than TreeAgg (largest rho over rho)",
            worst < 1,
            worst,
            "below 1",
        ),
        holds(
            "TreeAgg and BLT run any number of rounds, BandMF as many as it was made for",
            all(
                (row["rho"] is not None) == (int(row["rounds"] or 0) <= sizes.bandmf_rounds)
                for row in rows
                if row["series"] == "BandMF"
            ),
            "so it is",
            "",
        ),
    ]
    return Findings(rows, claims)


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    min_seps = sorted({row["min_sep"] for row in rows}, key=lambda b: int(b or 0))
    axes, look = panels(figure, len(min_seps)), looks(rows)
    look = {name: {**style, "marker": ""} for name, style in look.items()}
    for panel, min_sep in zip(axes, min_seps, strict=True):
        curves(panel, [row for row in rows if row["min_sep"] == min_sep], "rounds", "rho", look)
        log_ticks(panel.yaxis)
        panel.set_title(f"min-sep {min_sep}")
        panel.set_xlabel("rounds")
    axes[0].set_ylabel("rho (zCDP)")
    legend_below(figure, axes[-1], 3)


VARY = Item(
    "fig-varyn",
    "The guarantee of the production mechanisms as training goes on",
    Sizes(5000, 25, 2000),
    Sizes(400, 4, 100),
    compute,
    _draw,
    height=4,
)
