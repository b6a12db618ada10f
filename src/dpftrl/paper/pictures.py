"""Helpers that draw the figures of the paper as PNG and SVG, in the colours of `dpftrl.plots`."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from dpftrl.errors import InvalidInput
from dpftrl.paper.findings import Draw, Row, column, series_of
from dpftrl.plots import COLOURS, DASHES

# Ticks of a logarithmic axis that spans about a decade.
FINE_STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
FORMATS = ("png", "svg")


def draw_files(draw: Draw, rows: Sequence[Row], height: float, folder: Path, name: str) -> None:
    """Draw a figure and write it in each format."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput("figures need matplotlib: pip install 'dpftrl[plot]'") from None
    library: Any = matplotlib  # its types are partial
    with library.rc_context({"font.size": 11, "svg.hashsalt": name, "svg.fonttype": "none"}):
        figure: Any = Figure(figsize=(11, height), layout="constrained")
        draw(figure, rows)
        for kind in FORMATS:
            # Without a date the same rows give the same file.
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(folder / f"{name}.{kind}", dpi=130, metadata=metadata)


def panels(figure: Any, columns: int, lines: int = 1, **shared: Any) -> list[Any]:
    """Axes with a light grid, in `lines` rows of `columns`, listed row by row."""
    grid: Any = figure.subplots(lines, columns, squeeze=False, **shared)
    axes: list[Any] = [panel for line in grid for panel in line]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
        panel.set_axisbelow(True)
    return axes


def looks(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """The colour, dashes and marker of each series; no two series differ in colour alone."""
    styles = zip(cycle(COLOURS[:7]), cycle(DASHES), cycle(MARKERS), strict=False)
    return {
        name: {"color": colour, "linestyle": dash, "marker": marker}
        for name, (colour, dash, marker) in zip(series_of(rows), styles, strict=False)
    }


def curves(axes: Any, rows: Sequence[Row], x: str, y: str, look: dict[str, dict[str, str]]) -> None:
    """Plot one line per series."""
    for name, part in series_of(rows).items():
        axes.plot(column(part, x), column(part, y), label=name, markersize=3.5, **look[name])


def log_ticks(axis: Any, steps: Sequence[float] = (1, 2, 5)) -> None:
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
