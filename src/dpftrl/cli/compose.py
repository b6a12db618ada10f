"""`dpftrl compose`: one guarantee for several runs on the same clients."""

from pathlib import Path

import click
from rich.table import Table

from dpftrl._internal.formatting import rounded_up
from dpftrl.accounting import compose, save_guarantee
from dpftrl.cli.files import check_target, force_option, guarantee_in, kind_of
from dpftrl.cli.options import Count, json_option
from dpftrl.cli.output import print_json, print_table, say, working
from dpftrl.errors import InvalidInput


@click.command("compose")
@click.argument("files", metavar="GUARANTEE|PLAN|RUN...", nargs=-1, required=True)
@click.option("--delta", type=float, required=True, help="Delta at which epsilon is stated.")
@click.option(
    "--max-participations",
    type=Count(),
    help="Most rounds of one client over all runs together, if the server enforced such a cap.",
)
@click.option(
    "--devices", type=Count(), default=1, help="Devices of one person that are protected together."
)
@click.option("--out", type=click.Path(path_type=Path), help="Save the guarantee as FILE.json.")
@force_option()
@json_option
def compose_command(
    files: tuple[str, ...],
    delta: float,
    max_participations: int | None,
    devices: int,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compute one guarantee for several runs that the same clients could take part in.

    Use it for restarts, changed mechanisms and later models. `dpftrl account --out` writes the
    files. A plan counts with all its rounds, and the folder of a run with the rounds that it has
    released. Each run is taken at its own worst participation pattern: the result is an upper
    bound.
    """
    check_target(out, "guarantee", force=force)
    for file in files:
        if kind_of(file) in ("plan", "run"):
            released = kind_of(file) == "run" and (Path(file) / "guarantee.json").exists()
            what = "the rounds that it has released" if released else "all planned rounds"
            say(f"from the {kind_of(file)} {file}: {what}", err=True)
    with working("composing"):
        guarantees = [guarantee_in(file) for file in files]
        if any(guarantee.devices != 1 for guarantee in guarantees):
            raise InvalidInput(
                "a file has a guarantee for several devices of one person; compose guarantees for "
                "one client, and give --devices for the result"
            )
        together = compose(guarantees, delta, max_participations).for_devices(devices)
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
