"""The facts of a statement, computed once, and the hypotheses that its guarantee rests on.

The document and the JSON file both show these facts. Each hypothesis has the library's own text and
a basis. Anybody can edit a guarantee file. So a statement takes only the name of a hypothesis from
the file; the text comes from this library. The basis in the file is a claim, unless `dpftrl verify`
passed for the run that wrote the file.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final, Literal, final

import numpy as np

from dpftrl._internal.formatting import probability_in_words, rounded_up, short_up
from dpftrl.accounting import Guarantee, Hypothesis, Run, delta_of, guarantee_of
from dpftrl.accounting.guarantee import (
    ADAPTIVE_CLIPPING,
    CLIPPING,
    KEYSTREAM,
    ROUNDING_NOT_COVERED,
    SECRECY,
    ZERO_OUT,
)
from dpftrl.accounting.logs import Observed
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.federated import Start
from dpftrl.federated.run_guarantee import AGGREGATORS, IDENTITIES
from dpftrl.federated.start_model import EARLIER_RUNS, OTHER_PEOPLE, TEST_KEY, UNKNOWN_START
from dpftrl.mechanisms import mechanism
from dpftrl.mechanisms._sensitivity import ROUNDING
from dpftrl.plan import Fleet
from dpftrl.statement.document import plain
from dpftrl.statement.promised_and_observed import REPEATED, StatedGuarantee
from dpftrl.verify import Verdict

StatedBasis = Literal["enforced", "observed", "claimed", "assumed"]
Role = Literal["plan", "guarantee", "run guarantee", "log", "run record"]
# The result of `dpftrl verify` for the run; "none" if the private files are not there.
Evidence = Literal["verified", "failed", "none"]

# A statement gives epsilon at these deltas, in addition to the delta of the guarantee.
DELTAS = (1e-5, 1e-6, 1e-8, 1e-10)
# The sampler's delta is not added to the stated delta if it is below this share of the latter. This
# concerns runs of version 0.1 only: in later versions, the stated delta includes the sampler's.
NEGLIGIBLE = 1e-5

NOT_COVERED = (
    "Choosing hyper-parameters: tuning runs on the same people are separate runs.",
    "Choosing which checkpoint to ship.",
    "Metrics on held-out data of people, and A/B tests.",
    "Who took part, and when.",
    "When a round starts and ends, and how many clients it contacts.",
    "Data used before the training, such as public data for pre-training.",
    "Data that clients send outside of the training.",
)

PARTICIPATION: Final = "participation"
COMMON_CAP: Final = "participation over all runs"
# Hypotheses about the start model. They are stated by the file of the model or by the operator, and
# nobody can check them.
CLAIMS: Final = (EARLIER_RUNS, OTHER_PEOPLE, UNKNOWN_START)
# The texts that a hypothesis may have, by its name. The first one replaces any other text.
TEXTS: Final[dict[str, tuple[str, ...]]] = {
    hypothesis.name: (hypothesis.text,)
    for hypothesis in (
        ZERO_OUT,
        KEYSTREAM,
        ROUNDING_NOT_COVERED,
        AGGREGATORS,
        REPEATED,
        *CLAIMS,
    )
} | {
    CLIPPING.name: (CLIPPING.text, ADAPTIVE_CLIPPING.text),
    SECRECY.name: (SECRECY.text, TEST_KEY.text),
    "identity": tuple(hypothesis.text for hypothesis in IDENTITIES.values()),
}


@final
@dataclass(frozen=True)
class StatedHypothesis:
    """A hypothesis of the guarantee, and the evidence for it.

    Attributes:
        name: The subject of the hypothesis.
        text: What must be true.
        basis: The evidence. `enforced`: the server of a run that passes verification enforced it.
            `observed`: it was read from a log, for this statement or by the server of a run that
            passes verification. `claimed`: a file or the operator states it, without evidence.
            `assumed`: there is no evidence.
    """

    name: str
    text: str
    basis: StatedBasis


def with_own_texts(guarantee: Guarantee) -> Guarantee:
    """Return the guarantee with the texts of its hypotheses as this version writes them.

    Raises:
        InvalidInput: The guarantee has a hypothesis with an unknown name.
    """
    for hypothesis in guarantee.hypotheses:
        if hypothesis.name not in {PARTICIPATION, COMMON_CAP, *TEXTS}:
            raise InvalidInput(
                f"the guarantee rests on {hypothesis.name!r:.60}, which is no hypothesis of "
                "dpftrl; it was edited, or made by a later version"
            )
    dropped = {PARTICIPATION, *([COMMON_CAP] if guarantee.common_cap is None else [])}
    others = (
        replace(hypothesis, text=_own_text(hypothesis, guarantee))
        for hypothesis in guarantee.hypotheses
        if hypothesis.name not in dropped
    )
    last_run_first = reversed(participation_of(guarantee))
    return replace(guarantee, hypotheses=(*last_run_first, *others))


def participation_of(guarantee: Guarantee) -> tuple[Hypothesis, ...]:
    """Return the hypothesis about participation of each run, in the order of the runs.

    A hypothesis belongs to the run whose limits are in its text. The server of the last run writes
    its own hypothesis first. So if two runs have the same limits, the last run gets the first
    hypothesis.
    """
    unused = [hypothesis for hypothesis in guarantee.hypotheses if hypothesis.name == PARTICIPATION]
    by_text = {hypothesis.text: hypothesis for hypothesis in reversed(unused)}
    last_run_first: list[Hypothesis] = []
    for run in reversed(guarantee.runs):
        expected = run.hypothesis
        match = next(
            (hypothesis for hypothesis in unused if hypothesis.text == expected.text),
            by_text.get(expected.text),
        )
        if match in unused:
            unused.remove(match)
        last_run_first.append(match or expected)
    return tuple(reversed(last_run_first))


def without_evidence(guarantee: Guarantee) -> Guarantee:
    """Return the guarantee with the basis `assumed` for all hypotheses."""
    assumed = (replace(hypothesis, basis="assumed") for hypothesis in guarantee.hypotheses)
    return replace(guarantee, hypotheses=tuple(assumed))


def claims_of(guarantee: Guarantee) -> frozenset[tuple[str, str]]:
    """Return the names and texts of the hypotheses that are called enforced or observed."""
    return frozenset(
        (hypothesis.name, hypothesis.text)
        for hypothesis in guarantee.hypotheses
        if hypothesis.basis != "assumed"
    )


def stated_hypotheses(
    guarantee: Guarantee, claims: Iterable[tuple[str, str]], earlier: int, has_evidence: bool
) -> tuple[StatedHypothesis, ...]:
    """Return the hypotheses that a statement lists.

    A hypothesis that the guarantee needs, but that a file left out, is listed as assumed.

    Args:
        guarantee: The stated guarantee, from `with_own_texts`. Its bases `enforced` and `observed`
            have evidence.
        claims: Names and texts of hypotheses that a file calls enforced or observed, without
            evidence.
        earlier: The number of runs of the guarantee that produced the start model. They come first.
        has_evidence: False if verification of the run failed: then nothing is enforced or
            observed.
    """
    claimed = set(claims)

    def stated(hypothesis: Hypothesis, text: str, is_claim: bool) -> StatedHypothesis:
        if hypothesis.basis == "assumed":
            is_claim = is_claim or (hypothesis.name, hypothesis.text) in claimed
        else:
            is_claim = is_claim or not has_evidence
        return StatedHypothesis(hypothesis.name, text, "claimed" if is_claim else hypothesis.basis)

    has_several_runs = len(guarantee.runs) > 1
    required = guarantee_of(guarantee.runs, guarantee.delta).hypotheses
    names = {hypothesis.name for hypothesis in guarantee.hypotheses}
    claim_names = {claim.name for claim in CLAIMS}
    others = (
        *(hypothesis for hypothesis in guarantee.hypotheses if hypothesis.name != PARTICIPATION),
        *(hypothesis for hypothesis in required if hypothesis.name not in {PARTICIPATION, *names}),
    )
    return (
        *(
            stated(
                hypothesis,
                f"Run {number}: {hypothesis.text}" if has_several_runs else hypothesis.text,
                is_claim=number <= earlier,
            )
            for number, hypothesis in enumerate(participation_of(guarantee), 1)
        ),
        *(
            stated(hypothesis, hypothesis.text, is_claim=hypothesis.name in claim_names)
            for hypothesis in others
        ),
    )


def _own_text(hypothesis: Hypothesis, guarantee: Guarantee) -> str:
    if hypothesis.name == COMMON_CAP:
        return (
            f"Over all {len(guarantee.runs)} runs together, each client takes part in at most "
            f"{guarantee.common_cap:,} rounds."
        )
    texts = TEXTS[hypothesis.name]
    return hypothesis.text if hypothesis.text in texts else texts[0]


@final
@dataclass(frozen=True)
class Input:
    """A file that a statement was computed from.

    Attributes:
        role: What the file contains.
        name: The name of the file, with its folder if it belongs to a run.
        sha256: SHA-256 of the file, in hexadecimal.
    """

    role: Role
    name: str
    sha256: str


@final
@dataclass(frozen=True)
class RunRecord:
    """What `run.json` says about a run.

    Attributes:
        run: The identity of the run.
        population: The operator's name for the people in the run, if there is one.
        start: The model file that the run started from, with the private runs that produced it.
        version: The version of `run.json`. Version 1 does not record start models.
        canaries: Number of canaries that were added for an audit.
    """

    run: str
    population: str | None
    start: Start | None
    version: int
    canaries: int = 0


MOST_CHARACTERS: Final = 2000  # of one detail: it is a line of a table, not a document


@final
@dataclass(frozen=True)
class Details:
    """What the publisher says about the training. dpftrl prints it, and checks none of it.

    White space is reduced to single spaces, and invisible characters become a visible sign.

    Attributes:
        organisation: Who is responsible for the training.
        model_name: The name of the trained model.
        contact: Where to ask about this statement.
        public_data: The public data that was used, such as data for pre-training.
        shipped_checkpoint: The checkpoint that is used in the product.

    Raises:
        InvalidInput: A text is blank or longer than 2,000 characters.
    """

    organisation: str | None = None
    model_name: str | None = None
    contact: str | None = None
    public_data: str | None = None
    shipped_checkpoint: str | None = None

    def __post_init__(self) -> None:
        for name, text in self.given().items():
            shown = plain(text).strip()
            if not shown:
                raise InvalidInput(f"{name} is blank; give a text, or leave it out")
            if len(shown) > MOST_CHARACTERS:
                raise InvalidInput(
                    f"{name} has {len(shown):,} characters; give at most {MOST_CHARACTERS:,}"
                )
            object.__setattr__(self, name, shown)

    def given(self) -> dict[str, str]:
        """Return the details that are given, by name."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: text for name, text in pairs if text is not None}


