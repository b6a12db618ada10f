"""`dpftrl reproduce`: recompute the tables and figures of the paper."""

from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from dpftrl.cli.options import json_option
from dpftrl.cli.output import print_json, print_table, progress_bar, say
from dpftrl.paper import Result, chosen, reproduce, shown


@click.command("reproduce")
@click.argument("names", metavar="[ITEM]...", nargs=-1)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/paper"),
    show_default=True,
    help="Folder for the results. Items that it already contains are not computed again.",
)
@click.option(
    "--quick", is_flag=True, help="Compute reduced sizes, in about a minute, without verdicts."
)
@click.option("--list", "list_items", is_flag=True, help="List the items and exit.")
@json_option
def reproduce_command(
    names: tuple[str, ...], out: Path, quick: bool, list_items: bool, as_json: bool
) -> None:
    """Recompute the tables and figures of the paper, and check each claim of the paper.

    Without ITEM it computes all items. For each item it writes a CSV file, a page that compares
    the values of the paper with ours, and a plot if the item is a figure.
    """
    items = chosen(names)
    if list_items:
        _list(items, as_json)
        return
    results: list[Result] = []
    with progress_bar("reproducing") as on_progress:
        for result in reproduce(items, out, quick, on_progress):
            results.append(result)
            if not as_json:
                say(_line(result), err=True)
    if as_json:
        print_json({"folder": str(out), "items": [_as_json(result) for result in results]})
        return
    print_table(_verdict_table(results))
    say(f"pages, tables and plots: {out}", err=True)


def _list(items: Any, as_json: bool) -> None:
    if as_json:
        print_json([{"item": item.name, "title": item.title} for item in items])
        return
    table = Table("item", "content")
    for item in items:
        table.add_row(item.name, item.title)
    print_table(table)


def _line(result: Result) -> str:
    return f"{result.item}: {_verdict_counts(result)} ({result.seconds:.1f} s)"


def _verdict_counts(result: Result) -> str:
    counts = Counter(claim.verdict for claim in result.claims)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _verdict_table(results: list[Result]) -> Table:
    table = Table("item", "claim", "paper", "ours", "verdict")
    for result in results:
        for claim in result.claims:
            table.add_row(result.item, claim.text, claim.paper, shown(claim.ours), claim.verdict)
    return table


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "item": result.item,
        "title": result.title,
        "quick": result.quick,
        "seconds": result.seconds,
        "claims": [
            {
                "claim": claim.text,
                "paper": claim.paper,
                "ours": claim.ours,
                "ratio": claim.ratio,
                "verdict": claim.verdict,
                "because": claim.because,
            }
            for claim in result.claims
        ],
    }
