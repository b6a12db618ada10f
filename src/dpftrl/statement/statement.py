"""Make and save privacy statements: what is guaranteed, for whom, and under which hypotheses."""

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
    participation_of,
    with_own_texts,
    without_evidence,
)
from dpftrl.statement.json_content import statement_json
from dpftrl.statement.promised_and_observed import choose_guarantee
from dpftrl.statement.render import html, markdown
from dpftrl.statement.sections import (
    definition_section,
    promised_and_observed_section,
    setting_section,
    summary_section,
)
from dpftrl.statement.wording import (
    formal_sentence,
    origin_text,
    start_model_sentences,
    summary_sentence,
)
from dpftrl.verify import Verdict

SUFFIXES = (".md", ".html", ".json")


@final
@dataclass(frozen=True)
class Statement:
    """A privacy statement. The same facts give the same bytes.

    Attributes:
        facts: The facts that the statement presents.
        document: The text of the statement, before rendering.
    """

    facts: Facts
    document: Document

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee that is stated."""
        return self.facts.guarantee

    @property
    def summary(self) -> str:
        """A short paragraph: warnings, the guarantee, its origin and the start model."""
        facts = self.facts
        return " ".join(
            [
                *facts.warnings,
                summary_sentence(facts),
                origin_text(facts),
                *start_model_sentences(facts),
            ]
        )

    def markdown(self) -> str:
        """Return the document as Markdown."""
        return markdown(self.document)

    def html(self) -> str:
        """Return the document as a complete HTML page."""
        return html(self.document)

    def json_bytes(self) -> bytes:
        """Return the facts as JSON, with numbers in full."""
        return statement_json(self.facts, summary_sentence(self.facts), formal_sentence(self.facts))


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
    """Make the privacy statement of a plan or guarantee and, optionally, of a run.

    Args:
        promise: The plan or the guarantee that was promised.
        accounted: The guarantee that the run's server wrote into `guarantee.json`.
        observed: The summary of the run's log; see `dpftrl.accounting.logs`.
        devices: One more number of devices of one person to state the guarantee for.
        inputs: The files that the arguments were read from. The file of `promise` comes first.
        date: The date to print, or None to print no date.
        curves: A picture of accuracy and epsilon per round, as PNG.
        verdict: The result of verifying the run that `accounted` belongs to.
        record: What the run's `run.json` says, with the model that the run started from.

    Raises:
        InvalidInput: A guarantee has an unknown hypothesis, or a log contradicts several runs.

    Guarantees:
        The stated guarantee is `accounted` if that is given, and the promised guarantee otherwise.
        But if the log does not keep to its limits, the guarantee of the log is stated, with an
        epsilon that is not smaller. If the run started from a private model, the earlier runs on
        the same people are composed. A hypothesis is called enforced only if the verdict passed,
        and observed only if it passed or a log is given. Every number in the text is rounded up.

    >>> from dpftrl import MinSep, mechanism
    >>> from dpftrl.accounting import account
    >>> clients = MinSep(rounds=2000, min_sep=1182, max_participations=2)
    >>> statement = make_statement(
    ...     account(mechanism("blt-b1000"), clients, noise_multiplier=16.1, delta=1e-10)
    ... )
    >>> print(statement.summary.partition("are ")[2].partition(" It ")[0])
    (0.9790, 1e-10)-differentially private and 0.01395-zCDP, for each device.
    """
    promised = with_own_texts(promise.guarantee if isinstance(promise, Plan) else promise)
    accounted = None if accounted is None else with_own_texts(accounted)
    is_verified = verdict is not None and verdict.passed
    claims: frozenset[tuple[str, str]] = frozenset()
    if accounted is None or not is_verified:
        claims = claims_of(accounted or promised)
        accounted = None if accounted is None else without_evidence(accounted)
    promised = without_evidence(promised)
    start = None if record is None else record.start
    if start is not None:
        promised = _without_earlier_runs(promised, start)
        accounted = None if accounted is None else _without_earlier_runs(accounted, start)
    origin = "plan" if isinstance(promise, Plan) else "guarantee"
    stated = choose_guarantee(promised, origin, accounted, observed)
    if start is not None:
        stated = replace(stated, guarantee=start.composed_with(stated.guarantee))
    facts = Facts(
        stated=stated,
        promised=promised,
        fleet=promise.fleet if isinstance(promise, Plan) else None,
        accounted=accounted,
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


def _without_earlier_runs(guarantee: Guarantee, start: Start) -> Guarantee:
    """Return the guarantee of the last run, without the earlier runs that it was composed with."""
    dropped = {PARTICIPATION, *(claim.name for claim in CLAIMS)}
    others = (hypothesis for hypothesis in guarantee.hypotheses if hypothesis.name not in dropped)
    hypotheses = (participation_of(guarantee)[-1], *others)
    if len(guarantee.runs) == 1:
        return replace(guarantee, hypotheses=hypotheses)
    if guarantee.runs[:-1] != start.runs:
        # The file and run.json disagree about the earlier runs. Keep both, even if a run is then
        # counted twice: epsilon is too large rather than too small.
        return guarantee
    alone = guarantee_of(guarantee.runs[-1:], guarantee.delta).for_devices(guarantee.devices)
    return replace(alone, hypotheses=hypotheses)


def save_statement(statement: Statement, stem: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write the statement to three files, and its picture, if there is one, to `curves.png`.

    Existing files are replaced.

    Args:
        statement: The statement.
        stem: The path of the files without `.md`, `.html` and `.json`; see `statement_paths`.

    Returns:
        The paths of the three files.
    """
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
    """Return the paths of the Markdown, HTML and JSON file.

    Args:
        stem: The common path. It may end with the suffix of one of the three files.

    Raises:
        InvalidInput: The path has no file name.
    """
    path = Path(stem)
    base = path.with_suffix("") if path.suffix in SUFFIXES else path
    if not base.name:
        raise InvalidInput(f"a statement needs a name such as out/statement, got {str(stem)!r}")
    return tuple(base.with_name(base.name + suffix) for suffix in SUFFIXES)


def _document(facts: Facts) -> Document:
    introduction: list[Block] = [
        Notice((Span("Attention.", "strong"), " ", warning)) for warning in facts.warnings
    ]
    introduction.append(
        Paragraph(
            "This statement says what the training guarantees to the people whose devices take "
            "part, and on which hypotheses the guarantee rests. The sections follow the "
            "reporting checklist of Ponomareva et al. (2023), How to DP-fy ML, section 5.3."
        )
    )
    is_after_run = facts.accounted is not None or facts.observed is not None
    return Document(
        "Privacy statement",
        tuple(introduction),
        (
            summary_section(facts),
            *([promised_and_observed_section(facts)] if is_after_run else []),
            setting_section(),
            definition_section(facts),
            accounting_section(facts),
            verification_section(facts),
        ),
    )
