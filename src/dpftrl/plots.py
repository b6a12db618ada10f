"""Plots of mechanisms, plans and trainings.

Lines differ in colour, dashes and markers, so that colour-blind readers and grey prints can tell
them apart. Lines that are drawn first are wider, so that a line on top does not hide them.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Vector
from dpftrl._internal.formatting import rounded_up
from dpftrl._internal.storage import replace_file
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import ErrorReport, Mechanism
from dpftrl.participation import Participation
from dpftrl.plan import Point, Walk

# Written into every plot.
MARK = "dpftrl"

# First the palette of Okabe and Ito, which is distinct under all common forms of colour blindness;
# then darker colours for the further lines of a crowded plot.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#999933",
    "#332288",
    "#66C200",
    "#7F4F24",
    "#999999",
)
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WINDOWS = 64  # points of the smoothed curve of a mechanism whose error jumps from round to round


class Rival(NamedTuple):
    """A mechanism in a comparison, with its label and its error report."""

    label: str
    mechanism: Mechanism
    error_report: ErrorReport


def plot_comparison(rivals: Sequence[Rival], participation: Participation, path: Path) -> None:
    """Plot RmsLoss and MaxLoss of each mechanism, and the noise on the prefix sum after each round.

    Args:
        rivals: The mechanisms, from top to bottom.
        participation: The participation of the error reports.
        path: A .png, .svg or .pdf file.
    """
    figure, (dots, curves) = _figure(path, 2, height=0.3 * len(rivals) + 2.8)
    places = np.arange(len(rivals))[::-1]
    rms_losses = [rival.error_report.rms_loss for rival in rivals]
    max_losses = [rival.error_report.max_loss for rival in rivals]
    dots.hlines(places, rms_losses, max_losses, color="#999999", linewidth=1)
    # The diamond is hollow: a dot in it shows that both losses are the same.
    hollow = {"markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.5}
    dots.plot(rms_losses, places, "o", color=COLOURS[0], label="RmsLoss", markersize=5)
    dots.plot(max_losses, places, "D", color=COLOURS[1], label="MaxLoss", **hollow)
    for place, value in zip(places, rms_losses, strict=True):
        dots.annotate(
            f"{value:.4g}",
            (value, place),
            xytext=(-9, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize="x-small",
        )
    dots.set_yticks(places, [rival.label for rival in rivals])
    _plain_log_scale(dots.xaxis)
    dots.margins(x=0.15)
    dots.set_xlabel("loss: error times sensitivity (clip norms, at mu = 1)")
    dots.legend(frameon=False)
    has_range = False
    styles = line_styles(len(rivals))
    for (label, mechanism, error_report), style in zip(rivals, styles, strict=True):
        curve = mechanism.error_curve(participation.rounds) * error_report.sensitivity.value
        rounds = np.arange(1, len(curve) + 1)
        if mechanism.has_jagged_error and len(curve) > 2 * WINDOWS:
            has_range = True
            rounds, curve = _smoothed(curves, curve, style["color"])
        curves.plot(rounds, curve, label=label, markevery=_spread_markers(len(curve)), **style)
    _plain_log_scale(curves.yaxis)
    curves.set_xlabel("round")
    curves.set_ylabel("noise on the prefix sum (std in clip norms, at mu = 1)")
    if has_range:
        note = "Shaded: range of a mechanism whose noise jumps from round to round;\n"
        curves.set_title(note + "its line is the root mean square.", fontsize="x-small")
    _legend_below(figure, *curves.get_legend_handles_labels(), columns=6)
    figure.suptitle(str(participation))
    _save(figure, path)


def _smoothed(axes: Any, curve: Vector, colour: Any) -> tuple[Vector, Vector]:
    """Shade the range of a curve in windows of rounds; return their middles and the RMS in each."""
    ends = np.linspace(0, len(curve), WINDOWS + 1).round().astype(int)
    windows = [curve[start:end] for start, end in pairwise(ends)]
    middles = (ends[:-1] + ends[1:] + 1) / 2
    low, high = [window.min() for window in windows], [window.max() for window in windows]
    axes.fill_between(middles, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1)
    return middles, np.sqrt([np.mean(window**2) for window in windows])


def plot_canary_scores(
    scores: Vector, included: NDArray[np.bool_], path: Path, kind: str = "gradients"
) -> None:
    """Plot histograms of the scores of canaries, of included ones and of the others.

    Args:
        scores: The score of each canary: for gradients its log-likelihood ratio, for sentences by
            how much its loss fell, compared with the median sentence.
        included: Whether each canary was included.
        path: A .png, .svg or .pdf file.
        kind: The kind of canaries, `gradients` or `sentences`.
    """
    figure, axes = _figure(path, 1, height=3.6)
    edges = np.histogram_bin_edges(scores, bins=40)
    for name, chosen, colour, hatch in (
        ("not included", ~included, COLOURS[0], ""),
        ("included", included, COLOURS[1], "//"),
    ):
        axes.hist(
            scores[chosen],
            edges,
            label=f"{name} ({np.count_nonzero(chosen):,})",
            color=colour,
            alpha=0.55,
            hatch=hatch,
        )
    axes.axvline(0.0, color="#000000", linewidth=1)
    if kind == "sentences":
        axes.set_xlabel("how much the loss of a sentence fell (nats), compared with the median")
    else:
        axes.set_xlabel("score of a canary (log-likelihood ratio); guessed as included right of 0")
    axes.set_ylabel("number of canaries")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_coefficients(series: Mapping[str, tuple[Vector, Vector]], path: Path) -> None:
    """Plot the coefficients of C and of C^-1 by lag.

    Args:
        series: The coefficients of C and of C^-1 by the name of the mechanism.
        path: A .png, .svg or .pdf file.
    """
    figure, (left, right) = _figure(path, 2, height=3.6)
    styles = line_styles(len(series))
    for (name, (strategy, inverse)), style in zip(series.items(), styles, strict=True):
        every = _spread_markers(len(strategy), most=130)  # one coefficient may be all there is
        left.plot(strategy, label=name, markevery=every, **style)
        lags = np.arange(1, len(inverse))
        right.plot(lags, -inverse[1:], label=name, markevery=every, **style)
    left.set_yscale("symlog", linthresh=1e-4)
    right.set_yscale("symlog", linthresh=1e-6)
    left.set_ylabel("coefficient of C")
    right.set_ylabel("minus the coefficient of C⁻¹")
    for axes in (left, right):
        axes.set_xlabel("lag (rounds)")
        axes.legend(frameon=False)
    _save(figure, path)


def plot_extrapolation(
    walks: Sequence[Walk],
    delta: float,
    path: Path,
    epsilon: float | None = None,
    reference: str = "blt",
) -> None:
    """Plot epsilon by mechanism against report goal, rounds or min-sep; one panel per walk.

    All mechanisms have the utility of the reference in the plan. A vertical line shows the planned
    setting, a star the reference in it, and a horizontal line the target epsilon.

    Args:
        walks: The walks away from the plan.
        delta: The delta of every epsilon.
        path: A .png, .svg or .pdf file.
        epsilon: The epsilon that the reference is calibrated to, if there is one.
        reference: The mechanism that keeps the noise of its plan.
    """
    figure, axes_of_walks = _figure(path, len(walks), height=4.4)
    panels: list[Any] = np.ravel(axes_of_walks).tolist()  # a single panel comes without a list
    labels = {
        "report_goal": "report goal (reports per round; noise scales with it)",
        "min_sep": "min-sep (rounds)",
    }
    planned = _planned_point(walks)
    for axes, walk in zip(panels, walks, strict=True):
        names = list(walk.points[0].epsilon) if walk.points else []
        for name, style in zip(names, line_styles(len(names)), strict=True):
            curve = [point.epsilon[name] for point in walk.points]  # None leaves a gap
            axes.plot(walk.places, curve, label=name, **style)
        if planned is not None:
            _mark_plan(axes, walk, planned, epsilon, reference)
        _plain_log_scale(axes.xaxis)
        _plain_log_scale(axes.yaxis)
        axes.tick_params(axis="x", labelrotation=45)
        axes.set_xlabel(labels.get(walk.along, walk.along))
        axes.set_ylabel(f"epsilon at delta {delta:g}, at equal utility")
    _legend_below(figure, *panels[0].get_legend_handles_labels(), columns=5)
    _save(figure, path)


def _planned_point(walks: Sequence[Walk]) -> Point | None:
    """The point that all walks start from: it is the only one that is in every walk."""
    if not walks:
        return None
    others = [{_setting(point) for point in walk.points} for walk in walks[1:]]
    common = [
        point
        for point in walks[0].points
        if point.scale == 1 and all(_setting(point) in settings for settings in others)
    ]
    return common[0] if common else None


def _setting(point: Point) -> tuple[int, Participation]:
    return point.report_goal, point.participation


def _mark_plan(axes: Any, walk: Walk, planned: Point, target: float | None, reference: str) -> None:
    """Mark the planned setting, the reference in it, and the epsilon that was the target."""
    place = Walk(walk.along, (planned,)).places[0]
    axes.axvline(place, color="0.6", linewidth=1, linestyle=":", zorder=1)
    if target is not None:
        label = f"target epsilon {rounded_up(target)}"
        axes.axhline(target, color="0.4", linewidth=1, linestyle=(0, (6, 3)), label=label, zorder=1)
    epsilon = planned.epsilon.get(reference)
    epsilons = [] if epsilon is None else [epsilon]
    star = {"marker": "*", "markersize": 15, "color": "black", "markerfacecolor": "gold"}
    axes.plot(
        [place] * len(epsilons),
        epsilons,
        linestyle="",
        label=f"planned: {reference}",
        zorder=5,
        **star,
    )


@final
@dataclass(frozen=True)
class Panel:
    """A curve by rounds.

    Attributes:
        label: Label of the vertical axis.
        rounds: Number of released rounds at each value.
        values: The values.
        baseline: A value to compare with, drawn as a dashed line; None for no line.
    """

    label: str
    rounds: Sequence[int]
    values: Sequence[float]
    baseline: float | None = None


def plot_training(panels: Sequence[Panel], path: Path, *, private: bool = False) -> None:
    """Plot curves of a training by round, one beside the other.

    Args:
        panels: The curves.
        path: The image to write.
        private: Whether only the owner may read the image.
    """
    figure, all_axes = _figure(path, len(panels), height=3.4)
    marks = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
    each: list[Any] = np.ravel(all_axes).tolist()
    for panel, axes, (colour, mark) in zip(panels, each, marks, strict=False):
        every = _spread_markers(len(panel.rounds))
        style = {"color": colour, "marker": mark, "markersize": 4, "markevery": every}
        axes.plot(panel.rounds, panel.values, **style)
        axes.set_ylabel(panel.label)
        axes.set_xlabel("rounds released")
        if panel.baseline is not None:
            dashes: Any = {"color": "0.4", "linewidth": 1, "linestyle": (0, (6, 3))}
            axes.axhline(panel.baseline, label="always the most common word", **dashes)
            axes.legend(frameon=False, fontsize="small")
        if min(panel.values, default=0.0) >= 0:
            axes.set_ylim(bottom=0)
    _save(figure, path, private=private)


def _plain_log_scale(axis: Any) -> None:
    """Make an axis logarithmic, with ticks at 1, 2, 5 times powers of ten, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def line_styles(count: int) -> list[dict[str, Any]]:
    """Return a style for each of `count` lines: colour, dashes, marker and widths.

    No two of the first 104 lines have the same colour, dashes and marker. Later lines are thinner
    and have smaller markers, which are hollow: a line below another one stays visible.
    """
    styles = zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS), range(count), strict=False)
    return [
        {
            "color": colour,
            "linestyle": dash,
            "marker": marker,
            "markerfacecolor": "none",
            **line_sizes(number, count),
        }
        for colour, dash, marker, number in styles
    ]


