"""All items that can be reproduced, their computation, and the files of their results.

Results that already exist are kept. Each item has a JSON file, a CSV file, a Markdown page and, if
it is a figure, pictures.
"""

import csv
import difflib
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec

from dpftrl._internal.progress import Progress
from dpftrl._internal.storage import read_json, replace_file
from dpftrl.errors import InvalidInput
from dpftrl.paper.accuracy import ACCURACY, TUNING, UTILITY
from dpftrl.paper.coefficients import CINV, COEFFICIENTS
from dpftrl.paper.extrapolation import EXTRAPOLATE, VARY
from dpftrl.paper.frontier import FRONTIER
from dpftrl.paper.item import Cell, Claim, Draw, Item, Row
from dpftrl.paper.mechanism_summary import SUMMARY
from dpftrl.paper.numbers_in_text import TEXT
from dpftrl.paper.optimization_time import FASTER
from dpftrl.paper.production import GBOARD, LAUNCHED
from dpftrl.paper.rmse import MAXLOSS, RMSE
from dpftrl.paper.robustness import K3, NKB, OTHERS, VARY_N
from dpftrl.paper.stackoverflow_loss import LOSSES

# Tables with more rows than this are written as CSV only, not in the Markdown page.
MOST_ROWS = 16
FORMATS = ("png", "svg")  # file formats of figures
HEADINGS = ("claim", "paper", "ours", "ratio", "verdict")
# All items, in the order of the paper.
ITEMS: tuple[Item[Any], ...] = (
    SUMMARY,
    CINV,
    FASTER,
    LOSSES,
    ACCURACY,
    TUNING,
    RMSE,
    MAXLOSS,
    K3,
    NKB,
    VARY_N,
    OTHERS,
    GBOARD,
    LAUNCHED,
    UTILITY,
    EXTRAPOLATE,
    VARY,
    COEFFICIENTS,
    TEXT,
    FRONTIER,
)


