"""Requests for a plan: what a user knows, with what is left open, and what follows from it.

A request is plain data, so that the command line, a web page and a program can ask the same
question. `plan_request` reads one from JSON. `FleetPlanRequest.question` fills in what was left
open: the rounds, the report goal and the buffers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, final

import msgspec

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.optimize import Objective
from dpftrl.participation import UNCAPPED, MinSep
from dpftrl.plan.candidates import Budget, Question
from dpftrl.plan.dataset import SAMPLINGS, Dataset, SamplingName, large_delta
from dpftrl.plan.plan import Fleet

# How much time an answer may take: `quick` leaves out mechanisms that need a long optimization,
# `normal` takes about a second, `slow` also optimizes BandMF, which can take minutes.
Effort = Literal["quick", "normal", "slow"]
# What limits min-sep: the strict rotation of the fleet, the timer, or the min-sep that was given.
Binding = Literal["fleet", "timer", "min_sep"]


@final
@dataclass(frozen=True)
class Choice:
    """A value that the user left open, and why it was chosen.

    Attributes:
        name: The field of the request.
        value: The chosen value.
        reason: One sentence.
    """

    name: str
    value: int
    reason: str


class FleetPlanRequest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="fleet",
):
    """A planned training of a fleet. What is None is left open, and chosen.

    Attributes:
        population: Number of clients that may take part.
        delta: The delta of the guarantee.
        epsilon: The epsilon that every mechanism is calibrated to, for one client.
        noise_multiplier: Instead of `epsilon`: the noise multiplier of the row `blt`.
        report_goal: Number of reports that complete a round.
        rounds: Rounds of training.
        days: Days of training.
        rounds_per_day: Rounds per day.
        timer_days: Days that a client waits before it takes part again, if a timer enforces this.
        min_sep: The min-sep that is enforced, instead of that of the fleet.
        max_min_sep: The other end of a range of min-seps; it needs `min_sep`, which is planned for.
        availability: The share of the population that can be contacted.
        over_selection: Clients contacted per report needed.
        max_participations: Largest number of rounds of one client, if the server enforces a cap.
        devices: Devices of one person, to state epsilon per person too.
        parameters: Number of model parameters.
        buffers: Number of buffers of the BLTs.
        objective: The loss for which the mechanisms are optimized.
        effort: How much time the answer may take.
        extrapolate: Whether to compute epsilon for other report goals, rounds and min-seps.
    """

    population: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    report_goal: int | None = None
    rounds: int | None = None
    days: float | None = None
    rounds_per_day: float | None = None
    timer_days: float | None = None
    min_sep: int | None = None
    max_min_sep: int | None = None
    availability: float = 1.0
    over_selection: float = 1.0
    max_participations: int | None = None
    devices: int = 1
    parameters: int = 1_000_000
    buffers: int | None = None
    objective: Objective = "rms"
    effort: Effort = "normal"
    extrapolate: bool = False

    def resolve(self) -> "ResolvedRequest":
        """Check the fields and choose what was left open.

        Raises:
            InvalidInput: A field is wrong or missing; the message names it.
        """
        whole_number("population", self.population)
        whole_number("devices", self.devices)
        for name in ("days", "rounds_per_day", "timer_days"):
            if (value := getattr(self, name)) is not None:
                positive_number(name, value)
        if self.max_min_sep is not None and self.min_sep is None:
            raise InvalidInput("max_min_sep needs min_sep, the lower end of the range")
        choices = list[Choice]()
        rounds, per_day = self._rounds(choices)
        if self.timer_days is not None and per_day is None:
            raise InvalidInput(
                "timer_days needs rounds_per_day: a timer in days is a min-sep only if the number "
                "of rounds per day is known"
            )
        fleet = Fleet(
            self.population,
            1 if self.report_goal is None else self.report_goal,
            availability=self.availability,
            over_selection=self.over_selection,
            timer_days=self.timer_days,
            rounds_per_day=None if self.timer_days is None else per_day,
        )
        if self.report_goal is None:
            fleet = fleet.with_report_goal(self._report_goal(fleet, rounds, choices))
        question = Question(
            fleet,
            rounds,
            Budget(self.delta, self.epsilon, self.noise_multiplier),
            UNCAPPED if self.max_participations is None else self.max_participations,
            self.parameters,
            self.objective,
            self.buffers,
            self.min_sep,
            self.max_min_sep,
        )
        days = None if per_day is None else rounds / per_day
        return ResolvedRequest(self, question, days, tuple(choices))

    def _rounds(self, choices: list[Choice]) -> tuple[int, float | None]:
        """The rounds of training and the rounds per day, if they are known."""
        if self.rounds is not None:
            rounds = whole_number("rounds", self.rounds)
            if self.days is None:
                return rounds, self.rounds_per_day
            if self.rounds_per_day is not None:
                raise InvalidInput(
                    "rounds, days and rounds_per_day say the same thing twice: give two of them"
                )
            return rounds, rounds / self.days
        if self.days is None or self.rounds_per_day is None:
            raise InvalidInput("rounds is missing: give rounds, or days and rounds_per_day")
        exact = Fraction(repr(float(self.days))) * Fraction(repr(float(self.rounds_per_day)))
        rounds = math.floor(exact)
        if rounds < 1:
            raise InvalidInput(
                f"days: {self.days:g} days at {self.rounds_per_day:g} rounds per day are less than "
                "one round"
            )
        reason = f"{self.days:g} days at {self.rounds_per_day:g} rounds per day."
        choices.append(Choice("rounds", rounds, reason))
        return rounds, self.rounds_per_day

    def _report_goal(self, fleet: Fleet, rounds: int, choices: list[Choice]) -> int:
        """The largest report goal that costs no privacy.

        More reports per round make the noise in the mean smaller. They cost nothing as long as
        min-sep stays the same: up to where a rotation of the fleet takes as long as the timer, or
        as the given min-sep. Without either, up to where no client takes part twice.
        """
        if self.min_sep is not None:
            needed, why = whole_number("min_sep", self.min_sep), "the given min-sep"
        elif fleet.timer_rounds is not None:
            needed, why = fleet.timer_rounds, "the timer"
        else:
            needed, why = rounds, "the training, so that no client takes part twice"
        if needed >= rounds:
            needed, why = rounds, "the training, so that no client takes part twice"
        goal = fleet.largest_report_goal(needed)
        reason = (
            f"The largest at which a rotation of the available clients takes {needed:,} rounds, "
            f"as long as {why}: up to there, more reports mean less noise at the same epsilon."
        )
        choices.append(Choice("report_goal", goal, reason))
        return goal


@final
@dataclass(frozen=True)
class ResolvedRequest:
    """A request with nothing left open.

    Attributes:
        request: The request.
        question: The question to the planner.
        days: Days of training; None if the rounds per day are not known.
        choices: What was left open, and chosen.
    """

    request: FleetPlanRequest
    question: Question
    days: float | None
    choices: tuple[Choice, ...]

    @property
    def binding(self) -> Binding:
        """What limits min-sep."""
        fleet = self.question.fleet
        if self.question.min_sep is not None:
            return "min_sep"
        timer = fleet.timer_rounds
        return "fleet" if timer is None or fleet.rotation() < timer else "timer"

    @property
    def binding_text(self) -> str:
        """What limits min-sep, and whether anything enforces it, in plain words."""
        fleet, planned = self.question.fleet, self.question.participation()
        min_sep, timer = planned.min_sep, fleet.timer_rounds
        if planned.max_participations == 1:
            enforced = timer is not None and timer >= min(min_sep, planned.rounds)
            by = "The timer enforces it." if enforced else UNENFORCED
            return f"Each client takes part at most once in {planned.rounds:,} rounds. {by}"
        if self.binding == "timer":
            return (
                f"Min-sep {min_sep:,} comes from the timer; strict rotation of the fleet would "
                f"give {fleet.rotation():,}."
            )
        if self.binding == "min_sep":
            enforced = timer is not None and timer >= min_sep
            by = "The timer enforces it." if enforced else UNENFORCED
            return f"Min-sep {min_sep:,} was given. {by}"
        if timer is None:
            return f"Min-sep {min_sep:,} assumes strict rotation. {UNENFORCED}"
        return (
            f"Min-sep {min_sep:,} comes from the fleet: strict rotation repeats after "
            f"{min_sep:,} rounds, before the timer of {timer:,} rounds ends. Rounds will wait for "
            "clients; lower the report goal or the timer."
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before using the plan."""
        delta, population = self.question.budget.delta, self.question.fleet.population
        # A mechanism that publishes each client's data in full with probability delta is
        # (0, delta)-DP. With such a delta it publishes the data of one client on average.
        if delta * population < 1:
            return ()
        return (
            f"delta {delta:g} is not below 1 / population, {1 / population:.3g}: "
            "such a delta permits publishing the data of one client in full",
        )

    def with_rounds(self, rounds: int) -> MinSep:
        """The participation if the training has this many rounds instead."""
        planned = self.question.participation()
        return MinSep(rounds, planned.min_sep, self.question.max_participations)


