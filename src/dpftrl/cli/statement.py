"""`dpftrl statement`: the privacy statement of a plan, a guarantee or a run."""

import hashlib
from collections.abc import Iterator
from datetime import date as calendar_date
from pathlib import Path

import click
import msgspec

from dpftrl.accounting import Guarantee, load_guarantee
from dpftrl.cli.options import Count
from dpftrl.cli.output import progress_bar, working
from dpftrl.errors import InvalidInput
from dpftrl.observed import Limits, Observed, observe
from dpftrl.plan import Plan, load_plan
from dpftrl.report.facts import Input, Role
from dpftrl.report.happened import limits_of
from dpftrl.report.statement import Statement, save_statement, statement, statement_paths
from dpftrl.storage import read_json

GUARANTEE, LEDGER = "guarantee.json", "ledger.csv"


class Header(msgspec.Struct):
    """What tells the kind of a file."""

    format: str


@click.command("statement")
@click.argument("promise", metavar="PLAN|GUARANTEE", type=click.Path(path_type=Path))
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="Folder of a run, finished or not: its guarantee.json, its ledger.csv, or both.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write OUT.md, OUT.html and OUT.json.",
    show_default="statement, beside the file or in the run's folder",
)
@click.option("--devices", type=Count(), help="State it for so many devices of one person too.")
@click.option("--date", help="Print this date (2026-01-31); without it there is none.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the summary.")
def statement_command(
    promise: Path,
    run: Path | None,
    out: Path | None,
    devices: int | None,
    date: str | None,
    as_json: bool,
) -> None:
    """The privacy statement of a plan or a guarantee: as Markdown, as HTML and as JSON.

    It says what is guaranteed, to whom, against what, what it rests on (enforced, observed or
    assumed), what it leaves out, and how to recompute it. With --run it sets what was promised
    beside what happened; if the log shows that the limits were not kept, it says so and states the
    larger epsilon.
    """
    day = _day(date)
    stem = out or (promise.parent if run is None else run) / "statement"
    _spare(statement_paths(stem), promise, run)
    made = _made(promise, run, devices, day)
    paths = save_statement(made, stem)
    if as_json:
        click.echo(made.json_bytes(), nl=False)
        return
    click.echo(made.summary)
    for path in paths:
        click.echo(path)


def _made(promise: Path, run: Path | None, devices: int | None, day: str | None) -> Statement:
    with working(f"reading {promise}"):
        promised = _load(promise)
        role: Role = "plan" if isinstance(promised, Plan) else "guarantee"
        inputs = [Input(role, promise.name, _sha256(promise))]
        accounted = None if run is None else _accounted(run)
    base = accounted or (promised.guarantee if isinstance(promised, Plan) else promised)
    observed = None if run is None else _observed(run, base)
    if run is not None:
        inputs += _run_inputs(run)
    return statement(
        promised,
        accounted=accounted,
        observed=observed,
        devices=devices,
        inputs=tuple(inputs),
        date=day,
    )


def _load(path: Path) -> Plan | Guarantee:
    kind = read_json(path, Header, "plan or guarantee").format
    if kind == "dpftrl plan":
        return load_plan(path)
    if kind == "dpftrl guarantee":
        return load_guarantee(path)
    raise InvalidInput(
        f"{path} has the format {kind!r:.60}; a statement is made from a plan (dpftrl plan --out) "
        "or a guarantee (dpftrl account --out)"
    )


def _accounted(run: Path) -> Guarantee | None:
    """What the run's server wrote, if it did."""
    if not run.is_dir():
        raise InvalidInput(f"{run} is not a folder; --run takes the folder of a run")
    if not any((run / name).exists() for name in (GUARANTEE, LEDGER)):
        raise InvalidInput(f"{run} holds neither {GUARANTEE} nor {LEDGER}: it is not that of a run")
    path = run / GUARANTEE
    return load_guarantee(path) if path.exists() else None


def _observed(run: Path, base: Guarantee) -> Observed | None:
    path = run / LEDGER
    if not path.exists():
        return None
    limits = Limits()
    if len(base.runs) == 1:  # of several, nobody knows which limits apply to which rows
        allowed = limits_of(base)
        limits = Limits(allowed.min_sep, allowed.max_participations)
    with progress_bar("reading the log") as report:
        return observe(path, limits, report=report)


def _run_inputs(run: Path) -> Iterator[Input]:
    roles: dict[str, Role] = {GUARANTEE: "run guarantee", LEDGER: "log"}
    for name, role in roles.items():
        if (run / name).exists():
            yield Input(role, f"{run.resolve().name}/{name}", _sha256(run / name))


def _sha256(path: Path) -> str:
    """Read piece by piece: a log may be larger than the memory."""
    try:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None


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
