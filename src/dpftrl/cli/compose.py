"""`dpftrl compose`: one guarantee for several runs on the same people."""

from pathlib import Path

import click
from rich.table import Table

from dpftrl._internal.formatting import rounded_up
from dpftrl.accounting import compose, load_guarantee, save_guarantee
from dpftrl.cli.options import Count, json_option
from dpftrl.cli.output import print_json, print_table, working
from dpftrl.errors import InvalidInput


@click.command("compose")
@click.argument("files", metavar="GUARANTEE.json...", nargs=-1, required=True)
@click.option("--delta", type=float, required=True, help="Where to state epsilon.")
@click.option(
    "--max-participations",
    type=Count(),
    help="Most rounds of one device over all the runs together, where that was enforced.",
)
@click.option("--devices", type=int, default=1, help="Devices of one person, protected as one.")
@click.option("--out", type=click.Path(path_type=Path), help="Save the guarantee to this .json.")
@json_option
def compose_command(
    files: tuple[str, ...],
    delta: float,
    max_participations: int | None,
    devices: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """One guarantee for several runs that the same devices could take part in.

    For restarts, changed mechanisms and later models; files come from `dpftrl account --out`. Each
    run counts at its own worst, so the result is an upper bound.
    """
    with working("composing"):
        each = [load_guarantee(file) for file in files]
        if any(guarantee.devices != 1 for guarantee in each):
            raise InvalidInput("compose guarantees for one device; --devices widens the result")
        together = compose(each, delta, max_participations).for_devices(devices)
    if out is not None:
        save_guarantee(together, out)
    if as_json:
        print_json(
            {
                "runs": len(together.runs),
                "kind": together.kind,
                "mu": together.mu,
                "rho": together.rho,
                "epsilon": together.epsilon,
                "delta": together.delta,
                "sampler_delta": together.sampler_delta,
                "max_participations": together.common_cap,
                "unit": together.unit,
            }
        )
        return
    table = Table(title=f"{len(together.runs)} runs, for each {together.unit} ({together.kind})")
    for heading in ("run", "rounds", "mu", "rho", "epsilon"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    rows = [(run.mechanism.name, run.participation.rounds, run.mu) for run in together.runs]
    for label, rounds, mu in rows:
        table.add_row(label, f"{rounds:,}", rounded_up(mu), rounded_up(mu**2 / 2), "")
    total = sum(rounds for _, rounds, _ in rows)
    numbers = (together.mu, together.rho, together.epsilon)
    table.add_section()
    table.add_row("together", f"{total:,}", *(rounded_up(number) for number in numbers))
    print_table(table)
