"""`dpftrl observe`: what really happened, from a log of who took part."""

from pathlib import Path

import click
import numpy as np
from rich.markup import escape
from rich.table import Table

from dpftrl.accounting.logs import Bin, Limits, Observed
from dpftrl.accounting.logs import observe as observe_log
from dpftrl.cli.options import Count, json_option
from dpftrl.cli.output import print_json, print_table, progress_bar, sparkline


@click.command()
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--rounds", type=Count(), help="Rounds of training.  [default: the log's last]")
@click.option(
    "--first-round",
    type=Count(),
    default=0,
    show_default=True,
    help="Number of the first round in the log.",
)
@click.option("--min-sep", type=Count(), help="Check this least difference between two rounds.")
@click.option("--max-participations", type=Count(), help="Check this most rounds of one client.")
@json_option
@click.pass_context
def observe(
    context: click.Context,
    log: Path,
    rounds: int | None,
    first_round: int,
    min_sep: int | None,
    max_participations: int | None,
    as_json: bool,
) -> None:
    """What really happened, from a log of who took part.

    LOG is a .csv, .jsonl or .parquet file of any size, in any order, with columns `round`, `client`
    and, if there is one, `status`: counted (the update is in a released sum; an empty status says
    so too), contacted (it was not used) or abandoned (its round was not released).

    Min-sep and participations are those of counted updates. The limits that you state are checked
    on everyone who was contacted; the exit code is 1 if somebody broke one.
    """
    limits = Limits(min_sep, max_participations)
    with progress_bar("reading the log") as report:
        found = observe_log(log, limits, rounds=rounds, first_round=first_round, report=report)
    if as_json:
        print_json(found.as_json())
    else:
        _print_tables(log, found)
    _warn(found)
    if found.broken_clients:
        context.exit(1)


def _print_tables(log: Path, found: Observed) -> None:
    table = Table(title=escape(f"{log.name}: what really happened"), show_header=False)
    last = found.first_round + found.rounds - 1
    table.add_row("rounds", f"{found.rounds:,} ({found.first_round:,} to {last:,})")
    table.add_row("rounds with nobody counted", f"{found.empty_rounds:,}")
    table.add_row("clients", f"{found.clients:,}")
    table.add_row("participations", f"{found.participations:,}")
    table.add_row("max participations", f"{found.max_participations:,}")
    table.add_row("clients by participations", _spark(found.counts))
    table.add_row("min-sep", f"{found.min_sep:,}{_once(found.min_sep, found)}")
    table.add_row("gaps of one client", _spark(found.gaps))
    contacts = f"{found.contacts:,} of {found.contacted_clients:,} clients"
    table.add_row("contacted", contacts)
    once = _once(found.contacted_min_sep, found)
    table.add_row("min-sep of the contacted", f"{found.contacted_min_sep:,}{once}")
    print_table(table)
    if found.broken:
        _print_broken(found)


def _once(min_sep: int, found: Observed) -> str:
    return " (nobody twice)" if min_sep == found.rounds else ""


def _spark(bins: tuple[Bin, ...]) -> str:
    """The ends, and between them how many there are, on a logarithmic scale."""
    if not bins:
        return "none"
    drawn = sparkline(np.array([b.number for b in bins], dtype=np.float64))
    return f"{bins[0].low:,} {drawn} {bins[-1].high:,}"


def _print_broken(found: Observed) -> None:
    table = Table(title="clients that broke a limit")
    for heading in ("client", "limit", "what happened", "in released sums"):
        table.add_column(heading)
    for one in found.broken:
        happened = (
            f"{one.count:,} participations"
            if one.rounds is None
            else f"rounds {one.rounds[0]:,} and {one.rounds[1]:,}"
        )
        in_sums = "yes" if one.counted else "no, contacted only"
        table.add_row(escape(_readable(one.client)), one.limit.replace("_", "-"), happened, in_sums)
    print_table(table)


def _readable(client: str) -> str:
    """An id as it is, unless it would upset a terminal."""
    return client if client.isprintable() else repr(client)


def _warn(found: Observed) -> None:
    """Say on standard error what must not be overlooked."""
    if (example := found.duplicate_example) is not None:
        click.echo(
            f"warning: {found.duplicate_rows:,} counted row(s) repeat a client and round, such as "
            f"client {_readable(example.client)} in round {example.round:,} "
            f"({example.rows:,} rows); each was taken once, which is wrong if an update was "
            "summed twice",
            err=True,
        )
    if found.broken_clients:
        click.echo(
            f"limits broken: {found.broken_clients:,} client(s), of which "
            f"{found.broken_counted_clients:,} in released sums; account for what is observed, "
            "not for what was stated",
            err=True,
        )
