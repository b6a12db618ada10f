"""`dpftrl export`: write the model of a run to a file that can be shared."""

from pathlib import Path

import click

from dpftrl._internal.formatting import rounded_up
from dpftrl.cli.files import check_target, force_option, refuse_centralized
from dpftrl.cli.options import state_folder_option
from dpftrl.cli.output import print_json, say, working
from dpftrl.federated import Server


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("model", metavar="MODEL.safetensors", type=click.Path(path_type=Path))
@state_folder_option
@click.option(
    "--trust-folder",
    is_flag=True,
    help="Read the run without its witness: you know that the folder is its newest state.",
)
@force_option()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export_command(
    run: Path,
    model: Path,
    state_folder: Path | None,
    trust_folder: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the released model of RUN to a file that can be shared.

    The file contains the arrays of the model by name, the number of rounds, their privacy
    guarantee, and the list of private runs behind the model, so that a run that starts from it can
    compose their guarantees. It contains no noise, no key and nothing about who took part.
    """
    refuse_centralized(run)
    check_target(model, "model", force=force)
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
        say(f"{model}: {summary['rounds']} rounds, epsilon {epsilon} at delta {delta}")