def chosen(names: Sequence[str]) -> tuple[Item[Any], ...]:
    """The items with these names, in the order of the paper; all items if no name is given.

    Raises:
        InvalidInput: There is no item of this name.
    """
    known = {item.name: item for item in ITEMS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else "--list shows all names"
            raise InvalidInput(f"the paper has no item {name!r}; {hint}")
    return tuple(item for item in ITEMS if not names or item.name in names)


@final
@dataclass(frozen=True)
class Result:
    """The result of an item, as it is stored in a .json file.

    Attributes:
        item: The name of the item.
        title: What the item shows.
        quick: Whether it was computed at reduced size.
        settings: A hash of the settings it was computed for (see `Item.settings`).
        seconds: Duration of the computation.
        has_picture: Whether the item is a figure.
        claims: The claims of the paper, with our verdicts.
        rows: The rows of the table.
    """

    item: str
    title: str
    quick: bool
    settings: str
    seconds: float
    has_picture: bool
    claims: Sequence[Claim]
    rows: Sequence[Row]


def reproduce(
    items: Sequence[Item[Any]], folder: Path, quick: bool, on_progress: Progress
) -> Iterator[Result]:
    """Compute items and write JSON, CSV and Markdown files, and figures, to a folder.

    Args:
        items: The items to compute, in this order.
        folder: The folder for the results. Results in it with the same settings are kept.
        quick: Compute at reduced sizes.
        on_progress: Called with the share of the items that are done, and with what is being done.

    Yields:
        The result of each item, once it is written.

    Raises:
        InvalidInput: The folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be created: {error.strerror}") from None
    for number, item in enumerate(items):
        done = number / len(items)
        stored = _stored(item, folder, quick)
        result = stored or _computed(item, quick, done, on_progress)
        if stored is None or not _is_written(item, folder):
            on_progress(done, f"{item.name}: writing")
            _write(item, result, folder)
        yield result


def load_results(folder: Path) -> list[Result]:
    """All results in a folder, ordered by name."""
    return [read_json(path, Result, "result") for path in sorted(folder.glob("*.json"))]


def _stored(item: Item[Any], folder: Path, quick: bool) -> Result | None:
    """The stored result; None if there is none, it is damaged, or it has other settings."""
    path = folder / f"{item.name}.json"
    try:
        result = read_json(path, Result, "result")
    except InvalidInput:
        return None
    return result if result.settings == item.settings(quick) else None


def _is_written(item: Item[Any], folder: Path) -> bool:
    """Whether all files beside the .json file exist."""
    kinds = ("csv", "md", *(FORMATS if item.draw is not None else ()))
    return all((folder / f"{item.name}.{kind}").is_file() for kind in kinds)


def _computed(item: Item[Any], quick: bool, done: float, on_progress: Progress) -> Result:
    """Compute an item; pass on its progress messages with its name and the share of items done."""

    def on_item_progress(_fraction: float | None, message: str) -> None:
        on_progress(done, f"{item.name}: {message}")

    start = time.perf_counter()
    findings = item.findings(quick, on_item_progress)
    return Result(
        item.name,
        item.title,
        item.is_reduced(quick),
        item.settings(quick),
        round(time.perf_counter() - start, 2),
        item.draw is not None,
        findings.claims,
        findings.rows,
    )


def _write(item: Item[Any], result: Result, folder: Path) -> None:
    """Write the files of a result; the .json file is last, since it marks them as complete."""
    replace_file(folder / f"{item.name}.csv", as_csv(result.rows).encode())
    page = as_markdown(item.name, item.title, result.claims, result.rows, result.has_picture)
    replace_file(folder / f"{item.name}.md", page.encode())
    if item.draw is not None:
        _draw_files(item.draw, result.rows, item.height, folder, item.name)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    replace_file(folder / f"{item.name}.json", encoded + b"\n")


def _draw_files(draw: Draw, rows: Sequence[Row], height: float, folder: Path, name: str) -> None:
    """Draw a figure and write it in each format."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput("figures need matplotlib: pip install 'dpftrl[plot]'") from None
    library: Any = matplotlib  # its type annotations are incomplete
    with library.rc_context({"font.size": 11, "svg.hashsalt": name, "svg.fonttype": "none"}):
        figure: Any = Figure(figsize=(11, height), layout="constrained")
        draw(figure, rows)
        for kind in FORMATS:
            # Without a date the same rows give the same file.
            metadata = {"Date": None} if kind == "svg" else None
            content = io.BytesIO()
            figure.savefig(content, dpi=130, metadata=metadata, format=kind)
            replace_file(folder / f"{name}.{kind}", content.getvalue())


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV, with all digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(
    name: str, title: str, claims: Sequence[Claim], rows: Sequence[Row], has_picture: bool
) -> str:
    """The Markdown page of an item: the figure, the verdicts, and the table if it is short."""
    parts = [f"# {title}", f"`dpftrl reproduce {name}`"]
    if has_picture:
        parts.append(f"![{title}]({name}.png)")
    parts.append(claims_table(claims))
    if 0 < len(rows) <= MOST_ROWS and "claim" not in rows[0]:
        parts.append(rows_table(rows))
    parts.append(f"All numbers: [{name}.csv]({name}.csv).")
    return "\n\n".join(parts) + "\n"


def claims_table(claims: Sequence[Claim]) -> str:
    """A Markdown table of the claims: the paper's value, ours, and the verdict."""
    return table(HEADINGS, [claim_cells(claim) for claim in claims])


def rows_table(rows: Sequence[Row]) -> str:
    """A Markdown table of the rows."""
    return table([*rows[0]], [[shown(row[key]) for key in row] for row in rows])


def claim_cells(claim: Claim) -> list[str]:
    """One row of the table of claims."""
    ratio = "" if claim.ratio is None else shown(claim.ratio)
    because = f": {claim.because}" if claim.because else ""
    return [claim.text, claim.paper, shown(claim.ours), ratio, f"*{claim.verdict}*{because}"]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Cell) -> str:
    """Format a value of a table, with four significant digits for fractions.

    >>> shown(10.73408), shown(1234567), shown(0.0000321), shown(None)
    ('10.73', '1,234,567', '3.21e-05', '')
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if abs(value) < 1e15 and float(value).is_integer():
        return f"{value:,.0f}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}"