@final
@dataclass(frozen=True)
class Facts:
    """The facts that a statement presents.

    Attributes:
        stated: The guarantee that is stated, and how it compares with the log.
        promised: The guarantee of the plan or file that the statement is about.
        fleet: The clients of the plan, or None if there is no plan.
        accounted: The guarantee that the run's server accounted, without earlier runs.
        observed: The summary of the log.
        devices: Further numbers of devices of one person to state the guarantee for.
        inputs: The files that the statement was computed from; the first is the file of the plan or
            the guarantee.
        date: The date of the statement, or None to print no date.
        curves: A picture of accuracy and epsilon per round, as PNG.
        verdict: The result of `dpftrl verify`, or None if the private files of the run are missing.
        record: What the run's `run.json` says.
        claims: Names and texts of hypotheses that a file calls enforced or observed, without
            evidence.
        details: What the publisher says about the training.
    """

    stated: StatedGuarantee
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
    details: Details = Details()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee that is stated."""
        return self.stated.guarantee

    @property
    def kind(self) -> Literal["exact", "upper bound"]:
        """Whether some client attains the numbers, or they are only an upper bound."""
        attained = self.guarantee.runs[0].mu * self.guarantee.devices
        if self.guarantee.common_cap is not None or self.guarantee.mu > attained * (1 + ROUNDING):
            return "upper bound"
        return self.guarantee.kind

    @property
    def evidence(self) -> Evidence:
        """The result of `dpftrl verify`: the evidence that the run's server enforced hypotheses."""
        if self.verdict is None:
            return "none"
        return "verified" if self.verdict.passed else "failed"

    @property
    def start(self) -> Start | None:
        """The model file that the run started from, or None if there is none or it is unknown."""
        return None if self.record is None else self.record.start

    @cached_property
    def hypotheses(self) -> tuple[StatedHypothesis, ...]:
        """The hypotheses of the guarantee, each with its basis."""
        earlier = 0 if self.start is None else len(self.start.runs)
        has_evidence = self.evidence != "failed"
        return stated_hypotheses(self.guarantee, self.claims, earlier, has_evidence)

    @cached_property
    def by_devices(self) -> tuple[Guarantee, ...]:
        """The guarantee for several devices of one person together, the fewest devices first."""
        counts = sorted({1, 2, 3, self.guarantee.devices, *self.devices})
        return tuple(replace(self.guarantee, devices=n) for n in counts)

    @cached_property
    def by_unit(self) -> tuple[Guarantee, ...]:
        """The guarantees in the headline: the stated one first, then per client and per person.

        There is one for the stated unit, one for a single client, and one for each further number
        of devices of one person that was asked for.
        """
        stated = self.guarantee.devices
        others = sorted({1, *self.devices} - {stated})
        return (self.guarantee, *(replace(self.guarantee, devices=n) for n in others))

    @cached_property
    def by_delta(self) -> tuple[Guarantee, ...]:
        """The guarantee at several deltas, the largest delta first."""
        deltas = sorted({self.guarantee.delta, *DELTAS}, reverse=True)
        return tuple(self.guarantee.at(delta) for delta in deltas)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Sentences at the start of the statement: first about the run, then about the numbers."""
        warnings = [*self._verification_warnings(), *self.stated.warnings]
        if any("NOTHING IS PRIVATE" in one.text for one in self.guarantee.hypotheses):
            warnings.append(
                "NOTHING IS PRIVATE: the noise key is one for tests, which anybody knows."
            )
        if is_empty(self.guarantee):
            warnings.append("There is no guarantee at all: the noise is far too small.")
        if self.fleet is not None and not whole_delta(self.guarantee) * self.fleet.population < 1:
            warnings.append(
                f"Delta is not below 1 / {self.fleet.population:,}, one over the number of "
                "clients: publishing all data of one random client would satisfy the same delta."
            )
        return tuple(warnings)

    def _verification_warnings(self) -> Iterator[str]:
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
        if any((check.name, check.outcome) == ("witness", "warning") for check in verdict.checks):
            yield (
                "The run was verified without its witness: this may be an older copy of the run, "
                "with fewer rounds than were released."
            )

    def comparable(self, guarantee: Guarantee) -> Guarantee:
        """Return a guarantee restated for the number of devices and the delta of the stated one."""
        return replace(guarantee, devices=self.guarantee.devices, delta=self.guarantee.delta)

    @property
    def right_guess(self) -> float:
        """The largest probability of a correct guess about the stated unit; see `right_guess`."""
        return right_guess(self.guarantee)


def right_guess(guarantee: Guarantee) -> float:
    """Return the largest probability of a correct guess whether data was used, at even odds."""
    padded_mu = guarantee.mu * (1 + ROUNDING)
    return min(1.0, (1 + delta_of(0.0, padded_mu) + guarantee.sampler_delta) / 2)


def whole_delta(guarantee: Guarantee) -> float:
    """Return delta including the sampler's part, if that part is not negligible."""
    total = guarantee.total_delta
    return guarantee.delta if total <= guarantee.delta * (1 + NEGLIGIBLE) else total


def delta_text(guarantee: Guarantee) -> str:
    """Return delta as text; a delta above 1, which is no guarantee, is shown as 1."""
    return short_up(min(whole_delta(guarantee), 1.0))


def delta_in_words(guarantee: Guarantee) -> str:
    """Return delta as a probability in words, such as "one in ten billion"."""
    return probability_in_words(whole_delta(guarantee))


def is_empty(guarantee: Guarantee) -> bool:
    """Return whether delta is at least 1. Every mechanism satisfies such a guarantee."""
    return not whole_delta(guarantee) < 1


def catalogue_name(run: Run) -> str | None:
    """Return the name that gives this mechanism on the command line, or None if there is none."""
    try:
        named_mechanism = mechanism(run.mechanism.name, run.participation)
    except DpftrlError:
        return None
    return run.mechanism.name if named_mechanism == run.mechanism else None


def matrix_digest(value: np.ndarray[Any, Any]) -> str:
    """Return the SHA-256 of the entries of a matrix as little-endian float64, row by row."""
    return hashlib.sha256(np.ascontiguousarray(value, dtype="<f8").tobytes()).hexdigest()
