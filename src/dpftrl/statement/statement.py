"""Privacy statements: `make_statement` computes one, `save_statement` writes it to files.

The JSON file of a statement has the same facts as its document, with numbers in full.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import msgspec
import numpy as np

from dpftrl import __version__
from dpftrl._internal.checks import whole_number
from dpftrl._internal.storage import replace_file
from dpftrl.accounting import Guarantee, Run, guarantee_of, risk_of
from dpftrl.accounting.guarantee_files import ParticipationContent
from dpftrl.accounting.logs import Observed
from dpftrl.errors import InvalidInput
from dpftrl.federated import Start
from dpftrl.plan import Plan
from dpftrl.statement.accounting_section import accounting_section, verification_section
from dpftrl.statement.document import (
    Block,
    Document,
    Notice,
    Paragraph,
    Span,
    html,
    markdown,
    visible,
)
from dpftrl.statement.facts import (
    CLAIMS,
    NOT_COVERED,
    PARTICIPATION,
    Details,
    Facts,
    Input,
    RunRecord,
    catalogue_name,
    claims_of,
    delta_in_words,
    matrix_digest,
    participation_of,
    whole_delta,
    with_own_texts,
    without_evidence,
)
from dpftrl.statement.promised_and_observed import choose_guarantee
from dpftrl.statement.sections import (
    definition_section,
    delta_sentences,
    details_table,
    formal_sentence,
    glossary_section,
    origin_text,
    promised_and_observed_section,
    setting_section,
    start_model_sentences,
    summary_section,
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
        """A paragraph with warnings, the guarantee, delta, the origin and the start model."""
        facts = self.facts
        return " ".join(
            [
                *facts.warnings,
                summary_sentence(facts),
                *delta_sentences(facts),
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
        formal = " ".join(map(formal_sentence, self.facts.by_unit))
        return statement_json(self.facts, summary_sentence(self.facts), formal)


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
    organisation: str | None = None,
    model_name: str | None = None,
    contact: str | None = None,
    public_data: str | None = None,
    shipped_checkpoint: str | None = None,
) -> Statement:
    """Make the privacy statement of a plan or guarantee and, optionally, of a run.

    Args:
        promise: The plan or the guarantee that was promised.
        accounted: The guarantee that the run's server wrote into `guarantee.json`.
        observed: The summary of the run's log; see `dpftrl.accounting.logs`.
        devices: A number of devices of one person. The headline then states the guarantee for a
            person with so many devices too.
        inputs: The files that the arguments were read from. The file of `promise` comes first.
        date: The date to print, or None to print no date.
        curves: A picture of accuracy and epsilon per round, as PNG.
        verdict: The result of verifying the run that `accounted` belongs to.
        record: What the run's `run.json` says, with the model that the run started from.
        organisation: Who is responsible for the training. This and the following texts are printed
            as the publisher's words; nothing checks them.
        model_name: The name of the trained model.
        contact: Where to ask about the statement.
        public_data: The public data that was used, such as data for pre-training.
        shipped_checkpoint: The checkpoint that is used in the product.

    Raises:
        InvalidInput: A guarantee has an unknown hypothesis, a log contradicts several runs, or a
            text of the publisher is blank or too long.

    Guarantees:
        The stated guarantee is `accounted` if that is given, and the promised guarantee otherwise.
        But if the log does not keep to the limits of that guarantee, the guarantee of the log is
        stated, with an epsilon that is not smaller. If the run started from a private model, the
        earlier runs on the same people are composed. A hypothesis is called enforced only if the
        verdict passed, and observed only if the verdict passed or a log is given. In the text,
        noise multipliers are rounded down, and all other numbers about privacy are rounded up.

    >>> from dpftrl import MinSep, mechanism
    >>> from dpftrl.accounting import account
    >>> clients = MinSep(rounds=2000, min_sep=1182, max_participations=2)
    >>> statement = make_statement(
    ...     account(mechanism("blt-b1000"), clients, noise_multiplier=16.1, delta=1e-10)
    ... )
    >>> print(statement.summary.partition("are ")[2].partition(" A delta")[0])
    (0.9790, 1e-10)-differentially private and 0.01395-zCDP, for each client.
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
        details=Details(organisation, model_name, contact, public_data, shipped_checkpoint),
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
    details = details_table(facts)
    if details is not None:
        introduction.append(details)
    is_after_run = facts.accounted is not None or facts.observed is not None
    return Document(
        "Privacy statement",
        tuple(introduction),
        (
            summary_section(facts),
            *([promised_and_observed_section(facts)] if is_after_run else []),
            setting_section(facts),
            definition_section(facts),
            accounting_section(facts),
            verification_section(facts),
            glossary_section(),
        ),
    )


def statement_json(facts: Facts, summary: str, formal: str) -> bytes:
    """Return the facts as indented JSON. The same facts give the same bytes.

    Args:
        facts: The facts of the statement.
        summary: The guarantee in one plain sentence.
        formal: The guarantee in one formal sentence.
    """
    encoded = msgspec.json.encode(_json_content(facts, summary, formal), enc_hook=_encode_array)
    return msgspec.json.format(encoded, indent=2) + b"\n"


