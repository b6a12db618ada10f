"""Everything that a statement says, computed once: the page and its JSON twin read it from here."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, final

from dpftrl.accounting import Guarantee, Hypothesis, Run, delta_of, guarantee_of
from dpftrl.errors import DpftrlError
from dpftrl.mechanisms import mechanism
from dpftrl.observed import Observed
from dpftrl.plan import Fleet
from dpftrl.report.happened import Happened
from dpftrl.report.numbers import in_full, rounded_up
from dpftrl.sensitivity.result import ROUNDING

# Where epsilon is stated besides the delta that was asked for.
DELTAS = (1e-5, 1e-6, 1e-8, 1e-10)
# Below this share of delta, what the sampler adds (in runs of version 0.1) is named and not added.
NEGLIGIBLE = 1e-5

NOT_COVERED = (
    "Choosing hyper-parameters: runs made to tune them, on the same people, are runs of their own.",
    "Choosing which checkpoint to ship.",
    "Metrics on held-out data of people, and A/B tests.",
    "Who took part, and when.",
    "When a round starts and ends, and how many devices it asks.",
    "Data used before the training, such as public data for pre-training.",
    "Data that devices send outside of the training.",
)

Role = Literal["plan", "guarantee", "run guarantee", "log"]


@final
@dataclass(frozen=True)
class Input:
    """A file that a statement was made from.

    Attributes:
        role: What it was read as.
        name: What to call it: the name of the file, with its folder if it belongs to a run.
        sha256: Of its bytes, in hexadecimal.
    """

    role: Role
    name: str
    sha256: str


@final
@dataclass(frozen=True)
class Facts:
    """What a statement says.

    Attributes:
        happened: The guarantee that is stated, and what has to be said about it.
        promised: The guarantee of the plan or file that the statement is about.
        fleet: The devices it was planned for, where that is known.
        accounted: What the run's server enforced and accounted.
        observed: What the log shows.
        devices: For how many devices of one person to state the guarantee.
        inputs: The files; the first is the plan or guarantee.
        date: When the statement was made, if it should say so.
        curves: A picture of accuracy and epsilon by round, as PNG.
    """

    happened: Happened
    promised: Guarantee
    fleet: Fleet | None
    accounted: Guarantee | None
    observed: Observed | None
    devices: tuple[int, ...]
    inputs: tuple[Input, ...]
    date: str | None
    curves: bytes | None = None

    @property
    def guarantee(self) -> Guarantee:
        """The one that is stated."""
        return self.happened.guarantee

    @property
    def kind(self) -> Literal["exact", "upper bound"]:
        """Whether some participant attains the numbers, or they only bound everybody's."""
        attained = self.guarantee.runs[0].mu * self.guarantee.devices
        if self.guarantee.common_cap is not None or self.guarantee.mu > attained * (1 + ROUNDING):
            return "upper bound"
        return self.guarantee.kind

    @cached_property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """What it rests on; what a file left out is assumed, because it is needed all the same."""
        needed = guarantee_of(self.guarantee.runs, self.guarantee.delta).hypotheses
        named = {hypothesis.name for hypothesis in self.guarantee.hypotheses}
        return (*self.guarantee.hypotheses, *(one for one in needed if one.name not in named))

    @cached_property
    def by_devices(self) -> tuple[Guarantee, ...]:
        """The guarantee for one person's devices together."""
        counts = sorted({1, 2, 3, self.guarantee.devices, *self.devices})
        return tuple(replace(self.guarantee, devices=n) for n in counts)

    @cached_property
    def by_delta(self) -> tuple[Guarantee, ...]:
        """The guarantee at other deltas, the largest first."""
        deltas = sorted({self.guarantee.delta, *DELTAS}, reverse=True)
        return tuple(self.guarantee.at(delta) for delta in deltas)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What nobody may overlook: what happened first, then the numbers themselves."""
        found = list(self.happened.warnings)
        if empty(self.guarantee):
            found.append("There is no guarantee at all: the noise is far too small.")
        if self.fleet is not None and not whole_delta(self.guarantee) * self.fleet.population < 1:
            found.append(
                f"Delta is not below 1 / {self.fleet.population:,}, one over the number of "
                "devices: to publish all data of one of them would keep to the same delta."
            )
        return tuple(found)

    def alike(self, guarantee: Guarantee) -> Guarantee:
        """Another guarantee for as many devices and at the same delta, so that the two compare."""
        return replace(guarantee, devices=self.guarantee.devices, delta=self.guarantee.delta)

    @property
    def right_guess(self) -> float:
        """How often somebody is right who guesses whether a device was there, at even odds."""
        padded = self.guarantee.mu * (1 + ROUNDING)
        return min(1.0, (1 + delta_of(0.0, padded) + self.guarantee.sampler_delta) / 2)


def whole_delta(guarantee: Guarantee) -> float:
    """The delta of a guarantee with the sampler's part, where that is not negligible."""
    total = guarantee.total_delta
    return guarantee.delta if total <= guarantee.delta * (1 + NEGLIGIBLE) else total


def delta_text(guarantee: Guarantee) -> str:
    """Delta as it is stated; 1 or more is no guarantee."""
    whole = whole_delta(guarantee)
    return in_full(whole) if whole == guarantee.delta else rounded_up(min(whole, 1.0))


def empty(guarantee: Guarantee) -> bool:
    """Whether it promises nothing: with a delta of 1, every mechanism is private."""
    return not whole_delta(guarantee) < 1


def catalogue_name(run: Run) -> str | None:
    """What the command line calls the mechanism, if that name makes this very one."""
    try:
        found = mechanism(run.mechanism.name, run.participation)
    except DpftrlError:
        return None
    return run.mechanism.name if found == run.mechanism else None
