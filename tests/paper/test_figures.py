"""The figures of docs/paper, drawn from their stored rows: lines and labels can be told apart."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from dpftrl.paper.item import COARSE_STEPS, FINE_STEPS, log_ticks, tick_steps
from dpftrl.paper.results import ITEMS, load_results
from figure_checks import check_text, labelled, look, overlapping, renderer_of

FOLDER = Path(__file__).parents[2] / "docs" / "paper"
RESULTS = {result.item: result for result in load_results(FOLDER)}
FIGURES = [item for item in ITEMS if item.draw is not None]
every = pytest.mark.parametrize("item", FIGURES, ids=lambda item: item.name)


def drawn(item: Any) -> Any:
    figure = Figure(figsize=(11, item.height), layout="constrained")
    item.draw(figure, RESULTS[item.name].rows)
    return figure


@every
def test_axes_have_labels_that_are_not_cut_off_and_do_not_overlap(item):
    check_text(drawn(item))


def test_fine_ticks_on_a_long_axis_would_overlap():
    """A negative control: these were the ticks of fig-rmse-nkb."""
    (item,) = [item for item in FIGURES if item.name == "fig-rmse-nkb"]
    figure = drawn(item)
    log_ticks(figure.axes[1].yaxis, FINE_STEPS)
    assert overlapping(figure.axes[1].yaxis, renderer_of(figure))


@every
def test_lines_differ_and_are_in_the_legend(item):
    figure = drawn(item)
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    entries = {text.get_text() for legend in legends for text in legend.get_texts()}
    styles: dict[str, Any] = {}
    for axes in figure.axes:
        lines = [line for line in labelled(axes) if len(line.get_xdata())]
        for line in lines:
            style = look(line)
            assert styles.setdefault(line.get_label(), style) == style  # the same in all panels
        widths = [line.get_linewidth() for line in lines]
        if item.name != "tab-sonwp-accuracy":
            assert len(set(widths)) == len(widths)
    assert len(set(styles.values())) == len(styles)
    assert set(styles) <= entries
    for legend in legends:
        names = [text.get_text() for text in legend.get_texts()]
        assert len(names) == len(set(names))


def test_thirteen_series_have_thirteen_colours():
    (item,) = [item for item in FIGURES if item.name == "fig-frontier"]
    (axes,) = drawn(item).axes
    lines = labelled(axes)
    assert len({to_hex(line.get_color()) for line in lines}) == len(lines) == 13


def test_long_axes_get_few_ticks():
    assert tick_steps([1.0, 5.0]) == FINE_STEPS
    assert tick_steps([1.0, 200.0]) == COARSE_STEPS
    assert tick_steps([float("nan"), 2.0, 3.0]) == FINE_STEPS
    assert tick_steps([]) == COARSE_STEPS
