"""`dpftrl export`: the model of a run, and nothing else of it."""

from pathlib import Path

import click

from dpftrl.cli.output import print_json, working
from dpftrl.errors import InvalidInput
from dpftrl.federated import Server
from dpftrl.report.numbers import rounded_up
from dpftrl.storage import replace_file


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

    It has the model's arrays by name, how many rounds it was trained, and what these guarantee: no
    noise state, no key, nothing about who took part.
    """
    from safetensors.numpy import save

    if model.suffix != ".safetensors":
        raise InvalidInput(f"a model ends in .safetensors, got {str(model)!r}")
    with (
        working(f"reading {run}"),
        Server.open(run, state_folder=state_folder, trust_folder=trust_folder) as server,
    ):
        if not server.rounds:
            raise InvalidInput(f"{run} has released nothing yet; train at least one round")
        guarantee = server.guarantee()
        said = {
            "rounds": str(server.rounds),
            "epsilon": repr(guarantee.epsilon),
            "delta": repr(guarantee.delta),
        }
        replace_file(model, save(server.arrays(), said))
    if as_json:
        print_json({"model": str(model), **said})
    else:
        epsilon, delta = rounded_up(guarantee.epsilon), f"{guarantee.delta:g}"
        click.echo(f"{model}: {said['rounds']} rounds, epsilon {epsilon} at delta {delta}")