def line_sizes(number: int, count: int) -> dict[str, float]:
    """Return the widths of line `number` of `count`: the first line is the widest."""
    above = (count - 1 - number) / max(count - 1, 4)  # few lines need little difference
    return {"linewidth": 1.2 + 1.6 * above, "markersize": 4.0 + 3.5 * above}


def _spread_markers(points: int, most: int = 20) -> int:
    """Return how many points apart markers are, so that a curve has about `most` at most."""
    return max(1, points // most)


def _legend_below(figure: Any, handles: Any, labels: Any, columns: int) -> None:
    """Put one legend below all panels, where it covers no line."""
    where: Any = {"loc": "outside lower center", "ncols": columns}
    figure.legend(handles, labels, frameon=False, fontsize="small", handlelength=3.5, **where)


def check_plot_path(path: Path) -> None:
    """Raise `InvalidInput` if no plot can be written to this path; call it before computing."""
    if path.suffix not in {".png", ".svg", ".pdf"}:
        raise InvalidInput(f"the name of a plot ends in .png, .svg or .pdf, got {str(path)!r}")
    if not path.parent.is_dir():
        raise InvalidInput(f"{path} cannot be written: there is no folder {path.parent}")


def _figure(path: Path, columns: int, height: float) -> tuple[Any, Any]:
    """A figure with one row of axes, which have a light grid, after checking the path."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput("plots need matplotlib: pip install 'dpftrl[plot]'") from None
    check_plot_path(path)
    figure = Figure(figsize=(11, height), layout="constrained")
    axes: Any = figure.subplots(1, columns)
    for panel in np.ravel(axes):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
        panel.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path, *, private: bool = False) -> None:
    """Write a figure; raise `InvalidInput` if that is not possible."""
    content = io.BytesIO()
    # The mark by which the command line knows that it may replace the file.
    mark = {"Software" if path.suffix == ".png" else "Creator": MARK}
    figure.savefig(content, dpi=130, format=path.suffix[1:], metadata=mark)
    replace_file(path, content.getvalue(), private=private)
