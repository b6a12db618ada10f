"""`dpftrl ledger`: write who took part in which round of a run to a CSV file."""

from pathlib import Path

import click

from dpftrl.cli.files import check_target, force_option, refuse_centralized
from dpftrl.cli.output import print_json, say, working
from dpftrl.federated import write_ledger


@click.command("ledger")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out",
    metavar="FILE.csv",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write, readable by you only.",
)
@force_option()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ledger_command(run: Path, out: Path, force: bool, as_json: bool) -> None:
    """Write the ledger of RUN: which client was contacted and counted in which round.

    The ledger is derived from the journal of the run, so that it needs the private files. Clients
    appear as keyed hashes, unless the run stores their names. It must not be published.
    `dpftrl observe` and `dpftrl account --log` read it; they also take the folder of a run in its
    place.
    """
    refuse_centralized(run)
    check_target(out, "ledger", force=force)
    with working(f"reading {run}"):
        write_ledger(run, out)
    size = out.stat().st_size
    if as_json:
        print_json({"ledger": str(out), "bytes": size})
    else:
        say(f"{out}: {size:,} bytes")
