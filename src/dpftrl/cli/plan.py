"""`dpftrl plan`: which mechanism, how much noise, what epsilon, before training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from dpftrl._internal.formatting import rounded_up
from dpftrl.cli.options import (
    Count,
    can_be_saved,
    describe,
    json_option,
    max_participations_option,
)
from dpftrl.cli.output import number, print_json, print_table, progress_bar
from dpftrl.errors import InvalidInput
from dpftrl.optimize import Objective
from dpftrl.plan import (
    LABELS,
    Budget,
    Fleet,
    Missing,
    Option,
    Point,
    Question,
    Walk,
    extrapolate,
    options,
    save_plan,
)
from dpftrl.plots import check_plot_path, plot_extrapolation

CHOSEN = "blt"
HEADINGS = {
    "min_sep_half": "min-sep ÷ 2",
    "min_sep_double": "min-sep x 2",
    "rounds_half": "rounds ÷ 2",
    "rounds_double": "rounds x 2",
}


@click.command("plan")
@click.option("--population", type=Count(), required=True, help="Devices that may take part.")
@click.option("--report-goal", type=Count(), required=True, help="Reports that close a round.")
@click.option("--rounds", type=Count(), required=True, help="Rounds of training.")
@click.option("--delta", type=float, required=True, help="Well below 1 / population.")
@click.option("--epsilon", type=float, help="What every mechanism is calibrated to.")
@click.option("--noise-multiplier", type=float, help="Instead: the sigma of the optimised BLT.")
@click.option(
    "--availability",
    type=float,
    default=1.0,
    show_default=True,
    help="Share that can be asked at all.",
)
@click.option(
    "--over-selection",
    type=float,
    default=1.0,
    show_default=True,
    help="Devices asked a report wanted.",
)
@click.option("--timer-days", type=float, help="A device waits so long before it comes again.")
@click.option("--rounds-per-day", type=float, help="Goes with --timer-days.")
@max_participations_option
@click.option(
    "--parameters",
    type=Count(),
    default="1M",
    show_default=True,
    help="Size of the model, for memory.",
)
@click.option("--buffers", type=int, default=4, show_default=True, help="Buffers of the BLTs.")
@click.option(
    "--objective",
    type=click.Choice(["rms", "max"]),
    default="rms",
    show_default=True,
    help="ErrorReport to make small.",
)
@click.option("--with-bandmf", is_flag=True, help="Optimise BandMF too, which takes a while.")
@click.option(
    "--extrapolate", "far", is_flag=True, help="Print how epsilon moves, setting by setting."
)
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw the same to a .png, .svg or .pdf."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=can_be_saved,
    help="Save the row blt, or the one of --choose, as FILE.json.",
)
@click.option("--choose", help=f"Which row --out saves.  [default: {CHOSEN}]")
@json_option
def plan_command(
    population: int,
    report_goal: int,
    rounds: int,
    delta: float,
    epsilon: float | None,
    noise_multiplier: float | None,
    availability: float,
    over_selection: float,
    timer_days: float | None,
    rounds_per_day: float | None,
    max_participations: int,
    parameters: int,
    buffers: int,
    objective: Objective,
    with_bandmf: bool,
    far: bool,
    plot: Path | None,
    out: Path | None,
    choose: str | None,
    as_json: bool,
) -> None:
    """Which mechanism, how much noise, what epsilon: side by side, before training.

    Min-sep is what the fleet allows if everybody takes turns: population x availability over what
    a round asks for, and no more than a device's timer enforces. A second table says what epsilon
    becomes if min-sep or the rounds turn out half or twice that.

    \b
    dpftrl plan --population 4.21M --report-goal 6500 --rounds 2000 --delta 1e-10 --epsilon 4
    """  # noqa: D301 (\b keeps click from reflowing the lines below it)
    if plot is not None:
        check_plot_path(plot)
    _check_choice(out, choose)
    fleet = Fleet(population, report_goal, availability, over_selection, timer_days, rounds_per_day)
    budget = Budget(delta, epsilon, noise_multiplier)
    question = Question(fleet, rounds, budget, max_participations, parameters, objective, buffers)
    with progress_bar("planning") as report:
        rows: list[Option | Missing] = []
        for row in options(question, with_bandmf):
            rows.append(row)
            if report is not None:
                report(None, row.label)
        found = [row for row in rows if isinstance(row, Option)]
        wanted = as_json or far or plot is not None
        walks = extrapolate(question, found) if wanted else ()
    chosen = None if out is None else _chosen(found, choose or CHOSEN)
    if plot is not None:
        plot_extrapolation(walks, delta, plot)
    if out is not None and chosen is not None:
        save_plan(chosen.plan, out)
    _warn_of_delta(delta, population)
    if as_json:
        print_json(_as_json(question, rows, walks))
        return
    print_table(_table(question, found, rows))
    print_table(_scenario_table(found))
    if far:
        for walk in walks:
            print_table(_walk_table(walk))


def _check_choice(out: Path | None, choose: str | None) -> None:
    """Say now, not after a long search, that there is no such row to save."""
    if choose is not None and choose not in LABELS:
        raise InvalidInput(f"--choose takes one of {', '.join(LABELS)}, got {choose!r}")
    if choose is not None and out is None:
        raise InvalidInput("--choose says which row --out saves: give --out FILE.json too")


def _warn_of_delta(delta: float, population: int) -> None:
    """To publish each device's data whole with probability delta keeps epsilon 0 at that delta."""
    if not delta * population < 1:
        click.echo(
            f"warning: delta {delta:g} is not below 1 / population, {1 / population:.3g}: "
            "at such a delta a device's data may be published whole",
            err=True,
        )


