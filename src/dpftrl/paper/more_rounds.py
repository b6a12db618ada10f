"""Figure `varyn`: the guarantee of the production mechanisms as training goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from dpftrl import MinSep, mechanism
from dpftrl.paper.extrapolation import GOAL, Rival
from dpftrl.paper.findings import Findings, Item, Row, Say, holds
from dpftrl.paper.pictures import curves, legend_below, log_ticks, looks, panels
from dpftrl.paper.shared_mechanisms import bandmf

# The BLT for b = 100 had a report goal of 3,000: its noise multiplier grows to that of the others.
PT_PT = GOAL / 3000


@final
@dataclass(frozen=True)
class Sizes:
    """The longest training, how many lengths to try, and the rounds that BandMF is made for."""

    longest: int
    steps: int
    bandmf_rounds: int


def _rivals(sizes: Sizes, say: Say) -> dict[int, list[Rival]]:
    say("BandMF")
    n = sizes.bandmf_rounds
    four, ten = bandmf(n, n // 5), bandmf(n, n // 2)
    tree = mechanism("tree")
    scale = four.sensitivity(MinSep(n, n // 5)).value
    return {
        100: [
            Rival("TreeAgg", tree, 7),
            Rival("BLT", mechanism("blt-b100"), 3.12 * PT_PT),
        ],
        400: [
            Rival("TreeAgg", tree, 7),
            Rival("BLT", mechanism("blt-b400"), 7.379),
            Rival("BandMF", four, 1.411 * scale),
        ],
        1000: [
            Rival("TreeAgg", tree, 7),
            Rival("BLT", mechanism("blt-b1000"), 8.681),
            Rival("BandMF", ten, 4.523),
        ],
    }


def compute(sizes: Sizes, say: Say) -> Findings:
    """Rho at more and more rounds, each with as many participations as fit."""
    rows: list[Row] = []
    for min_sep, rivals in _rivals(sizes, say).items():
        for step in range(1, sizes.steps + 1):
            rounds = step * sizes.longest // sizes.steps
            say(f"min-sep {min_sep}, {rounds:,} rounds")
            rows += [
                {
                    "min_sep": min_sep,
                    "series": one.name,
                    "rounds": rounds,
                    "rho": one.rho(MinSep(rounds, min_sep)),
                }
                for one in rivals
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
    found = {row["min_sep"] for row in rows}
    axes, look = panels(figure, len(found)), looks(rows)
    look = {name: {**one, "marker": ""} for name, one in look.items()}
    for one, min_sep in zip(axes, sorted(found, key=lambda b: int(b or 0)), strict=True):
        curves(one, [row for row in rows if row["min_sep"] == min_sep], "rounds", "rho", look)
        log_ticks(one.yaxis)
        one.set_title(f"min-sep {min_sep}")
        one.set_xlabel("rounds")
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
