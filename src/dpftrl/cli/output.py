"""How commands print: tables, JSON, progress bars and numbers."""

import json
import re
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any, final

import click
import msgspec
import numpy as np
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from dpftrl._internal.formatting import number, rounded_up
from dpftrl._internal.tables import TextTable
from dpftrl.accounting.risk import Risk
from dpftrl.errors import visible
from dpftrl.mechanisms._sensitivity import Sensitivity

# Characters that a table may be wide where there is no terminal that it has to fit into.
PLAIN_WIDTH = 120
# On a narrow terminal, words and bars longer than this are broken over several lines.
LONG_WORD = 16
BLOCKS = "▁▂▃▄▅▆▇█"
# Seconds until the first line about the progress of a computation, the next, and all later ones.
FIRST_BEAT = 2.0
NEXT_BEAT = 10.0
SLOWEST_BEAT = 60.0
# Characters that JSON does not escape, and some of which a terminal obeys.
UNPRINTABLE = re.compile("[^\\x00-\\x7e]")


def say(text: object, *, err: bool = False) -> None:
    """Print text, on standard error if asked; control characters appear as escapes."""
    click.echo(visible(str(text)), err=err)


def print_json(content: Any) -> None:
    """Print indented JSON on standard output."""
    encoded = msgspec.json.encode(content, enc_hook=_plain)
    click.echo(UNPRINTABLE.sub(_json_escape, msgspec.json.format(encoded, indent=2).decode()))


def print_json_line(content: Any) -> None:
    """Print JSON on one line of standard output."""
    encoded = msgspec.json.encode(content, enc_hook=_plain).decode()
    click.echo(UNPRINTABLE.sub(_json_escape, encoded))


def _json_escape(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else json.dumps(character)[1:-1]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"cannot write {type(value).__name__} as JSON")


def print_table(table: Table) -> None:
    """Print a table; on a terminal it has colors and is fitted to the width of the terminal.

    Control characters in titles and cells appear as escapes.
    """
    console = Console()
    if isinstance(table.title, str):
        table.title = visible(table.title)
    for column in table.columns:
        column._cells = [visible(c) if isinstance(c, str) else c for c in column._cells]  # pyright: ignore[reportPrivateUsage]
    wide = console.options.update(max_width=1000)  # wider than any table: measures the full width
    width = max(PLAIN_WIDTH, Measurement.get(console, wide, table).maximum)
    if console.is_terminal:
        width = max(console.width, _narrow(table, console, wide))
    Console(width=width).print(table)


def _narrow(table: Table, console: Console, wide: ConsoleOptions) -> int:
    """Shrink the columns to the width of the terminal, and return the resulting table width.

    Rich would shrink all columns in the same way. Here text is wrapped and long words are folded,
    but names and numbers are never cut: if they do not fit, the table is wider than the terminal.
    """
    table.min_width = min(table.min_width or 0, console.width)  # the title can wrap
    whole = Measurement.get(console, wide, table).maximum
    sizes = [_sizes(table, column, console, wide) for column in table.columns]
    widths = [largest for _, largest in sizes]
    while whole > console.width:
        shrinkable = [i for i, (smallest, _) in enumerate(sizes) if widths[i] > smallest]
        if not shrinkable:
            break
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
        whole -= 1
    for column, column_width in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap, column.overflow = column_width, False, "fold"
    return whole


def _sizes(table: Table, column: Column, console: Console, wide: ConsoleOptions) -> tuple[int, int]:
    """Smallest and largest useful width of a column; the first column holds names."""
    heading = Measurement.get(console, wide, column.header)
    cells = [Measurement.get(console, wide, cell) for cell in column.cells]
    widest_cell = max((cell.maximum for cell in cells), default=0)
    longest_word = max([heading.minimum, *(cell.minimum for cell in cells)])
    is_never_cut = column.justify == "right" or (column.no_wrap and column is table.columns[0])
    whole = max(heading.minimum, widest_cell)
    smallest = whole if is_never_cut else min(LONG_WORD, longest_word)
    return smallest, max(heading.maximum, widest_cell)


@contextmanager
def working(message: str) -> Generator[None]:
    """Show a message with the time it takes, while the body runs."""
    with progress_bar(message):
        yield


@contextmanager
def progress_bar(title: str) -> Generator[Callable[[float | None, str], None]]:
    """Show progress on standard error while the body runs; yield the callback that updates it.

    The callback takes the fraction done (None if it is not known) and a message. A terminal gets a
    bar. Anything else gets a line after two seconds, and then one now and then.
    """
    if not sys.stderr.isatty():
        heartbeat = Heartbeat(title)
        heartbeat.start()
        try:
            yield heartbeat.update
        finally:
            heartbeat.stop()
        return
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape(title), total=None)

        def on_progress(done: float | None, message: str) -> None:
            bar.update(task, total=None if done is None else 1.0, completed=done or 0.0)
            bar.update(task, description=escape(visible(f"{title}: {message}")))

        yield on_progress


@final
class Heartbeat:
    """A thread that prints what is being done, and for how long, until it is stopped."""

    def __init__(self, title: str):
        self._title = title
        self._text = ""
        self._stop = Event()
        self._thread = Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        """Begin to wait for the first line."""
        self._thread.start()

    def stop(self) -> None:
        """Print no more."""
        self._stop.set()
        self._thread.join()

    def update(self, done: float | None, message: str) -> None:
        """Say what is being done: the callback that long computations call."""
        share = "" if done is None else f", {done:.0%} done"
        self._text = f": {message}{share}"

    def _beat(self) -> None:
        started, wait = time.monotonic(), FIRST_BEAT
        while not self._stop.wait(wait):
            with suppress(OSError, ValueError):  # standard error was closed
                say(f"{self._title}{self._text} ({time.monotonic() - started:.0f} s)", err=True)
            wait = min(max(2 * wait, NEXT_BEAT), SLOWEST_BEAT)


def sensitivity_text(sensitivity: Sensitivity) -> str:
    """Format a sensitivity for a table; `≤` marks an upper bound, which is rounded up."""
    exact = sensitivity.kind == "exact"
    return number(sensitivity.value) if exact else f"≤ {rounded_up(sensitivity.value, 5)}"


def rich_table(text_table: TextTable) -> Table:
    """A table of texts as one that can be printed: names on the left, numbers on the right."""
    table = Table(title=escape(text_table.title), caption=escape(text_table.caption))
    for place, heading in enumerate(text_table.columns):
        if place < text_table.name_columns:
            table.add_column(heading, no_wrap=True)
        else:
            table.add_column(heading, justify="right")
    for row in text_table.rows:
        table.add_row(*map(escape, row))
    return table


def risk_table(risk: Risk, unit: str) -> Table:
    """The risk of a guarantee as a table; every figure is rounded up."""
    return rich_table(risk.table(unit))


def sparkline(values: np.ndarray[Any, np.dtype[np.float64]], width: int = 60) -> str:
    """Draw the absolute values as a row of blocks on a logarithmic scale of four decades."""
    size = np.abs(values[:width])
    if not size.max() > 0:
        return BLOCKS[0] * len(size)
    floor = size.max() * 1e-4  # four decades below the largest value
    height = 1 + np.log10(np.maximum(size, floor) / size.max()) / 4
    return "".join(BLOCKS[round(h * (len(BLOCKS) - 1))] for h in height)
