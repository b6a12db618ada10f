"""How epsilon moves with the report goal, the rounds and min-sep, at the same utility.

The hypothesis of the paper: a report goal and a noise multiplier that grow together keep the signal
to noise, hence the utility; and min-sep alone does not change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Banded, FullTree
from dpftrl.participation import MinSep
from dpftrl.plan.options import Option, Question, epsilon_if

STEPS = 13


@final
@dataclass(frozen=True)
class Point:
    """One setting, and the epsilon of each mechanism there.

    Attributes:
        report_goal: Reports a round.
        scale: How many times the planned noise multiplier.
        participation: Rounds, min-sep and cap.
        epsilon: By the label of the mechanism; None where it cannot run that long.
    """

    report_goal: int
    scale: float
    participation: MinSep
    epsilon: dict[str, float | None]


@final
@dataclass(frozen=True)
class Extrapolation:
    """Three walks away from the plan, the others held fixed."""

    by_report_goal: tuple[Point, ...]
    by_rounds: tuple[Point, ...]
    by_min_sep: tuple[Point, ...]


def extrapolate(
    question: Question, rivals: Sequence[Option], steps: int = STEPS, reach: float = 8.0
) -> Extrapolation:
    """From 1 / `reach` to `reach` times what is planned, in so many steps."""
    quick = [one for one in rivals if not isinstance(one.plan.mechanism, Banded | FullTree)]
    planned = question.participation()
    factors = np.geomspace(1 / reach, reach, steps).tolist()

    def point(report_goal: int, rounds: int, min_sep: int) -> Point:
        participation = MinSep(rounds, min_sep, question.max_participations)
        scale = report_goal / question.fleet.report_goal
        epsilon = {
            one.label: epsilon_if(
                one.plan.mechanism, participation, one.plan.sigma * scale, question.budget.delta
            )
            for one in quick
        }
        return Point(report_goal, scale, participation, epsilon)

    goals = _around(question.fleet.report_goal, factors)
    return Extrapolation(
        tuple(
            point(goal, planned.rounds, min_sep)
            for goal in goals
            if (min_sep := _min_sep(question, goal)) is not None
        ),
        tuple(
            point(question.fleet.report_goal, rounds, planned.min_sep)
            for rounds in _around(planned.rounds, factors)
        ),
        tuple(
            point(question.fleet.report_goal, planned.rounds, min_sep)
            for min_sep in _around(planned.min_sep, factors)
        ),
    )


def _around(value: int, factors: Sequence[float]) -> list[int]:
    return sorted({max(1, round(value * factor)) for factor in factors})


def _min_sep(question: Question, report_goal: int) -> int | None:
    try:
        return question.fleet.with_report_goal(report_goal).min_sep()
    except InvalidInput:  # more than the whole fleet
        return None
