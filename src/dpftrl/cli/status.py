"""`dpftrl status`: how a run is doing, once, again and again, or as metrics for Prometheus."""

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from dpftrl._internal.formatting import duration, in_full, memory_text, rounded_up
from dpftrl.cli.options import json_option, state_folder_option
from dpftrl.cli.output import print_json, print_table, say, working
from dpftrl.errors import InvalidInput, visible
from dpftrl.status import Status, StatusReader
from dpftrl.status.figures import Attempts, Clients, PrivateFigures, PublicFigures

UNKNOWN: Final = "not known"
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
        f"{_unit(public)} {public.rounds:,}/{public.rounds_planned:,}  "
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
        "May be published": dict(_public(status.public)),
        "For the operator only, not to be published": dict(
            _private(status.public, status.private, status.time)
        ),
    }
    for title, cells in rows.items():
        table = Table(title=title, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in cells.items():
            table.add_row(name, escape(visible(text)))
        yield table


def _unit(public: PublicFigures) -> str:
    return "rounds" if public.kind == "federated" else "steps"


def _public(public: PublicFigures) -> Iterator[tuple[str, str]]:
    """Names and texts of the figures that may be published."""
    yield "run", public.run
    share = public.rounds / public.rounds_planned
    ended = f"; ended: {public.ended}" if public.ended else ""
    yield _unit(public), f"{public.rounds:,} of {public.rounds_planned:,} ({share:.0%}){ended}"
    yield "epsilon", _epsilon(public)
    yield "delta", in_full(public.delta)
    noise = f"noise multiplier {public.noise_multiplier:.4g}"
    yield "mechanism", f"{public.mechanism}, {noise}"
    moves = " in the last round; it is adaptive" if public.clip_norm_moves else ""
    yield "clip norm", f"{public.clip_norm:.4g}{moves}"
    if public.kind == "centralized":
        yield "data set", f"{public.population:,} {public.unit}s"
        return
    yield "fleet", f"{public.population:,} clients planned"
    yield (
        "reports",
        f"{public.report_goal:,} per round, from {public.contacts_per_round:,} contacted clients",
    )
    if public.timer_hours is None:
        yield "timers", f"min-sep {public.min_sep:,} rounds"
    else:
        yield "timers", f"{public.timer_hours:g} hours"


def _epsilon(public: PublicFigures) -> str:
    text = f"{rounded_up(public.epsilon)}; {rounded_up(public.epsilon_planned)} planned"
    if public.epsilon_budget is None:
        return text
    text += f"; {public.epsilon / public.epsilon_budget:.0%} of the budget of "
    text += f"{public.epsilon_budget:g}"
    within = public.rounds_within_budget
    return text if within is None else f"{text}, which allows {within:,} rounds"


def _private(
    public: PublicFigures, private: PrivateFigures, now: float
) -> Iterator[tuple[str, str]]:
    """Names and texts of the figures for the operator."""
    process = private.process
    running = {True: f"number {process.pid}", False: "none on this machine", None: UNKNOWN}
    yield "process", running[process.running]
    yield "last change", f"{_clock(process.last_change)}, {_ago(process.last_change, now)}"
    if private.attempts is not None:
        yield from _attempt_rows(public, private.attempts)
    if private.clients is not None:
        yield from _client_rows(private.clients, bool(public.ended))
    pace = private.pace
    if pace.seconds_per_round is None:
        yield "pace", UNKNOWN
    else:
        basis = "" if pace.basis == "last rounds" else " (whole run, pauses included)"
        yield "pace", f"{duration(pace.seconds_per_round)} per {_unit(public)[:-1]}{basis}"
    if pace.last_round is not None:
        yield f"last {_unit(public)[:-1]}", _ago(pace.last_round, now)
    if not public.ended:
        yield "expected end", _expected_end(private, now)
    disk = private.disk
    per = UNKNOWN if disk.bytes_per_round is None else memory_text(disk.bytes_per_round)
    yield (
        "disk",
        f"{memory_text(disk.free_bytes)} free, {memory_text(disk.bytes_needed)} needed to the end; "
        f"the run has {memory_text(disk.run_bytes)} and grows per {_unit(public)[:-1]} by {per}",
    )
    yield "permissions", "; ".join(disk.problems) or "fine"
    yield "witness", f"{private.witness.state} ({private.witness.folder})"


def _attempt_rows(public: PublicFigures, attempts: Attempts) -> Iterator[tuple[str, str]]:
    if attempts.open is None:
        yield "open round", "none"
    else:
        open_round = attempts.open
        yield (
            "open round",
            f"attempt {open_round.attempt:,}: {open_round.contacted:,} clients contacted "
            f"{duration(open_round.seconds)} ago; reports so far {UNKNOWN}, of "
            f"{public.report_goal:,} needed",
        )
    yield "attempts", f"{attempts.total:,}, of which {attempts.abandoned:,} were abandoned"
    if attempts.drop_out is None:
        yield "drop-outs", UNKNOWN
    else:
        yield (
            "drop-outs",
            f"{attempts.drop_out:.1%} of {attempts.recent_contacts:,} contacts were not counted in "
            f"the last {attempts.recent:,} attempts; {public.drop_out_planned or 0:.1%} planned",
        )
    yield "unfit updates", UNKNOWN if attempts.unfit is None else f"{attempts.unfit:,}"


def _client_rows(clients: Clients, is_over: bool) -> Iterator[tuple[str, str]]:
    before = f"{clients.rested:,} that were contacted before"
    yield "clients", f"{clients.contacted:,} contacted so far"
    if clients.eligible is None:
        yield "eligible now", f"{UNKNOWN}, because the fleet is larger than planned; {before}"
    else:
        yield (
            "eligible now",
            f"{clients.eligible:,} if the fleet is as planned: {before}, and "
            f"{clients.never_contacted:,} new ones",
        )
    if not is_over:
        following = " ".join(f"{number:,}" for number in clients.eligible_next)
        yield "eligible next", following or UNKNOWN
    if clients.available_at_begin is None:
        yield "last selection", UNKNOWN
    else:
        able = UNKNOWN if clients.eligible_at_begin is None else f"{clients.eligible_at_begin:,}"
        yield (
            "last selection",
            f"{clients.available_at_begin:,} clients were available; eligible of them: {able}",
        )
    still = clients.stand_still
    if is_over:
        return
    if still is None:
        yield "stand-still", UNKNOWN if clients.eligible is None else "none foreseen"
    elif still.observed or not still.rounds_left:
        yield "stand-still", "now"
    else:
        yield "stand-still", f"after {still.round:,} rounds, in {still.rounds_left:,} rounds"


def _expected_end(private: PrivateFigures, now: float) -> str:
    end = private.pace.expected_end
    if end is None:
        return UNKNOWN
    pause = "" if private.process.running else ", if it goes on now"
    return f"{_clock(end)}, in {duration(end - now)}{pause}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "minutes")


def _ago(seconds: float, now: float) -> str:
    return f"{duration(max(0.0, now - seconds))} ago"
