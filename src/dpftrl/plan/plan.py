"""Fleets and plans, and plans as .json files.

A `Plan` holds everything about privacy that a run needs: the mechanism, the noise, the
participation and the guarantee.
"""

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
from dpftrl.accounting.gaussian import check_rounding
from dpftrl.accounting.guarantee import BufferType
from dpftrl.accounting.guarantee_files import GuaranteeFile, guarantee_content, guarantee_from
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation


@final
@dataclass(frozen=True)
class Fleet:
    """The clients that can take part in a training.

    Attributes:
        population: Number of clients that may take part.
        report_goal: Number of reports that complete a round.
        availability: The share of the population that can be contacted (idle, charging, ...).
        over_selection: Clients contacted per report needed.
        timer_days: Days that a client waits before it takes part again, if a timer enforces this.
        rounds_per_day: Rounds per day; required with `timer_days`.

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
            raise InvalidInput(
                f"availability must be above 0 and at most 1, got {self.availability!r}"
            )
        if not 1 <= self.over_selection < math.inf:
            raise InvalidInput(
                f"over_selection must be a finite number of at least 1, got {self.over_selection!r}"
            )
        if (self.timer_days is None) != (self.rounds_per_day is None):
            raise InvalidInput(
                "timer_days and rounds_per_day depend on each other: give both, or neither"
            )
        for name in ("timer_days", "rounds_per_day"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, positive_number(name, value))

    def min_sep(self) -> int:
        """The min-sep if clients participate in strict rotation, limited by the timer.

        With a timer, min-sep is at most the length of the timer, because nothing else makes clients
        wait.

        Raises:
            InvalidInput: The available clients do not suffice for one round, or the timer is
                shorter than one round.
        """
        rotation = self.rotation()
        return rotation if self.timer_rounds is None else min(rotation, self.timer_rounds)

    def rotation(self) -> int:
        """The number of rounds that a strict rotation of all available clients takes.

        It is the number of available clients divided by the clients contacted per round. This is
        the paper's optimistic assumption: no client is contacted again before all others were.

        Raises:
            InvalidInput: The available clients do not suffice for one round.
        """
        contacted = self.report_goal * _exact(self.over_selection)
        rotation = math.floor(self.population * _exact(self.availability) / contacted)
        if rotation < 1:
            raise InvalidInput(
                f"one round contacts {math.ceil(contacted):,} clients, but only "
                f"{self.population:,} x {self.availability:g} are available; "
                "lower the report goal or the over-selection"
            )
        return rotation

    def largest_report_goal(self, rotation: int) -> int:
        """The largest report goal at which a strict rotation takes at least this many rounds.

        Raises:
            InvalidInput: Not even one report per round does.
        """
        contacts = self.population * _exact(self.availability) / rotation
        goal = math.floor(contacts / _exact(self.over_selection))
        if goal < 1:
            raise InvalidInput(
                f"population: {self.population:,} clients, of which {self.availability:g} are "
                f"available, cannot take turns over {rotation:,} rounds; use fewer rounds, a "
                "shorter timer, or give the report_goal"
            )
        return goal

    @property
    def timer_rounds(self) -> int | None:
        """Length of a client's timer in rounds; None without a timer."""
        if self.timer_days is None or self.rounds_per_day is None:
            return None
        rounds = math.floor(_exact(self.timer_days) * _exact(self.rounds_per_day))
        if rounds < 1:
            raise InvalidInput(
                f"a timer of {self.timer_days:g} days at {self.rounds_per_day:g} rounds per day "
                "is shorter than one round, so it does not separate participations"
            )
        return rounds

    def with_report_goal(self, report_goal: int) -> "Fleet":
        """The same fleet with another report goal."""
        return replace(self, report_goal=report_goal)


def _exact(value: float) -> Fraction:
    """The decimal number as written: 0.1 is exactly 1/10, so that rounding down is as expected."""
    return Fraction(repr(float(value)))


@final
@dataclass(frozen=True)
class Plan:
    """A mechanism with its noise for a fleet, and the guarantee of a run with them.

    Only a plan can train: its noise multiplier is chosen and its guarantee is computed.

    Attributes:
        fleet: The clients.
        guarantee: The promised guarantee. Its only run holds the mechanism, the participation and
            the noise multiplier.
    """

    fleet: Fleet
    guarantee: Guarantee

    def __post_init__(self) -> None:
        promised = self.guarantee
        if len(promised.runs) != 1 or promised.devices != 1 or promised.common_cap is not None:
            raise InvalidInput(
                "a plan needs the guarantee of one run, for one client and without a common cap, "
                f"got {len(promised.runs)} runs and {promised.devices} clients"
            )
        run = promised.runs[0]
        rounds = run.participation.rounds
        check_rounding(run.rounding, run.mu, run.mechanism, rounds)
        run.mechanism.check_noise(rounds)

    def covering_rounding(self) -> "Plan":
        """The same plan with a guarantee that covers rounding in the noise buffers.

        Plans of version 0.1 did not cover this rounding. Covering it raises mu, and therefore
        epsilon, by about one part in a million.
        """
        run = self.guarantee.runs[0]
        if self.buffers == "float64":
            return self
        guarantee = account(
            run.mechanism, run.participation, run.noise_multiplier, self.guarantee.delta
        )
        return Plan(self.fleet, guarantee)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that correlates the noise."""
        return self.guarantee.runs[0].mechanism

    @property
    def participation(self) -> Participation:
        """The rounds in which one client may take part; the server enforces this limit."""
        return self.guarantee.runs[0].participation

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of Z divided by the clip norm."""
        return self.guarantee.runs[0].noise_multiplier

    @property
    def buffers(self) -> BufferType:
        """The number type of the noise buffers: float64, or float32 for plans of version 0.1."""
        return self.guarantee.runs[0].buffers

    @property
    def sigma(self) -> float:
        """The old name of `noise_multiplier`."""
        warn("Plan.sigma", "Plan.noise_multiplier")
        return self.noise_multiplier

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier / sensitivity: the "noise multiplier" of Opacus and PLD accountants."""
        return self.noise_multiplier / self.guarantee.runs[0].sensitivity.value


class PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a plan file."""

    format: Literal["dpftrl plan"]
    version: Literal[1, 2]
    fleet: Fleet
    guarantee: GuaranteeFile


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a .json file; an existing file is replaced."""
    target = _json_path(path)
    content = PlanFile("dpftrl plan", 2, plan.fleet, guarantee_content(plan.guarantee, target))
    replace_file(target, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a .json file.

    Raises:
        InvalidInput: The file is not a plan.

    Guarantees:
        The guarantee is recomputed. A file that claims a smaller mu, rho or epsilon is refused.
    """
    target = _json_path(path)
    content = read_json(target, PlanFile, "plan")
    return Plan(content.fleet, guarantee_from(content.guarantee, target))


def _json_path(path: str | os.PathLike[str]) -> Path:
    """The path, after checking that it ends in .json."""
    target = Path(path)
    if target.suffix != ".json":
        raise InvalidInput(f"the name of a plan file ends in .json, got {str(target)!r}")
    return target
