"""Every mechanism that could serve a plan, side by side, and how each takes surprises."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from dpftrl.accounting import account, calibrate
from dpftrl.checks import as_float, positive_number, whole_number
from dpftrl.errors import DpftrlError, InvalidInput, RoundsExceeded
from dpftrl.mechanisms import Loss, Mechanism
from dpftrl.optimize import Objective
from dpftrl.participation import MOST_ROUNDS, UNCAPPED, MinSep
from dpftrl.plan.candidates import Candidate, candidates
from dpftrl.plan.fleet import Fleet
from dpftrl.plan.plan import Plan

# What may turn out otherwise than planned, by what it is called.
SCENARIOS = ("min_sep_half", "min_sep_double", "rounds_half", "rounds_double")
BYTES = 8  # per coordinate of the noise state, in float64


@final
@dataclass(frozen=True)
class Budget:
    """What fixes the noise: an epsilon for every mechanism, or the BLT's sigma.

    Sigmas of different mechanisms do not compare. With a sigma given, it is that of the optimised
    BLT; every other mechanism gets the sigma at which its RmsError times sigma is the same.
    """

    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", as_float(self.delta))
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InvalidInput("give one of epsilon and noise_multiplier")
        if not 0 < self.delta < 1:
            raise InvalidInput(f"delta must be between 0 and 1, got {self.delta!r}")
        if self.epsilon is not None:
            positive_number("epsilon", self.epsilon)
        if self.noise_multiplier is not None:
            positive_number("noise_multiplier", self.noise_multiplier)


@final
@dataclass(frozen=True)
class Option:
    """A mechanism that could serve, with its noise.

    Attributes:
        label: What to call it here.
        plan: What it would promise.
        loss: Error and sensitivity.
        memory_bytes: What its noise state takes for the model's parameters, in float64.
        scenarios: Epsilon if things turn out otherwise; None where it cannot run that long.
    """

    label: str
    plan: Plan
    loss: Loss
    memory_bytes: int
    scenarios: Mapping[str, float | None]


@final
@dataclass(frozen=True)
class Missing:
    """A mechanism that was left out, and why."""

    label: str
    note: str


@final
@dataclass(frozen=True)
class Question:
    """What a privacy engineer knows before training.

    Attributes:
        fleet: The devices.
        rounds: Rounds of training.
        budget: What fixes the noise.
        max_participations: A cap that the server will enforce; without one it is as often as
            min-sep allows.
        parameters: Size of the model.
        objective: Which loss the mechanisms are optimised for.
        buffers: Buffers of the BLTs.
    """

    fleet: Fleet
    rounds: int
    budget: Budget
    max_participations: int = UNCAPPED
    parameters: int = 1
    objective: Objective = "rms"
    buffers: int = 4

    def __post_init__(self) -> None:
        whole_number("parameters", self.parameters)
        whole_number("buffers", self.buffers)
        self.participation()

    def participation(self) -> MinSep:
        """What to expect of one device."""
        return MinSep(self.rounds, self.fleet.min_sep(), self.max_participations)


def options(
    question: Question,
    with_bandmf: bool = False,
) -> Iterator[Option | Missing]:
    """Each mechanism with its noise, the optimised BLT first."""
    rms_noise: float | None = None  # RmsError times sigma of the first
    found = candidates(
        question.participation(),
        question.objective,
        question.buffers,
        question.max_participations,
        with_bandmf,
    )
    for candidate in found:
        option = _option(question, candidate, rms_noise)
        if isinstance(option, Option) and rms_noise is None:
            rms_noise = option.loss.rms_error * option.plan.sigma
        yield option


def _option(question: Question, candidate: Candidate, rms_noise: float | None) -> Option | Missing:
    mechanism = candidate.mechanism
    if mechanism is None:
        return Missing(candidate.label, candidate.note)
    try:
        loss = mechanism.loss(question.participation())
        sigma = _sigma(question, mechanism, loss, rms_noise)
        guarantee = account(mechanism, question.participation(), sigma, question.budget.delta)
        plan = Plan(question.fleet, guarantee)
        scenarios = {name: _scenario(question, mechanism, sigma, name) for name in SCENARIOS}
    except DpftrlError as error:
        return Missing(candidate.label, str(error))
    memory = mechanism.memory(question.rounds) * question.parameters * BYTES
    return Option(candidate.label, plan, loss, memory, scenarios)


def _sigma(question: Question, mechanism: Mechanism, loss: Loss, rms_noise: float | None) -> float:
    budget = question.budget
    if budget.epsilon is not None:
        return calibrate(mechanism, question.participation(), budget.epsilon, budget.delta)
    assert budget.noise_multiplier is not None
    return budget.noise_multiplier if rms_noise is None else rms_noise / loss.rms_error


def _scenario(question: Question, mechanism: Mechanism, sigma: float, name: str) -> float | None:
    planned = question.participation()
    n, b = planned.rounds, planned.min_sep
    rounds = {"rounds_half": max(1, n // 2), "rounds_double": 2 * n}.get(name, n)
    min_sep = {"min_sep_half": max(1, b // 2), "min_sep_double": 2 * b}.get(name, b)
    if max(rounds, min_sep) > MOST_ROUNDS:
        return None
    return epsilon_if(
        mechanism,
        MinSep(rounds, min_sep, question.max_participations),
        sigma,
        question.budget.delta,
    )


def epsilon_if(
    mechanism: Mechanism, participation: MinSep, sigma: float, delta: float
) -> float | None:
    """Epsilon under another participation; None where the mechanism cannot run that long."""
    try:
        return account(mechanism, participation, sigma, delta).epsilon
    except RoundsExceeded:
        return None
