"""`dpftrl plan`: compare mechanisms for a fleet or a data set, and save one of them as a plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from dpftrl._internal.formatting import rounded_up
from dpftrl.cli.dataset import (
    DatasetRequest,
    dataset_options,
    plan_for_dataset,
    refuse_others,
)
from dpftrl.cli.files import check_target, force_option
from dpftrl.cli.options import (
    Count,
    Share,
    describe,
    json_option,
    max_participations_option,
)
from dpftrl.cli.output import number, print_json, print_table, progress_bar, say
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
from dpftrl.plots import plot_extrapolation

# The row that `--out` saves unless `--choose` names another one.
DEFAULT_ROW = "blt"
HEADINGS = {
    "min_sep_half": "min-sep ÷ 2",
    "min_sep_double": "min-sep x 2",
    "rounds_half": "rounds ÷ 2",
    "rounds_double": "rounds x 2",
}


@click.command("plan")
@click.option("--population", type=Count(), help="Clients that may take part.")
@click.option("--report-goal", type=Count(), help="Client reports that a round needs.")
@click.option("--rounds", type=Count(), help="Rounds of training.")
@dataset_options
@click.option(
    "--delta",
    type=float,
    required=True,
    help="Delta of the guarantee; choose it well below 1 / population.",
)
@click.option("--epsilon", type=float, help="Epsilon that every mechanism is calibrated to.")
@click.option(
    "--noise-multiplier",
    type=float,
    help="Instead of --epsilon: the noise multiplier of the row blt. The other rows get the noise "
    "multiplier that gives the same RMS error.",
)
@click.option(
    "--availability",
    type=Share(),
    default=1.0,
    show_default=True,
    help="Share of the clients that can be contacted, such as 0.6 or 60%.",
)
@click.option(
    "--over-selection",
    type=Share(),
    default=1.0,
    show_default=True,
    help="Clients contacted per report needed.",
)
@click.option(
    "--timer-days",
    type=float,
    help="Days that a client waits after a contact before it can be contacted again.",
)
@click.option(
    "--rounds-per-day", type=float, help="Rounds of training per day; needed with --timer-days."
)
@max_participations_option
@click.option(
    "--parameters",
    type=Count(),
    default="1M",
    show_default=True,
    help="Parameters of the model, for the column memory.",
)
@click.option("--buffers", type=int, default=4, show_default=True, help="Buffers of each BLT.")
@click.option(
    "--objective",
    type=click.Choice(["rms", "max"]),
    default="rms",
    show_default=True,
    help="Loss to minimize: RmsLoss or MaxLoss.",
)
@click.option(
    "--with-bandmf", is_flag=True, help="Also optimize BandMF, which takes a minute or more."
)
@click.option(
    "--extrapolate",
    "show_walks",
    is_flag=True,
    help="Also print epsilon for other report goals, rounds and min-seps, one table per setting.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Draw the extrapolation to FILE.png, .svg or .pdf, with the planned point and the target.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Save one row as a plan, FILE.json: the row blt, or the row of --choose. With --dataset, "
    "the recommended row.",
)
@click.option("--choose", help=f"Row that --out saves.  [default: {DEFAULT_ROW}]")
@force_option()
@json_option
def plan_command(
    population: int | None,
    report_goal: int | None,
    rounds: int | None,
    dataset_request: DatasetRequest | None,
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
    show_walks: bool,
    plot: Path | None,
    out: Path | None,
    choose: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compare mechanisms for your fleet: noise multiplier, epsilon, loss and memory of each.

    Min-sep is population x availability / clients contacted per round: it assumes that clients
    participate in strict rotation. Nothing enforces this without a timer. With --timer-days,
    min-sep is at most the length of the timer. A second table shows epsilon if min-sep or the
    number of rounds turns out to be half or twice the planned value.

    \b
    dpftrl plan --population 4.21M --report-goal 6500 --rounds 2000 --delta 1e-10 --epsilon 4

    With --dataset, it compares mechanisms and samplings for training on a data set, sorts them by
    the noise on prefix sums, and recommends the first.

    \b
    dpftrl plan --dataset 50000 --batch-size 500 --epochs 10 --epsilon 1 --delta 1e-6
    """  # noqa: D301 (\b keeps click from reflowing the lines below it)
    if dataset_request is not None:
        refuse_others(
            {
                "--population": population,
                "--report-goal": report_goal,
                "--rounds": rounds,
                "--noise-multiplier": noise_multiplier,
                "--timer-days": timer_days,
                "--extrapolate": show_walks,
                "--plot": plot,
            }
        )
        check_target(out, "dataset plan", force=force)
        if choose is not None and out is None:
            raise InvalidInput("--choose names the row that --out saves: give --out FILE.json too")
        plan_for_dataset(dataset_request, epsilon, delta, with_bandmf, out, choose, as_json)
        return
    if population is None or report_goal is None or rounds is None:
        raise InvalidInput(
            "give --population, --report-goal and --rounds of a fleet, or --dataset, --batch-size "
            "and --epochs of a data set"
        )
    check_target(plot, "picture", force=force)
    check_target(out, "plan", force=force)
    _check_choice(out, choose)
    fleet = Fleet(population, report_goal, availability, over_selection, timer_days, rounds_per_day)
    budget = Budget(delta, epsilon, noise_multiplier)
    question = Question(fleet, rounds, budget, max_participations, parameters, objective, buffers)
    with progress_bar("planning") as on_progress:
        rows: list[Option | Missing] = []
        for row in options(question, with_bandmf):
            rows.append(row)
            on_progress(None, row.label)
        candidates = [row for row in rows if isinstance(row, Option)]
        needs_walks = as_json or show_walks or plot is not None
        walks = extrapolate(question, candidates) if needs_walks else ()
    chosen = None if out is None else _row_to_save(candidates, choose or DEFAULT_ROW)
    if out is not None and chosen is not None:
        save_plan(chosen.plan, out)  # first: a plot that fails must not lose the plan
    if plot is not None:
        plot_extrapolation(walks, delta, plot, epsilon)
    _warn_about_large_delta(delta, population)
    if as_json:
        print_json(_as_json(question, rows, walks))
        return
    print_table(_table(question, candidates, rows))
    print_table(_scenario_table(candidates))
    if show_walks:
        for walk in walks:
            print_table(_walk_table(walk))


