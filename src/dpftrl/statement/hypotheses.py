"""The hypotheses that a statement lists, with the library's own texts and a basis for each.

Anybody can edit a guarantee file. So a statement takes only the name of a hypothesis from the file;
the text comes from this library. The basis in the file is a claim, unless `dpftrl verify` passed
for the run that wrote the file.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, final

from dpftrl.accounting import Guarantee, Hypothesis, guarantee_of
from dpftrl.accounting.guarantee import (
    CLIPPING,
    KEYSTREAM,
    ROUNDING_NOT_COVERED,
    SECRECY,
    ZERO_OUT,
)
from dpftrl.errors import InvalidInput
from dpftrl.federated.run_guarantee import IDENTITIES
from dpftrl.federated.start_model import EARLIER_RUNS, OTHER_PEOPLE, TEST_KEY, UNKNOWN_START
from dpftrl.statement.promised_and_observed import REPEATED

StatedBasis = Literal["enforced", "observed", "claimed", "assumed"]

PARTICIPATION: Final = "participation"
COMMON_CAP: Final = "participation over all runs"
# Hypotheses about the start model. Its file or the operator states them; nobody can check them.
CLAIMS: Final = (EARLIER_RUNS, OTHER_PEOPLE, UNKNOWN_START)
# The texts that a hypothesis of this name may have. The first one replaces any other text.
TEXTS: Final[dict[str, tuple[str, ...]]] = {
    hypothesis.name: (hypothesis.text,)
    for hypothesis in (CLIPPING, ZERO_OUT, KEYSTREAM, ROUNDING_NOT_COVERED, REPEATED, *CLAIMS)
} | {
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
            `observed`: it was read from a log for this statement, or by such a server. `claimed`:
            a file or the operator states it, without evidence. `assumed`: there is no evidence.
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
        earlier: The number of its runs that produced the start model. They come first.
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
            f"Over all {len(guarantee.runs)} runs together, each device takes part in at most "
            f"{guarantee.common_cap:,} rounds."
        )
    texts = TEXTS[hypothesis.name]
    return hypothesis.text if hypothesis.text in texts else texts[0]
