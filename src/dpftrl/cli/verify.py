"""`dpftrl verify`: check a run and recompute its guarantee from its files."""

from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from dpftrl.cli.options import json_option, no_witness_option, state_folder_option
from dpftrl.cli.output import print_json, print_table, say, working
from dpftrl.verify import Verdict, verify_run
from dpftrl.verify.texts import verdict_json, verdict_summary

COLORS = {"passed": "green", "failed": "bold red", "warning": "yellow", "skipped": "dim"}


@click.command("verify")
@click.argument("run", type=click.Path(path_type=Path))
@state_folder_option
@no_witness_option
@json_option
@click.pass_context
def verify_command(
    context: click.Context, run: Path, state_folder: Path | None, no_witness: bool, as_json: bool
) -> None:
    """Check that the files of a run were not changed, and that its epsilon is correct.

    RUN is the folder of a federated or a centralized run that no process is working on. The command
    compares journal, plan, checkpoints and witness with each other, and recomputes the guarantee
    with code that is independent of the run. In a federated run, it also compares the ledger, and
    checks the contacts of every client against its timer. In a centralized run with balls-in-bins
    sampling, delta is estimated by Monte Carlo, which is no certificate.

    If python-flint is installed (`pip install 'dpftrl[audit]'`), the numbers of a guarantee without
    sampling are also enclosed in interval arithmetic: the true epsilon is in the interval for
    certain, and the check fails if the interval reaches above the stated epsilon.

    The exit code is 0 if no check failed, 1 if a check failed, and 2 if there is no run.
    """
    with working(f"verifying {run}"):
        verdict = verify_run(run, state_folder, witness=not no_witness)
    if as_json:
        print_json(verdict_json(verdict))
    else:
        _print_verdict(run, verdict)
    if not verdict.passed:
        context.exit(1)


def _print_verdict(run: Path, verdict: Verdict) -> None:
    table = Table(title=escape(f"{run}: verification"))
    for heading in ("check", "outcome", "details"):
        table.add_column(heading)
    for check in verdict.checks:
        color = COLORS[check.outcome]
        table.add_row(check.name, f"[{color}]{check.outcome}[/]", escape(check.text))
    print_table(table)
    say(verdict_summary(verdict))
