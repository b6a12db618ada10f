"""`dpftrl account`: what a mechanism with its noise guarantees."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from dpftrl._internal.checks import positive_number
from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.accounting import (
    Guarantee,
    Run,
    Spent,
    delta_for,
    guarantee_of,
    save_guarantee,
)
from dpftrl.accounting.guarantee import BufferType
from dpftrl.accounting.logs import Observed, WorstPattern, open_log
from dpftrl.cli.options import (
    Count,
    describe,
    is_plan,
    json_option,
    participation_or_log_options,
)
from dpftrl.cli.output import (
    print_json,
    print_table,
    progress_bar,
    sensitivity_text,
    working,
)
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import FixedEpochs, Participation
from dpftrl.plan import load_plan
from dpftrl.plan import mechanism as mechanism_by_name


class Seen(NamedTuple):
    """What a log adds: the summary, and the worst client that was really there."""

    observed: Observed
    worst: WorstPattern


@click.command("account")
@click.argument("name", metavar="MECH|PLAN")
@participation_or_log_options
@click.option(
    "--noise-multiplier",
    type=float,
    help="Standard deviation of the independent noise Z, in units of the clip norm.  "
    "[required, unless PLAN says it]",
)
@click.option("--delta", type=float, help="Where to state epsilon.  [default: that of PLAN]")
@click.option("--epsilon", type=float, help="Instead of --delta: the delta at this epsilon.")
@click.option("--devices", type=int, default=1, help="Devices of one person, protected as one.")
@click.option("--first-round", type=Count(), help="Number of the first round in the log.")
@click.option(
    "--repeated-rows",
    is_flag=True,
    help="Rows that repeat a client and round were written twice; no update was summed twice.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Save the guarantee to this .json.")
@json_option
@click.pass_context
def account_command(
    context: click.Context,
    name: str,
    participation: Participation | None,
    rounds: int | None,
    log: Path | None,
    noise_multiplier: float | None,
    delta: float | None,
    epsilon: float | None,
    devices: int,
    repeated_rows: bool,
    first_round: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Epsilon, rho and mu of one mechanism with its noise.

    MECH is a name or a .json file. PLAN is a plan as `dpftrl plan --out` saves it: it says the
    mechanism, the noise, the participation and delta.

    With --log the guarantee is that of the participation which the log shows: its smallest gap and
    its largest count, over all rounds that were planned. Beside it stands the bound for the worst
    single client that was really there, which is tighter, and, if you state a participation, what
    that would have given. The exit code is 1 if the log breaks what was stated or planned. A
    mechanism that is built for a participation, such as `banded`, is built for the planned one.
    """
    if log is None and (repeated_rows or first_round is not None):
        raise InvalidInput("--repeated-rows and --first-round go with --log")
    asked = _asked(name, participation, rounds, noise_multiplier, delta, epsilon, log is not None)
    covered, seen = asked.planned, None
    if log is not None:
        seen = _look(log, asked, first_round or 0, repeated_rows)
        observed = seen.observed
        covered = observed.participation if covered is None else observed.within(covered)
    assert covered is not None  # `_asked` refuses to do with neither
    with working(f"computing {name}"):
        run = Run.of(asked.mechanism, covered, asked.noise_multiplier, asked.buffers)
        at = _delta(run, devices, asked.delta, epsilon)
        guarantee = guarantee_of([run], at).for_devices(devices)
        planned = None
        if seen is not None:
            guarantee = guarantee.resting_on(replace(run.hypothesis, basis="observed"))
            if asked.planned is not None:
                stated = Run.of(
                    asked.mechanism, asked.planned, asked.noise_multiplier, asked.buffers
                )
                planned = guarantee_of([stated], at).for_devices(devices)
    if out is not None:
        save_guarantee(guarantee, out)
    if as_json:
        print_json(_as_json(guarantee, seen, planned))
    else:
        print_table(_table(guarantee, seen, planned))
    if seen is not None and asked.planned is not None and _breaks(seen.observed, asked.planned):
        click.echo(
            f"the log breaks what was stated: min-sep {seen.observed.min_sep:,} and "
            f"{seen.observed.max_participations:,} participation(s) were observed",
            err=True,
        )
        context.exit(1)


class Asked(NamedTuple):
    """What to account for, put together from the plan and the options.

    Attributes:
        mechanism: As it was run.
        noise_multiplier: The noise multiplier.
        delta: Where to state epsilon, if that was said.
        planned: The participation that was planned, if it is known.
        rounds: Rounds that were released, if that was said.
        buffers: What the noise buffers were kept in.
    """

    mechanism: Mechanism
    noise_multiplier: float
    delta: float | None
    planned: Participation | None
    rounds: int | None
    buffers: BufferType = "float64"


def _asked(
    name: str,
    stated: Participation | None,
    rounds: int | None,
    noise_multiplier: float | None,
    delta: float | None,
    epsilon: float | None,
    with_log: bool,
) -> Asked:
    if is_plan(name):
        if stated is not None or rounds is not None or noise_multiplier is not None:
            raise InvalidInput(
                f"{name} is a plan and says the rounds, the separation and the noise multiplier; "
                "leave these options out"
            )
        plan = load_plan(name)
        at = plan.guarantee.delta if delta is None and epsilon is None else delta
        buffers = plan.guarantee.runs[0].buffers
        return Asked(plan.mechanism, plan.noise_multiplier, at, plan.participation, None, buffers)
    if noise_multiplier is None:
        raise InvalidInput("give the --noise-multiplier, or a plan in place of the mechanism")
    positive_number("--noise-multiplier", noise_multiplier)
    if rounds is None and with_log:
        raise InvalidInput(
            "say how many --rounds were planned, or give a plan in place of the mechanism: a "
            "client still moves the rounds after the last one that a log has"
        )
    if rounds is None:
        raise InvalidInput("give --rounds and --min-sep, or a --log")
    if stated is None and not with_log:
        raise InvalidInput("give one of --min-sep and --rounds-between")
    return Asked(mechanism_by_name(name, stated), noise_multiplier, delta, stated, rounds)


