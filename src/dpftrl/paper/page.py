"""Numbers in a page, from saved results: `python -m dpftrl.paper.page RESULTS PAGE`.

Between `<!-- begin NAME -->` and `<!-- end NAME -->` the page holds what this writes: `gallery`,
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
from dpftrl.paper.items import ITEMS
from dpftrl.paper.output import Result, claim_cells, load_results, rows_table, shown, table
from dpftrl.paper.trainings import Recipe

BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def insert(results: Path, page: Path) -> None:
    """Fill every block of the page anew."""
    order = {item.name: place for place, item in enumerate(ITEMS)}
    found = sorted(load_results(results), key=lambda result: order.get(result.item, len(order)))
    folder = os.path.relpath(results, page.parent)
    text = read_file(page).decode()
    filled = BLOCK.sub(
        lambda match: f"{match[1]}\n{block(match[2], found, folder)}\n\n{match[3]}", text
    )
    replace_file(page, filled.encode())


def block(name: str, results: Sequence[Result], folder: str) -> str:
    """What stands in one block."""
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
    return "\n\n".join(
        f"**[{one.item}]({folder}/{one.item}.md)**: {one.title}\n\n"
        f"![{one.title}]({folder}/{one.item}.png)"
        for one in results
        if one.has_picture
    )


def _claims(results: Sequence[Result], folder: str) -> str:
    headings = ("claim", "paper", "ours", "ratio", "verdict", "`dpftrl reproduce`")
    rows = [
        [*claim_cells(claim), f"[{one.item}]({folder}/{one.item}.md)"]
        for one in results
        for claim in one.claims
    ]
    return table(headings, rows)


def _counts(results: Sequence[Result]) -> str:
    verdicts = Counter(claim.verdict for one in results for claim in one.claims)
    total = sum(verdicts.values())
    trained = {item.name for item in ITEMS if isinstance(item.full, Recipe)}
    seconds = sum(one.seconds for one in results if one.item not in trained)
    each = ", ".join(f"{count} *{verdict}*" for verdict, count in verdicts.most_common())
    minutes = f"{shown(round(seconds / 60, 1))} minutes"
    kept = "with BandMF matrices from the cache and trainings not counted"
    return f"Of {total} claims: {each}. Computed in {minutes}, {kept}."


def _missing(results: Sequence[Result]) -> str:
    """What has no result of full size, so that nobody takes the page for complete."""
    saved = {one.item for one in results if not one.quick}
    names = [f"`{item.name}`" for item in ITEMS if item.name not in saved]
    if not names:
        return "Every item has been computed at full size."
    return f"Not computed at full size yet, and so without a verdict here: {', '.join(names)}."


def main(arguments: Sequence[str]) -> int:
    """The exit code; a mistake is one line on standard error."""
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
