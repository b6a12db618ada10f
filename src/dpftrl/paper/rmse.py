"""Figures `rmse` and `maxloss`: losses against min-sep, for two and five participations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from dpftrl import FullTree, Mechanism, MinSep
from dpftrl._internal.progress import Progress
from dpftrl.optimize import Objective
from dpftrl.paper.item import (
    FINE_STEPS,
    Claim,
    Draw,
    Findings,
    Item,
    Row,
    bandmf,
    blt,
    curves,
    holds,
    legend_below,
    log_ticks,
    looks,
    losses,
    panels,
    series_of,
)

BUFFERS = 4
METRICS: dict[Objective, str] = {"rms": "rms_loss", "max": "max_loss"}
OBJECTIVES: dict[str, Objective] = {"mean": "rms", "max": "max"}


@final
@dataclass(frozen=True)
class Sizes:
    """Rounds, the min-sep that BLTs are optimized for, the bands of BandMF, the min-seps to try."""

    rounds: int
    home: int
    bands: tuple[int, ...]
    min_seps: tuple[int, ...]


FULL = Sizes(
    2000,
    400,
    (200, 400, 800),
    (50, 71, 100, 141, 200, 250, 300, 350, 375, 399, 400, 425, 450, 499, 600, 700, 800, 900, 1000),
)
QUICK = Sizes(200, 40, (20, 40, 80), (10, 20, 35, 40, 45, 60, 80, 100))


def _mechanisms(sizes: Sizes) -> dict[str, Mechanism]:
    """The mechanisms of the figures by name."""
    mechanisms: dict[str, Mechanism] = {
        f"BLT(k={k}, {word})": blt(MinSep(sizes.rounds, sizes.home, k), BUFFERS, objective)
        for k in (2, 5)
        for word, objective in OBJECTIVES.items()
    }
    for bands in sizes.bands:
        mechanisms[f"BandMF({bands})"] = bandmf(sizes.rounds, bands)
    mechanisms["TreeAgg-Full"] = FullTree(sizes.rounds)
    return mechanisms


def _rows(sizes: Sizes, on_progress: Progress) -> list[Row]:
    """The losses of all mechanisms, for 2 and 5 participations."""
    rows: list[Row] = []
    for k in (2, 5):
        reachable = [b for b in sizes.min_seps if (k - 1) * b < sizes.rounds]
        points = [MinSep(sizes.rounds, b, k) for b in reachable]
        for part in losses(_mechanisms(sizes), points, on_progress).values():
            rows += part
    return rows


def compute_rms_loss(sizes: Sizes, on_progress: Progress) -> Findings:
    """RmsLoss, and the claim about the min-seps at which a BLT is better than BandMF."""
    rows = _rows(sizes, on_progress)
    return Findings(rows, [*_beats_bandmf(sizes, on_progress), *_common_claims(rows, sizes, "rms")])


def compute_max_loss(sizes: Sizes, on_progress: Progress) -> Findings:
    """MaxLoss of the same mechanisms."""
    rows = _rows(sizes, on_progress)
    return Findings(rows, _common_claims(rows, sizes, "max"))


def _beats_bandmf(sizes: Sizes, on_progress: Progress) -> list[Claim]:
    """The claims about the min-seps below and above which a BLT is better than BandMF."""
    ours = "BLT(k=2, mean)"
    rival = f"BandMF({sizes.home})"
    pair = {name: _mechanisms(sizes)[name] for name in (ours, rival)}
    error = {name: mechanism.rms_error(sizes.rounds) for name, mechanism in pair.items()}

    def ratio(b: int) -> float:
        on_progress(None, f"BLT against BandMF at min-sep {b}")
        point = MinSep(sizes.rounds, b, 2)
        loss = {
            name: error[name] * mechanism.sensitivity(point).value
            for name, mechanism in pair.items()
        }
        return loss[ours] / loss[rival]

    low = _last(lambda b: ratio(b) < 1, 1, sizes.home)
    high = _last(lambda b: ratio(b) >= 1, sizes.home, sizes.rounds - 1) + 1
    gap = ratio(7 * sizes.home // 4) - 1
    text = "With k = 2, BLT(k=2, mean) has the smaller RmsLoss than BandMF(400)"
    return [
        holds(f"{text} below min-sep", 370 <= low + 1 <= 410, float(low + 1), "390"),
        holds(
            f"{text} above min-sep",
            665 <= high <= 735,
            float(high),
            "700",
            f"the curves nearly touch: at {7 * sizes.home // 4} they differ by {gap:.1%}",
        ),
    ]


def _last(test: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number below `high` for which the test holds, by bisection.

    The test must hold from `low` up to some number, and not above it.
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if test(middle) else (low, middle)
    return low


def _common_claims(rows: Sequence[Row], sizes: Sizes, objective: Objective) -> list[Claim]:
    metric = METRICS[objective]
    table = {
        (str(row["series"]), row["participations"], row["min_sep"]): float(row[metric] or 0)
        for row in rows
    }
    names = list(series_of(rows))
    blts = [name for name in names if name.startswith("BLT")]
    bands = [name for name in names if name.startswith("BandMF")]
    points = sorted({key[1:] for key in table})
    worst = max(
        table[name, *p] / min(table[band, *p] for band in bands) for p in points for name in blts
    )
    over_tree = max(table[name, *p] / table["TreeAgg-Full", *p] for p in points for name in blts)
    own, other = ("mean", "max") if objective == "rms" else ("max", "mean")
    gains = [
        table[f"BLT(k={k}, {own})", k, sizes.home] / table[f"BLT(k={k}, {other})", k, sizes.home]
        for k in (2, 5)
    ]
    loss_name = "RmsLoss" if objective == "rms" else "MaxLoss"
    return [
        holds(
            f"All the BLTs perform competitively with BandMF: worst {loss_name} of any BLT over "
            "that of the best of the three BandMFs",
            worst < 1.35,
            worst,
            "competitive",
            "the best of three matrices at every point is more than one run can have",
        ),
        holds(
            f"BLTs beat TreeAgg-Full: worst {loss_name} of any BLT over its",
            over_tree < 1,
            over_tree,
            "below 1",
        ),
        holds(
            f"BLTs optimised for {loss_name} do better on it than those for the other loss (ratio "
            "at their own k and min-sep)",
            max(gains) < 1,
            max(gains),
            "below 1",
        ),
    ]


def _draw(metric: str, label: str) -> Draw:
    def draw(figure: Any, rows: Sequence[Row]) -> None:
        axes, look = panels(figure, 2), looks(rows)
        for panel, (k, part) in zip(axes, series_of(rows, "participations").items(), strict=True):
            curves(panel, part, "min_sep", metric, look)
            log_ticks(panel.yaxis, FINE_STEPS)
            log_ticks(panel.xaxis)
            panel.set_title(f"k = {k} participations")
            panel.set_xlabel("min-sep (rounds)")
            panel.set_ylabel(label)
        legend_below(figure, axes[0])

    return draw


RMSE = Item(
    "fig-rmse",
    "RmsLoss of the mechanisms against min-sep, for 2 and 5 participations",
    FULL,
    QUICK,
    compute_rms_loss,
    _draw("rms_loss", "RmsLoss"),
    height=5.2,
)
MAXLOSS = Item(
    "fig-maxloss",
    "MaxLoss of the mechanisms against min-sep, for 2 and 5 participations",
    FULL,
    QUICK,
    compute_max_loss,
    _draw("max_loss", "MaxLoss"),
    height=5.2,
)
