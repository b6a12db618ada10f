"""What the items of the paper share: rows, claims with a verdict each, curves, and mechanisms.

The helpers that draw figures use the colors of `dpftrl.plots`. A mechanism that several items use
is optimized only once.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from functools import lru_cache
from typing import Any, Final, Generic, Literal, TypeVar, final

import numpy as np

from dpftrl import BLT, Banded, FullTree, Mechanism, MinSep, Toeplitz
from dpftrl._internal.progress import Progress
from dpftrl.optimize import (
    Objective,
    optimize_band_toeplitz,
    optimize_bandmf,
    optimize_blt,
)
from dpftrl.plots import line_styles

# The first version that computes the saved results as they are, up to the digits that are shown.
# Change it whenever a newer version computes others: then the saved results are out of date.
COMPUTED_SINCE: Final = "0.1.0"

Verdict = Literal["reproduces", "better", "does not", "not at this size"]
Cell = float | int | str | None
Row = dict[str, Cell]


@final
@dataclass(frozen=True)
class Claim:
    """One claim of the paper, and our result.

    Attributes:
        text: The claim.
        paper: The paper's number as printed, or its words.
        ours: Our number, or our result in words.
        verdict: How the two compare.
        because: Why they differ, or another remark.
    """

    text: str
    paper: str
    ours: float | str
    verdict: Verdict
    because: str = ""

    @property
    def ratio(self) -> float | None:
        """Our number divided by the paper's; None unless both are numbers."""
        try:
            printed = float(self.paper)
        except ValueError:
            return None
        return self.ours / printed if isinstance(self.ours, float) and printed else None

    def at_reduced_size(self) -> "Claim":
        """The claim without a verdict, for a computation at a smaller size than the paper's."""
        return replace(self, verdict="not at this size", because="")


@final
@dataclass(frozen=True)
class Findings:
    """The rows of a table, each in the order of its columns, and the claims about them."""

    rows: Sequence[Row]
    claims: Sequence[Claim]


def printed(text: str, paper: str, ours: float, because: str = "", *, up: bool = False) -> Claim:
    """The claim that a number is as printed.

    The verdict is `reproduces` if our number rounds to the printed one, and `better` if our number
    is smaller.

    Args:
        text: What the number is.
        paper: The number as printed.
        ours: Our number with all digits.
        because: Why the number differs; not used if it reproduces.
        up: Whether the paper rounds this number up.

    >>> printed("MaxLoss", "10.79", 10.7514).verdict
    'better'
    """
    if rounds_to(ours, paper, up=up):
        return Claim(text, paper, ours, "reproduces")
    return Claim(text, paper, ours, "better" if ours < float(paper) else "does not", because)


def rounds_to(value: float, paper: str, *, up: bool = False) -> bool:
    """Whether a value equals the printed number when rounded to as many decimal places."""
    rounding = ROUND_CEILING if up else ROUND_HALF_EVEN
    return Decimal(value).quantize(Decimal(paper), rounding) == Decimal(paper)


def holds(text: str, truth: bool, ours: float | str, paper: str = "", because: str = "") -> Claim:
    """The claim that a statement in words is true; `because` says why it is not, if it is not."""
    if truth:
        return Claim(text, paper, ours, "reproduces")
    return Claim(text, paper, ours, "does not", because)


def series_of(rows: Sequence[Row], key: str = "series") -> dict[str, list[Row]]:
    """The rows grouped by the value of one column, in the order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[key]), []).append(row)
    return groups


def column(rows: Sequence[Mapping[str, Cell]], key: str) -> list[float]:
    """One column of numbers; a missing value becomes NaN, which is a gap in a curve."""
    return [float(value) if (value := row[key]) is not None else float("nan") for row in rows]


Sizes = TypeVar("Sizes")
# Draws rows onto a matplotlib figure.
Draw = Callable[[Any, Sequence[Row]], None]


@final
@dataclass(frozen=True)
class Item(Generic[Sizes]):
    """A table, a figure or a list of numbers that `dpftrl reproduce` can recompute.

    Attributes:
        name: Its name on the command line.
        title: What it shows.
        full: The paper's sizes, or larger ones.
        quick: Reduced sizes that take a few seconds.
        compute: Computes the findings for given sizes.
        draw: Draws the figure; None for a table.
        height: Height of the figure in inches, at a width of 11.
    """

    name: str
    title: str
    full: Sizes
    quick: Sizes
    compute: Callable[[Sizes, Progress], Findings]
    draw: Draw | None = None
    height: float = 4.2

    def findings(self, quick: bool, on_progress: Progress) -> Findings:
        """Compute the findings; at reduced size they have no verdicts."""
        findings = self.compute(self.quick if quick else self.full, on_progress)
        if not self.is_reduced(quick):
            return findings
        return Findings(findings.rows, [claim.at_reduced_size() for claim in findings.claims])

    def is_reduced(self, quick: bool) -> bool:
        """Whether the sizes are reduced: some items have their full size even if `quick`."""
        return quick and self.quick != self.full

    def settings(self, quick: bool) -> str:
        """A hash of everything that the result depends on, except the code."""
        text = f"{self.name} {COMPUTED_SINCE} {self.quick if quick else self.full!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# Ticks of a logarithmic axis that spans about a decade.
FINE_STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9)
COARSE_STEPS = (1, 2, 5)


def panels(figure: Any, columns: int, lines: int = 1, **shared: Any) -> list[Any]:
    """Add `lines` rows of `columns` axes with a light grid, and return them row by row."""
    grid: Any = figure.subplots(lines, columns, squeeze=False, **shared)
    axes: list[Any] = [panel for line in grid for panel in line]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
        panel.set_axisbelow(True)
    return axes


def looks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The style of each series, the same in all panels; no two series differ in color alone.

    The first lines are wider, and markers are hollow: a line below another one stays visible.
    """
    names = list(series_of(rows))
    return dict(zip(names, line_styles(len(names)), strict=True))


def curves(axes: Any, rows: Sequence[Row], x: str, y: str, look: dict[str, dict[str, Any]]) -> None:
    """Plot one line per series, with at most about 20 markers."""
    for name, part in series_of(rows).items():
        every = max(1, len(part) // 20)
        axes.plot(column(part, x), column(part, y), label=name, markevery=every, **look[name])


def tick_steps(values: Sequence[float]) -> Sequence[float]:
    """Steps for the ticks of a logarithmic axis: fine steps would overlap on a long axis."""
    finite = [value for value in values if value > 0]  # NaN fails this, too
    is_short = bool(finite) and max(finite) < 6 * min(finite)
    return FINE_STEPS if is_short else COARSE_STEPS


def log_ticks(axis: Any, steps: Sequence[float] = COARSE_STEPS) -> None:
    """Make an axis logarithmic, with ticks at 1, 2, 5, 10 times powers of ten, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=tuple(steps)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Any, axes: Any, columns: int = 4) -> None:
    """Put one legend for all panels below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="medium"
    )


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
