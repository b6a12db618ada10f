"""`dpftrl loss`: error and sensitivity of one mechanism."""

from typing import Any

import click
from rich.table import Table

from dpftrl._internal.formatting import number
from dpftrl.cli.files import resolve
from dpftrl.cli.options import describe, json_option, participation_or_source_options
from dpftrl.cli.output import print_json, print_table, sensitivity_text, working
from dpftrl.mechanisms import ErrorReport, Mechanism
from dpftrl.participation import Participation


@click.command()
@click.argument("name", metavar="MECH|PLAN|GUARANTEE|RUN")
@participation_or_source_options
@json_option
def loss(name: str, participation: Participation | None, as_json: bool) -> None:
    """Compute error, sensitivity and loss of one mechanism.

    The error is the standard deviation of the noise on prefix sums, for independent noise Z of
    standard deviation 1: its largest value (max) and its root mean square (rms) over the rounds.
    The loss is error times sensitivity, which is the error at a fixed privacy level. Compare
    mechanisms by their losses. Of a plan, a guarantee or a run, the mechanism is taken, and the
    participation unless the options state another.
    """
    with working(f"computing {name}"):
        mechanism, participation, _ = resolve(name, participation)
        result = mechanism.error_report(participation)
    if as_json:
        print_json(loss_as_json(mechanism, participation, result))
        return
    table = Table(title=f"{mechanism.name}, {participation}", show_header=False)
    table.add_row("max loss", number(result.max_loss))
    table.add_row("rms loss", number(result.rms_loss))
    table.add_row("max error", number(result.max_error))
    table.add_row("rms error", number(result.rms_error))
    kind = result.sensitivity.kind
    table.add_row("sensitivity", f"{sensitivity_text(result.sensitivity)} ({kind})")
    if kind != "exact":
        table.add_row("lower bound of sensitivity", number(result.sensitivity.lower_bound))
    table.add_row("memory", f"{mechanism.memory(participation.rounds):,} model-sized vectors")
    print_table(table)


def loss_as_json(
    mechanism: Mechanism, participation: Participation, result: ErrorReport
) -> dict[str, Any]:
    """Return the losses of one mechanism as the JSON object that all commands print."""
    return {
        "mechanism": mechanism.name,
        **describe(participation),
        "max_loss": result.max_loss,
        "rms_loss": result.rms_loss,
        "max_error": result.max_error,
        "rms_error": result.rms_error,
        "sensitivity": result.sensitivity.value,
        "sensitivity_kind": result.sensitivity.kind,
        "sensitivity_lower_bound": result.sensitivity.lower_bound,
        "memory": mechanism.memory(participation.rounds),
    }
