"""`dpftrl compare`: losses and memory of several mechanisms for one participation."""

from pathlib import Path

import click
from rich.table import Table

from dpftrl._internal.formatting import number
from dpftrl.cli.dataset import (
    DatasetRequest,
    compare_for_dataset,
    dataset_options,
    refuse_others,
    refuse_without_dataset,
)
from dpftrl.cli.files import Source, check_target, force_option, read_source
from dpftrl.cli.loss import loss_as_json
from dpftrl.cli.options import json_option, participation_or_source_options
from dpftrl.cli.output import print_json, print_table, say, sensitivity_text, working
from dpftrl.errors import InvalidInput, RoundsExceeded, TooLarge
from dpftrl.participation import Participation
from dpftrl.plan import mechanism as mechanism_by_name
from dpftrl.plots import Rival, plot_comparison

# Mechanisms that are compared if none is named.
DEFAULT_NAMES = (
    "blt-b100",
    "blt-b400",
    "blt-b1000",
    "banded",
    "band-sqrt",
    "inv-sqrt",
    "sqrt",
    "tree-full",
    "tree",
    "tree-vanilla",
    "smooth-tree",
    "independent",
)
# Mechanisms that are compared with --dataset if none is named, by sampling.
DATASET_NAMES = {
    "none": ("blt", "banded", "band-sqrt", "tree-full", "independent"),
    "poisson": ("independent",),
    "cyclic-poisson": ("band-toeplitz", "band-sqrt:4", "band-sqrt:16", "independent"),
    "balls-in-bins": ("blt", "blt-b100", "independent"),
}
BAR = 24  # characters of the longest bar


@click.command()
@click.argument("names", metavar="[MECH|PLAN|GUARANTEE|RUN]...", nargs=-1)
@participation_or_source_options
@click.option(
    "--sort",
    type=click.Choice(["rms", "max"]),
    default="rms",
    show_default=True,
    help="Loss to sort by.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Draw the comparison to FILE.png, .svg or .pdf.",
)
@dataset_options
@click.option("--epsilon", type=float, help="For --dataset: epsilon that all are calibrated to.")
@click.option("--delta", type=float, help="For --dataset: delta at which --epsilon is stated.")
@force_option()
@json_option
def compare(
    names: tuple[str, ...],
    participation: Participation | None,
    sort: str,
    plot: Path | None,
    dataset_request: DatasetRequest | None,
    epsilon: float | None,
    delta: float | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compare the losses of mechanisms for one participation, the smallest loss first.

    Without MECH, it compares all mechanisms that need no further parameter. A mechanism that does
    not support the number of rounds, or is too large to compute, is listed with the reason. If the
    options state no participation, it is that of the first plan, guarantee or run.

    With --dataset, --batch-size, --epochs and --sampling, mechanisms are compared by the noise that
    they need for --epsilon at --delta: `rms_noise`.
    """
    if dataset_request is not None:
        refuse_others({"--rounds": participation, "--plot": plot})
        chosen = names or DATASET_NAMES[dataset_request.sampling_or_none]
        compare_for_dataset(chosen, dataset_request, epsilon, delta, as_json)
        return
    refuse_without_dataset({"--epsilon": epsilon, "--delta": delta})
    check_target(plot, "picture", force=force)
    sources = {
        name: source for name in names if (source := read_source(name, planned=True)) is not None
    }
    if participation is None:
        participation = _participation_of(sources)
    for source in sources.values():
        source.announce("mechanism")
    compared: list[Rival] = []
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(names or DEFAULT_NAMES):
        with working(f"computing {name}"):
            try:
                source = sources.get(name)
                mechanism = (
                    source.run.mechanism if source else mechanism_by_name(name, participation)
                )
                label = name if source or name.endswith(".json") else mechanism.name
                compared.append(Rival(label, mechanism, mechanism.error_report(participation)))
            except (RoundsExceeded, TooLarge) as reason:
                left_out[name] = str(reason)
    compared.sort(key=lambda rival: _loss(rival, sort))
    if plot is not None:
        with working(f"drawing {plot}"):
            plot_comparison(compared, participation, plot)
    if as_json:
        rows = [
            loss_as_json(rival.mechanism, participation, rival.error_report) for rival in compared
        ]
        print_json({"mechanisms": rows, "left_out": left_out})
        return
    print_table(_table(compared, participation, sort))
    for name, reason in left_out.items():
        say(f"left out: {name}: {reason}", err=True)
    if plot is not None:
        say(f"plot: {plot}", err=True)


def _participation_of(sources: dict[str, Source]) -> Participation:
    """The participation of the first source, which is announced."""
    first = next(iter(sources.values()), None)
    if first is None:
        raise InvalidInput("give --rounds and --min-sep, or a plan among the mechanisms")
    first.announce("participation")
    return first.run.participation


def _table(compared: list[Rival], participation: Participation, sort: str) -> Table:
    table = Table(title=str(participation))
    table.add_column("mechanism", no_wrap=True)
    for heading in ("max loss", "rms loss", "sensitivity", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(f"{sort} loss", no_wrap=True)
    scale = max((_loss(rival, sort) for rival in compared), default=1.0)
    for rival in compared:
        table.add_row(
            rival.label,
            number(rival.error_report.max_loss),
            number(rival.error_report.rms_loss),
            sensitivity_text(rival.error_report.sensitivity),
            f"{rival.mechanism.memory(participation.rounds):,}",
            "█" * max(1, round(BAR * _loss(rival, sort) / scale)),
        )
    return table


def _loss(rival: Rival, sort: str) -> float:
    return rival.error_report.rms_loss if sort == "rms" else rival.error_report.max_loss