def _json_content(facts: Facts, summary: str, formal: str) -> dict[str, Any]:
    stated = facts.guarantee
    return {
        "format": "dpftrl statement",
        "version": 2,
        "summary": summary,
        "formal_statement": formal,
        "warnings": facts.warnings,
        "origin": facts.stated.origin,
        **_numbers_json(stated),
        "delta_in_words": delta_in_words(stated),
        "right_guess": facts.right_guess,
        **risk_of(stated).as_json(),
        "kind": facts.kind,
        "unit": stated.unit,
        "adjacency": stated.adjacency,
        "setting": "central",
        "max_participations_over_all_runs": stated.common_cap,
        "runs": [_run_json(run) for run in stated.runs],
        "hypotheses": facts.hypotheses,
        "not_covered": NOT_COVERED,
        "epsilon_at_delta": [
            {"delta": guarantee.delta, "epsilon": guarantee.epsilon} for guarantee in facts.by_delta
        ],
        "devices": [
            {"devices": guarantee.devices, **_numbers_json(guarantee)}
            for guarantee in facts.by_devices
        ],
        "fleet": facts.fleet,
        "planned": _guarantee_json(facts.promised),
        "accounted": None if facts.accounted is None else _guarantee_json(facts.accounted),
        "observed": _observed_json(facts),
        "run": None if facts.record is None else facts.record.run,
        "population": None if facts.record is None else facts.record.population,
        "start": _start_json(facts),
        **({"canaries": facts.record.canaries} if facts.record and facts.record.canaries else {}),
        "verification": _verification_json(facts),
        "dpftrl_version": __version__,
        "input_sha256": facts.inputs[0].sha256 if facts.inputs else None,
        "inputs": [
            {"role": file.role, "name": visible(file.name), "sha256": file.sha256}
            for file in facts.inputs
        ],
        "date": facts.date,
        **({"publisher": facts.details.given()} if facts.details.given() else {}),
    }


def _numbers_json(guarantee: Guarantee) -> dict[str, float]:
    return {
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "sampler_delta": guarantee.sampler_delta,
        "whole_delta": min(1.0, whole_delta(guarantee)),
        "rho": guarantee.rho,
        "mu": guarantee.mu,
    }


def _guarantee_json(guarantee: Guarantee) -> dict[str, Any]:
    return {
        **_numbers_json(guarantee),
        "kind": guarantee.kind,
        "unit": guarantee.unit,
        "runs": [_run_json(run) for run in guarantee.runs],
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "mechanism": run.mechanism.name,
        "catalogue_name": catalogue_name(run),
        "family": run.mechanism.family,
        "parameters": run.mechanism.parameters(),
        "participation": ParticipationContent.of(run.participation),
        "noise_multiplier": run.noise_multiplier,
        "sensitivity": run.sensitivity.value,
        "sensitivity_kind": run.sensitivity.kind,
        "mu": run.mu,
    }


def _observed_json(facts: Facts) -> dict[str, Any] | None:
    """Return the summary of the log, without the name of any client.

    The guarantee does not cover who took part, so a statement must not say it.
    """
    observed, ex_post = facts.observed, facts.stated.ex_post
    if observed is None:
        return None
    return {
        "rounds": observed.rounds,
        "empty_rounds": observed.empty_rounds,
        "clients": observed.clients,
        "participations": observed.participations,
        "min_sep": observed.min_sep,
        "max_participations": observed.max_participations,
        "duplicate_rows": observed.duplicate_rows,
        "kept_to_limits": facts.stated.kept_limits,
        "guarantee": None if ex_post is None else _guarantee_json(ex_post),
    }


def _start_json(facts: Facts) -> dict[str, Any] | None:
    """Return the start model of the run, or None if there is none or it is not recorded."""
    start = facts.start
    if start is None:
        return None
    return {
        "sha256": start.sha256,
        "earlier_runs": [
            {
                "run": run.run,
                "population": run.population,
                "people": run.people,
                "composed": run.people == "same",
                **_guarantee_json(run.guarantee),
            }
            for run in start.earlier
        ],
    }


def _verification_json(facts: Facts) -> dict[str, Any] | None:
    """Return the names of the checks by outcome, without their texts, which may name folders."""
    if facts.verdict is None:
        return None
    by_outcome: dict[str, list[str]] = {"passed": [], "failed": [], "warning": []}
    for check in facts.verdict.checks:
        by_outcome.setdefault(check.outcome, []).append(check.name)
    empty = facts.verdict.empty_rounds
    return {
        "verified": facts.verdict.passed,
        "checks": by_outcome,
        **({"empty_rounds": empty} if empty else {}),
    }


def _encode_array(value: Any) -> Any:
    """Encode a matrix for JSON by its shape and digest."""
    if isinstance(value, np.ndarray):
        matrix = cast("np.ndarray[Any, Any]", value)
        return {"shape": list(matrix.shape), "sha256": matrix_digest(matrix)}
    raise NotImplementedError(f"cannot write {type(value).__name__} as JSON")
