"""How epsilon changes with the report goal, the rounds and min-sep, at the same utility.

This rests on two hypotheses of the paper. If the report goal and the noise multiplier grow by the
same factor, the signal-to-noise ratio stays the same, and so does the utility. Min-sep alone does
not change the utility.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.participation import MOST_ROUNDS, MinSep
from dpftrl.plan.candidates import Option, Question, epsilon_if, is_quick_tree

STEPS = 13  # points per walk: with a reach of 8, neighboring points differ by a factor of sqrt(2)


@final
@dataclass(frozen=True)
class Point:
    """One setting, and the epsilon of each mechanism in it.

    Attributes:
        report_goal: Reports per round.
        scale: The noise multiplier divided by the planned one.
        participation: Rounds, min-sep and cap.
        epsilon: Epsilon by the label of the mechanism. None where the mechanism cannot run for so
            many rounds, or where its sensitivity is slow to compute.
    """

    report_goal: int
    scale: float
    participation: MinSep
    epsilon: dict[str, float | None]


Along = Literal["report_goal", "rounds", "min_sep"]


@final
@dataclass(frozen=True)
class Walk:
    """Points at which one setting moves away from the plan while the others stay the same.

    Attributes:
        along: The setting that moves.
        points: The points, by increasing value of that setting.
    """

    along: Along
    points: tuple[Point, ...]

    @property
    def places(self) -> list[int]:
        """The value of the moving setting at each point."""
        if self.along == "report_goal":
            return [point.report_goal for point in self.points]
        if self.along == "rounds":
            return [point.participation.rounds for point in self.points]
        return [point.participation.min_sep for point in self.points]


def extrapolate(
    question: Question, rivals: Sequence[Option], steps: int = STEPS, reach: float = 8.0
) -> tuple[Walk, ...]:
    """Compute epsilon while the report goal, the rounds or min-sep moves away from the plan.

    Mechanisms whose sensitivity is slow to compute (`sensitivity_cost` is `high`) are skipped.

    Args:
        question: The planned training.
        rivals: The mechanisms to compare.
        steps: Points per walk, in addition to the plan itself.
        reach: Each walk goes from 1 / `reach` to `reach` times the planned value.

    Returns:
        Three walks: along the report goal, the rounds and min-sep. Report goals that the fleet
        cannot fill are dropped.
    """
    quick_rivals = [rival for rival in rivals if rival.plan.mechanism.sensitivity_cost != "high"]
    planned, goal = question.participation(), question.fleet.report_goal
    whole_number("steps", steps)
    if not 1 <= reach < math.inf:
        raise InvalidInput(f"reach must be a finite number of at least 1, got {reach!r}")
    factors = sorted({1.0, *np.geomspace(1 / reach, reach, steps).tolist()})

    def point(report_goal: int, rounds: int, min_sep: int) -> Point:
        participation = MinSep(rounds, min_sep, question.max_participations)
        scale = report_goal / goal
        epsilon = {
            rival.label: epsilon_if(
                rival.plan.mechanism,
                participation,
                rival.plan.noise_multiplier * scale,
                question.budget.delta,
            )
            if is_quick_tree(participation) or rival.plan.mechanism.sensitivity_cost == "low"
            else None
            for rival in quick_rivals
        }
        return Point(report_goal, scale, participation, epsilon)

    goals = [(other_goal, _min_sep(question, other_goal)) for other_goal in _around(goal, factors)]
    settings: dict[Along, list[tuple[int, int, int]]] = {
        "report_goal": [
            (other_goal, planned.rounds, b) for other_goal, b in goals if b is not None
        ],
        "rounds": [(goal, n, planned.min_sep) for n in _around(planned.rounds, factors)],
        "min_sep": [(goal, planned.rounds, b) for b in _around(planned.min_sep, factors)],
    }
    return tuple(
        Walk(along, tuple(point(*setting) for setting in along_settings))
        for along, along_settings in settings.items()
    )


def _around(value: int, factors: Sequence[float]) -> list[int]:
    """The value times each factor, as increasing whole numbers from 1 to `MOST_ROUNDS`."""
    return sorted({min(max(1, round(value * factor)), MOST_ROUNDS) for factor in factors})


def _min_sep(question: Question, report_goal: int) -> int | None:
    """Min-sep of the fleet with another report goal; None if the fleet cannot fill such a round."""
    try:
        return question.fleet.with_report_goal(report_goal).min_sep()
    except InvalidInput:  # one round would contact more clients than are available
        return None