def _look(log: Path, asked: Asked, first_round: int, repeated_rows: bool) -> Seen:
    with (
        progress_bar("reading the log") as report,
        open_log(log, rounds=asked.rounds, first_round=first_round, report=report) as opened,
    ):
        observed = opened.summary()
        example = observed.duplicate_example
        if example is not None and not repeated_rows:
            raise InvalidInput(
                f"{log}: client {example.client} is counted {example.rows} times in round "
                f"{example.round}; an update summed twice has no guarantee; if rows were only "
                "written twice, say --repeated-rows"
            )
        planned = 0 if asked.planned is None else asked.planned.rounds
        rounds = max(planned, observed.rounds)
        return Seen(observed, opened.worst_pattern(asked.mechanism, rounds))


def _breaks(observed: Observed, planned: Participation) -> bool:
    often, gap = observed.max_participations, planned.min_sep
    if often > planned.max_participations or (often > 1 and observed.min_sep < gap):
        return True
    if observed.rounds > planned.rounds:
        return True
    return isinstance(planned, FixedEpochs) and not observed.comes_back_after(gap)


def _delta(run: Run, devices: int, delta: float | None, epsilon: float | None) -> float:
    if delta is not None and epsilon is None:
        return delta
    if epsilon is None or delta is not None:
        raise InvalidInput("give one of --delta and --epsilon")
    found = delta_for(run.mechanism, run.participation, run.noise_multiplier, epsilon, devices)
    if not 0 < found < 1:
        raise InvalidInput(f"delta at epsilon {epsilon:g} is {found:g}: give a --delta instead")
    return found


def _as_json(guarantee: Guarantee, seen: Seen | None, planned: Guarantee | None) -> dict[str, Any]:
    run = guarantee.runs[0]
    content: dict[str, Any] = {
        "mechanism": run.mechanism.name,
        **describe(run.participation),
        "noise_multiplier": run.noise_multiplier,
        "sensitivity": run.sensitivity.value,
        "sensitivity_kind": run.sensitivity.kind,
        "rounding": run.rounding,
        **_numbers(guarantee),
        "sampler_delta": guarantee.sampler_delta,
        "unit": guarantee.unit,
        "adjacency": guarantee.adjacency,
        "hypotheses": [asdict(hypothesis) for hypothesis in guarantee.hypotheses],
    }
    if seen is not None:
        content["basis"] = "observed"
        content["observed"] = seen.observed.as_json()
        worst = _worst(guarantee, seen.worst)
        content["worst_pattern"] = {
            "client": seen.worst.client,
            "pattern": seen.worst.pattern,
            "sensitivity": seen.worst.value,
            "sensitivity_kind": seen.worst.kind,
            "mu": worst.mu,
            "rho": worst.rho,
            "epsilon": worst.epsilon(guarantee.delta) if worst.mu > 0 else 0.0,
        }
    if planned is not None:
        content["stated"] = {
            **describe(planned.runs[0].participation),
            "sensitivity": planned.runs[0].sensitivity.value,
            **_numbers(planned),
        }
    return content


def _numbers(guarantee: Guarantee) -> dict[str, float]:
    return {
        "mu": guarantee.mu,
        "rho": guarantee.rho,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
    }


def _worst(guarantee: Guarantee, worst: WorstPattern) -> Spent:
    """What the releases say at most of the worst client that was there."""
    run = guarantee.runs[0]
    # The two are computed on different ways, and where they are equal may differ in the last bit.
    norm = min(worst.value, run.sensitivity.value)
    return Spent(run.participation.rounds, run.mu_of(norm) * guarantee.devices)


def _table(guarantee: Guarantee, seen: Seen | None, planned: Guarantee | None) -> Table:
    run = guarantee.runs[0]
    noise_multiplier = f"sigma {run.noise_multiplier:g}"
    title = f"{run.mechanism.name}, {noise_multiplier}, {run.participation}"
    table = Table(
        title=title,
        min_width=len(title),
        caption=f"for each {guarantee.unit}, {guarantee.adjacency} adjacency, "
        f"delta {in_full(guarantee.delta)}",
    )
    table.add_column("")
    for heading in ("sensitivity", "mu", "rho", "epsilon"):
        table.add_column(heading, justify="right")

    def row(label: str, sensitivity: str, mu: float, epsilon: float) -> None:
        numbers = (mu, mu * (mu / 2), epsilon)
        table.add_row(label, sensitivity, *(rounded_up(number) for number in numbers))

    label = "guarantee" if seen is None else "observed gap and count"
    row(label, sensitivity_text(run.sensitivity), guarantee.mu, guarantee.epsilon)
    if seen is not None:
        worst = _worst(guarantee, seen.worst)
        epsilon = worst.epsilon(guarantee.delta) if worst.mu > 0 else 0.0
        sign = "≤ " if seen.worst.value > 0 else ""
        norm = sign + rounded_up(seen.worst.value, 5)
        row("worst client there", norm, worst.mu, epsilon)
    if planned is not None:
        stated = planned.runs[0]
        label = f"stated: min-sep {stated.participation.min_sep:,}"
        row(label, sensitivity_text(stated.sensitivity), planned.mu, planned.epsilon)
    return table
