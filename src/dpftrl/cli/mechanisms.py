"""`dpftrl mechanisms`: the list of mechanisms."""

from typing import Any

import click
from rich.table import Table

from dpftrl.cli.options import Count, json_option
from dpftrl.cli.output import print_json, print_table
from dpftrl.mechanisms.registry import CATALOGUE
from dpftrl.participation import MinSep
from dpftrl.plan import mechanism

# An example of each family whose name alone is not enough to build it.
EXAMPLES = {
    "gblt": "gblt:0.9@0.2,0.5+0.1j@0.05",
    "toeplitz": "toeplitz:1,0.5,0.25",
    "banded-inverse": "banded-inverse:1,-0.5,-0.1",
    "lambda": "lambda:0.9",
}


@click.command()
@click.option(
    "--rounds",
    type=Count(),
    default=2048,
    show_default=True,
    help="Rounds of training, for the column memory.",
)
@click.option("--min-sep", type=Count(), help="Bands where P is not given.  [default: rounds / 6]")
@json_option
def mechanisms(rounds: int, min_sep: int | None, as_json: bool) -> None:
    """List the mechanisms, the memory they need and the rounds they support.

    Memory is the number of model-sized vectors that a noise stream keeps between rounds. Where a
    name has an optional P, the table takes P = min-sep.
    """
    participation = MinSep(rounds, max(1, rounds // 6) if min_sep is None else min_sep)
    rows: list[dict[str, Any]] = []
    for entry in CATALOGUE:
        built = mechanism(EXAMPLES.get(entry.name, entry.name), participation)
        rows.append(
            {
                "name": entry.form,
                "summary": entry.summary,
                "memory": built.memory(rounds),
                "rounds_supported": built.rounds,
            }
        )
    if as_json:
        print_json({"rounds": rounds, "min_sep": participation.min_sep, "mechanisms": rows})
        return
    table = Table(title=f"Mechanisms, at {rounds:,} rounds and min-sep {participation.min_sep:,}")
    table.add_column("MECH", no_wrap=True)
    table.add_column("description")
    table.add_column("memory", justify="right")
    table.add_column("max rounds", justify="right")
    for row in rows:
        supported = row["rounds_supported"]
        table.add_row(
            row["name"],
            row["summary"],
            f"{row['memory']:,}",
            "any" if supported is None else f"{supported:,}",
        )
    print_table(table)
