"""The tables of an answer, as texts: the command line prints them, the web page shows them."""

from collections.abc import Sequence
from typing import Final

from dpftrl._internal.formatting import memory_text, number, rounded_up
from dpftrl._internal.tables import TextTable
from dpftrl.accounting import risk_of
from dpftrl.plan.answer import DatasetAnswer, FleetAnswer
from dpftrl.plan.candidates import Option, Walk
from dpftrl.plan.dataset import DatasetOption

HEADINGS: Final = {
    "min_sep_half": "min-sep ÷ 2",
    "min_sep_double": "min-sep x 2",
    "rounds_half": "rounds ÷ 2",
    "rounds_double": "rounds x 2",
}


def fleet_tables(answer: FleetAnswer, *, with_walks: bool = False) -> list[TextTable]:
    """The tables of an answer for a fleet: mechanisms, scenarios, early stops, min-seps and risk.

    Args:
        answer: The answer.
        with_walks: Whether to add one table per walk.
    """
    tables = [mechanism_table(answer), _scenario_table(answer.computed), _stop_table(answer)]
    if answer.by_min_sep():
        tables.append(_min_sep_table(answer))
    person = answer.recommended.plan.guarantee.for_devices(answer.resolved.request.devices)
    tables.append(risk_of(person).table(person.unit))
    if with_walks:
        tables += map(_walk_table, answer.walks)
    return tables


def mechanism_table(answer: FleetAnswer) -> TextTable:
    """The mechanisms with their noise, guarantee, loss and memory."""
    devices = answer.resolved.request.devices
    headings = ["mechanism", "noise multiplier", "rho", "epsilon"]
    headings += [] if devices == 1 else [f"epsilon of {devices:,} devices"]
    rows = list[tuple[str, ...]]()
    for row in answer.computed:
        guarantee = row.plan.guarantee
        bound = "" if guarantee.kind == "exact" else "≤ "
        person = [f"≤ {rounded_up(guarantee.for_devices(devices).epsilon)}"]
        rows.append(
            (
                f"{row.label} *" if row is answer.recommended else row.label,
                rounded_up(row.plan.noise_multiplier),
                rounded_up(guarantee.rho),
                bound + rounded_up(guarantee.epsilon),
                *([] if devices == 1 else person),
                number(row.error_report.rms_loss),
                number(row.error_report.max_loss),
                memory_text(row.memory_bytes),
            )
        )
    return TextTable(
        fleet_title(answer),
        (*headings, "RmsLoss", "MaxLoss", "memory"),
        tuple(rows),
        _fleet_caption(answer),
        marked=answer.computed.index(answer.recommended),
    )


def fleet_title(answer: FleetAnswer) -> str:
    """The planned participation, the days of training and the report goal in one line."""
    question, days = answer.resolved.question, answer.resolved.days
    lasts = "" if days is None else f", {days:,.3g} day(s)"
    goal = f"report goal {question.fleet.report_goal:,}"
    return f"{question.participation()}{lasts}, {goal}"


def _fleet_caption(answer: FleetAnswer) -> str:
    resolved = answer.resolved
    lines = [f"* recommended: {answer.reason}"]
    lines += [
        f"{choice.name.replace('_', ' ')} {choice.value:,}: {choice.reason}"
        for choice in resolved.choices
    ]
    lines += [
        resolved.binding_text,
        f"epsilon at delta {resolved.question.budget.delta:g}, for each client",
        "compare mechanisms by loss, not by noise multiplier",
        "the row blt was optimized for this fleet; --out saves the recommended row as a plan, or "
        "the row of --choose",
    ]
    lines += [f"{row.label}: {row.note}" for row in answer.left_out]
    return "\n".join(lines)


def _scenario_table(candidates: Sequence[Option]) -> TextTable:
    rows = (
        (
            row.label,
            rounded_up(row.plan.guarantee.epsilon),
            *(_epsilon(row.scenarios[name]) for name in HEADINGS),
        )
        for row in candidates
    )
    return TextTable(
        "epsilon if min-sep or the rounds turn out differently",
        ("mechanism", "as planned", *HEADINGS.values()),
        tuple(rows),
    )


