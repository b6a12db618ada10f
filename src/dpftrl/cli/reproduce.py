"""`dpftrl reproduce`: every table and figure of the paper, recomputed."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from dpftrl.cli.options import json_option
from dpftrl.cli.output import print_json, print_table, progress_bar
from dpftrl.paper import Result, chosen, reproduce, shown


@click.command("reproduce")
@click.argument("names", metavar="[ITEM]...", nargs=-1)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/paper"),
    show_default=True,
    help="Folder for the results; what is there already is not computed again.",
)
@click.option("--quick", is_flag=True, help="At reduced sizes, in a minute or so; no verdicts.")
@click.option("--list", "list_items", is_flag=True, help="Show what there is, and stop.")
@json_option
def reproduce_command(
    names: tuple[str, ...], out: Path, quick: bool, list_items: bool, as_json: bool
) -> None:
    """Recompute the paper's tables and figures, and say of each claim whether it holds.

    Without ITEM it takes all of them. Each gets a CSV, a page with the paper's values beside ours,
    and a picture where it is one.
    """
    items = chosen(names)
    if list_items:
        _list(items, as_json)
        return
    results: list[Result] = []
    with progress_bar("reproducing") as report:

        def say(line: str) -> None:
            if report is not None:
                report(len(results) / len(items), line)

        for result in reproduce(items, out, quick, say):
            results.append(result)
            if not as_json:
                click.echo(_line(result), err=True)
    if as_json:
        print_json({"folder": str(out), "items": [_as_json(result) for result in results]})
        return
    print_table(_verdicts(results))
    click.echo(f"pages, tables and pictures: {out}", file=sys.stderr)


def _list(items: Any, as_json: bool) -> None:
    if as_json:
        print_json([{"item": item.name, "title": item.title} for item in items])
        return
    table = Table("item", "what it shows")
    for item in items:
        table.add_row(item.name, item.title)
    print_table(table)


def _line(result: Result) -> str:
    return f"{result.item}: {_counted(result)} ({result.seconds:.1f} s)"


def _counted(result: Result) -> str:
    counts = Counter(claim.verdict for claim in result.claims)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _verdicts(results: list[Result]) -> Table:
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