UNENFORCED: Final = "Nothing enforces it: give --timer-days, or train with round timers."


class DatasetPlanRequest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="dataset",
):
    """A planned training on a data set.

    Attributes:
        size: Number of examples.
        batch_size: Expected number of examples per batch.
        epochs: How often every example takes part.
        epsilon: The target epsilon, for one example.
        delta: The target delta.
        max_batch_size: Largest number of examples in a batch; None for no limit.
        sampling: The sampling; None to compare all.
        effort: How much time the answer may take. A quick answer has no certificates from samples
            and no cyclic Poisson sampling.
    """

    size: int
    batch_size: int
    epochs: int
    epsilon: float
    delta: float
    max_batch_size: int | None = None
    sampling: SamplingName | None = None
    effort: Effort = "normal"

    @property
    def dataset(self) -> Dataset:
        """The data set."""
        return Dataset(self.size, self.batch_size, self.epochs, self.max_batch_size)

    @property
    def samplings(self) -> tuple[SamplingName, ...]:
        """The samplings to compare."""
        if self.sampling is not None:
            return (self.sampling,)
        return ("poisson", "none") if self.effort == "quick" else SAMPLINGS

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before using the plan."""
        warning = large_delta(self.delta, self.size)
        return () if warning is None else (warning,)


PlanRequest = FleetPlanRequest | DatasetPlanRequest


def plan_request(content: Mapping[str, Any]) -> PlanRequest:
    """Read a request from JSON; its field `kind` is `fleet` or `dataset`.

    Raises:
        InvalidInput: A field is missing, unknown or of the wrong type; the message names it.

    >>> plan_request({"kind": "fleet", "population": "many", "delta": 1e-8})
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: population: Expected `int`, got `str`
    """
    try:
        return msgspec.convert(content, PlanRequest)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise InvalidInput(f"{path.rstrip('`')}: {message}" if path else message) from None