def _check_choice(out: Path | None, choose: str | None) -> None:
    """Refuse a wrong `--choose` before the mechanisms are optimized, not after."""
    if choose is not None and choose not in LABELS:
        raise InvalidInput(f"--choose takes one of {', '.join(LABELS)}, got {choose!r}")
    if choose is not None and out is None:
        raise InvalidInput("--choose names the row that --out saves: give --out FILE.json too")


def _warn_about_large_delta(delta: float, population: int) -> None:
    """Print a warning unless delta is below 1 / population.

    A mechanism that publishes each client's data in full with probability delta is (0, delta)-DP.
    With such a delta it would publish the data of at least one client on average.
    """
    if not delta * population < 1:
        say(
            f"warning: delta {delta:g} is not below 1 / population, {1 / population:.3g}: "
            "such a delta permits publishing the data of one client in full",
            err=True,
        )


def _row_to_save(candidates: Sequence[Option], label: str) -> Option:
    for option in candidates:
        if option.label == label:
            return option
    raise InvalidInput(
        f"the row {label} was left out, so --out has nothing to save; choose another row"
    )


def _table(
    question: Question, candidates: Sequence[Option], rows: Sequence[Option | Missing]
) -> Table:
    table = Table(title=str(question.participation()), caption=_caption(question, rows))
    table.add_column("mechanism", no_wrap=True)
    for heading in ("noise multiplier", "rho", "epsilon", "RmsLoss", "MaxLoss", "memory"):
        table.add_column(heading, justify="right")
    for row in candidates:
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


def _scenario_table(candidates: Sequence[Option]) -> Table:
    table = Table(title="epsilon if min-sep or the rounds turn out differently")
    table.add_column("mechanism", no_wrap=True)
    for heading in ("as planned", *HEADINGS.values()):
        table.add_column(heading, justify="right")
    for row in candidates:
        others = (_epsilon(row.scenarios[name]) for name in HEADINGS)
        table.add_row(row.label, rounded_up(row.plan.guarantee.epsilon), *others)
    return table


def _caption(question: Question, rows: Sequence[Option | Missing]) -> str:
    lines = [
        f"epsilon at delta {question.budget.delta:g}, for each client",
        "compare mechanisms by loss, not by noise multiplier",
        "the row blt was optimized for this fleet; --out saves it as a plan",
    ]
    lines += [f"{row.label}: {row.note}" for row in rows if isinstance(row, Missing)]
    return escape("\n".join(lines))


def _walk_table(walk: Walk) -> Table:
    table = Table(title=f"epsilon by {walk.along.replace('_', ' ')}")
    labels = list(walk.points[0].epsilon) if walk.points else []
    for heading in ("report goal", "noise x", "rounds", "min-sep", "max participations", *labels):
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


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


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
