"""Everything that a statement says, computed once: the page and its JSON twin read it from here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, final

from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.accounting import Guarantee, Run, delta_of
from dpftrl.accounting.logs import Observed
from dpftrl.errors import DpftrlError
from dpftrl.federated import Start
from dpftrl.mechanisms import mechanism
from dpftrl.mechanisms._sensitivity import ROUNDING
from dpftrl.plan import Fleet
from dpftrl.statement.hypotheses import StatedHypothesis, stated_hypotheses
from dpftrl.statement.promised_and_observed import Happened
from dpftrl.verify import Verdict

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

Role = Literal["plan", "guarantee", "run guarantee", "log", "run record"]
# Whether `dpftrl verify` passed on the run, failed, or had no private files to look at.
Evidence = Literal["verified", "failed", "none"]


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
class RunRecord:
    """What the run's own `run.json` says of it.

    Attributes:
        run: The identity of the run.
        population: What its operator calls the people in it, if anything.
        start: The model file that it started from, with the private runs behind it.
        version: Of the file; version 1 did not record start models.
    """

    run: str
    population: str | None
    start: Start | None
    version: int


@final
@dataclass(frozen=True)
class Facts:
    """What a statement says.

    Attributes:
        happened: The guarantee that is stated, and what has to be said about it.
        promised: The guarantee of the plan or file that the statement is about.
        fleet: The devices it was planned for, where that is known.
        accounted: What the run's server accounted for the run itself, without earlier runs.
        observed: What the log shows.
        devices: For how many devices of one person to state the guarantee.
        inputs: The files; the first is the plan or guarantee.
        date: When the statement was made, if it should say so.
        curves: A picture of accuracy and epsilon by round, as PNG.
        verdict: What `dpftrl verify` finds about the run, if its private files are there.
        record: What the run's `run.json` says.
        claims: Hypotheses that a file calls enforced or observed, without evidence.
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
    verdict: Verdict | None = None
    record: RunRecord | None = None
    claims: frozenset[tuple[str, str]] = frozenset()

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

    @property
    def evidence(self) -> Evidence:
        """What stands behind the word "enforced"."""
        if self.verdict is None:
            return "none"
        return "verified" if self.verdict.passed else "failed"

    @property
    def start(self) -> Start | None:
        """The model file that the run started from, where that is known."""
        return None if self.record is None else self.record.start

    @cached_property
    def hypotheses(self) -> tuple[StatedHypothesis, ...]:
        """What it rests on."""
        earlier = 0 if self.start is None else len(self.start.runs)
        has_evidence = self.evidence != "failed"
        return stated_hypotheses(self.guarantee, self.claims, earlier, has_evidence)

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
        found = [*self._about_verification(), *self.happened.warnings]
        if empty(self.guarantee):
            found.append("There is no guarantee at all: the noise is far too small.")
        if self.fleet is not None and not whole_delta(self.guarantee) * self.fleet.population < 1:
            found.append(
                f"Delta is not below 1 / {self.fleet.population:,}, one over the number of "
                "devices: to publish all data of one of them would keep to the same delta."
            )
        return tuple(found)

    def _about_verification(self) -> Iterator[str]:
        verdict = self.verdict
        if verdict is None:
            return
        failed = [check.name for check in verdict.checks if check.outcome == "failed"]
        if failed:
            yield (
                f"The run does not verify: of {len(verdict.checks)} checks, these failed: "
                f"{', '.join(failed)}. Its files were changed, or it did not keep to its plan. "
                "Nothing is called enforced or observed here, and the numbers may be too small; "
                "`dpftrl verify` says more."
            )
        if failed and verdict.epsilon is not None and verdict.epsilon > self.guarantee.epsilon:
            epsilon = rounded_up(verdict.epsilon)
            yield f"By the run's journal and plan, epsilon is {epsilon}, more than is stated here."
        if any((one.name, one.outcome) == ("witness", "warning") for one in verdict.checks):
            yield (
                "The witness of the run was left out when it was verified: this may be an older "
                "copy of the run, with fewer rounds than were released."
            )

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
