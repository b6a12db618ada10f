"""Inserts stored results into a Markdown page: `python -m dpftrl.paper.page RESULTS PAGE`.

The text between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced. NAME is `gallery`,
`claims`, `counts`, `missing`, or `rows-` and the name of an item for its table.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dpftrl._internal.storage import read_file, replace_file
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.paper.results import ITEMS, Result, claim_cells, load_results, rows_table, shown, table
from dpftrl.paper.trainings import Recipe

BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def insert(results: Path, page: Path) -> None:
    """Replace every block of the page.

    Args:
        results: The folder with the results.
        page: The Markdown file, which is overwritten.
    """
    order = {item.name: position for position, item in enumerate(ITEMS)}
    loaded = sorted(load_results(results), key=lambda result: order.get(result.item, len(order)))
    folder = os.path.relpath(results, page.parent)
    text = read_file(page).decode()
    filled = BLOCK.sub(
        lambda match: f"{match[1]}\n{block(match[2], loaded, folder)}\n\n{match[3]}", text
    )
    replace_file(page, filled.encode())


def block(name: str, results: Sequence[Result], folder: str) -> str:
    """The text of one block; `folder` is the path of the results relative to the page."""
    if name == "gallery":
        return _gallery(results, folder)
    if name == "claims":
        return _claims(results, folder)
    if name == "counts":
        return _counts(results)
    if name == "missing":
        return _missing(results)
    for result in results:
        if name == f"rows-{result.item}":
            return rows_table(result.rows)
    raise InvalidInput(f"there is no result for {name!r} to insert; run dpftrl reproduce first")


def _gallery(results: Sequence[Result], folder: str) -> str:
    """All figures with their titles."""
    return "\n\n".join(
        f"**[{result.item}]({folder}/{result.item}.md)**: {result.title}\n\n"
        f"![{result.title}]({folder}/{result.item}.png)"
        for result in results
        if result.has_picture
    )


def _claims(results: Sequence[Result], folder: str) -> str:
    """The table of all claims."""
    headings = ("claim", "paper", "ours", "ratio", "verdict", "`dpftrl reproduce`")
    rows = [
        [*claim_cells(claim), f"[{result.item}]({folder}/{result.item}.md)"]
        for result in results
        for claim in result.claims
    ]
    return table(headings, rows)


def _counts(results: Sequence[Result]) -> str:
    """One sentence with the number of claims per verdict, and the time of computation."""
    verdicts = Counter(claim.verdict for result in results for claim in result.claims)
    total = sum(verdicts.values())
    trained = {item.name for item in ITEMS if isinstance(item.full, Recipe)}
    seconds = sum(result.seconds for result in results if result.item not in trained)
    by_verdict = ", ".join(f"{count} *{verdict}*" for verdict, count in verdicts.most_common())
    minutes = f"{shown(round(seconds / 60, 1))} minutes"
    excluded = "trainings not counted"
    return f"Of {total} claims: {by_verdict}. Computed in {minutes}, {excluded}."


def _missing(results: Sequence[Result]) -> str:
    """One sentence that lists the items without a result at full size."""
    saved = {result.item for result in results if not result.quick}
    names = [f"`{item.name}`" for item in ITEMS if item.name not in saved]
    if not names:
        return "Every item has been computed at full size."
    return f"Not computed at full size yet, and so without a verdict here: {', '.join(names)}."


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code. An error is one line on standard error."""
    try:
        if len(arguments) != 2:
            raise InvalidInput("usage: python -m dpftrl.paper.page RESULTS PAGE")
        results, page = map(Path, arguments)
        insert(results, page)
    except DpftrlError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
