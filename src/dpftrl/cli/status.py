"""`dpftrl status`: how a run is doing, once, again and again, or as metrics for Prometheus."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from dpftrl._internal.formatting import rounded_up
from dpftrl.cli.options import json_option, state_folder_option
from dpftrl.cli.output import print_json, print_table, say, working
from dpftrl.errors import InvalidInput, visible
from dpftrl.status import Status, StatusReader
from dpftrl.status.texts import private_rows, public_rows, unit_of

WATCH_SECONDS: Final = 2.0  # between two readings
# A reading that takes long is repeated less often: reading takes at most this share of the time.
READING_SHARE: Final = 0.2


@click.command("status")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--watch", is_flag=True, help="Show the status again and again, until the run ends.")
@click.option(
    "--prometheus",
    "port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Serve the figures as metrics for Prometheus; port 0 takes a free port.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address on which --prometheus listens. Anybody who reaches it can read private figures.",
)
@state_folder_option
@json_option
@click.pass_context
def status_command(
    context: click.Context,
    run: Path,
    watch: bool,
    port: int | None,
    host: str,
    state_folder: Path | None,
    as_json: bool,
) -> None:
    """Show how a run is doing: rounds, epsilon, drop-outs, eligible clients, expected end, disk.

    RUN is the folder of a federated or a centralized run. Another process may be training: nothing
    is locked or written. The first table may be published. The second table and the warnings are
    for the operator only, because they depend on what clients did.

    The exit code is 0 if all is well, 1 if there are warnings, and 2 if the run cannot be read.
    """
    if watch + as_json + (port is not None) > 1:
        raise InvalidInput("give one of --watch, --json and --prometheus")
    with working(f"reading {run}"):
        reader = StatusReader(run, state_folder=state_folder)
        status = reader.read()
    if port is not None:
        _serve(reader, host, port)
    if watch:
        status = _watch(reader, status)
    elif as_json:
        print_json(status)
    else:
        for table in _tables(status):
            print_table(table)
        for line in _warnings(status):
            say(line)
    if status.warnings:
        context.exit(1)


def _serve(reader: StatusReader, host: str, port: int) -> None:
    """Serve metrics until the process is interrupted."""
    from dpftrl.status.prometheus import serve

    server = serve(reader, host, port)
    address = f"[{host}]" if ":" in host else host
    say(f"metrics: http://{address}:{server.server_port}/metrics (Ctrl-C ends this)")
    try:
        while True:
            time.sleep(3600)
    finally:
        server.shutdown()
        server.server_close()


def _watch(reader: StatusReader, status: Status) -> Status:
    """Show the status until the run ends: tables on a terminal, else a line for every change."""
    console = Console()
    if not console.is_terminal:
        return _print_changes(reader, status)
    with Live(_screen(status), console=console, auto_refresh=False) as live:
        while not status.public.ended:
            status = _next(reader)
            live.update(_screen(status), refresh=True)
    return status


def _print_changes(reader: StatusReader, status: Status) -> Status:
    line = _line(status)
    say(line)
    while not status.public.ended:
        status = _next(reader)
        if line != (line := _line(status)):
            say(line)
    return status


def _next(reader: StatusReader) -> Status:
    """Wait, and read the status."""
    time.sleep(WATCH_SECONDS)
    started = time.monotonic()
    status = reader.read()
    time.sleep((time.monotonic() - started) * (1 / READING_SHARE - 1))
    return status


def _line(status: Status) -> str:
    public = status.public
    warnings = ", ".join(sorted({warning.kind for warning in status.warnings}))
    return (
        f"{unit_of(public)} {public.rounds:,}/{public.rounds_planned:,}  "
        f"epsilon {rounded_up(public.epsilon)}  {public.ended or ''}"
        f"{f'warnings: {warnings}' if warnings else ''}"
    ).rstrip()


def _screen(status: Status) -> Group:
    return Group(*_tables(status), *map(escape, _warnings(status)))


def _warnings(status: Status) -> Iterator[str]:
    for warning in status.warnings:
        yield visible(f"WARNING ({warning.kind}): {warning.text}")


def _tables(status: Status) -> Iterator[Table]:
    rows = {
        "May be published": dict(public_rows(status.public)),
        "For the operator only, not to be published": dict(
            private_rows(status.public, status.private, status.time)
        ),
    }
    for title, cells in rows.items():
        table = Table(title=title, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in cells.items():
            table.add_row(name, escape(visible(text)))
        yield table
