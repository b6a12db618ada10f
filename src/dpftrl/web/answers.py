"""What the planner page shows for a filled-in form, and the files that it offers.

`answer_form` returns the answer that `dpftrl plan --json` prints, with the texts and tables that
`dpftrl plan` prints, and the points of the figures.
"""

import io
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from dpftrl._internal.formatting import memory_text, number, rounded_up
from dpftrl._internal.progress import Progress
from dpftrl._internal.tables import TextTable
from dpftrl.accounting import risk_of
from dpftrl.errors import DpftrlError
from dpftrl.mechanisms import save_mechanism
from dpftrl.plan import (
    DatasetAnswer,
    DatasetPlan,
    FleetAnswer,
    FleetPlanRequest,
    save_dataset_plan,
    save_plan,
    solve_dataset,
    solve_fleet,
)
from dpftrl.plan.candidates import NOT_QUICK
from dpftrl.plan.request import Effort
from dpftrl.plan.tables import dataset_tables, epsilon_text, fleet_tables
from dpftrl.statement import make_statement
from dpftrl.statement.dataset_plan import draft_statement
from dpftrl.statement.document import html, markdown
from dpftrl.web.figures import dataset_figures, fleet_figures
from dpftrl.web.form import Form

Answer = FleetAnswer | DatasetAnswer
# The files that can be downloaded, with the type of their content.
FILES: Final = {
    "plan.json": "application/json",
    "mechanism.json": "application/json",
    "statement.md": "text/markdown; charset=utf-8",
    "statement.html": "text/html; charset=utf-8",
}
ZIP: Final = "application/zip"


@final
@dataclass(frozen=True)
class File:
    """A file to download.

    Attributes:
        name: Its name.
        media_type: The type of its content.
        content: The content.
    """

    name: str
    media_type: str
    content: bytes


def solve_form(
    form: Form, effort: Effort, *, extrapolate: bool, on_progress: Progress | None = None
) -> Answer:
    """Compute the answer for a form.

    Raises:
        FieldError: A field is wrong.
    """
    request = form.request(effort, extrapolate=extrapolate)
    try:
        if isinstance(request, FleetPlanRequest):
            return solve_fleet(request, on_progress)
        return solve_dataset(request, on_progress)
    except DpftrlError as error:
        raise form.error(error) from None


def answer_form(
    form: Form, effort: Effort, *, figures: bool, on_progress: Progress | None = None
) -> dict[str, Any]:
    """What the page shows for a form.

    Args:
        form: The form.
        effort: How much time the answer may take.
        figures: Whether to compute the figures too, and epsilon for other settings.
        on_progress: Called with the label of each row.

    Returns:
        `answer` is what `dpftrl plan --json` prints for the command in `command`.

    Raises:
        FieldError: A field is wrong.
    """
    return describe(form, solve_form(form, effort, extrapolate=figures, on_progress=on_progress))


def describe(form: Form, answer: Answer) -> dict[str, Any]:
    """What the page shows for an answer."""
    effort = _effort(answer)
    common = {"answer": answer.as_json(), "command": form.command(effort), "effort": effort}
    if isinstance(answer, FleetAnswer):
        has_walks = answer.resolved.request.extrapolate
        return {
            **common,
            "headline": _fleet_headline(answer),
            "tables": _tables(fleet_tables(answer), answer),
            "figures": fleet_figures(answer) if has_walks else None,
        }
    return {
        **common,
        "headline": _dataset_headline(answer),
        "tables": _tables(dataset_tables(answer), answer),
        "figures": dataset_figures(answer),
    }


def _tables(tables: list[TextTable], answer: Answer) -> list[dict[str, Any]]:
    """The tables as plain data; the caption of the first leaves out what the headline says."""
    shown = [table.as_json() for table in tables]
    notes = {
        "epsilon at delta",
        "compare",
        "its epsilon is certified",
        *(f"{row.label}: {row.note}" for row in answer.left_out if row.note != NOT_QUICK),
    }
    lines = [line for line in shown[0]["caption"] if line.startswith(tuple(notes))]
    quick = [row.label for row in answer.left_out if row.note == NOT_QUICK]
    if quick:
        lines.append(f"{NOT_QUICK}: {', '.join(quick)}")
    shown[0]["caption"] = lines
    return shown


def _effort(answer: Answer) -> Effort:
    request = answer.resolved.request if isinstance(answer, FleetAnswer) else answer.request
    return request.effort


