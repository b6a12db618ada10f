"""The privacy statement: what is promised, to whom, and what that rests on."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from dpftrl.accounting import Guarantee
from dpftrl.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.observed import Observed
from dpftrl.plan import Plan
from dpftrl.report.accounting_section import accounting_section
from dpftrl.report.as_html import html
from dpftrl.report.as_markdown import markdown
from dpftrl.report.document import Block, Document, Notice, Paragraph, Span
from dpftrl.report.facts import Facts, Input
from dpftrl.report.happened import weigh
from dpftrl.report.sections import (
    definition_section,
    happened_section,
    setting_section,
    summary_section,
)
from dpftrl.report.twin import twin
from dpftrl.report.verification import verification_section
from dpftrl.report.wording import formal, origin, summary
from dpftrl.storage import replace_file

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
        """A short paragraph: warnings, the guarantee, and where it comes from."""
        return " ".join([*self.facts.warnings, summary(self.facts), origin(self.facts)])

    def markdown(self) -> str:
        """For people, as text."""
        return markdown(self.document)

    def html(self) -> str:
        """For people, as a page of its own."""
        return html(self.document)

    def json_bytes(self) -> bytes:
        """For machines."""
        return twin(self.facts, summary(self.facts), formal(self.facts))


def statement(
    promise: Plan | Guarantee,
    *,
    accounted: Guarantee | None = None,
    observed: Observed | None = None,
    devices: int | None = None,
    inputs: tuple[Input, ...] = (),
    date: str | None = None,
    curves: bytes | None = None,
) -> Statement:
    """State what a plan or guarantee promises or, after a run, what may still be stated.

    Args:
        promise: What was planned.
        accounted: What the run's server enforced and accounted.
        observed: What the run's log shows; see `dpftrl.observed`.
        devices: One more number of devices of one person to state the guarantee for.
        inputs: The files that all this came from, the promise first.
        date: To be printed; nothing is if none is given.
        curves: A picture of accuracy and epsilon by round, as PNG.

    Guarantees:
        What is stated is the promise, or what was accounted if that is given; but if the log does
        not keep to its limits, the guarantee of the log, with an epsilon that is not smaller. Every
        number in text is rounded up.

    >>> from dpftrl import MinSep, mechanism
    >>> from dpftrl.accounting import account
    >>> clients = MinSep(rounds=2000, min_sep=1182, max_participations=2)
    >>> found = statement(account(mechanism("blt-b1000"), clients, sigma=16.1, delta=1e-10))
    >>> print(found.summary.partition("are ")[2].partition(" It ")[0])
    (0.9790, 1e-10)-differentially private and 0.01394-zCDP, for each device.
    """
    guarantee = promise.guarantee if isinstance(promise, Plan) else promise
    kind = "plan" if isinstance(promise, Plan) else "guarantee"
    facts = Facts(
        happened=weigh(guarantee, kind, accounted, observed),
        promised=guarantee,
        fleet=promise.fleet if isinstance(promise, Plan) else None,
        accounted=accounted,
        observed=observed,
        devices=() if devices is None else (whole_number("devices", devices),),
        inputs=inputs,
        date=date,
        curves=curves,
    )
    return Statement(facts, _document(facts))


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
