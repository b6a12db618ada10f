"""Figure `rmse_vary_n`: running fewer or more rounds than a mechanism was made for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl import Mechanism, MinSep
from dpftrl.paper.findings import Claim, Findings, Item, Row, Say, holds
from dpftrl.paper.pictures import curves, legend_below, looks, panels
from dpftrl.paper.shared_mechanisms import bandmf, blt


@final
@dataclass(frozen=True)
class Sizes:
    """What mechanisms are made for, and the step of the rounds at which they are tried."""

    made_for: tuple[int, ...]
    min_sep: int
    step: int


def compute(sizes: Sizes, say: Say) -> Findings:
    """RmsLoss for every number of rounds up to the largest."""
    rivals: dict[str, Mechanism] = {}
    for n in sizes.made_for:
        say(f"mechanisms for {n} rounds")
        point = MinSep(n, sizes.min_sep)
        for d in (1, 2, 5):
            rivals[f"BLT(n={n}, d={d})"] = blt(point, d, "rms")
        rivals[f"BandMF(n={n})"] = bandmf(n, sizes.min_sep)
    largest = sizes.made_for[-1]
    places = range(sizes.step, largest + 1, sizes.step)
    loss = {name: _losses(one, places, sizes.min_sep) for name, one in rivals.items()}
    base = loss[f"BLT(n={largest}, d=5)"]
    rows: list[Row] = [
        {"series": name, "rounds": n, "rms_loss": value, "relative": value / base[n]}
        for name, part in loss.items()
        for n, value in part.items()
    ]
    return Findings(rows, _claims(loss, base, sizes))


def _losses(mechanism: Mechanism, places: range, min_sep: int) -> dict[int, float]:
    """The error of fewer rounds is that of the first rows: one curve serves all."""
    reach = mechanism.rounds or places[-1]
    square = np.cumsum(mechanism.error_curve(min(reach, places[-1])) ** 2)
    return {
        n: float(np.sqrt(square[n - 1] / n)) * mechanism.sensitivity(MinSep(n, min_sep)).value
        for n in places
        if n <= reach
    }


def _claims(loss: dict[str, dict[int, float]], base: dict[int, float], sizes: Sizes) -> list[Claim]:
    short, largest = sizes.made_for[0], sizes.made_for[-1]

    def at(name: str, n: int) -> float:
        return loss[name][n] / base[n]

    def worst(name: str) -> float:
        return max(value / base[n] for n, value in loss[name].items() if n >= sizes.min_sep)

    one = at(f"BLT(n={largest}, d=1)", largest)
    two = at(f"BLT(n={largest}, d=2)", largest)
    foreign = worst(f"BLT(n={short}, d=5)")
    early = max(
        value / loss[f"BandMF(n={short})"][n]
        for n, value in loss[f"BandMF(n={largest})"].items()
        if sizes.min_sep <= n <= short
    )
    return [
        holds("One buffer is not enough: relative RmsLoss", one > 1.07, one, "> 1.07"),
        holds(
            "Two buffers are almost as good as five: relative RmsLoss", two < 1.01, two, "about 1"
        ),
        holds(
            f"BLTs are not particularly sensitive to the n they are made for: one for n = {short} "
            f"up to {largest} rounds, over one for {largest}, at worst",
            foreign < 1.1,
            foreign,
            "about 1",
        ),
        holds(
            f"BandMF made for n = {largest} performs well when fewer rounds are run: over one for "
            f"{short}, at worst (from one min-sep on)",
            early < 1.1,
            early,
            "about 1",
        ),
        Claim("Memory of BandMF over that of two buffers", "200", sizes.min_sep / 2, "reproduces"),
    ]


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes = panels(figure, 2)
    shown = [row for row in rows if "d=1)" not in str(row["series"])]
    base = [str(row["series"]) for row in shown if "d=5)" in str(row["series"])][-1]
    look = {name: {**one, "marker": ""} for name, one in looks(shown).items()}
    for one, (metric, label) in zip(
        axes,
        (("relative", f"RmsLoss relative to {base}"), ("rms_loss", "RmsLoss")),
        strict=True,
    ):
        curves(one, shown, "rounds", metric, look)
        one.set_xlabel("rounds run")
        one.set_ylabel(label)
    axes[0].set_ylim(0.9, 1.1)
    legend_below(figure, axes[0], 3)


VARY_N = Item(
    "fig-rmse-vary-n",
    "RmsLoss when other than the expected number of rounds is run",
    Sizes((800, 2000), 400, 40),
    Sizes((80, 200), 40, 20),
    compute,
    _draw,
    height=4.8,
)
