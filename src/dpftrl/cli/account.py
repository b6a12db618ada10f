"""`dpftrl account`: what a mechanism with its noise guarantees."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from dpftrl.accounting import (
    Guarantee,
    Run,
    Spent,
    account,
    delta_for,
    guarantee_of,
    save_guarantee,
)
from dpftrl.checks import positive_number
from dpftrl.cli.options import Count, describe, json_option, participation_or_log_options, resolve
from dpftrl.cli.output import (
    print_json,
    print_table,
    progress_bar,
    sensitivity_text,
    working,
)
from dpftrl.errors import InvalidInput
from dpftrl.observed import Observed, WorstPattern, open_log
from dpftrl.participation import FixedEpochs, Participation
from dpftrl.report.numbers import in_full, rounded_up


class Seen(NamedTuple):
    """What a log adds: the summary, and the worst client that was really there."""

    observed: Observed
    worst: WorstPattern


@click.command("account")
@click.argument("name", metavar="MECH")
@participation_or_log_options
@click.option(
    "--noise-multiplier",
    "sigma",
    type=float,
    required=True,
    help="Standard deviation of the independent noise Z, in units of the clip norm.",
)
@click.option("--delta", type=float, help="Where to state epsilon.")
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
def account_command(
    name: str,
    participation: Participation | None,
    rounds: int | None,
    log: Path | None,
    sigma: float,
    delta: float | None,
    epsilon: float | None,
    devices: int,
    repeated_rows: bool,
    first_round: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Epsilon, rho and mu of one mechanism with its noise.

    With --log the guarantee is that of the participation which the log shows: its smallest gap and
    its largest count. Beside it stands the bound for the worst single client that was really there,
    which is tighter, and, if you state a participation, what that would have given.
    """
    positive_number("--noise-multiplier", sigma)
    if log is None and (repeated_rows or first_round is not None):
        raise InvalidInput("--repeated-rows and --first-round go with --log")
    stated, seen = participation, None
    if log is not None:
        seen = _look(log, rounds, first_round or 0, name, stated, repeated_rows)
        participation = seen.observed.participation
    assert participation is not None  # one of the two is there
    with working(f"computing {name}"):
        mechanism = resolve(name, stated or participation)
        run = Run.of(mechanism, participation, sigma)
        at = _delta(run, devices, delta, epsilon)
        guarantee = guarantee_of([run], at).for_devices(devices)
        if seen is not None:
            guarantee = guarantee.resting_on(replace(run.hypothesis, basis="observed"))
        planned = None
        if seen is not None and stated is not None:
            planned = account(mechanism, stated, sigma, at).for_devices(devices)
    if seen is not None and stated is not None and _breaks(seen.observed, stated):
        click.echo(
            f"the log breaks what was stated: min-sep {seen.observed.min_sep:,} and "
            f"{seen.observed.max_participations:,} participation(s) were observed",
            err=True,
        )
    if out is not None:
        save_guarantee(guarantee, out)
    if as_json:
        print_json(_as_json(guarantee, seen, planned))
    else:
        print_table(_table(guarantee, seen, planned))


def _look(
    log: Path,
    rounds: int | None,
    first_round: int,
    name: str,
    stated: Participation | None,
    repeated_rows: bool,
) -> Seen:
    with (
        progress_bar("reading the log") as report,
        open_log(log, rounds=rounds, first_round=first_round, report=report) as opened,
    ):
        observed = opened.summary()
        example = observed.duplicate_example
        if example is not None and not repeated_rows:
            raise InvalidInput(
                f"{log}: client {example.client} is counted {example.rows} times in round "
                f"{example.round}; an update summed twice has no guarantee; if rows were only "
                "written twice, say --repeated-rows"
            )
        mechanism = resolve(name, stated or observed.participation)
        return Seen(observed, opened.worst_pattern(mechanism))


def _breaks(observed: Observed, stated: Participation) -> bool:
    often, gap = observed.max_participations, stated.min_sep
    if often > stated.max_participations or (often > 1 and observed.min_sep < gap):
        return True
    others = any(not bin_.low == bin_.high == gap for bin_ in observed.gaps)
    return isinstance(stated, FixedEpochs) and others


def _delta(run: Run, devices: int, delta: float | None, epsilon: float | None) -> float:
    if delta is not None and epsilon is None:
        return delta
    if epsilon is None or delta is not None:
        raise InvalidInput("give one of --delta and --epsilon")
    found = delta_for(run.mechanism, run.participation, run.sigma, epsilon, devices)
    if not 0 < found < 1:
        raise InvalidInput(f"delta at epsilon {epsilon:g} is {found:g}: give a --delta instead")
    return found


def _as_json(guarantee: Guarantee, seen: Seen | None, planned: Guarantee | None) -> dict[str, Any]:
    run = guarantee.runs[0]
    content: dict[str, Any] = {
        "mechanism": run.mechanism.name,
        **describe(run.participation),
        "noise_multiplier": run.sigma,
        "sensitivity": run.sensitivity.value,
        "sensitivity_kind": run.sensitivity.kind,
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
    sigma = f"sigma {run.sigma:g}"
    title = f"{run.mechanism.name}, {sigma}, {run.participation}"
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
