"""Plots of mechanisms, plans and trainings.

Lines differ in colour and dashes, so that colour-blind readers and grey prints can tell them apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import ErrorReport, Mechanism
from dpftrl.participation import Participation
from dpftrl.plan import Walk

# The palette of Okabe and Ito, which is distinct under all common forms of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", ":", "-.")


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
    figure, (dots, curves) = _figure(path, 2, height=0.3 * len(rivals) + 2.2)
    places = np.arange(len(rivals))[::-1]
    rms_losses = [rival.error_report.rms_loss for rival in rivals]
    max_losses = [rival.error_report.max_loss for rival in rivals]
    dots.hlines(places, rms_losses, max_losses, color="#999999", linewidth=1)
    dots.plot(rms_losses, places, "o", color=COLOURS[0], label="RmsLoss")
    dots.plot(max_losses, places, "D", color=COLOURS[1], label="MaxLoss")
    for place, value in zip(places, rms_losses, strict=True):
        dots.annotate(f"{value:.4g}  ", (value, place), ha="right", va="center", fontsize="x-small")
    dots.set_yticks(places, [rival.label for rival in rivals])
    dots.set_xscale("log")
    dots.margins(x=0.12)
    dots.set_xlabel("loss: error times sensitivity")
    dots.legend(frameon=False)
    for (label, mechanism, error_report), style in zip(rivals, _styles(), strict=False):
        curve = mechanism.error_curve(participation.rounds) * error_report.sensitivity.value
        width = 0.6 if mechanism.has_jagged_error else 1.6
        rounds = np.arange(1, len(curve) + 1)
        curves.plot(rounds, curve, label=label, linewidth=width, **style)
    curves.set_yscale("log")
    curves.set_xlabel("round")
    curves.set_ylabel("noise on the prefix sum (std)")
    curves.legend(fontsize="x-small", frameon=False, ncols=2)
    figure.suptitle(str(participation))
    _save(figure, path)


def plot_coefficients(series: Mapping[str, tuple[Vector, Vector]], path: Path) -> None:
    """Plot the coefficients of C and of C^-1 by lag.

    Args:
        series: The coefficients of C and of C^-1 by the name of the mechanism.
        path: A .png, .svg or .pdf file.
    """
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
    """Plot epsilon by mechanism against report goal, rounds or min-sep; one panel per walk."""
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
    """Plot accuracy on held-out clients, and epsilon, by round."""
    figure, (left, right) = _figure(path, 2, height=3.4)
    left.plot(rounds, [100 * share for share in accuracy], color=COLOURS[0], marker=".")
    left.set_ylabel("accuracy on held-out clients (%)")
    right.plot(rounds, epsilon, color=COLOURS[1], marker=".")
    right.set_ylabel("epsilon so far")
    for axes in (left, right):
        axes.set_xlabel("round")
        axes.set_ylim(bottom=0)
    _save(figure, path)


def _plain_log_scale(axes: Any) -> None:
    """Make the y-axis logarithmic, with ticks at 1, 2, 5 times powers of ten, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _styles() -> Iterator[dict[str, str]]:
    """Yield line styles: all colours with the first dashes, then with the next, and so on."""
    return ({"color": colour, "linestyle": dash} for dash in cycle(DASHES) for colour in COLOURS)


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


def _save(figure: Any, path: Path) -> None:
    """Write a figure; raise `InvalidInput` if that is not possible."""
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
