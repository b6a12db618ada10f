"""How epsilon moves with the report goal, the rounds and min-sep, at the same utility.

The hypothesis of the paper: a report goal and a noise multiplier that grow together keep the signal
to noise, hence the utility; and min-sep alone does not change it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Banded, BinaryTree, FullTree
from dpftrl.participation import MOST_ROUNDS, MinSep
from dpftrl.plan.candidates import Option, Question, epsilon_if, quick_tree

STEPS = 13


@final
@dataclass(frozen=True)
class Point:
    """One setting, and the epsilon of each mechanism there.

    Attributes:
        report_goal: Reports a round.
        scale: How many times the planned noise multiplier.
        participation: Rounds, min-sep and cap.
        epsilon: By the label of the mechanism; None where it cannot run that long, or where the
            answer would take too long.
    """

    report_goal: int
    scale: float
    participation: MinSep
    epsilon: dict[str, float | None]


Along = Literal["report_goal", "rounds", "min_sep"]


@final
@dataclass(frozen=True)
class Walk:
    """A walk away from the plan in one direction, the others held fixed."""

    along: Along
    points: tuple[Point, ...]

    @property
    def places(self) -> list[int]:
        """Where each point stands on the way."""
        if self.along == "report_goal":
            return [point.report_goal for point in self.points]
        if self.along == "rounds":
            return [point.participation.rounds for point in self.points]
        return [point.participation.min_sep for point in self.points]


def extrapolate(
    question: Question, rivals: Sequence[Option], steps: int = STEPS, reach: float = 8.0
) -> tuple[Walk, ...]:
    """By report goal, rounds and min-sep, from 1 / `reach` to `reach` times what is planned."""
    quick = [one for one in rivals if not isinstance(one.plan.mechanism, Banded | FullTree)]
    planned, goal = question.participation(), question.fleet.report_goal
    whole_number("steps", steps)
    if not 1 <= reach < math.inf:
        raise InvalidInput(f"reach must be a finite number of at least 1, got {reach!r}")
    factors = sorted({1.0, *np.geomspace(1 / reach, reach, steps).tolist()})

    def point(report_goal: int, rounds: int, min_sep: int) -> Point:
        participation = MinSep(rounds, min_sep, question.max_participations)
        scale = report_goal / goal
        epsilon = {
            one.label: epsilon_if(
                one.plan.mechanism,
                participation,
                one.plan.noise_multiplier * scale,
                question.budget.delta,
            )
            if quick_tree(participation) or not isinstance(one.plan.mechanism, BinaryTree)
            else None
            for one in quick
        }
        return Point(report_goal, scale, participation, epsilon)

    goals = [(other, _min_sep(question, other)) for other in _around(goal, factors)]
    settings: dict[Along, list[tuple[int, int, int]]] = {
        "report_goal": [(other, planned.rounds, b) for other, b in goals if b is not None],
        "rounds": [(goal, n, planned.min_sep) for n in _around(planned.rounds, factors)],
        "min_sep": [(goal, planned.rounds, b) for b in _around(planned.min_sep, factors)],
    }
    return tuple(
        Walk(along, tuple(point(*setting) for setting in each)) for along, each in settings.items()
    )


def _around(value: int, factors: Sequence[float]) -> list[int]:
    return sorted({min(max(1, round(value * factor)), MOST_ROUNDS) for factor in factors})


def _min_sep(question: Question, report_goal: int) -> int | None:
    try:
        return question.fleet.with_report_goal(report_goal).min_sep()
    except InvalidInput:  # more than the whole fleet
        return None
