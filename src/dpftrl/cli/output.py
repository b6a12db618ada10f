"""How commands print: tables, JSON, progress bars and numbers."""

import json
import re
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from dpftrl._internal.formatting import rounded_up
from dpftrl.errors import visible
from dpftrl.mechanisms._sensitivity import Sensitivity

# Characters that a table may be wide where there is no terminal that it has to fit into.
PLAIN_WIDTH = 120
# On a narrow terminal, words and bars longer than this are broken over several lines.
LONG_WORD = 16
BLOCKS = "▁▂▃▄▅▆▇█"
# Characters that JSON does not escape, and some of which a terminal obeys.
UNPRINTABLE = re.compile("[^\\x00-\\x7e]")


def say(text: object, *, err: bool = False) -> None:
    """Print text, on standard error if asked; control characters appear as escapes."""
    click.echo(visible(str(text)), err=err)


def print_json(content: Any) -> None:
    """Print indented JSON on standard output."""
    encoded = msgspec.json.encode(content, enc_hook=_plain)
    click.echo(UNPRINTABLE.sub(_json_escape, msgspec.json.format(encoded, indent=2).decode()))


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


def working(message: str) -> AbstractContextManager[Any]:
    """Show a spinner with a message while the body runs, if standard error is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    return Console(stderr=True).status(message)


@contextmanager
def progress_bar(title: str) -> Generator[Callable[[float | None, str], None] | None]:
    """Show a progress bar if standard error is a terminal; yield its callback, or else None.

    The callback takes the fraction done (None if it is not known) and a message.
    """
    if not sys.stderr.isatty():
        yield None
        return
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def on_progress(done: float | None, message: str) -> None:
            bar.update(task, total=None if done is None else 1.0, completed=done or 0.0)
            bar.update(task, description=f"{title}: {message}")

        yield on_progress


def number(value: float) -> str:
    """Format a number for a table, with three decimals or four significant digits."""
    return f"{value:,.3f}" if 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def sensitivity_text(sensitivity: Sensitivity) -> str:
    """Format a sensitivity for a table; `≤` marks an upper bound, which is rounded up."""
    exact = sensitivity.kind == "exact"
    return number(sensitivity.value) if exact else f"≤ {rounded_up(sensitivity.value, 5)}"


def sparkline(values: np.ndarray[Any, np.dtype[np.float64]], width: int = 60) -> str:
    """Draw the absolute values as a row of blocks on a logarithmic scale of four decades."""
    size = np.abs(values[:width])
    if not size.max() > 0:
        return BLOCKS[0] * len(size)
    floor = size.max() * 1e-4  # four decades below the largest value
    height = 1 + np.log10(np.maximum(size, floor) / size.max()) / 4
    return "".join(BLOCKS[round(h * (len(BLOCKS) - 1))] for h in height)