def _fleet_headline(answer: FleetAnswer) -> dict[str, Any]:
    """The recommended row in words and in large figures."""
    resolved, chosen = answer.resolved, answer.recommended
    guarantee, planned = chosen.plan.guarantee, resolved.question.participation()
    devices = resolved.request.devices
    person = guarantee.for_devices(devices)
    bound = "" if guarantee.kind == "exact" else "≤ "
    delta = f"delta {guarantee.delta:g}"
    figures = [
        _figure("epsilon per device", bound + rounded_up(guarantee.epsilon), f"at {delta}"),
        _figure(
            "epsilon per person",
            ("≤ " if devices > 1 else bound) + rounded_up(person.epsilon),
            "one device" if devices == 1 else f"with {devices:,} devices",
        ),
        _figure(
            "noise multiplier",
            rounded_up(chosen.plan.noise_multiplier),
            "std of the noise / clip norm",
        ),
        _figure(
            "days of training",
            "not known" if resolved.days is None else f"{resolved.days:,.3g}",
            f"{planned.rounds:,} rounds",
        ),
        _figure(
            "min-sep",
            f"{planned.min_sep:,}",
            f"at most {planned.max_participations:,} participation(s)",
        ),
        _figure("report goal", f"{resolved.question.fleet.report_goal:,}", "reports per round"),
        _figure("memory", memory_text(chosen.memory_bytes), "of the noise, on the server"),
    ]
    whose = "the data of a client" if devices == 1 else f"the data of {person.unit}"
    return {
        "recommended": chosen.label,
        "reason": answer.reason,
        "binding": resolved.binding_text,
        "choices": [
            f"{choice.name.replace('_', ' ').capitalize()} {choice.value:,} was chosen: "
            f"{choice.reason}"
            for choice in resolved.choices
        ],
        "warnings": list(resolved.warnings),
        "risk": risk_of(person).sentence(whose),
        "figures": figures,
    }


def _dataset_headline(answer: DatasetAnswer) -> dict[str, Any]:
    chosen, dataset = answer.recommended, answer.request.dataset
    guarantee = chosen.guarantee
    certificate = "no part of it is estimated"
    if answer.failure:
        certificate = f"certified by samples; wrong with probability ≤ {answer.failure:g}"
    figures = [
        _figure("epsilon per example", epsilon_text(chosen), f"at delta {guarantee.delta:g}"),
        _figure("sampling", chosen.sampling, f"{guarantee.adjacency} adjacency"),
        _figure(
            "noise multiplier", rounded_up(chosen.noise_multiplier), "std of the noise / clip norm"
        ),
        _figure("rms noise", number(chosen.rms_noise), "on prefix sums, in clip norms"),
        _figure("steps", f"{dataset.steps:,}", f"{dataset.steps_per_epoch:,} per epoch"),
        _figure(
            "memory", f"{chosen.mechanism.memory(dataset.steps):,}", "vectors of the model's size"
        ),
        _figure("certainty", "1" if not answer.failure else f"1 - {answer.failure:g}", certificate),
    ]
    return {
        "recommended": chosen.label,
        "reason": answer.reason,
        "binding": f"Every example takes part {dataset.epochs:,} time(s), once per epoch.",
        "choices": [],
        "warnings": list(answer.request.warnings),
        "risk": risk_of(guarantee).sentence("an example"),
        "figures": figures,
    }


def _figure(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def plan_file(answer: Answer, name: str) -> File:
    """One of `FILES` for the recommended row of an answer.

    A mechanism with a large matrix consists of several files, which come as a .zip file.
    """
    if name.startswith("statement."):
        return _statement_file(answer, name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        if name == "mechanism.json":
            mechanism = (
                answer.recommended.plan.mechanism
                if isinstance(answer, FleetAnswer)
                else answer.recommended.mechanism
            )
            save_mechanism(mechanism, path)
        elif isinstance(answer, FleetAnswer):
            save_plan(answer.recommended.plan, path)
        else:
            save_dataset_plan(_dataset_plan(answer), path)
        written = sorted(Path(folder).iterdir())
        if len(written) == 1:
            return File(name, FILES[name], path.read_bytes())
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for one in written:
                archive.write(one, one.name)
        return File(f"{path.stem}.zip", ZIP, packed.getvalue())


def _statement_file(answer: Answer, name: str) -> File:
    """The draft of the statement, as Markdown or HTML."""
    if isinstance(answer, FleetAnswer):
        devices = answer.resolved.request.devices
        document = make_statement(
            answer.recommended.plan, devices=None if devices == 1 else devices
        ).document
    else:
        document = draft_statement(_dataset_plan(answer))
    text = html(document) if name.endswith(".html") else markdown(document)
    return File(name, FILES[name], text.encode())


def _dataset_plan(answer: DatasetAnswer) -> DatasetPlan:
    chosen = answer.recommended
    return DatasetPlan(chosen.sampling, chosen.guarantee, answer.request.dataset)
