"""Plots: lines that can be told apart, complete legends and labels, and the plan in its plot."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpftrl import MinSep, plots
from dpftrl.plan import Budget, Fleet, Option, Question, extrapolate, mechanism, options
from dpftrl.plots import (
    COLOURS,
    Panel,
    Rival,
    line_sizes,
    line_styles,
    plot_coefficients,
    plot_comparison,
    plot_extrapolation,
    plot_training,
)
from figure_checks import check_text, labelled, look

CLIENTS = MinSep(rounds=300, min_sep=50)
NAMES = [
    "blt-b100",
    "blt-b400",
    "blt-b1000",
    "band-sqrt:50",
    "inv-sqrt:50",
    "sqrt",
    "tree",
    "tree-vanilla",
    "independent",
]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Return a function that calls a plot function and returns its figure."""
    figures: list[Any] = []
    save = plots._save

    def keep(figure: Any, path: Path, **options: Any) -> None:
        save(figure, path, **options)
        figures.append(figure)

    monkeypatch.setattr(plots, "_save", keep)

    def draw(plot: Any, *arguments: Any) -> Any:
        plot(*arguments, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 1000
        return figures[-1]

    return draw


def test_twenty_lines_have_different_styles():
    styles = line_styles(20)
    looks = {(style["color"], style["linestyle"], style["marker"]) for style in styles}
    assert len(looks) == 20
    assert len({style["color"] for style in styles[: len(COLOURS)]}) == len(COLOURS) == 13
    assert all(style["markerfacecolor"] == "none" for style in styles)


@pytest.mark.parametrize("count", [1, 2, 5, 13])
def test_lines_below_others_are_wider(count):
    widths = [line_sizes(number, count)["linewidth"] for number in range(count)]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == count
    assert 1 < widths[-1] <= widths[0] < 3


# --- dpftrl compare ------------------------------------------------------------------------------


@pytest.fixture
def comparison(drawn):
    rivals = [
        Rival(name, built := mechanism(name, CLIENTS), built.error_report(CLIENTS))
        for name in NAMES
    ]
    return drawn(plot_comparison, rivals, CLIENTS)


def test_a_comparison_of_nine_mechanisms_has_nine_styles_and_legend_entries(comparison):
    _, curves = comparison.axes
    lines = labelled(curves)
    assert [line.get_label() for line in lines] == NAMES
    assert len({look(line) for line in lines}) == len({look(line)[0] for line in lines}) == 9
    (legend,) = comparison.legends
    assert [text.get_text() for text in legend.get_texts()] == NAMES
    check_text(comparison)


def test_trees_are_smooth_lines_with_their_range_shaded_behind(comparison):
    _, curves = comparison.axes
    by_name = {line.get_label(): line for line in labelled(curves)}
    for name in ("tree", "tree-vanilla"):
        curve = mechanism(name, CLIENTS).error_curve(CLIENTS.rounds)
        shown = by_name[name].get_ydata()
        assert len(shown) == plots.WINDOWS < len(curve)

        def jumps(values):
            return np.abs(np.diff(np.log(values))).mean()

        assert jumps(shown) < jumps(curve)
    assert len(by_name["sqrt"].get_ydata()) == CLIENTS.rounds
    shades = curves.collections
    assert len(shades) == 2
    lowest_line = min(line.get_zorder() for line in curves.lines)
    assert all(shade.get_alpha() < 0.3 and shade.get_zorder() < lowest_line for shade in shades)


def test_equal_losses_are_both_visible(comparison):
    dots, _ = comparison.axes
    rms, largest = labelled(dots)
    assert largest.get_markerfacecolor() == "none"
    assert largest.get_markersize() > rms.get_markersize()
    assert "clip norms" in dots.get_xlabel()


# --- dpftrl plan ---------------------------------------------------------------------------------


def walks_of(budget: Budget):
    fleet = Fleet(population=20_000, report_goal=100)
    question = Question(fleet, 400, budget)
    candidates = [row for row in options(question, False) if isinstance(row, Option)]
    return extrapolate(question, candidates, steps=5)


@pytest.fixture(scope="module")
def calibrated():
    return walks_of(Budget(1e-8, epsilon=4.0))


def test_a_plan_shows_the_planned_point_and_the_target(drawn, calibrated):
    figure = drawn(partial(plot_extrapolation, epsilon=4.0), calibrated, 1e-8)
    for axes, place in zip(figure.axes, (100, 400, 200), strict=True):
        by_name = {line.get_label(): line for line in labelled(axes)}
        planned = by_name["planned: blt"]
        assert list(planned.get_xdata()) == [place]
        assert planned.get_ydata() == pytest.approx([4.0], rel=1e-6)
        target = by_name["target epsilon 4.000"]
        assert target.get_ydata()[0] == pytest.approx(4.0, rel=1e-6)
        assert "epsilon at delta 1e-08, at equal utility" in axes.get_ylabel()
    check_text(figure)


def test_the_lines_of_a_plan_differ_and_are_all_in_the_legend(drawn, calibrated):
    figure = drawn(partial(plot_extrapolation, epsilon=4.0), calibrated, 1e-8)
    (legend,) = figure.legends
    entries = [text.get_text() for text in legend.get_texts()]
    for axes in figure.axes:
        lines = labelled(axes)
        assert [line.get_label() for line in lines] == entries
        assert len({look(line) for line in lines}) == len(lines)
        assert len({line.get_linewidth() for line in lines[:-2]}) == len(lines) - 2


def test_a_plan_by_noise_multiplier_has_no_target(drawn):
    figure = drawn(plot_extrapolation, walks_of(Budget(1e-8, noise_multiplier=8.0)), 1e-8)
    for axes in figure.axes:
        labels = [line.get_label() for line in labelled(axes)]
        assert "planned: blt" in labels
        assert not any(label.startswith("target") for label in labels)


# --- dpftrl show and dpftrl train ----------------------------------------------------------------


def test_coefficients_of_several_mechanisms_differ(drawn):
    series = {
        name: (mechanism(name).coefficients(40), mechanism(name).inverse_coefficients(40))
        for name in ("blt-b100", "blt-b400", "blt-b1000")
    }
    figure = drawn(plot_coefficients, series)
    for axes in figure.axes:
        lines = labelled(axes)
        assert len({look(line) for line in lines}) == len(lines) == 3
        assert len(axes.get_legend().get_texts()) == 3
    check_text(figure)


@pytest.mark.parametrize("points", [0, 1, 200])
def test_training_curves_have_labels_and_visible_points(drawn, points):
    rounds = list(range(points))
    panels = [
        Panel("accuracy (%)", rounds, [0.2] * points, baseline=0.1),
        Panel("epsilon of all rounds so far", rounds, [0.01 * n for n in rounds]),
    ]
    figure = drawn(plot_training, panels)
    assert [axes.get_ylabel() for axes in figure.axes] == [panel.label for panel in panels]
    assert [len(axes.lines) for axes in figure.axes] == [2, 1]  # one with the baseline
    assert all(axes.lines[0].get_marker() != "None" for axes in figure.axes)
    check_text(figure)
