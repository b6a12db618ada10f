"""Figure `rmse_vary_n`: running fewer or more rounds than a mechanism was optimised for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl import Mechanism, MinSep
from dpftrl._internal.progress import Progress
from dpftrl.paper.findings import Claim, Findings, Item, Row, holds
from dpftrl.paper.pictures import curves, legend_below, looks, panels
from dpftrl.paper.shared_mechanisms import bandmf, blt


@final
@dataclass(frozen=True)
class Sizes:
    """Rounds and min-sep that mechanisms are optimised for; they run multiples of `step` rounds."""

    made_for: tuple[int, ...]
    min_sep: int
    step: int


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """RmsLoss of each mechanism by number of rounds."""
    rivals: dict[str, Mechanism] = {}
    for n in sizes.made_for:
        on_progress(None, f"mechanisms for {n} rounds")
        point = MinSep(n, sizes.min_sep)
        for d in (1, 2, 5):
            rivals[f"BLT(n={n}, d={d})"] = blt(point, d, "rms")
        rivals[f"BandMF(n={n})"] = bandmf(n, sizes.min_sep)
    largest = sizes.made_for[-1]
    rounds = range(sizes.step, largest + 1, sizes.step)
    loss = {name: _losses(rival, rounds, sizes.min_sep) for name, rival in rivals.items()}
    base = loss[f"BLT(n={largest}, d=5)"]
    rows: list[Row] = [
        {"series": name, "rounds": n, "rms_loss": value, "relative": value / base[n]}
        for name, part in loss.items()
        for n, value in part.items()
    ]
    return Findings(rows, _claims(loss, base, sizes))


def _losses(mechanism: Mechanism, rounds: range, min_sep: int) -> dict[int, float]:
    """RmsLoss by number of rounds, as far as the mechanism can run.

    The error of fewer rounds is that of the first rows, so one error curve is enough.
    """
    most = mechanism.rounds or rounds[-1]
    square = np.cumsum(mechanism.error_curve(min(most, rounds[-1])) ** 2)
    return {
        n: float(np.sqrt(square[n - 1] / n)) * mechanism.sensitivity(MinSep(n, min_sep)).value
        for n in rounds
        if n <= most
    }


def _claims(loss: dict[str, dict[int, float]], base: dict[int, float], sizes: Sizes) -> list[Claim]:
    short, largest = sizes.made_for[0], sizes.made_for[-1]

    def at(name: str, n: int) -> float:
        return loss[name][n] / base[n]

    def worst(name: str) -> float:
        return max(value / base[n] for n, value in loss[name].items() if n >= sizes.min_sep)

    one_buffer = at(f"BLT(n={largest}, d=1)", largest)
    two_buffers = at(f"BLT(n={largest}, d=2)", largest)
    longer_run = worst(f"BLT(n={short}, d=5)")
    shorter_run = max(
        value / loss[f"BandMF(n={short})"][n]
        for n, value in loss[f"BandMF(n={largest})"].items()
        if sizes.min_sep <= n <= short
    )
    return [
        holds(
            "One buffer is not enough: relative RmsLoss", one_buffer > 1.07, one_buffer, "> 1.07"
        ),
        holds(
            "Two buffers are almost as good as five: relative RmsLoss",
            two_buffers < 1.01,
            two_buffers,
            "about 1",
        ),
        holds(
            f"BLTs are not particularly sensitive to the n they are made for: one for n = {short} "
            f"up to {largest} rounds, over one for {largest}, at worst",
            longer_run < 1.1,
            longer_run,
            "about 1",
        ),
        holds(
            f"BandMF made for n = {largest} performs well when fewer rounds are run: over one for "
            f"{short}, at worst (from one min-sep on)",
            shorter_run < 1.1,
            shorter_run,
            "about 1",
        ),
        Claim("Memory of BandMF over that of two buffers", "200", sizes.min_sep / 2, "reproduces"),
    ]


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes = panels(figure, 2)
    shown = [row for row in rows if "d=1)" not in str(row["series"])]
    base = [str(row["series"]) for row in shown if "d=5)" in str(row["series"])][-1]
    look = {name: {**style, "marker": ""} for name, style in looks(shown).items()}
    for panel, (metric, label) in zip(
        axes,
        (("relative", f"RmsLoss relative to {base}"), ("rms_loss", "RmsLoss")),
        strict=True,
    ):
        curves(panel, shown, "rounds", metric, look)
        panel.set_xlabel("rounds run")
        panel.set_ylabel(label)
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
