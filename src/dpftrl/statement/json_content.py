"""The JSON file of a statement: the same facts as the document, with numbers in full."""

import hashlib
from typing import Any, cast

import msgspec
import numpy as np

from dpftrl import __version__
from dpftrl.accounting import Guarantee, Run
from dpftrl.accounting.files import ParticipationContent
from dpftrl.statement.document import visible
from dpftrl.statement.facts import NOT_COVERED, Facts, catalogue_name, whole_delta


def statement_json(facts: Facts, summary: str, formal: str) -> bytes:
    """Return the facts as indented JSON. The same facts give the same bytes.

    Args:
        facts: The facts of the statement.
        summary: The guarantee in one plain sentence.
        formal: The guarantee in one formal sentence.
    """
    encoded = msgspec.json.encode(_content(facts, summary, formal), enc_hook=_encode_array)
    return msgspec.json.format(encoded, indent=2) + b"\n"


def _content(facts: Facts, summary: str, formal: str) -> dict[str, Any]:
    stated = facts.guarantee
    return {
        "format": "dpftrl statement",
        "version": 2,
        "summary": summary,
        "formal_statement": formal,
        "warnings": facts.warnings,
        "origin": facts.stated.origin,
        **_numbers(stated),
        "right_guess": facts.right_guess,
        "kind": facts.kind,
        "unit": stated.unit,
        "adjacency": stated.adjacency,
        "setting": "central",
        "max_participations_over_all_runs": stated.common_cap,
        "runs": [_run(run) for run in stated.runs],
        "hypotheses": facts.hypotheses,
        "not_covered": NOT_COVERED,
        "epsilon_at_delta": [
            {"delta": guarantee.delta, "epsilon": guarantee.epsilon} for guarantee in facts.by_delta
        ],
        "devices": [
            {"devices": guarantee.devices, **_numbers(guarantee)} for guarantee in facts.by_devices
        ],
        "fleet": facts.fleet,
        "planned": _guarantee(facts.promised),
        "accounted": None if facts.accounted is None else _guarantee(facts.accounted),
        "observed": _observed(facts),
        "run": None if facts.record is None else facts.record.run,
        "population": None if facts.record is None else facts.record.population,
        "start": _start(facts),
        "verification": _verification(facts),
        "dpftrl_version": __version__,
        "input_sha256": facts.inputs[0].sha256 if facts.inputs else None,
        "inputs": [
            {"role": file.role, "name": visible(file.name), "sha256": file.sha256}
            for file in facts.inputs
        ],
        "date": facts.date,
    }


def _numbers(guarantee: Guarantee) -> dict[str, float]:
    return {
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "sampler_delta": guarantee.sampler_delta,
        "whole_delta": min(1.0, whole_delta(guarantee)),
        "rho": guarantee.rho,
        "mu": guarantee.mu,
    }


def _guarantee(guarantee: Guarantee) -> dict[str, Any]:
    return {
        **_numbers(guarantee),
        "kind": guarantee.kind,
        "unit": guarantee.unit,
        "runs": [_run(run) for run in guarantee.runs],
    }


def _run(run: Run) -> dict[str, Any]:
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


def _observed(facts: Facts) -> dict[str, Any] | None:
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
        "guarantee": None if ex_post is None else _guarantee(ex_post),
    }


def _start(facts: Facts) -> dict[str, Any] | None:
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
                **_guarantee(run.guarantee),
            }
            for run in start.earlier
        ],
    }


def _verification(facts: Facts) -> dict[str, Any] | None:
    """Return the names of the checks by outcome, without their texts, which may name folders."""
    if facts.verdict is None:
        return None
    by_outcome: dict[str, list[str]] = {"passed": [], "failed": [], "warning": []}
    for check in facts.verdict.checks:
        by_outcome[check.outcome].append(check.name)
    return {"verified": facts.verdict.passed, "checks": by_outcome}


def matrix_digest(value: np.ndarray[Any, Any]) -> str:
    """Return the SHA-256 of the entries as little-endian float64, row by row."""
    return hashlib.sha256(np.ascontiguousarray(value, dtype="<f8").tobytes()).hexdigest()


def _encode_array(value: Any) -> Any:
    """Encode a matrix for JSON by its shape and digest."""
    if isinstance(value, np.ndarray):
        matrix = cast("np.ndarray[Any, Any]", value)
        return {"shape": list(matrix.shape), "sha256": matrix_digest(matrix)}
    raise NotImplementedError(f"cannot write {type(value).__name__} as JSON")