def _stop_table(answer: FleetAnswer) -> TextTable:
    """Epsilon of the recommended row if training stops early or goes on past the plan."""
    stops = answer.epsilon_after()
    return TextTable(
        f"epsilon of {answer.recommended.label} if training stops early or goes on",
        ("rounds", *(f"{rounds:,}" for rounds in stops)),
        (("epsilon", *map(_epsilon, stops.values())),),
        f"planned: {answer.resolved.question.rounds:,} rounds; a run of a plan stops there",
    )


def _min_sep_table(answer: FleetAnswer) -> TextTable:
    """What other min-seps of the range give."""
    rows = (
        (
            f"{row['min_sep']:,}",
            f"{row['max_participations']:,}",
            _epsilon(row["epsilon"]),
            _epsilon(row["noise_multiplier_for_target"]),
        )
        for row in answer.by_min_sep()
    )
    return TextTable(
        f"{answer.recommended.label} at other min-seps",
        ("min-sep", "max participations", "epsilon", "noise multiplier for the target"),
        tuple(rows),
        name_columns=0,
    )


def _walk_table(walk: Walk) -> TextTable:
    labels = list(walk.points[0].epsilon) if walk.points else []
    rows = (
        (
            f"{point.report_goal:,}",
            f"{point.scale:.3g}",
            f"{point.participation.rounds:,}",
            f"{point.participation.min_sep:,}",
            f"{point.participation.max_participations:,}",
            *(_epsilon(point.epsilon[label]) for label in labels),
        )
        for point in walk.points
    )
    return TextTable(
        f"epsilon by {walk.along.replace('_', ' ')}",
        ("report goal", "noise x", "rounds", "min-sep", "max participations", *labels),
        tuple(rows),
        "at equal utility",
        name_columns=0,
    )


def _epsilon(value: float | None) -> str:
    return "-" if value is None else rounded_up(value)


def dataset_tables(answer: DatasetAnswer) -> list[TextTable]:
    """The tables of an answer for a data set: mechanisms with samplings, and risk."""
    dataset = answer.request.dataset
    rows = list[tuple[str, ...]]()
    for row in answer.computed:
        groups = getattr(getattr(row.guarantee, "sampling", None), "groups", None)
        rows.append(
            (
                row.label if groups is None else f"{row.label} ({groups} bands)",
                row.sampling,
                rounded_up(row.noise_multiplier),
                epsilon_text(row),
                number(row.rms_noise),
                f"{row.mechanism.memory(dataset.steps):,}",
            )
        )
    mechanisms = TextTable(
        str(dataset),
        ("mechanism", "sampling", "noise multiplier", "epsilon", "rms noise", "memory"),
        tuple(rows),
        _dataset_caption(answer),
        marked=0,
        name_columns=2,
    )
    return [mechanisms, risk_of(answer.recommended.guarantee).table("example")]


def epsilon_text(row: DatasetOption) -> str:
    """Epsilon of a way to train on a data set; `≤` marks an upper bound."""
    bound = "" if row.guarantee.kind == "exact" else "≤ "
    return bound + rounded_up(row.guarantee.epsilon)


def _dataset_caption(answer: DatasetAnswer) -> str:
    chosen = answer.recommended
    lines = [
        f"recommended: {answer.reason}",
        f"epsilon at delta {answer.request.delta:g}, for each example, "
        f"{chosen.guarantee.adjacency} adjacency",
        "compare by rms noise, not by noise multiplier; memory in model-sized vectors",
    ]
    if answer.failure:
        lines.append(
            "its epsilon is certified by samples; wrong with a probability of at most "
            f"{answer.failure:g}"
        )
    lines += [f"{row.label}: {row.note}" for row in answer.left_out]
    return "\n".join(lines)
