"""`dpftrl statement`: the privacy statement of a plan, a guarantee or a run."""

from datetime import date as calendar_date
from pathlib import Path

import click

from dpftrl.cli.options import Count
from dpftrl.cli.output import progress_bar
from dpftrl.errors import InvalidInput
from dpftrl.statement.files import GUARANTEE, LEDGER, statement_of_files
from dpftrl.statement.statement import save_statement, statement_paths


@click.command("statement")
@click.argument("promise", metavar="PLAN|GUARANTEE", type=click.Path(path_type=Path))
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="Folder of a run, finished or not: its guarantee.json, its ledger.csv, or both; with its "
    "private files, it is verified.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write OUT.md, OUT.html and OUT.json.",
    show_default="statement, beside the file or in the run's folder",
)
@click.option("--devices", type=Count(), help="State it for so many devices of one person too.")
@click.option("--date", help="Print this date (2026-01-31); without it there is none.")
@click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="Where the witness of the run is.",
    show_default="$DPFTRL_STATE, or ~/.local/state/dpftrl",
)
@click.option(
    "--no-witness",
    is_flag=True,
    help="Verify the run without its witness: this may then be an older copy of it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the summary.")
@click.pass_context
def statement_command(
    context: click.Context,
    promise: Path,
    run: Path | None,
    out: Path | None,
    devices: int | None,
    date: str | None,
    state_folder: Path | None,
    no_witness: bool,
    as_json: bool,
) -> None:
    """The privacy statement of a plan or a guarantee: as Markdown, as HTML and as JSON.

    It says what is guaranteed, to whom, against what, what it rests on (enforced, observed,
    claimed or assumed), what it leaves out, and how to recompute it. With --run it sets what was
    promised beside what happened; if the log shows that the limits were not kept, it says so,
    states the larger epsilon, and the exit code is 1.

    A file alone proves nothing: what it calls enforced is stated as claimed. If the private files
    of the run are in --run, the run is verified as by `dpftrl verify`. If that fails, the statement
    says so, calls nothing enforced or observed, and the exit code is 1.
    """
    day = _day(date)
    stem = out or (promise.parent if run is None else run) / "statement"
    _spare(statement_paths(stem), promise, run)
    with progress_bar("reading the log") as report:
        made = statement_of_files(
            promise,
            run,
            devices=devices,
            date=day,
            report=report,
            state_folder=state_folder,
            witness=not no_witness,
        )
    paths = save_statement(made, stem)
    if as_json:
        click.echo(made.json_bytes(), nl=False)
    else:
        click.echo(made.summary)
        for path in paths:
            click.echo(path)
    if made.facts.happened.kept is False or made.facts.evidence == "failed":
        context.exit(1)


def _spare(targets: tuple[Path, ...], promise: Path, run: Path | None) -> None:
    """Refuse to write over what the statement is made from."""
    sources = [promise] if run is None else [promise, run / GUARANTEE, run / LEDGER]
    taken = {source.resolve() for source in sources}
    for target in targets:
        if target.resolve() in taken:
            raise InvalidInput(
                f"{target} is what the statement is made from; choose another name with --out"
            )


def _day(given: str | None) -> str | None:
    if given is None:
        return None
    try:
        return calendar_date.fromisoformat(given).isoformat()
    except ValueError:
        raise InvalidInput(f"--date takes a day like 2026-01-31, got {given!r:.40}") from None
