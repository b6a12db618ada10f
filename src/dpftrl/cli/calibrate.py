"""`dpftrl calibrate`: the smallest noise multiplier for a privacy budget."""

import click
from rich.table import Table

from dpftrl._internal.checks import whole_number
from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.accounting import account, calibrate, calibrate_rho, calibrate_risk, risk_of
from dpftrl.accounting.risk import epsilon_for_risk
from dpftrl.cli.dataset import (
    DatasetRequest,
    calibrate_for_dataset,
    dataset_options,
    refuse_others,
)
from dpftrl.cli.files import resolve
from dpftrl.cli.options import (
    Count,
    Share,
    describe,
    json_option,
    participation_or_source_options,
)
from dpftrl.cli.output import print_json, print_table, risk_table, sensitivity_text, working
from dpftrl.errors import InvalidInput
from dpftrl.participation import Participation


@click.command("calibrate")
@click.argument("name", metavar="MECH|PLAN|GUARANTEE|RUN")
@participation_or_source_options
@click.option("--epsilon", type=float, help="Largest epsilon allowed.")
@click.option("--delta", type=float, help="Delta at which --epsilon is stated.")
@click.option("--rho", type=float, help="Instead of --epsilon: largest rho of zCDP allowed.")
@click.option(
    "--max-tpr",
    type=Share(),
    help="Instead of --epsilon: the largest probability that an attack detects that data was used.",
)
@click.option(
    "--at-fpr",
    type=Share(),
    help="For --max-tpr: rate of false alarms of the attack, such as 0.1%.",
)
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
    max_tpr: float | None,
    at_fpr: float | None,
    devices: int | None,
    dataset_request: DatasetRequest | None,
    as_json: bool,
) -> None:
    """Compute the smallest noise multiplier for an epsilon, a rho or a risk.

    The noise multiplier is the standard deviation of the independent noise Z in units of the clip
    norm. Noise multipliers of different mechanisms are not comparable; compare losses instead.
    Of a plan, a guarantee or a run, the mechanism is taken, and the participation and delta unless
    the options state others. With --dataset, --batch-size, --epochs and --sampling, the noise
    multiplier is that of training on secret random batches of a data set.

    A risk is a largest true-positive rate at a false-positive rate: with --max-tpr 0.05 --at-fpr
    0.001, no attack with one false alarm in a thousand detects more than 5% of the clients whose
    data was used. With --dataset it also needs --delta.
    """
    if (max_tpr is None) != (at_fpr is None):
        raise InvalidInput("--max-tpr and --at-fpr go together: give both, or neither")
    if dataset_request is not None:
        refuse_others({"--rounds": participation, "--rho": rho, "--devices": devices})
        if max_tpr is not None and at_fpr is not None:
            if epsilon is not None or delta is None:
                raise InvalidInput("--max-tpr with --dataset needs --delta, and no --epsilon")
            epsilon = epsilon_for_risk(max_tpr, at_fpr, delta)
        calibrate_for_dataset(name, dataset_request, epsilon, delta, as_json)
        return
    if sum(target is not None for target in (epsilon, rho, max_tpr)) != 1:
        raise InvalidInput(
            "give one of --epsilon (with --delta), --rho and --max-tpr (with --at-fpr)"
        )
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
        elif max_tpr is not None and at_fpr is not None:
            noise_multiplier = calibrate_risk(mechanism, participation, max_tpr, at_fpr, devices)
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
                **risk_of(guarantee).as_json(),
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
    print_table(risk_table(risk_of(guarantee), guarantee.unit))
