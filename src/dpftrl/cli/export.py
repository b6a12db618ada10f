"""`dpftrl export`: the model of a run, and nothing else of it."""

from pathlib import Path

import click

from dpftrl._internal.formatting import rounded_up
from dpftrl.cli.output import print_json, working
from dpftrl.federated import Server


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("model", metavar="MODEL.safetensors", type=click.Path(path_type=Path))
@click.option("--state-folder", type=click.Path(path_type=Path), help="Where its witness is kept.")
@click.option("--trust-folder", is_flag=True, help="Do without the witness.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export_command(
    run: Path, model: Path, state_folder: Path | None, trust_folder: bool, as_json: bool
) -> None:
    """Write the released model of RUN: the only file of a run that is meant to be shared.

    It has the model's arrays by name, how many rounds it was trained, what these guarantee, and
    which private runs are behind it, so that a training that starts from it can compose them: no
    noise state, no key, nothing about who took part.
    """
    with (
        working(f"reading {run}"),
        Server.resume(run, state_folder=state_folder, trust_folder=trust_folder) as server,
    ):
        summary = server.export(model)
    if as_json:
        print_json({"model": str(model), **summary})
    else:
        epsilon = rounded_up(float(summary["epsilon"]))
        delta = f"{float(summary['delta']):g}"
        click.echo(f"{model}: {summary['rounds']} rounds, epsilon {epsilon} at delta {delta}")
