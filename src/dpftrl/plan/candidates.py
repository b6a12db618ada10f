"""Every mechanism that could serve a plan, side by side, and how each takes surprises."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

from dpftrl._internal.checks import as_float, positive_number, whole_number
from dpftrl.accounting import account, calibrate
from dpftrl.errors import DpftrlError, InvalidInput, RoundsExceeded
from dpftrl.mechanisms import ErrorReport, Mechanism, mechanism
from dpftrl.optimize import (
    Objective,
    optimize_band_toeplitz,
    optimize_bandmf,
    optimize_blt,
    optimize_robust_blt,
)
from dpftrl.participation import MOST_ROUNDS, UNCAPPED, MinSep
from dpftrl.plan.plan import Fleet, Plan

# What takes a second or two: rounds of BandMF; rounds, and rounds times bands, of BandToep; rounds
# times participations of a tree's sensitivity.
QUICK_BANDMF = 400
QUICK_BAND_TOEPLITZ = 50_000
QUICK_BANDS = 10_000_000
QUICK_TREE = 400_000
# What the candidates are called, in their order.
LABELS = ("blt", "blt-robust", "blt-b400", "tree", "tree-full", "band-toeplitz", "bandmf")
# Points a side on which the robust BLT is checked.
QUICK_GRID = 3


@final
@dataclass(frozen=True)
class Candidate:
    """A mechanism under consideration, or why there is none.

    Attributes:
        label: What to call it here.
        mechanism: The mechanism, where there is one.
        note: Why not, or what is special.
    """

    label: str
    mechanism: Mechanism | None
    note: str = ""


Maker = Callable[[], Mechanism]


def candidates(
    participation: MinSep,
    objective: Objective,
    buffers: int,
    max_participations: int,
    with_bandmf: bool,
) -> Iterator[Candidate]:
    """One after another, the optimised BLT first; each may take a second or so."""
    n, b = participation.rounds, participation.min_sep
    doubled = (max(1, b // 2), 2 * b)

    def robust() -> Mechanism:
        around = (max(1, n // 2), 2 * n)
        fitting = min(buffers, around[0])
        return optimize_robust_blt(
            around, doubled, max_participations, fitting, objective, QUICK_GRID
        ).mechanism

    def band_toeplitz() -> Mechanism:
        bands = max(1, min(n, b, QUICK_BANDS // n))
        return optimize_band_toeplitz(participation, bands, objective).mechanism

    # The others are measured by this one: without it there is no comparison, so it may fail loudly.
    yield Candidate("blt", optimize_blt(participation, min(buffers, n), objective).mechanism)
    yield _made("blt-robust", robust)
    yield _made("blt-b400", lambda: mechanism("blt-b400"))
    if quick_tree(participation):
        yield _made("tree", lambda: mechanism("tree"))
        yield _made("tree-full", lambda: mechanism("tree-full", participation))
    else:
        note = "left out, its sensitivity takes a while here: dpftrl account tree"
        yield from (Candidate(label, None, note) for label in ("tree", "tree-full"))
    if n <= QUICK_BAND_TOEPLITZ:
        yield _made("band-toeplitz", band_toeplitz)
    else:
        yield Candidate("band-toeplitz", None, f"left out beyond {QUICK_BAND_TOEPLITZ:,} rounds")
    if with_bandmf or n <= QUICK_BANDMF:
        yield _made("bandmf", lambda: optimize_bandmf(participation, min(n, b)).mechanism)
    else:
        yield Candidate("bandmf", None, "left out, it takes a while: --with-bandmf")


def quick_tree(participation: MinSep) -> bool:
    """Whether the sensitivity of a tree is a matter of moments."""
    return participation.rounds * participation.max_participations <= QUICK_TREE


def _made(label: str, make: Maker) -> Candidate:
    try:
        return Candidate(label, make())
    except DpftrlError as error:
        return Candidate(label, None, str(error))


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
        error_report: Error and sensitivity.
        memory_bytes: What its noise state takes for the model's parameters, in float64.
        scenarios: Epsilon if things turn out otherwise; None where it cannot run that long.
    """

    label: str
    plan: Plan
    error_report: ErrorReport
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
            rms_noise = option.error_report.rms_error * option.plan.noise_multiplier
        yield option


def _option(question: Question, candidate: Candidate, rms_noise: float | None) -> Option | Missing:
    mechanism = candidate.mechanism
    if mechanism is None:
        return Missing(candidate.label, candidate.note)
    try:
        loss = mechanism.error_report(question.participation())
        noise_multiplier = _noise_multiplier(question, mechanism, loss, rms_noise)
        guarantee = account(
            mechanism, question.participation(), noise_multiplier, question.budget.delta
        )
        plan = Plan(question.fleet, guarantee)
        scenarios = {
            name: _scenario(question, mechanism, noise_multiplier, name) for name in SCENARIOS
        }
    except DpftrlError as error:
        return Missing(candidate.label, str(error))
    memory = mechanism.memory(question.rounds) * question.parameters * BYTES
    return Option(candidate.label, plan, loss, memory, scenarios)


def _noise_multiplier(
    question: Question, mechanism: Mechanism, loss: ErrorReport, rms_noise: float | None
) -> float:
    budget = question.budget
    if budget.epsilon is not None:
        return calibrate(mechanism, question.participation(), budget.epsilon, budget.delta)
    assert budget.noise_multiplier is not None
    return budget.noise_multiplier if rms_noise is None else rms_noise / loss.rms_error


def _scenario(
    question: Question, mechanism: Mechanism, noise_multiplier: float, name: str
) -> float | None:
    planned = question.participation()
    n, b = planned.rounds, planned.min_sep
    rounds = {"rounds_half": max(1, n // 2), "rounds_double": 2 * n}.get(name, n)
    min_sep = {"min_sep_half": max(1, b // 2), "min_sep_double": 2 * b}.get(name, b)
    if max(rounds, min_sep) > MOST_ROUNDS:
        return None
    return epsilon_if(
        mechanism,
        MinSep(rounds, min_sep, question.max_participations),
        noise_multiplier,
        question.budget.delta,
    )


def epsilon_if(
    mechanism: Mechanism, participation: MinSep, noise_multiplier: float, delta: float
) -> float | None:
    """Epsilon under another participation; None where the mechanism cannot run that long."""
    try:
        return account(mechanism, participation, noise_multiplier, delta).epsilon
    except RoundsExceeded:
        return None
