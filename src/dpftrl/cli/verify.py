"""`dpftrl verify`: the audit of a run, from its files."""

from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from dpftrl._internal.formatting import rounded_up
from dpftrl.cli.options import json_option
from dpftrl.cli.output import print_json, print_table, working
from dpftrl.verify import Verdict, verify_run

COLOURS = {"passed": "green", "failed": "bold red", "warning": "yellow"}


@click.command("verify")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="Where the witness of the run is.  [default: $DPFTRL_STATE, or the user's state folder]",
)
@click.option(
    "--no-witness",
    is_flag=True,
    help="Go without: then nobody can tell this folder from an older copy of it.",
)
@json_option
@click.pass_context
def verify_command(
    context: click.Context, run: Path, state_folder: Path | None, no_witness: bool, as_json: bool
) -> None:
    """Check a run from its files: that nothing was changed, and that its epsilon is true.

    RUN is the folder of a run, at a time when no server works on it. Journal, ledger, plan,
    checkpoints and witness are compared with each other, every client's contacts with the timers,
    and the guarantee is computed again by other means than those of the server.

    The exit code is 0 if nothing failed, 1 if a check failed, and 2 if there is no run.
    """
    with working(f"verifying {run}"):
        found = verify_run(run, state_folder, witness=not no_witness)
    if as_json:
        print_json(_content(found))
    else:
        _print(run, found)
    if not found.passed:
        context.exit(1)


def _content(found: Verdict) -> dict[str, object]:
    return {
        "passed": found.passed,
        "run": found.run,
        "rounds": found.rounds,
        "epsilon": found.epsilon,
        "delta": found.delta,
        "checks": found.checks,
    }


def _print(run: Path, found: Verdict) -> None:
    table = Table(title=escape(f"{run}: what its files say"))
    for heading in ("check", "outcome", "what was found"):
        table.add_column(heading)
    for check in found.checks:
        colour = COLOURS[check.outcome]
        table.add_row(check.name, f"[{colour}]{check.outcome}[/]", escape(check.text))
    print_table(table)
    click.echo(_summary(found))


def _summary(found: Verdict) -> str:
    failed = sum(check.outcome == "failed" for check in found.checks)
    warned = sum(check.outcome == "warning" for check in found.checks)
    warnings = f", with {warned} warning(s)" if warned else ""
    if failed:
        return f"FAILED: {failed} of {len(found.checks)} checks{warnings}"
    if found.epsilon is None:
        return f"passed{warnings}"
    return (
        f"passed{warnings}: {found.rounds:,} rounds, epsilon {rounded_up(found.epsilon)} "
        f"at delta {found.delta:g}, recomputed"
    )
