"""`dpftrl show`: family, parameters and coefficients of a mechanism."""

from pathlib import Path

import click
from rich.table import Table

from dpftrl.cli.files import check_target, force_option, read_source
from dpftrl.cli.options import Count, json_option
from dpftrl.cli.output import print_json, print_table, say, sparkline
from dpftrl.mechanisms.coefficients import coefficients_of
from dpftrl.participation import MinSep
from dpftrl.plan import mechanism as mechanism_by_name
from dpftrl.plots import plot_coefficients


@click.command()
@click.argument("name", metavar="MECH|PLAN|GUARANTEE|RUN")
@click.option(
    "--rounds", type=Count(), default=60, show_default=True, help="Number of coefficients to show."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Draw the coefficients to FILE.png, .svg or .pdf.",
)
@force_option()
@json_option
def show(name: str, rounds: int, plot: Path | None, force: bool, as_json: bool) -> None:
    """Show the family, the parameters and the coefficients of a mechanism.

    It draws the first column of C, which says how an update of round 0 affects later rounds, and
    the last row of C^-1 in reverse order, which says how much of each earlier row of Z is in the
    noise of the last round.
    """
    check_target(plot, "picture", force=force)
    source = read_source(name)
    if source is not None:
        source.announce("mechanism")
    mechanism = source.run.mechanism if source else mechanism_by_name(name, MinSep(rounds, rounds))
    shown = min(rounds, mechanism.rounds or rounds)
    strategy, inverse = coefficients_of(mechanism, shown)
    if plot is not None:
        plot_coefficients({mechanism.name: (strategy, inverse)}, plot)
    if as_json:
        print_json(
            {
                "mechanism": mechanism.name,
                "family": mechanism.family,
                "parameters": mechanism.parameters(),
                "rounds_supported": mechanism.rounds,
                "memory": mechanism.memory(shown),
                "strategy_coefficients": strategy,
                "inverse_coefficients": inverse,
            }
        )
        return
    table = Table(title=name, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("mechanism", mechanism.name)
    table.add_row("Python value", repr(mechanism))
    supported = mechanism.rounds
    table.add_row("max rounds", "any" if supported is None else f"{supported:,}")
    table.add_row("memory", f"{mechanism.memory(shown):,} model-sized vectors at {shown:,} rounds")
    table.add_row("C", f"{sparkline(strategy)}  {strategy[0]:.4g} ... {strategy[-1]:.4g}")
    table.add_row("C^-1", f"{sparkline(inverse)}  {inverse[0]:.4g} ... {inverse[-1]:.4g}")
    print_table(table)
    if plot is not None:
        say(f"plot: {plot}", err=True)
