"""Computing items and writing them down, each only once."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec

from dpftrl.errors import InvalidInput
from dpftrl.paper.findings import Claim, Findings, Row, Say
from dpftrl.paper.item import Item
from dpftrl.paper.pictures import FORMATS, draw_files
from dpftrl.paper.written import as_csv, as_markdown
from dpftrl.storage import read_json, replace_file


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
