"""How many devices there are, how many a round asks for, and what that says of min-sep."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import final

from dpftrl.checks import as_float, positive_number, whole_number
from dpftrl.errors import InvalidInput


@final
@dataclass(frozen=True)
class Fleet:
    """The devices that a training can ask.

    Attributes:
        population: Devices that may take part.
        report_goal: Reports that close a round.
        availability: The share of the population that can be asked at all (idle, charging, ...).
        over_selection: Devices asked for each report wanted.
        timer_days: How long a device waits before it takes part again, where a timer enforces it.
        rounds_per_day: How many rounds fit into a day; goes with `timer_days`.

    >>> Fleet(population=4_210_000, report_goal=6_500).min_sep()
    647
    """

    population: int
    report_goal: int
    availability: float = 1.0
    over_selection: float = 1.0
    timer_days: float | None = None
    rounds_per_day: float | None = None

    def __post_init__(self) -> None:
        for name in ("population", "report_goal"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("availability", "over_selection"):
            object.__setattr__(self, name, as_float(getattr(self, name)))
        if not 0 < self.availability <= 1:
            raise InvalidInput(f"availability must be above 0, up to 1, got {self.availability!r}")
        if not 1 <= self.over_selection < math.inf:
            raise InvalidInput(
                f"over_selection must be a finite number of at least 1, got {self.over_selection!r}"
            )
        if (self.timer_days is None) != (self.rounds_per_day is None):
            raise InvalidInput("timer_days and rounds_per_day go together: give both, or neither")
        for name in ("timer_days", "rounds_per_day"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, positive_number(name, value))

    def min_sep(self) -> int:
        """The min-sep to expect: everybody available takes turns, as far as the timer lets them.

        The paper's optimistic reading: nobody comes again before all the others have come. What a
        timer allows is a cap, because only the timer makes devices wait.
        """
        asked = self.report_goal * _exact(self.over_selection)
        turns = math.floor(self.population * _exact(self.availability) / asked)
        if turns < 1:
            raise InvalidInput(
                f"one round asks {math.ceil(asked):,} devices, and {self.population:,} x "
                f"{self.availability:g} are available; lower the report goal or the over-selection"
            )
        return turns if self.timer_rounds is None else min(turns, self.timer_rounds)

    @property
    def timer_rounds(self) -> int | None:
        """Rounds that a device's timer lasts."""
        if self.timer_days is None or self.rounds_per_day is None:
            return None
        lasts = math.floor(_exact(self.timer_days) * _exact(self.rounds_per_day))
        if lasts < 1:
            raise InvalidInput(
                f"a timer of {self.timer_days:g} days at {self.rounds_per_day:g} rounds a day "
                "ends before the next round: it separates nothing"
            )
        return lasts

    def with_report_goal(self, report_goal: int) -> "Fleet":
        """The same devices, asked in larger or smaller groups."""
        return replace(self, report_goal=report_goal)


def _exact(value: float) -> Fraction:
    """The decimal that was meant: 0.1 is a tenth, so that floors come out as people expect."""
    return Fraction(repr(float(value)))
