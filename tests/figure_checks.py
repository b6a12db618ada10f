"""Checks on matplotlib figures that several tests share."""

from itertools import combinations
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex


def look(line: Any) -> tuple[str, str, str]:
    """Return the colour, the dashes and the marker of a line."""
    return to_hex(line.get_color()), str(line.get_linestyle()), str(line.get_marker())


def labelled(axes: Any) -> list[Any]:
    """Return the lines that belong into a legend."""
    return [line for line in axes.lines if not str(line.get_label()).startswith("_")]


def renderer_of(figure: Any) -> Any:
    """Draw the figure; return what measures its texts."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def overlapping(axis: Any, renderer: Any) -> list[tuple[str, str]]:
    """Return the pairs of tick labels that overlap, on an axis whose labels are not rotated."""
    low, high = sorted(axis.get_view_interval())
    shown = [
        tick.label1
        for tick in axis.get_major_ticks()
        if low <= tick.get_loc() <= high and tick.label1.get_visible() and tick.label1.get_text()
    ]
    if any(label.get_rotation() for label in shown):
        return []
    return [
        (first.get_text(), second.get_text())
        for first, second in combinations(shown, 2)
        if first.get_window_extent(renderer).overlaps(second.get_window_extent(renderer))
    ]


def check_text(figure: Any) -> None:
    """Check that axes have labels, that no text is cut off, and that tick labels do not overlap."""
    renderer, page = renderer_of(figure), figure.bbox
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel() or _has_row_names(axes)
        for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
            if text.get_text():
                box = text.get_window_extent(renderer)
                assert page.x0 - 1 <= box.x0 < box.x1 <= page.x1 + 1
                assert page.y0 - 1 <= box.y0 < box.y1 <= page.y1 + 1
        for axis in (axes.xaxis, axes.yaxis):
            assert overlapping(axis, renderer) == []


def _has_row_names(axes: Any) -> bool:
    """Return whether the y-axis, which panels can share, has names that need no further label."""
    return any(
        text.get_text()[:1].isalpha()
        for sibling in axes.get_shared_y_axes().get_siblings(axes)
        for text in sibling.get_yticklabels()
    )
