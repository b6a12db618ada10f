"""`dpftrl observe`: the participation that a log shows, checked against limits."""

from pathlib import Path

import click
import numpy as np
from rich.markup import escape
from rich.table import Table

from dpftrl.accounting.logs import Bin, Limits, LogLayout, Observed
from dpftrl.accounting.logs import observe as observe_log
from dpftrl.cli.files import log_file
from dpftrl.cli.options import Count, json_option, log_layout_options
from dpftrl.cli.output import print_json, print_table, progress_bar, say, sparkline


@click.command()
@click.argument("log", type=click.Path(path_type=Path))
@click.option(
    "--rounds", type=Count(), help="Rounds of training.  [default: up to the last round in the log]"
)
@click.option(
    "--first-round",
    type=Count(),
    default=0,
    show_default=True,
    help="Number that the log gives to the first round.",
)
@click.option(
    "--min-sep", type=Count(), help="Limit to check: smallest difference of two rounds of a client."
)
@click.option(
    "--max-participations", type=Count(), help="Limit to check: most rounds of one client."
)
@log_layout_options
@json_option
@click.pass_context
def observe(
    context: click.Context,
    log: Path,
    rounds: int | None,
    first_round: int,
    min_sep: int | None,
    max_participations: int | None,
    layout: LogLayout,
    as_json: bool,
) -> None:
    """Summarize who took part in a run, from a participation log.

    LOG is a .csv, .tsv, .txt, .jsonl or .parquet file of any size, with rows in any order, - for
    standard input, or the folder of a run with its private files. The columns of a file are
    `round`, `client` and optionally `status`: counted (the update is in a released sum; an empty
    status means the same), contacted (the client was asked, but its update was not used) or
    abandoned (the round was not released). The options from --client-column to --format are for
    logs that are written in another way.

    Min-sep and participations are computed from counted updates. The limits that you give are
    checked for all contacts; the exit code is 1 if a client broke a limit.
    """
    limits = Limits(min_sep, max_participations)
    with progress_bar("reading the log") as on_progress, log_file(log) as path:
        observed = observe_log(
            path,
            limits,
            rounds=rounds,
            first_round=first_round,
            layout=layout,
            on_progress=on_progress,
        )
    if as_json:
        print_json(observed.as_json())
    else:
        _print_tables(log, observed)
        _print_kept(observed)
    _warn(observed)
    if observed.broken_clients:
        context.exit(1)


def _print_tables(log: Path, observed: Observed) -> None:
    name = "standard input" if str(log) == "-" else log.name
    table = Table(title=escape(f"{name}: observed participation"), show_header=False)
    last = observed.first_round + observed.rounds - 1
    table.add_row("rounds", f"{observed.rounds:,} ({observed.first_round:,} to {last:,})")
    table.add_row("rounds without a counted update", f"{observed.empty_rounds:,}")
    table.add_row("counted clients", f"{observed.clients:,}")
    table.add_row("participations", f"{observed.participations:,}")
    table.add_row("max participations", f"{observed.max_participations:,}")
    table.add_row("clients by participations (histogram)", _histogram(observed.counts))
    at_least = "at least " if observed.from_times else ""
    table.add_row(
        "min-sep", f"{at_least}{observed.min_sep:,}{_no_return_note(observed.min_sep, observed)}"
    )
    table.add_row("gaps between rounds of a client (histogram)", _histogram(observed.gaps))
    contacts = f"{observed.contacts:,} of {observed.contacted_clients:,} clients"
    table.add_row("contacts", contacts)
    note = _no_return_note(observed.contacted_min_sep, observed)
    table.add_row("min-sep of contacts", f"{at_least}{observed.contacted_min_sep:,}{note}")
    print_table(table)
    if observed.broken:
        _print_broken(observed)


def _no_return_note(min_sep: int, observed: Observed) -> str:
    return " (no client came twice)" if min_sep == observed.rounds else ""


def _histogram(bins: tuple[Bin, ...]) -> str:
    """Draw a histogram with its smallest and largest value, on a logarithmic scale."""
    if not bins:
        return "none"
    drawn = sparkline(np.array([each.number for each in bins], dtype=np.float64))
    return f"{bins[0].low:,} {drawn} {bins[-1].high:,}"


def _print_broken(observed: Observed) -> None:
    table = Table(title="clients that broke a limit")
    for heading in ("client", "limit", "observed", "in released sums"):
        table.add_column(heading)
    for violation in observed.broken:
        evidence = (
            f"{violation.count:,} participations"
            if violation.rounds is None
            else f"rounds {violation.rounds[0]:,} and {violation.rounds[1]:,}"
        )
        in_sums = "yes" if violation.counted else "no, contacted only"
        limit = violation.limit.replace("_", "-")
        table.add_row(escape(_readable(violation.client)), limit, evidence, in_sums)
    print_table(table)


def _print_kept(observed: Observed) -> None:
    """Say that the limits were kept, if some were given and no client broke them."""
    limits = observed.limits
    if limits == Limits() or observed.broken_clients:
        return
    kept = [] if limits.min_sep is None else [f"min-sep {limits.min_sep:,}"]
    if limits.max_participations is not None:
        kept.append(f"max participations {limits.max_participations:,}")
    say(f"limits kept by all {observed.contacted_clients:,} clients: {', '.join(kept)}")


def _readable(client: str) -> str:
    """Return the id, with control characters escaped."""
    return client if client.isprintable() else repr(client)


def _warn(observed: Observed) -> None:
    """Warn on standard error about repeated rows and broken limits, which affect the guarantee."""
    if (example := observed.duplicate_example) is not None:
        repeats, counted = "repeat a client and round", "each was counted once"
        if observed.from_times:
            repeats = "can be in the same round as the row of that client before them"
            counted = "rows at different times were counted as two rounds"
        say(
            f"warning: {observed.duplicate_rows:,} counted row(s) {repeats}, such "
            f"as client {_readable(example.client)} in round {example.round:,} "
            f"({example.rows:,} rows); {counted}, which is wrong if an update "
            "was summed twice",
            err=True,
        )
    if observed.broken_clients:
        say(
            f"limits broken: {observed.broken_clients:,} client(s), of which "
            f"{observed.broken_counted_clients:,} in released sums; use the observed guarantee "
            "(dpftrl account --log), not the promised one",
            err=True,
        )
