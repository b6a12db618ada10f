"""`dpftrl export`: write the model of a run, and its model card, to files that can be shared."""

import sys
from pathlib import Path
from typing import NamedTuple

import click

from dpftrl._internal.formatting import rounded_up
from dpftrl._internal.storage import replace_file
from dpftrl.cli.files import check_target, force_option, refuse_centralized
from dpftrl.cli.options import state_folder_option
from dpftrl.cli.output import print_json, say, working
from dpftrl.errors import InvalidInput
from dpftrl.federated import Server

MODEL, CARD = "model.safetensors", "README.md"


class _Targets(NamedTuple):
    """The files to write; `folder` is the folder to make for them, if any."""

    model: Path
    card: Path | None
    folder: Path | None


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("target", metavar="MODEL.safetensors|FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--card",
    type=click.Path(path_type=Path),
    metavar="CARD.md",
    help="Also write the model card here; a FOLDER has one anyway, README.md.",
)
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
    target: Path,
    card: Path | None,
    state_folder: Path | None,
    trust_folder: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the released model of RUN to a file that can be shared.

    The file contains the arrays of the model by name, the number of rounds, their privacy
    guarantee, and the list of private runs behind the model, so that a run that starts from it can
    compose their guarantees. It says what kind of model it is, with vocabulary and preprocessing:
    `dpftrl predict` and dpftrl.load_model need nothing else. It contains no noise, no key and
    nothing about who took part.

    A FOLDER gets model.safetensors and README.md: the model card in the format of Hugging Face,
    with the privacy statement.
    """
    refuse_centralized(run)
    targets = _targets(target, card, force)
    with working(f"reading {run}"):
        statement = None
        if targets.card is not None:
            from dpftrl.statement.from_files import statement_of_files

            if not (run / "plan.json").exists():
                raise InvalidInput(f"{run} holds no run: there is no plan.json in it")
            statement = statement_of_files(
                run / "plan.json", run, state_folder=state_folder, witness=not trust_folder
            )
        with Server.resume(run, state_folder=state_folder, trust_folder=trust_folder) as server:
            server.check_released()
            if targets.folder is not None:
                _make(targets.folder)
            summary = server.export(targets.model)
        if targets.card is not None and statement is not None:
            from dpftrl.models import load_model, model_card

            text = model_card(load_model(targets.model), statement, targets.model.name)
            replace_file(targets.card, text.encode())
    verified = None if statement is None else statement.facts.evidence == "verified"
    _print(targets, summary, verified, as_json)
    if verified is False:
        say(f"{run} failed verification, and the card says so; see dpftrl verify {run}", err=True)
        sys.exit(1)


def _print(
    targets: _Targets, summary: dict[str, str], verified: bool | None, as_json: bool
) -> None:
    if as_json:
        card = {} if targets.card is None else {"card": str(targets.card), "verified": verified}
        print_json({"model": str(targets.model), **card, **summary})
        return
    epsilon = rounded_up(float(summary["epsilon"]))
    delta = f"{float(summary['delta']):g}"
    say(f"{targets.model}: {summary['rounds']} rounds, epsilon {epsilon} at delta {delta}")
    if targets.card is not None:
        say(f"{targets.card}: model card")


def _targets(target: Path, card: Path | None, force: bool) -> _Targets:
    """The files to write; refuse what cannot be written, or would be destroyed."""
    if target.suffix == ".safetensors":
        check_target(target, "model", force=force)
        check_target(card, "card", force=force)
        return _Targets(target, card, None)
    if target.suffix and not target.is_dir():
        raise InvalidInput(
            f"a model ends in .safetensors, got {str(target)!r}; for a folder with a model card, "
            "give a name without an ending"
        )
    if target.exists() and not target.is_dir():
        raise InvalidInput(
            f"{target} is a file; give a folder, or a name that ends in .safetensors"
        )
    if not target.absolute().parent.is_dir():
        raise InvalidInput(f"{target} cannot be made: there is no folder {target.parent}")
    found = _Targets(target / MODEL, card or target / CARD, target)
    if target.is_dir():
        check_target(found.model, "model", force=force)
    if target.is_dir() or card is not None:
        check_target(found.card, "card", force=force)
    return found


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be made: {error.strerror}") from None
