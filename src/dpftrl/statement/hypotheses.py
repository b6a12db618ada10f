"""What a statement says its guarantee rests on: in our own words, and with evidence or without.

A guarantee file can be edited by anybody. So a hypothesis of a file counts by its name alone: its
text comes from here. What the file says of its basis is a claim, unless `dpftrl verify` passed on
the run that wrote it.
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
# About the start model: what its file or the operator says, and nobody can check.
CLAIMS: Final = (EARLIER_RUNS, OTHER_PEOPLE, UNKNOWN_START)
# All texts that a name may have; the first stands for a text that is none of them.
TEXTS: Final[dict[str, tuple[str, ...]]] = {
    one.name: (one.text,)
    for one in (CLIPPING, ZERO_OUT, KEYSTREAM, ROUNDING_NOT_COVERED, REPEATED, *CLAIMS)
} | {
    SECRECY.name: (SECRECY.text, TEST_KEY.text),
    "identity": tuple(one.text for one in IDENTITIES.values()),
}


@final
@dataclass(frozen=True)
class StatedHypothesis:
    """One thing that must be so, and what shows that it is.

    Attributes:
        name: What it is about.
        text: What must be so.
        basis: `enforced` by the server of a run that verifies; `observed` in a log that was read
            for this statement, or by such a server; `claimed` by a file or by the operator, without
            evidence; `assumed`: taken for granted.
    """

    name: str
    text: str
    basis: StatedBasis


def in_our_words(guarantee: Guarantee) -> Guarantee:
    """The same guarantee with the texts of its hypotheses as this version writes them.

    Raises:
        InvalidInput: It has a hypothesis that dpftrl knows nothing of.
    """
    for one in guarantee.hypotheses:
        if one.name not in {PARTICIPATION, COMMON_CAP, *TEXTS}:
            raise InvalidInput(
                f"the guarantee rests on {one.name!r:.60}, which is no hypothesis of dpftrl; it "
                "was edited, or made by a later version"
            )
    dropped = {PARTICIPATION, *([COMMON_CAP] if guarantee.common_cap is None else [])}
    others = (one for one in guarantee.hypotheses if one.name not in dropped)
    written = (replace(one, text=_text(one, guarantee)) for one in others)
    last_first = reversed(participation_of(guarantee))
    return replace(guarantee, hypotheses=(*last_first, *written))


def participation_of(guarantee: Guarantee) -> tuple[Hypothesis, ...]:
    """The hypothesis about participation of each run, in the order of the runs.

    A run's own text finds it. The server of the last run writes its own hypothesis first, so that
    the last run has the first choice where two runs have the same limits.
    """
    unused = [one for one in guarantee.hypotheses if one.name == PARTICIPATION]
    known = {one.text: one for one in reversed(unused)}
    found: list[Hypothesis] = []
    for run in reversed(guarantee.runs):
        wanted = run.hypothesis
        match = next((one for one in unused if one.text == wanted.text), known.get(wanted.text))
        if match in unused:
            unused.remove(match)
        found.append(match or wanted)
    return tuple(reversed(found))


def without_evidence(guarantee: Guarantee) -> Guarantee:
    """The same guarantee, with everything that it rests on assumed."""
    assumed = (replace(one, basis="assumed") for one in guarantee.hypotheses)
    return replace(guarantee, hypotheses=tuple(assumed))


def claims_of(guarantee: Guarantee) -> frozenset[tuple[str, str]]:
    """Names and texts of what a guarantee calls enforced or observed."""
    return frozenset((one.name, one.text) for one in guarantee.hypotheses if one.basis != "assumed")


def stated_hypotheses(
    guarantee: Guarantee, claims: Iterable[tuple[str, str]], earlier: int, has_evidence: bool
) -> tuple[StatedHypothesis, ...]:
    """What a statement lists; what a file left out is assumed, because it is needed all the same.

    Args:
        guarantee: The one that is stated, in our words; what it calls enforced or observed is so.
        claims: What a file calls enforced or observed, without evidence.
        earlier: How many of its runs are earlier ones, which a start model was made by.
        has_evidence: False if the run does not verify: then nothing is enforced or observed.
    """
    claimed = set(claims)

    def stated(one: Hypothesis, text: str, is_claim: bool) -> StatedHypothesis:
        is_claim = is_claim or (one.basis == "assumed" and (one.name, one.text) in claimed)
        is_claim = is_claim or (one.basis != "assumed" and not has_evidence)
        return StatedHypothesis(one.name, text, "claimed" if is_claim else one.basis)

    several = len(guarantee.runs) > 1
    needed = guarantee_of(guarantee.runs, guarantee.delta).hypotheses
    named = {one.name for one in guarantee.hypotheses}
    rest = (
        *(one for one in guarantee.hypotheses if one.name != PARTICIPATION),
        *(one for one in needed if one.name not in {PARTICIPATION, *named}),
    )
    return (
        *(
            stated(one, f"Run {number}: {one.text}" if several else one.text, number <= earlier)
            for number, one in enumerate(participation_of(guarantee), 1)
        ),
        *(stated(one, one.text, one.name in {claim.name for claim in CLAIMS}) for one in rest),
    )


def _text(one: Hypothesis, guarantee: Guarantee) -> str:
    if one.name == COMMON_CAP:
        return (
            f"Over all {len(guarantee.runs)} runs together, each device takes part in at most "
            f"{guarantee.common_cap:,} rounds."
        )
    texts = TEXTS[one.name]
    return one.text if one.text in texts else texts[0]
