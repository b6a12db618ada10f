"""How commands print: tables for people, JSON for machines."""

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
from dpftrl.mechanisms._sensitivity import Sensitivity

# Without a terminal there is no width to fit into: tables are at least this wide if they like.
PLAIN_WIDTH = 120
# On a narrow terminal a word longer than this, or a bar, goes on in the next line.
LONG_WORD = 16
BLOCKS = "▁▂▃▄▅▆▇█"


def print_json(content: Any) -> None:
    """Indented JSON on standard output."""
    encoded = msgspec.json.encode(content, enc_hook=_plain)
    click.echo(msgspec.json.format(encoded, indent=2).decode())


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"cannot write {type(value).__name__} as JSON")


def print_table(table: Table) -> None:
    """A table, in colour only on a terminal, where it is as narrow as names and numbers allow."""
    console = Console()
    wide = console.options.update(max_width=1000)
    width = max(PLAIN_WIDTH, Measurement.get(console, wide, table).maximum)
    if console.is_terminal:
        width = max(console.width, _narrow(table, console, wide))
    Console(width=width).print(table)


def _narrow(table: Table, console: Console, wide: ConsoleOptions) -> int:
    """Fit the columns to the terminal if they can be; the width that the table has then.

    Rich would cut all columns alike. Here a text is wrapped, and a long word folded, but names and
    numbers stay whole: rather than show half of one, the table is wider than the terminal.
    """
    table.min_width = min(table.min_width or 0, console.width)  # room for the title, which wraps
    whole = Measurement.get(console, wide, table).maximum
    sizes = [_sizes(table, column, console, wide) for column in table.columns]
    widths = [most for _, most in sizes]
    while whole > console.width:
        spare = [place for place, (least, _) in enumerate(sizes) if widths[place] > least]
        if not spare:
            break
        widths[max(spare, key=widths.__getitem__)] -= 1
        whole -= 1
    for column, column_width in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap, column.overflow = column_width, False, "fold"
    return whole


def _sizes(table: Table, column: Column, console: Console, wide: ConsoleOptions) -> tuple[int, int]:
    """The least and the most that a column takes; names stand in the first one."""
    heading = Measurement.get(console, wide, column.header)
    cells = [Measurement.get(console, wide, cell) for cell in column.cells]
    most = max((cell.maximum for cell in cells), default=0)
    word = max([heading.minimum, *(cell.minimum for cell in cells)])
    is_whole = column.justify == "right" or (column.no_wrap and column is table.columns[0])
    least = max(heading.minimum, most) if is_whole else min(LONG_WORD, word)
    return least, max(heading.maximum, most)


def working(what: str) -> AbstractContextManager[Any]:
    """Show on standard error that something is being computed, if a person is looking."""
    if not sys.stderr.isatty():
        return nullcontext()
    return Console(stderr=True).status(what)


@contextmanager
def progress_bar(what: str) -> Generator[Callable[[float | None, str], None] | None]:
    """Show on standard error how far a computation is, if a person is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(what, total=None)

        def report(done: float | None, message: str) -> None:
            shown.update(task, total=None if done is None else 1.0, completed=done or 0.0)
            shown.update(task, description=f"{what}: {message}")

        yield report


def number(value: float) -> str:
    """Four significant places or so, as a table wants them."""
    return f"{value:,.3f}" if 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def sensitivity_text(sensitivity: Sensitivity) -> str:
    """The value, with a sign for a bound."""
    exact = sensitivity.kind == "exact"
    return number(sensitivity.value) if exact else f"≤ {rounded_up(sensitivity.value, 5)}"


def sparkline(values: np.ndarray[Any, np.dtype[np.float64]], width: int = 60) -> str:
    """The size of numbers as a row of blocks, the largest full height, on a logarithmic scale."""
    size = np.abs(values[:width])
    if not size.max() > 0:
        return BLOCKS[0] * len(size)
    floor = size.max() * 1e-4
    height = 1 + np.log10(np.maximum(size, floor) / size.max()) / 4
    return "".join(BLOCKS[round(h * (len(BLOCKS) - 1))] for h in height)
