"""The privacy statement: what is promised, to whom, and what that rests on."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from dpftrl._internal.checks import whole_number
from dpftrl._internal.storage import replace_file
from dpftrl.accounting import Guarantee, guarantee_of
from dpftrl.accounting.logs import Observed
from dpftrl.errors import InvalidInput
from dpftrl.federated import Start
from dpftrl.plan import Plan
from dpftrl.statement.accounting_section import accounting_section, verification_section
from dpftrl.statement.document import Block, Document, Notice, Paragraph, Span
from dpftrl.statement.facts import Facts, Input, RunRecord
from dpftrl.statement.hypotheses import (
    CLAIMS,
    PARTICIPATION,
    claims_of,
    in_our_words,
    participation_of,
    without_evidence,
)
from dpftrl.statement.json_content import twin
from dpftrl.statement.promised_and_observed import weigh
from dpftrl.statement.render import html, markdown
from dpftrl.statement.sections import (
    definition_section,
    happened_section,
    setting_section,
    summary_section,
)
from dpftrl.statement.wording import formal, origin, starts_from, summary
from dpftrl.verify import Verdict

ENDINGS = (".md", ".html", ".json")


@final
@dataclass(frozen=True)
class Statement:
    """A privacy statement; the same facts give the same bytes.

    Attributes:
        facts: What it says.
        document: How it says it.
    """

    facts: Facts
    document: Document

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee that is stated."""
        return self.facts.guarantee

    @property
    def summary(self) -> str:
        """A short paragraph: warnings, the guarantee, where it and its start model come from."""
        facts = self.facts
        return " ".join([*facts.warnings, summary(facts), origin(facts), *starts_from(facts)])

    def markdown(self) -> str:
        """For people, as text."""
        return markdown(self.document)

    def html(self) -> str:
        """For people, as a page of its own."""
        return html(self.document)

    def json_bytes(self) -> bytes:
        """For machines."""
        return twin(self.facts, summary(self.facts), formal(self.facts))


def make_statement(
    promise: Plan | Guarantee,
    *,
    accounted: Guarantee | None = None,
    observed: Observed | None = None,
    devices: int | None = None,
    inputs: tuple[Input, ...] = (),
    date: str | None = None,
    curves: bytes | None = None,
    verdict: Verdict | None = None,
    record: RunRecord | None = None,
) -> Statement:
    """State what a plan or guarantee promises or, after a run, what may still be stated.

    Args:
        promise: What was planned.
        accounted: What the run's server wrote into `guarantee.json`.
        observed: What the run's log shows; see `dpftrl.accounting.logs`.
        devices: One more number of devices of one person to state the guarantee for.
        inputs: The files that all this came from, the promise first.
        date: To be printed; nothing is if none is given.
        curves: A picture of accuracy and epsilon by round, as PNG.
        verdict: What `dpftrl.verify` finds about the run that `accounted` is of.
        record: What the run's `run.json` says, with the model that it started from.

    Guarantees:
        What is stated is the promise, or what was accounted if that is given; but if the log does
        not keep to its limits, the guarantee of the log, with an epsilon that is not smaller. If
        the run started from a private model, the earlier runs on the same people are composed.
        A hypothesis is called enforced only if the verdict passed, and observed only if it passed
        or a log is given. Every number in text is rounded up.

    >>> from dpftrl import MinSep, mechanism
    >>> from dpftrl.accounting import account
    >>> clients = MinSep(rounds=2000, min_sep=1182, max_participations=2)
    >>> found = make_statement(
    ...     account(mechanism("blt-b1000"), clients, noise_multiplier=16.1, delta=1e-10)
    ... )
    >>> print(found.summary.partition("are ")[2].partition(" It ")[0])
    (0.9790, 1e-10)-differentially private and 0.01395-zCDP, for each device.
    """
    promised = in_our_words(promise.guarantee if isinstance(promise, Plan) else promise)
    own = None if accounted is None else in_our_words(accounted)
    is_verified = verdict is not None and verdict.passed
    claims: frozenset[tuple[str, str]] = frozenset()
    if own is None or not is_verified:
        claims = claims_of(own or promised)
        own = None if own is None else without_evidence(own)
    promised = without_evidence(promised)
    start = None if record is None else record.start
    if start is not None:
        promised = _alone(promised, start)
        own = None if own is None else _alone(own, start)
    kind = "plan" if isinstance(promise, Plan) else "guarantee"
    happened = weigh(promised, kind, own, observed)
    if start is not None:
        happened = replace(happened, guarantee=start.composed_with(happened.guarantee))
    facts = Facts(
        happened=happened,
        promised=promised,
        fleet=promise.fleet if isinstance(promise, Plan) else None,
        accounted=own,
        observed=observed,
        devices=() if devices is None else (whole_number("devices", devices),),
        inputs=inputs,
        date=date,
        curves=curves,
        verdict=verdict,
        record=record,
        claims=claims,
    )
    return Statement(facts, _document(facts))


def _alone(guarantee: Guarantee, start: Start) -> Guarantee:
    """The guarantee of the last run, without the earlier runs that it was composed with."""
    dropped = {PARTICIPATION, *(one.name for one in CLAIMS)}
    others = (one for one in guarantee.hypotheses if one.name not in dropped)
    hypotheses = (participation_of(guarantee)[-1], *others)
    if len(guarantee.runs) == 1:
        return replace(guarantee, hypotheses=hypotheses)
    if guarantee.runs[:-1] != start.runs:  # not what run.json says: rather count a run twice
        return guarantee
    alone = guarantee_of(guarantee.runs[-1:], guarantee.delta).for_devices(guarantee.devices)
    return replace(alone, hypotheses=hypotheses)


def save_statement(statement: Statement, stem: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write STEM.md, STEM.html and STEM.json, replacing what is there; return the paths."""
    paths = statement_paths(stem)
    contents = (
        statement.markdown().encode(),
        statement.html().encode(),
        statement.json_bytes(),
    )
    for path, content in zip(paths, contents, strict=True):
        replace_file(path, content)
    if statement.facts.curves is not None:
        replace_file(paths[0].with_name("curves.png"), statement.facts.curves)
    return paths


def statement_paths(stem: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The three files of a stem, which may carry one of their endings."""
    whole = Path(stem)
    base = whole.with_suffix("") if whole.suffix in ENDINGS else whole
    if not base.name:
        raise InvalidInput(f"a statement needs a name such as out/statement, got {str(stem)!r}")
    return tuple(base.with_name(base.name + ending) for ending in ENDINGS)


def _document(facts: Facts) -> Document:
    first: list[Block] = [
        Notice((Span("Attention.", "strong"), " ", warning)) for warning in facts.warnings
    ]
    first.append(
        Paragraph(
            "What this training guarantees about the people whose devices take part, and what that "
            "rests on. The sections follow the reporting checklist of Ponomareva et al. (2023), "
            "How to DP-fy ML, section 5.3."
        )
    )
    happened = [] if facts.accounted is None and facts.observed is None else [facts]
    return Document(
        "Privacy statement",
        tuple(first),
        (
            summary_section(facts),
            *map(happened_section, happened),
            setting_section(),
            definition_section(facts),
            accounting_section(facts),
            verification_section(facts),
        ),
    )
