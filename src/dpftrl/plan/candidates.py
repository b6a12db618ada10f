"""Compares every mechanism that could run a planned training.

`options` builds the candidate mechanisms for a `Question`, chooses the noise of each by a `Budget`,
and computes the guarantee, the error, the memory, and epsilon in four scenarios that differ from
the plan.

`extrapolate` computes how epsilon changes with the report goal, the rounds and min-sep, at the same
utility. This rests on two hypotheses of the paper. If the report goal and the noise multiplier grow
by the same factor, the signal-to-noise ratio stays the same, and so does the utility. Min-sep alone
does not change the utility.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final

import numpy as np

from dpftrl._internal.checks import as_float, positive_number, whole_number
from dpftrl.accounting import account, calibrate
from dpftrl.errors import DpftrlError, InvalidInput, RoundsExceeded
from dpftrl.mechanisms import BLT, ErrorReport, Mechanism, mechanism
from dpftrl.optimize import (
    Objective,
    optimize_band_toeplitz,
    optimize_bandmf,
    optimize_blt,
    optimize_robust_blt,
)
from dpftrl.participation import MOST_ROUNDS, UNCAPPED, MinSep
from dpftrl.plan.plan import Fleet, Plan

# The labels of the candidates, in the order in which `options` yields them.
LABELS = ("blt", "blt-robust", "blt-b400", "tree", "tree-full", "band-toeplitz", "bandmf")
# The candidates that take milliseconds: they need no long optimization.
QUICK_LABELS = ("blt", "blt-b400", "tree")
NOT_QUICK = "left out of a quick answer"
# Default number of buffers of an optimized BLT; a run with fewer rounds gets one buffer per round.
DEFAULT_BUFFERS = 4
# The scenarios of `Option.scenarios`: what may differ from the plan.
SCENARIOS = ("min_sep_half", "min_sep_double", "rounds_half", "rounds_double")

# Each limit is chosen so that one candidate takes about two seconds at most.
QUICK_BANDMF = 400  # rounds for which BandMF is optimized
QUICK_BAND_TOEPLITZ = 50_000  # rounds for which BandToep is optimized
QUICK_BANDS = 10_000_000  # rounds times bands of BandToep
QUICK_TREE = 400_000  # rounds times participations for the sensitivity of a tree
QUICK_GRID = 3  # points per side of the grid on which the robust BLT is checked
# Points per walk of `extrapolate`: with a reach of 8, neighboring points differ by a factor of
# sqrt(2).
STEPS = 13
BYTES = 8  # bytes per coordinate of the noise state, which is in float64


@final
@dataclass(frozen=True)
class Budget:
    """Determines the noise: an epsilon for every mechanism, or the BLT's noise multiplier.

    The noise multipliers of different mechanisms are not comparable. A given noise multiplier is
    that of the optimized BLT. Every other mechanism gets the noise multiplier at which its RmsError
    times its noise multiplier is the same as for the BLT.

    Attributes:
        delta: The delta of the guarantee.
        epsilon: The largest epsilon allowed; the noise is calibrated to it.
        noise_multiplier: The noise multiplier of the optimized BLT, instead of `epsilon`.
    """

    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", as_float(self.delta))
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InvalidInput("give exactly one of epsilon and noise_multiplier")
        if not 0 < self.delta < 1:
            raise InvalidInput(f"delta must be between 0 and 1, got {self.delta!r}")
        if self.epsilon is not None:
            positive_number("epsilon", self.epsilon)
        if self.noise_multiplier is not None:
            positive_number("noise_multiplier", self.noise_multiplier)


@final
@dataclass(frozen=True)
class Question:
    """A planned training: what a privacy engineer knows before it starts.

    Attributes:
        fleet: The clients.
        rounds: Rounds of training.
        budget: Determines the noise.
        max_participations: Largest number of rounds of one client, if the server enforces a cap.
            Without a cap, min-sep alone limits the participations.
        parameters: Number of model parameters.
        objective: The loss for which the mechanisms are optimized.
        buffers: Number of buffers of the BLTs; None for the smallest number that is nearly as good
            as more.
        min_sep: The min-sep that is enforced, instead of that of the fleet.
        max_min_sep: The largest min-sep that clients may turn out to keep; the robust BLT is good
            up to there. By default twice the planned min-sep.
    """

    fleet: Fleet
    rounds: int
    budget: Budget
    max_participations: int = UNCAPPED
    parameters: int = 1
    objective: Objective = "rms"
    buffers: int | None = DEFAULT_BUFFERS
    min_sep: int | None = None
    max_min_sep: int | None = None

    def __post_init__(self) -> None:
        whole_number("parameters", self.parameters)
        if self.buffers is not None:
            whole_number("buffers", self.buffers)
        planned = self.participation()
        needed = min(planned.min_sep, planned.rounds)
        if self.min_sep is not None and not needed <= self.fleet.rotation():
            raise InvalidInput(
                f"min_sep must be at most {self.fleet.rotation():,}, after which a strict rotation "
                f"of the available clients repeats, got {self.min_sep:,}; lower it, or lower the "
                "report goal"
            )
        if self.max_min_sep is not None:
            whole_number("max_min_sep", self.max_min_sep, at_least=planned.min_sep)

    def participation(self) -> MinSep:
        """The planned participation of one client."""
        min_sep = self.fleet.min_sep() if self.min_sep is None else self.min_sep
        return MinSep(self.rounds, min_sep, self.max_participations)

    @property
    def min_sep_range(self) -> tuple[int, int]:
        """The smallest and largest min-sep for which the robust BLT is optimized."""
        planned = self.participation().min_sep
        if self.max_min_sep is None:
            return max(1, planned // 2), 2 * planned
        return planned, self.max_min_sep


@final
@dataclass(frozen=True)
class Option:
    """A mechanism that could run the training, with its noise.

    Attributes:
        label: One of `LABELS`.
        plan: The plan with this mechanism.
        error_report: Error and sensitivity of the mechanism.
        memory_bytes: Size of the noise state for the model's parameters, in float64.
        scenarios: Epsilon in each of `SCENARIOS`, where rounds or min-sep differ from the plan;
            None where the mechanism cannot run for that many rounds.
    """

    label: str
    plan: Plan
    error_report: ErrorReport
    memory_bytes: int
    scenarios: Mapping[str, float | None]


@final
@dataclass(frozen=True)
class Missing:
    """A mechanism that was left out.

    Attributes:
        label: One of `LABELS`.
        note: The reason.
    """

    label: str
    note: str


def options(
    question: Question, with_bandmf: bool = False, quick: bool = False
) -> Iterator[Option | Missing]:
    """Yield each mechanism with its noise, or the reason why it was left out.

    The optimized BLT comes first. Each mechanism is computed when the iterator reaches it.

    Args:
        question: The planned training.
        with_bandmf: Optimize BandMF even for many rounds, which is slow.
        quick: Leave out all mechanisms but those in `QUICK_LABELS`.

    Raises:
        DpftrlError: The BLT cannot be optimized: it is the reference for all other mechanisms.
    """
    blt_rms_noise: float | None = None  # RmsError times noise multiplier of the optimized BLT
    for candidate in candidates(question, with_bandmf, quick):
        option = _option(question, candidate, blt_rms_noise)
        if isinstance(option, Option) and blt_rms_noise is None:
            blt_rms_noise = option.error_report.rms_error * option.plan.noise_multiplier
        yield option


def _option(
    question: Question, candidate: "Candidate", blt_rms_noise: float | None
) -> Option | Missing:
    """The candidate with its noise, guarantee and scenarios."""
    mechanism = candidate.mechanism
    if mechanism is None:
        return Missing(candidate.label, candidate.note)
    try:
        error_report = mechanism.error_report(question.participation())
        noise_multiplier = _noise_multiplier(question, mechanism, error_report, blt_rms_noise)
        guarantee = account(
            mechanism, question.participation(), noise_multiplier, question.budget.delta
        )
        plan = Plan(question.fleet, guarantee)
        scenarios = {
            name: _scenario_epsilon(question, mechanism, noise_multiplier, name)
            for name in SCENARIOS
        }
    except DpftrlError as error:
        return Missing(candidate.label, str(error))
    memory = mechanism.memory(question.rounds) * question.parameters * BYTES
    return Option(candidate.label, plan, error_report, memory, scenarios)


def _noise_multiplier(
    question: Question,
    mechanism: Mechanism,
    error_report: ErrorReport,
    blt_rms_noise: float | None,
) -> float:
    """The noise multiplier that the budget gives to this mechanism."""
    budget = question.budget
    if budget.epsilon is not None:
        return calibrate(mechanism, question.participation(), budget.epsilon, budget.delta)
    assert budget.noise_multiplier is not None
    if blt_rms_noise is None:
        return budget.noise_multiplier
    return blt_rms_noise / error_report.rms_error


def _scenario_epsilon(
    question: Question, mechanism: Mechanism, noise_multiplier: float, name: str
) -> float | None:
    """Epsilon in one of `SCENARIOS`; None if the mechanism cannot run for that many rounds."""
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
    """Epsilon for another participation; None if the mechanism cannot run for so many rounds."""
    try:
        return account(mechanism, participation, noise_multiplier, delta).epsilon
    except RoundsExceeded:
        return None


@final
@dataclass(frozen=True)
class Candidate:
    """A mechanism under consideration, or the reason why it was left out.

    Attributes:
        label: One of `LABELS`.
        mechanism: The mechanism; None if it was left out.
        note: Why it was left out.
    """

    label: str
    mechanism: Mechanism | None
    note: str = ""


def candidates(
    question: Question, with_bandmf: bool = False, quick: bool = False
) -> Iterator[Candidate]:
    """Yield the candidates in the order of `LABELS`; each may take about two seconds.

    Args:
        question: The planned training.
        with_bandmf: Optimize BandMF even for many rounds.
        quick: Leave out all but `QUICK_LABELS`.
    """
    participation, objective = question.participation(), question.objective
    n, b = participation.rounds, participation.min_sep

    def robust_blt() -> Mechanism:
        rounds_range = (max(1, n // 2), 2 * n)
        return optimize_robust_blt(
            rounds_range,
            question.min_sep_range,
            question.max_participations,
            min(question.buffers or max(1, blt.memory(n)), rounds_range[0]),
            objective,
            QUICK_GRID,
        ).mechanism

    def band_toeplitz() -> Mechanism:
        bands = max(1, min(n, b, QUICK_BANDS // n))
        return optimize_band_toeplitz(participation, bands, objective).mechanism

    # The BLT is the reference for the others: if it fails, there is no comparison, so its error is
    # not caught.
    buffers = "auto" if question.buffers is None else min(question.buffers, n)
    blt = optimized_blt(participation, buffers, objective)
    yield Candidate("blt", blt)
    if quick:
        yield Candidate("blt-robust", None, NOT_QUICK)
    else:
        yield _try_to_build("blt-robust", robust_blt)
    yield _try_to_build("blt-b400", lambda: mechanism("blt-b400"))
    if is_quick_tree(participation):
        yield _try_to_build("tree", lambda: mechanism("tree"))
        if not quick:
            yield _try_to_build("tree-full", lambda: mechanism("tree-full", participation))
    else:
        note = (
            "left out, its sensitivity is slow to compute for this many rounds: "
            "use dpftrl account tree"
        )
        labels = ("tree",) if quick else ("tree", "tree-full")
        yield from (Candidate(label, None, note) for label in labels)
    if quick:
        labels = ("tree-full", "band-toeplitz", "bandmf")
        yield from (Candidate(label, None, NOT_QUICK) for label in labels)
        return
    if n <= QUICK_BAND_TOEPLITZ:
        yield _try_to_build("band-toeplitz", band_toeplitz)
    else:
        yield Candidate(
            "band-toeplitz", None, f"left out for more than {QUICK_BAND_TOEPLITZ:,} rounds"
        )
    if with_bandmf or n <= QUICK_BANDMF:
        yield _try_to_build("bandmf", lambda: optimize_bandmf(participation, min(n, b)).mechanism)
    else:
        yield Candidate("bandmf", None, "left out, it is slow to optimize: add --with-bandmf")


@lru_cache(maxsize=64)
def optimized_blt(
    participation: MinSep, buffers: int | Literal["auto"], objective: Objective
) -> BLT:
    """The best BLT for a participation. The privacy target does not change it, so it is kept."""
    return optimize_blt(participation, buffers, objective).mechanism


def is_quick_tree(participation: MinSep) -> bool:
    """Whether the sensitivity of a tree is quick to compute."""
    return participation.rounds * participation.max_participations <= QUICK_TREE


def _try_to_build(label: str, build: Callable[[], Mechanism]) -> Candidate:
    """The mechanism that `build` returns, or the error as the reason why it was left out."""
    try:
        return Candidate(label, build())
    except DpftrlError as error:
        return Candidate(label, None, str(error))


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
    question: Question,
    rivals: Sequence[Option],
    steps: int = STEPS,
    reach: float = 8.0,
    reference: Option | None = None,
) -> tuple[Walk, ...]:
    """Compute epsilon while the report goal, the rounds or min-sep moves away from the plan.

    All mechanisms have the same utility in the plan: the noise multiplier of each is the one at
    which its RmsError times its noise multiplier is that of the reference. So the mechanism with
    the smallest epsilon is the best. Mechanisms whose sensitivity is slow to compute
    (`sensitivity_cost` is `high`) are skipped.

    Args:
        question: The planned training.
        rivals: The mechanisms to compare.
        steps: Points per walk, in addition to the plan itself.
        reach: Each walk goes from 1 / `reach` to `reach` times the planned value.
        reference: The mechanism whose utility all have. It keeps the noise of its plan. By default
            the first of `rivals`.

    Returns:
        Three walks, along the report goal, the rounds and min-sep. Report goals that the fleet
        cannot fill are dropped.
    """
    quick_rivals = [rival for rival in rivals if rival.plan.mechanism.sensitivity_cost != "high"]
    planned, goal = question.participation(), question.fleet.report_goal
    noise_multipliers = _equal_utility(rivals, reference)
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
                noise_multipliers[rival.label] * scale,
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


def _equal_utility(rivals: Sequence[Option], reference: Option | None) -> dict[str, float]:
    """The noise multiplier of each mechanism at which all have the utility of the reference."""
    if not rivals:
        return {}
    same = reference or rivals[0]
    rms_noise = same.error_report.rms_error * same.plan.noise_multiplier
    noise_multipliers = {rival.label: rms_noise / rival.error_report.rms_error for rival in rivals}
    return {**noise_multipliers, same.label: same.plan.noise_multiplier}


def _around(value: int, factors: Sequence[float]) -> list[int]:
    """The value times each factor, as increasing whole numbers from 1 to `MOST_ROUNDS`."""
    return sorted({min(max(1, round(value * factor)), MOST_ROUNDS) for factor in factors})


def _min_sep(question: Question, report_goal: int) -> int | None:
    """Min-sep of the fleet with another report goal; None if the fleet cannot fill such a round."""
    try:
        fleet_min_sep = question.fleet.with_report_goal(report_goal).min_sep()
    except InvalidInput:  # one round would contact more clients than are available
        return None
    return fleet_min_sep if question.min_sep is None else min(question.min_sep, fleet_min_sep)
