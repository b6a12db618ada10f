"""`dpftrl calibrate`: the smallest noise multiplier for a privacy budget."""

import click
from rich.table import Table

from dpftrl._internal.checks import whole_number
from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.accounting import account, calibrate, calibrate_rho
from dpftrl.cli.dataset import (
    DatasetRequest,
    calibrate_for_dataset,
    dataset_options,
    refuse_others,
)
from dpftrl.cli.files import resolve
from dpftrl.cli.options import Count, describe, json_option, participation_or_source_options
from dpftrl.cli.output import print_json, print_table, sensitivity_text, working
from dpftrl.errors import InvalidInput
from dpftrl.participation import Participation


@click.command("calibrate")
@click.argument("name", metavar="MECH|PLAN|GUARANTEE|RUN")
@participation_or_source_options
@click.option("--epsilon", type=float, help="Largest epsilon allowed.")
@click.option("--delta", type=float, help="Delta at which --epsilon is stated.")
@click.option("--rho", type=float, help="Instead of --epsilon: largest rho of zCDP allowed.")
@click.option(
    "--devices",
    type=Count(),
    help="Devices of one person that are protected together.  [default: 1, or those of GUARANTEE]",
)
@dataset_options
@json_option
def calibrate_command(
    name: str,
    participation: Participation | None,
    epsilon: float | None,
    delta: float | None,
    rho: float | None,
    devices: int | None,
    dataset_request: DatasetRequest | None,
    as_json: bool,
) -> None:
    """Compute the smallest noise multiplier for an epsilon at a delta, or for a rho.

    The noise multiplier is the standard deviation of the independent noise Z in units of the clip
    norm. Noise multipliers of different mechanisms are not comparable; compare losses instead.
    Of a plan, a guarantee or a run, the mechanism is taken, and the participation and delta unless
    the options state others. With --dataset, --batch-size, --epochs and --sampling, the noise
    multiplier is that of training on secret random batches of a data set.
    """
    if dataset_request is not None:
        refuse_others({"--rounds": participation, "--rho": rho, "--devices": devices})
        calibrate_for_dataset(name, dataset_request, epsilon, delta, as_json)
        return
    if (epsilon is None) == (rho is None):
        raise InvalidInput("give one of --epsilon (with --delta) and --rho")
    if devices is not None:
        whole_number("devices", devices)
    with working(f"calibrating {name}"):
        takes_delta = epsilon is not None and delta is None
        also = ("delta",) if takes_delta else ()
        mechanism, participation, source = resolve(name, participation, *also)
        if takes_delta and source is None:
            raise InvalidInput("--epsilon needs a --delta, such as 1e-10")
        if takes_delta and source is not None:
            delta = source.guarantee.delta
        if source is not None:
            devices = source.devices(devices)
            if devices > 1:
                source.announce("devices")
        devices = devices or 1
        if epsilon is not None and delta is not None:
            noise_multiplier = calibrate(mechanism, participation, epsilon, delta, devices)
        else:
            assert rho is not None
            noise_multiplier = calibrate_rho(mechanism, participation, rho, devices)
        any_delta = (
            0.5  # mu and rho do not depend on delta, and without a delta epsilon is not shown
        )
        stated_delta = any_delta if delta is None else delta
        guarantee = account(mechanism, participation, noise_multiplier, stated_delta)
        guarantee = guarantee.for_devices(devices)
    sensitivity = guarantee.runs[0].sensitivity
    numbers = {"noise_multiplier": noise_multiplier, "mu": guarantee.mu, "rho": guarantee.rho}
    if delta is not None:
        numbers |= {"epsilon": guarantee.epsilon, "delta": delta}
    if as_json:
        print_json(
            {
                "mechanism": mechanism.name,
                **describe(participation),
                **numbers,
                "sensitivity": sensitivity.value,
                "sensitivity_kind": sensitivity.kind,
                "devices": devices,
            }
        )
        return
    title = f"{mechanism.name}, {participation}"
    table = Table(title=title, min_width=len(title), show_header=False)
    for label, value in numbers.items():
        shown = in_full(value) if label == "delta" else rounded_up(value)
        table.add_row(label.replace("_", " "), shown)
    table.add_row("sensitivity", f"{sensitivity_text(sensitivity)} ({sensitivity.kind})")
    print_table(table)
