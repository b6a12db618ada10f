"""The figures of an answer as plain data: series of points, with labels for the axes.

The browser draws them, and offers the same points as CSV.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl._internal.formatting import memory_text, rounded_up
from dpftrl.errors import DpftrlError
from dpftrl.mechanisms import Mechanism, ToeplitzMechanism
from dpftrl.mechanisms.coefficients import coefficients_of
from dpftrl.optimize import loss_value
from dpftrl.plan import DatasetAnswer, FleetAnswer, Walk

MOST_POINTS: Final = 256  # of one line
MOST_ROUNDS: Final = 200_000  # for which the error of every round is computed
MOST_LAGS: Final = 2_000  # of the coefficients

Figure = dict[str, Any]


def fleet_figures(answer: FleetAnswer) -> list[Figure]:
    """The figures of an answer for a fleet; those of the walks only if it has walks."""
    question = answer.resolved.question
    mechanisms = {row.label: row.plan.mechanism for row in answer.computed}
    scales = {row.label: row.error_report.sensitivity.value for row in answer.computed}
    order = {"min_sep": 0, "report_goal": 1, "rounds": 2}
    walks = sorted(answer.walks, key=lambda walk: order[walk.along])
    name = "RmsLoss" if question.objective == "rms" else "MaxLoss"
    points = [
        (row.label, row.memory_bytes, loss_value(row.error_report, question.objective))
        for row in answer.computed
    ]
    return [
        *(_walk_figure(walk, answer) for walk in walks),
        *_error_figure(
            mechanisms,
            scales,
            question.rounds,
            "Error per round",
            "round",
            "noise on prefix sums (clip norms, mu = 1)",
        ),
        _memory_figure(
            points,
            answer.recommended.label,
            "Loss against memory",
            f"{name} (at equal privacy)",
            "memory of the noise (bytes)",
        ),
        *_coefficient_figures(mechanisms, question.rounds),
    ]


def dataset_figures(answer: DatasetAnswer) -> list[Figure]:
    """The figures of an answer for a data set."""
    steps = answer.request.dataset.steps
    names = {id(row): f"{row.label}, {row.sampling}" for row in answer.computed}
    mechanisms = {names[id(row)]: row.mechanism for row in answer.computed}
    scales = {names[id(row)]: row.noise_multiplier for row in answer.computed}
    points = [
        (names[id(row)], row.mechanism.memory(steps), row.rms_noise) for row in answer.computed
    ]
    return [
        *_error_figure(
            mechanisms,
            scales,
            steps,
            "Error per step",
            "step",
            "noise on prefix sums (clip norms)",
        ),
        _memory_figure(
            points,
            names[id(answer.recommended)],
            "Noise against memory",
            "rms noise on prefix sums (clip norms)",
            "memory of the noise (vectors of model size)",
        ),
        *_coefficient_figures(mechanisms, steps),
    ]


def _walk_figure(walk: Walk, answer: FleetAnswer) -> Figure:
    question = answer.resolved.question
    fleet, planned = question.fleet, question.participation()
    place = {
        "report_goal": fleet.report_goal,
        "rounds": planned.rounds,
        "min_sep": planned.min_sep,
    }[walk.along]
    labels = list(walk.points[0].epsilon) if walk.points else []
    axis = {
        "report_goal": "report goal (reports per round; noise scales with it)",
        "rounds": "rounds",
        "min_sep": "min-sep (rounds)",
    }[walk.along]
    target = question.budget.epsilon
    return {
        "name": f"epsilon-by-{walk.along.replace('_', '-')}",
        "title": f"Epsilon against {walk.along.replace('_', '-' if 'sep' in walk.along else ' ')}",
        "x": {"label": axis, "log": True},
        "y": {
            "label": f"epsilon at delta {question.budget.delta:g}, at equal utility",
            "log": True,
        },
        "series": [
            {
                "name": label,
                "x": walk.places,
                "y": [_number(point.epsilon[label]) for point in walk.points],
            }
            for label in labels
        ],
        "planned": {
            "x": place,
            "y": answer.recommended.plan.guarantee.epsilon,
            "label": f"planned: {answer.recommended.label}",
        },
        "target": None
        if target is None
        else {"y": target, "label": f"target epsilon {rounded_up(target)}"},
    }


def _error_figure(
    mechanisms: dict[str, Mechanism],
    scales: dict[str, float],
    rounds: int,
    title: str,
    x_label: str,
    y_label: str,
) -> list[Figure]:
    if rounds > MOST_ROUNDS:
        return []
    series = list[dict[str, Any]]()
    for label, mechanism in mechanisms.items():
        try:
            curve = mechanism.error_curve(rounds) * scales[label]
        except DpftrlError:
            continue
        places = _places(len(curve))
        series.append({"name": label, "x": [i + 1 for i in places], "y": _values(curve, places)})
    return [
        {
            "name": "error-per-round",
            "title": title,
            "x": {"label": x_label, "log": False},
            "y": {"label": y_label, "log": True},
            "series": series,
        }
    ]


def _memory_figure(
    points: Sequence[tuple[str, float, float]], chosen: str, title: str, y_label: str, x_label: str
) -> Figure:
    return {
        "name": "loss-against-memory",
        "title": title,
        "x": {"label": x_label, "log": True},
        "y": {"label": y_label, "log": True},
        "markers": True,
        "series": [
            {
                "name": label,
                "x": [max(1, memory)],  # a logarithmic axis has no zero
                "y": [_number(loss)],
                "text": [memory_text(memory)],
                "chosen": label == chosen,
            }
            for label, memory, loss in points
        ],
    }


def _coefficient_figures(mechanisms: dict[str, Mechanism], rounds: int) -> list[Figure]:
    strategies, inverses = list[dict[str, Any]](), list[dict[str, Any]]()
    for label, mechanism in mechanisms.items():
        shown = min(rounds, MOST_LAGS, mechanism.rounds or rounds)
        if not isinstance(mechanism, ToeplitzMechanism):
            continue  # its rows differ, so no one column describes it
        try:
            strategy, inverse = coefficients_of(mechanism, shown)
        except DpftrlError:
            continue
        places = _places(shown, spread="log")
        strategies.append({"name": label, "x": places, "y": _values(strategy, places)})
        lags = [place for place in places if place]
        inverses.append({"name": label, "x": lags, "y": _values(-inverse, lags)})
    return [
        {
            "name": "coefficients-of-c",
            "title": "Coefficients of C",
            "x": {"label": "lag (rounds)", "log": False},
            "y": {"label": "coefficient of C", "log": True},
            "series": strategies,
        },
        {
            "name": "coefficients-of-c-inverse",
            "title": "Coefficients of C⁻¹",
            "x": {"label": "lag (rounds)", "log": True},
            "y": {"label": "minus the coefficient of C⁻¹", "log": True},
            "series": inverses,
        },
    ]


def _places(length: int, spread: str = "even") -> list[int]:
    """At most `MOST_POINTS` indices of a curve, with the first and the last."""
    if length <= MOST_POINTS:
        return list(range(length))
    if spread == "log":
        ends = np.geomspace(1, length, MOST_POINTS).round().astype(int) - 1
    else:
        ends = np.linspace(0, length - 1, MOST_POINTS).round().astype(int)
    return sorted(set(ends.tolist()))


def _values(curve: Vector, places: Sequence[int]) -> list[float | None]:
    return [_number(float(curve[place])) for place in places]


def _number(value: float | None) -> float | None:
    """The value; None, a gap, if JSON has no such number."""
    return value if value is not None and math.isfinite(value) else None
