"""Computing items and writing them down, each only once."""

import csv
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec

from dpftrl._internal.storage import read_json, replace_file
from dpftrl.errors import InvalidInput
from dpftrl.paper.findings import Cell, Claim, Findings, Item, Row, Say
from dpftrl.paper.pictures import FORMATS, draw_files

# Longer tables stay in the CSV.
MOST_ROWS = 16
HEADINGS = ("claim", "paper", "ours", "ratio", "verdict")


def as_csv(rows: Sequence[Row]) -> str:
    """With all digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(
    name: str, title: str, claims: Sequence[Claim], rows: Sequence[Row], has_picture: bool
) -> str:
    """One page: the picture, the verdicts, and the table where it is short."""
    parts = [f"# {title}", f"`dpftrl reproduce {name}`"]
    if has_picture:
        parts.append(f"![{title}]({name}.png)")
    parts.append(claims_table(claims))
    if 0 < len(rows) <= MOST_ROWS and "claim" not in rows[0]:
        parts.append(rows_table(rows))
    parts.append(f"All numbers: [{name}.csv]({name}.csv).")
    return "\n\n".join(parts) + "\n"


def claims_table(claims: Sequence[Claim]) -> str:
    """What the paper says, what we find, and the verdict."""
    return table(HEADINGS, [claim_cells(claim) for claim in claims])


def rows_table(rows: Sequence[Row]) -> str:
    """The rows as they are."""
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
    """A number with as many digits as people read.

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


@final
@dataclass(frozen=True)
class Result:
    """A computed item.

    Attributes:
        item: Its name.
        title: What it shows.
        quick: Whether at reduced size.
        settings: A hash of what it was computed for.
        seconds: How long that took.
        has_picture: Whether there is a picture of it.
        claims: What the paper says, and our verdicts.
        rows: The table.
    """

    item: str
    title: str
    quick: bool
    settings: str
    seconds: float
    has_picture: bool
    claims: Sequence[Claim]
    rows: Sequence[Row]


def reproduce(items: Sequence[Item[Any]], folder: Path, quick: bool, say: Say) -> Iterator[Result]:
    """Compute what is not there yet, and write it to the folder: JSON, CSV, Markdown, pictures.

    Args:
        items: What to compute, in this order.
        folder: Where results go; those that are there with the same settings are kept.
        quick: At reduced sizes.
        say: Called with what is being done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be made: {error.strerror}") from None
    for item in items:
        known = _known(item, folder, quick)
        result = known or _computed(item, quick, say)
        if known is None or not _is_written(item, folder):
            say(f"{item.name}: writing")
            _write(item, result, folder)
        yield result


def load_results(folder: Path) -> list[Result]:
    """Every result of a folder, by name."""
    return [read_json(path, Result, "result") for path in sorted(folder.glob("*.json"))]


def _known(item: Item[Any], folder: Path, quick: bool) -> Result | None:
    """The result that is there, unless it was for something else or cannot be read."""
    path = folder / f"{item.name}.json"
    try:
        found = read_json(path, Result, "result")
    except InvalidInput:
        return None
    return found if found.settings == item.settings(quick) else None


def _is_written(item: Item[Any], folder: Path) -> bool:
    kinds = ("csv", "md", *(FORMATS if item.draw is not None else ()))
    return all((folder / f"{item.name}.{kind}").is_file() for kind in kinds)


def _computed(item: Item[Any], quick: bool, say: Say) -> Result:
    start = time.perf_counter()
    found: Findings = item.findings(quick, lambda line: say(f"{item.name}: {line}"))
    return Result(
        item.name,
        item.title,
        item.is_reduced(quick),
        item.settings(quick),
        round(time.perf_counter() - start, 2),
        item.draw is not None,
        found.claims,
        found.rows,
    )


def _write(item: Item[Any], result: Result, folder: Path) -> None:
    """The JSON comes last: it says that the others are there."""
    replace_file(folder / f"{item.name}.csv", as_csv(result.rows).encode())
    words = as_markdown(item.name, item.title, result.claims, result.rows, result.has_picture)
    replace_file(folder / f"{item.name}.md", words.encode())
    if item.draw is not None:
        draw_files(item.draw, result.rows, item.height, folder, item.name)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    replace_file(folder / f"{item.name}.json", encoded + b"\n")
