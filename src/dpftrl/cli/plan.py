"""`dpftrl plan`: compare mechanisms for a fleet or a data set, and save one of them as a plan."""

from pathlib import Path
from typing import Any, get_args

import click

from dpftrl._internal.written_numbers import range_from_text
from dpftrl.cli.dataset import (
    DatasetRequest,
    dataset_options,
    plan_for_dataset,
    refuse_others,
)
from dpftrl.cli.files import check_target, force_option
from dpftrl.cli.options import Count, Share, json_option
from dpftrl.cli.output import print_json, print_table, progress_bar, rich_table, say
from dpftrl.errors import InvalidInput
from dpftrl.optimize import Objective
from dpftrl.plan import LABELS, FleetAnswer, FleetPlanRequest, save_plan, solve_fleet
from dpftrl.plan.request import Effort
from dpftrl.plan.tables import fleet_tables
from dpftrl.plots import plot_extrapolation


class MinSepRange(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A min-sep, or a range of min-seps: 400 or 400:800."""

    name = "number[:number]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int | None]:
        """Convert the text to the lower end and, of a range, the upper end."""
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]
        try:
            return range_from_text(str(value))
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


@click.command("plan")
@click.option("--population", type=Count(), help="Clients that may take part.")
@click.option(
    "--report-goal",
    type=Count(),
    help="Client reports that a round needs.  [default: the largest that costs no privacy]",
)
@click.option(
    "--rounds", type=Count(), help="Rounds of training.  [default: --days x --rounds-per-day]"
)
@click.option("--days", type=float, help="Days of training, instead of --rounds.")
@click.option(
    "--min-sep",
    type=MinSepRange(),
    help="Min-sep that is enforced, instead of that of the fleet; LOW:HIGH plans for LOW and shows "
    "what a larger min-sep would give.",
)
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
    "--rounds-per-day",
    type=float,
    help="Rounds of training per day; needed with --timer-days, and for days of training.",
)
@click.option(
    "--max-participations",
    type=Count(),
    show_default="rounds / min-sep, rounded up",
    help="Most rounds that one client can take part in, if the server enforces such a cap.",
)
@click.option(
    "--devices",
    type=Count(),
    default=1,
    show_default=True,
    help="Devices of one person: also states epsilon per person.",
)
@click.option(
    "--parameters",
    type=Count(),
    default="1M",
    show_default=True,
    help="Parameters of the model, for the column memory.",
)
@click.option(
    "--buffers",
    type=int,
    help="Buffers of each BLT.  [default: the fewest that are nearly as good as more]",
)
@click.option(
    "--objective",
    type=click.Choice(["rms", "max"]),
    default="rms",
    show_default=True,
    help="Loss to minimize: RmsLoss or MaxLoss.",
)
@click.option(
    "--effort",
    type=click.Choice(get_args(Effort)),
    default="normal",
    show_default=True,
    help="How long an answer may take: quick leaves out mechanisms that need a long optimization "
    "and certificates, slow is --with-bandmf.",
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
    help="Save one row as a plan, FILE.json: the recommended row, or the row of --choose.",
)
@click.option("--choose", help="Row that --out saves.  [default: the recommended row]")
@force_option()
@json_option
def plan_command(
    population: int | None,
    report_goal: int | None,
    rounds: int | None,
    days: float | None,
    min_sep: tuple[int, int | None] | None,
    dataset_request: DatasetRequest | None,
    delta: float,
    epsilon: float | None,
    noise_multiplier: float | None,
    availability: float,
    over_selection: float,
    timer_days: float | None,
    rounds_per_day: float | None,
    max_participations: int | None,
    devices: int,
    parameters: int,
    buffers: int | None,
    objective: Objective,
    effort: Effort,
    with_bandmf: bool,
    show_walks: bool,
    plot: Path | None,
    out: Path | None,
    choose: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compare mechanisms for your fleet, and recommend one.

    The row marked * is recommended: it needs the least memory, of all mechanisms whose loss is
    within 10% of the smallest. What you leave open is chosen: the rounds from --days and
    --rounds-per-day, the report goal, and the buffers of the BLTs.

    Min-sep is population x availability / clients contacted per round: it assumes that clients
    participate in strict rotation. Nothing enforces this without a timer. With --timer-days,
    min-sep is at most the length of the timer. Further tables show epsilon if min-sep or the
    number of rounds turns out differently, and what the best possible attack achieves.

    \b
    dpftrl plan --population 4.21M --report-goal 6500 --rounds 2000 --delta 1e-10 --epsilon 4
    dpftrl plan --population 3M --availability 60% --timer-days 3 --rounds-per-day 120 --days 14 \\
                --delta 1e-10 --epsilon 4

    With --dataset, it compares mechanisms and samplings for training on a data set, sorts them by
    the noise on prefix sums, and recommends the first.

    \b
    dpftrl plan --dataset 50000 --batch-size 500 --epochs 10 --epsilon 1 --delta 1e-6
    """  # noqa: D301 (\b keeps click from reflowing the lines below it)
    if with_bandmf and effort == "quick":
        raise InvalidInput("--effort quick leaves BandMF out; leave out --with-bandmf")
    effort = "slow" if with_bandmf else effort
    if dataset_request is not None:
        refuse_others(
            {
                "--population": population,
                "--report-goal": report_goal,
                "--rounds": rounds,
                "--days": days,
                "--min-sep": min_sep,
                "--noise-multiplier": noise_multiplier,
                "--timer-days": timer_days,
                "--devices": None if devices == 1 else devices,
                "--extrapolate": show_walks,
                "--plot": plot,
            }
        )
        check_target(out, "dataset plan", force=force)
        if choose is not None and out is None:
            raise InvalidInput("--choose names the row that --out saves: give --out FILE.json too")
        plan_for_dataset(dataset_request, epsilon, delta, effort, out, choose, as_json)
        return
    if population is None:
        raise InvalidInput(
            "give --population of a fleet, or --dataset, --batch-size and --epochs of a data set"
        )
    check_target(plot, "picture", force=force)
    check_target(out, "plan", force=force)
    _check_choice(out, choose)
    request = FleetPlanRequest(
        population=population,
        delta=delta,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        report_goal=report_goal,
        rounds=rounds,
        days=days,
        rounds_per_day=rounds_per_day,
        timer_days=timer_days,
        min_sep=None if min_sep is None else min_sep[0],
        max_min_sep=None if min_sep is None else min_sep[1],
        availability=availability,
        over_selection=over_selection,
        max_participations=max_participations,
        devices=devices,
        parameters=parameters,
        buffers=buffers,
        objective=objective,
        effort=effort,
        extrapolate=as_json or show_walks or plot is not None,
    )
    with progress_bar("planning") as on_progress:
        answer = solve_fleet(request, on_progress)
    if out is not None:
        saved = answer.recommended if choose is None else answer.row(choose)
        save_plan(saved.plan, out)  # first: a plot that fails must not lose the plan
        which = "the recommended row" if saved is answer.recommended else "the chosen row"
        say(f"saved: {out}: {saved.label}, {which}", err=True)
    if plot is not None:
        plot_extrapolation(answer.walks, delta, plot, epsilon, answer.recommended.label)
    for warning in answer.resolved.warnings:
        say(f"warning: {warning}", err=True)
    if as_json:
        print_json(answer.as_json())
        return
    _print_tables(answer, show_walks)


def _check_choice(out: Path | None, choose: str | None) -> None:
    """Refuse a wrong `--choose` before the mechanisms are optimized, not after."""
    if choose is not None and choose not in LABELS:
        raise InvalidInput(f"--choose takes one of {', '.join(LABELS)}, got {choose!r}")
    if choose is not None and out is None:
        raise InvalidInput("--choose names the row that --out saves: give --out FILE.json too")


def _print_tables(answer: FleetAnswer, show_walks: bool) -> None:
    for table in fleet_tables(answer, with_walks=show_walks):
        print_table(rich_table(table))
