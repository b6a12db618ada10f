"""A plan: all that a run needs to know about privacy, and nothing half-built."""

import math
import os
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, final

import msgspec

from dpftrl._internal.checks import as_float, positive_number, whole_number
from dpftrl._internal.deprecation import warn
from dpftrl._internal.storage import read_json, replace_file
from dpftrl.accounting import Guarantee, account
from dpftrl.accounting.files import GuaranteeFile, guarantee_content, guarantee_from
from dpftrl.accounting.finite_precision import check_rounding
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation


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


@final
@dataclass(frozen=True)
class Plan:
    """A mechanism with its noise, for a fleet, and the guarantee that a run of it will have.

    Only a plan can train: its sigma is chosen, its guarantee computed.

    Attributes:
        fleet: The devices.
        guarantee: What is promised; its one run holds mechanism, participation and sigma.
    """

    fleet: Fleet
    guarantee: Guarantee

    def __post_init__(self) -> None:
        promised = self.guarantee
        if len(promised.runs) != 1 or promised.devices != 1 or promised.common_cap is not None:
            raise InvalidInput(
                "a plan is for one run and states the guarantee of one device, got "
                f"{len(promised.runs)} runs and {promised.devices} devices"
            )
        run = promised.runs[0]
        rounds = run.participation.rounds
        check_rounding(run.rounding, run.mu, run.mechanism, rounds)
        run.mechanism.check_noise(rounds)

    def covering_rounding(self) -> "Plan":
        """The same plan with rounding covered, which a plan of version 0.1 did not do.

        Its mu, and with it epsilon, is larger by a part in a million or so.
        """
        run = self.guarantee.runs[0]
        if run.buffers == "float64":
            return self
        covered = account(
            run.mechanism, run.participation, run.noise_multiplier, self.guarantee.delta
        )
        return Plan(self.fleet, covered)

    @property
    def mechanism(self) -> Mechanism:
        """What correlates the noise."""
        return self.guarantee.runs[0].mechanism

    @property
    def participation(self) -> Participation:
        """Which rounds one device may take part in: the server enforces this."""
        return self.guarantee.runs[0].participation

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier: standard deviation of Z in units of the clip norm."""
        return self.guarantee.runs[0].noise_multiplier

    @property
    def sigma(self) -> float:
        """The old name of `noise_multiplier`."""
        warn("Plan.sigma", "Plan.noise_multiplier")
        return self.noise_multiplier

    @property
    def effective_noise_multiplier(self) -> float:
        """What Opacus and PLD accountants call the noise multiplier: it over the sensitivity."""
        return self.noise_multiplier / self.guarantee.runs[0].sensitivity.value


class PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    """What the JSON holds."""

    format: Literal["dpftrl plan"]
    version: Literal[1, 2]
    fleet: Fleet
    guarantee: GuaranteeFile


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a .json file, replacing one that is there."""
    target = _json_path(path)
    content = PlanFile("dpftrl plan", 2, plan.fleet, guarantee_content(plan.guarantee, target))
    replace_file(target, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; its guarantee is recomputed, and refused if the file claims too much."""
    target = _json_path(path)
    content = read_json(target, PlanFile, "plan")
    return Plan(content.fleet, guarantee_from(content.guarantee, target))


def _json_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        raise InvalidInput(f"a plan ends in .json, got {str(target)!r}")
    return target
