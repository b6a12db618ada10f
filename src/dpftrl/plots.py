"""Plots, with labelled axes and colours that survive colour blindness and grey print."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import BinaryTree, ErrorReport, FullTree, Mechanism
from dpftrl.participation import Participation
from dpftrl.plan import Walk

# Okabe and Ito's palette: distinct under every common colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", ":", "-.")


class Rival(NamedTuple):
    """A mechanism under comparison, and what to call it."""

    label: str
    mechanism: Mechanism
    error_report: ErrorReport


def plot_comparison(rivals: Sequence[Rival], participation: Participation, path: Path) -> None:
    """ErrorReport of each mechanism as bars, and round by round as curves."""
    figure, (dots, curves) = _figure(path, 2, height=0.3 * len(rivals) + 2.2)
    places = np.arange(len(rivals))[::-1]
    rms, most = (
        [rival.error_report.rms_loss for rival in rivals],
        [rival.error_report.max_loss for rival in rivals],
    )
    dots.hlines(places, rms, most, color="#999999", linewidth=1)
    dots.plot(rms, places, "o", color=COLOURS[0], label="RmsLoss")
    dots.plot(most, places, "D", color=COLOURS[1], label="MaxLoss")
    for place, value in zip(places, rms, strict=True):
        dots.annotate(f"{value:.4g}  ", (value, place), ha="right", va="center", fontsize="x-small")
    dots.set_yticks(places, [rival.label for rival in rivals])
    dots.set_xscale("log")
    dots.margins(x=0.12)
    dots.set_xlabel("loss: error times sensitivity")
    dots.legend(frameon=False)
    for (label, mechanism, loss), style in zip(rivals, _styles(), strict=False):
        curve = mechanism.error_curve(participation.rounds) * loss.sensitivity.value
        jagged = isinstance(mechanism, BinaryTree | FullTree)
        width = 0.6 if jagged else 1.6
        rounds = np.arange(1, len(curve) + 1)
        curves.plot(rounds, curve, label=label, linewidth=width, **style)
    curves.set_yscale("log")
    curves.set_xlabel("round")
    curves.set_ylabel("noise on the prefix sum (std)")
    curves.legend(fontsize="x-small", frameon=False, ncols=2)
    figure.suptitle(str(participation))
    _save(figure, path)


def plot_coefficients(series: Mapping[str, tuple[Vector, Vector]], path: Path) -> None:
    """The coefficients of C and of C^-1, by lag."""
    figure, (left, right) = _figure(path, 2, height=3.6)
    for (name, (strategy, inverse)), style in zip(series.items(), _styles(), strict=False):
        left.plot(strategy, label=name, **style)
        right.plot(np.arange(1, len(inverse)), -inverse[1:], label=name, **style)
    left.set_yscale("symlog", linthresh=1e-4)
    right.set_yscale("symlog", linthresh=1e-6)
    left.set_ylabel("coefficient of C")
    right.set_ylabel("minus the coefficient of C⁻¹")
    for axes in (left, right):
        axes.set_xlabel("lag (rounds)")
        axes.legend(frameon=False)
    _save(figure, path)


def plot_extrapolation(walks: Sequence[Walk], delta: float, path: Path) -> None:
    """Epsilon of each mechanism against report goal, rounds and min-sep."""
    figure, panels = _figure(path, len(walks), height=3.8)
    labels = {"report_goal": "report goal (noise scales with it)", "min_sep": "min-sep (rounds)"}
    for axes, walk in zip(panels, walks, strict=True):
        names = list(walk.points[0].epsilon) if walk.points else []
        for name, style in zip(names, _styles(), strict=False):
            curve = [point.epsilon[name] for point in walk.points]  # None leaves a gap
            axes.plot(walk.places, curve, label=name, marker=".", **style)
        axes.set_xscale("log")
        _plain_log_scale(axes)
        axes.set_xlabel(labels.get(walk.along, walk.along))
        axes.set_ylabel(f"epsilon at delta {delta:g}")
    panels[0].legend(fontsize="small", frameon=False)
    _save(figure, path)


def plot_training(
    rounds: Sequence[int], accuracy: Sequence[float], epsilon: Sequence[float], path: Path
) -> None:
    """Accuracy on held-out people, and epsilon, by round."""
    figure, (left, right) = _figure(path, 2, height=3.4)
    left.plot(rounds, [100 * one for one in accuracy], color=COLOURS[0], marker=".")
    left.set_ylabel("accuracy on held-out people (%)")
    right.plot(rounds, epsilon, color=COLOURS[1], marker=".")
    right.set_ylabel("epsilon so far")
    for axes in (left, right):
        axes.set_xlabel("round")
        axes.set_ylim(bottom=0)
    _save(figure, path)


def _plain_log_scale(axes: Any) -> None:
    """A logarithmic scale whose marks read 1, 2, 5, 10, as people write them."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _styles() -> Iterator[dict[str, str]]:
    """A colour and a dash for each line, colours first."""
    return ({"color": colour, "linestyle": dash} for dash in cycle(DASHES) for colour in COLOURS)


def check_plot_path(path: Path) -> None:
    """Refuse what no plot can be written to, before anything is computed."""
    if path.suffix not in {".png", ".svg", ".pdf"}:
        raise InvalidInput(f"a plot ends in .png, .svg or .pdf, got {str(path)!r}")
    if not path.parent.is_dir():
        raise InvalidInput(f"{path} cannot be written: there is no folder {path.parent}")


def _figure(path: Path, columns: int, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput("plots need matplotlib: pip install 'dpftrl[plot]'") from None
    check_plot_path(path)
    figure = Figure(figsize=(11, height), layout="constrained")
    axes: Any = figure.subplots(1, columns)
    for one in np.ravel(axes):
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
        one.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
