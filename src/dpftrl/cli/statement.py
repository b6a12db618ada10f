"""`dpftrl statement`: the privacy statement of a plan, a guarantee or a run."""

import os
from datetime import date as calendar_date
from pathlib import Path

import click

from dpftrl.cli.files import check_target, force_option, kind_of
from dpftrl.cli.options import Count, no_witness_option, state_folder_option
from dpftrl.cli.output import progress_bar, say
from dpftrl.errors import InvalidInput
from dpftrl.statement.centralized import (
    CentralizedStatement,
    centralized_statement,
    write_centralized_statement,
)
from dpftrl.statement.facts import Details
from dpftrl.statement.from_files import GUARANTEE, LEDGER, RECORD, statement_of_files
from dpftrl.statement.statement import Statement, save_statement, statement_paths
from dpftrl.verify.centralized_files import is_centralized


@click.command("statement")
@click.argument("promised", metavar="PLAN|GUARANTEE|RUN", type=click.Path(path_type=Path))
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="Folder of a run, finished or not, with guarantee.json, ledger.csv or both. If it also "
    "has the private files, the run is verified.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Path without suffix: writes OUT.md, OUT.html and OUT.json.",
    show_default="statement, next to the input file or in the folder of the run",
)
@click.option(
    "--devices",
    type=Count(),
    help="Also state the guarantee for a person with this many devices, in the headline too.",
)
@click.option("--date", help="Date to print, such as 2026-01-31.  [default: no date]")
@click.option("--organisation", help="Who is responsible for the training. Printed, not checked.")
@click.option("--model-name", help="Name of the trained model. Printed, not checked.")
@click.option("--contact", help="Where to ask about the statement. Printed, not checked.")
@click.option(
    "--public-data",
    help="Public data that was used, such as data for pre-training. Printed, not checked.",
)
@click.option(
    "--shipped-checkpoint",
    help="Checkpoint that is used in the product, such as round 2000. Printed, not checked.",
)
@state_folder_option
@no_witness_option
@force_option()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the summary.")
@click.pass_context
def statement_command(
    context: click.Context,
    promised: Path,
    run: Path | None,
    out: Path | None,
    devices: int | None,
    date: str | None,
    organisation: str | None,
    model_name: str | None,
    contact: str | None,
    public_data: str | None,
    shipped_checkpoint: str | None,
    state_folder: Path | None,
    no_witness: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the privacy statement of a plan, a guarantee or a run, as Markdown, HTML and JSON.

    `dpftrl statement RUN` is `dpftrl statement RUN/plan.json --run RUN`. The run may be a training
    of a fleet, or a centralized one of `dpftrl.torch` or `dpftrl.jax`.

    The statement says what is guaranteed, for whom and against whom, which hypotheses the guarantee
    has (each one enforced, observed, claimed or assumed), what it does not cover, how to recompute
    it, and what the technical terms mean. It rounds numbers to the safe side; the JSON file has all
    digits. With --run it compares the promised with the observed guarantee. If the log shows
    that a limit was broken, or the run spent more than was promised, the statement says so and
    states the larger epsilon, and the exit code is 1.

    A file alone proves nothing: a hypothesis that a file calls enforced is stated as claimed. If
    the folder of --run has the private files of the run, the run is verified as by `dpftrl verify`.
    If that fails, the statement says so and calls nothing enforced or observed, and the exit code
    is 1.
    """
    checked_date = _check_date(date)
    details = Details(organisation, model_name, contact, public_data, shipped_checkpoint)
    if is_centralized(promised):
        if run is not None or devices is not None:
            raise InvalidInput(f"{promised} is a centralized run; leave out --run and --devices")
        stem = out or promised / "statement"
        _check_overwrite(statement_paths(stem), promised / "plan.json", promised)
        for path in statement_paths(stem):
            check_target(path, "statement", force=force)
        with progress_bar("verifying the run"):
            one = centralized_statement(
                promised,
                state_folder=state_folder,
                witness=not no_witness,
                details=details,
                date=checked_date,
            )
        paths = write_centralized_statement(one, stem)
        _print_statement(one, paths, as_json)
        if one.evidence == "failed":
            context.exit(1)
        return
    if kind_of(str(promised)) == "run":
        if run is not None:
            raise InvalidInput(f"{promised} is a run already; leave out --run")
        promised, run = promised / "plan.json", promised
    stem = out or (promised.parent if run is None else run) / "statement"
    _check_overwrite(statement_paths(stem), promised, run)
    if stem.exists() and not stem.is_dir():
        check_target(stem, "statement", force=force)
    # A folder of the input that is missing is reported where it is read.
    if out is not None or stem.parent.is_dir():
        for path in statement_paths(stem):
            check_target(path, "statement", force=force)
        if run is not None and os.path.realpath(stem.parent) != os.path.realpath(run):
            check_target(stem.with_name("curves.png"), "picture", force=force)
    with progress_bar("reading the log") as on_progress:
        statement = statement_of_files(
            promised,
            run,
            devices=devices,
            date=checked_date,
            on_progress=on_progress,
            state_folder=state_folder,
            witness=not no_witness,
            details=details,
        )
    paths = save_statement(statement, stem)
    _print_statement(statement, paths, as_json)
    if not statement.facts.stated.kept_promise or statement.facts.evidence == "failed":
        context.exit(1)


def _print_statement(
    statement: Statement | CentralizedStatement, paths: tuple[Path, ...], as_json: bool
) -> None:
    if as_json:
        click.echo(statement.json_bytes(), nl=False)
    else:
        say(statement.summary)
        for path in paths:
            say(path)


def _check_overwrite(targets: tuple[Path, ...], promised: Path, run: Path | None) -> None:
    """Refuse to overwrite a file that the statement is computed from."""
    files = () if run is None else (GUARANTEE, LEDGER, RECORD)
    sources = [promised, *(run / name for name in files if run is not None)]
    protected = {Path(os.path.realpath(source)) for source in sources}
    for target in targets:
        if Path(os.path.realpath(target)) in protected:
            raise InvalidInput(
                f"{target} is an input of the statement; choose another name with --out"
            )


def _check_date(date: str | None) -> str | None:
    if date is None:
        return None
    try:
        return calendar_date.fromisoformat(date).isoformat()
    except ValueError:
        raise InvalidInput(f"--date takes a date such as 2026-01-31, got {date!r:.40}") from None