def _chosen(found: Sequence[Option], label: str) -> Option:
    for option in found:
        if option.label == label:
            return option
    raise InvalidInput(f"{label} was left out here, so that --out has nothing to save")


def _table(question: Question, found: Sequence[Option], rows: Sequence[Option | Missing]) -> Table:
    table = Table(title=str(question.participation()), caption=_caption(question, rows))
    table.add_column("mechanism", no_wrap=True)
    for heading in ("sigma", "rho", "epsilon", "RmsLoss", "MaxLoss", "memory"):
        table.add_column(heading, justify="right")
    for row in found:
        guarantee = row.plan.guarantee
        bound = "" if guarantee.kind == "exact" else "≤ "
        table.add_row(
            row.label,
            rounded_up(row.plan.noise_multiplier),
            rounded_up(guarantee.rho),
            bound + rounded_up(guarantee.epsilon),
            number(row.error_report.rms_loss),
            number(row.error_report.max_loss),
            _size(row.memory_bytes),
        )
    return table


def _scenario_table(found: Sequence[Option]) -> Table:
    table = Table(title="epsilon, if things turn out otherwise")
    table.add_column("mechanism", no_wrap=True)
    for heading in ("as planned", *HEADINGS.values()):
        table.add_column(heading, justify="right")
    for row in found:
        others = (_epsilon(row.scenarios[name]) for name in HEADINGS)
        table.add_row(row.label, rounded_up(row.plan.guarantee.epsilon), *others)
    return table


def _caption(question: Question, rows: Sequence[Option | Missing]) -> str:
    lines = [
        f"epsilon at delta {question.budget.delta:g}, for each device",
        "sigma, the noise multiplier, does not compare between mechanisms; losses do",
        "blt is made for this very fleet: --out saves it; to other commands, blt is blt-b400",
    ]
    lines += [f"{row.label}: {row.note}" for row in rows if isinstance(row, Missing)]
    return escape("\n".join(lines))


def _walk_table(walk: Walk) -> Table:
    table = Table(title=f"epsilon by {walk.along.replace('_', ' ')}")
    labels = list(walk.points[0].epsilon) if walk.points else []
    for heading in ("report goal", "sigma x", "rounds", "min-sep", "at most", *labels):
        table.add_column(heading, justify="right")
    for point in walk.points:
        table.add_row(
            f"{point.report_goal:,}",
            f"{point.scale:.3g}",
            f"{point.participation.rounds:,}",
            f"{point.participation.min_sep:,}",
            f"{point.participation.max_participations:,}",
            *(_epsilon(point.epsilon[label]) for label in labels),
        )
    return table


def _epsilon(value: float | None) -> str:
    return "-" if value is None else rounded_up(value)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def _as_json(
    question: Question, rows: Sequence[Option | Missing], walks: Sequence[Walk]
) -> dict[str, Any]:
    fleet = question.fleet
    return {
        "population": fleet.population,
        "report_goal": fleet.report_goal,
        "availability": fleet.availability,
        "over_selection": fleet.over_selection,
        "timer_rounds": fleet.timer_rounds,
        **describe(question.participation()),
        "delta": question.budget.delta,
        "parameters": question.parameters,
        "objective": question.objective,
        "mechanisms": [_option_as_json(row) for row in rows if isinstance(row, Option)],
        "left_out": [
            {"name": row.label, "note": row.note} for row in rows if isinstance(row, Missing)
        ],
        "extrapolation": {
            walk.along: [_point_as_json(point) for point in walk.points] for walk in walks
        },
    }


def _option_as_json(option: Option) -> dict[str, Any]:
    guarantee, sensitivity = option.plan.guarantee, option.error_report.sensitivity
    return {
        "name": option.label,
        "noise_multiplier": option.plan.noise_multiplier,
        "sensitivity": sensitivity.value,
        "sensitivity_kind": sensitivity.kind,
        "mu": guarantee.mu,
        "rho": guarantee.rho,
        "epsilon": guarantee.epsilon,
        "rms_loss": option.error_report.rms_loss,
        "max_loss": option.error_report.max_loss,
        "memory_bytes": option.memory_bytes,
        "epsilon_if": dict(option.scenarios),
    }


def _point_as_json(point: Point) -> dict[str, Any]:
    return {
        "report_goal": point.report_goal,
        "noise_scale": point.scale,
        **describe(point.participation),
        "epsilon": point.epsilon,
    }
