"""`dpftrl optimize`: the best mechanism of a family for a participation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from dpftrl.cli.loss import loss_as_json
from dpftrl.cli.options import Count, can_be_saved, json_option, max_participations_option
from dpftrl.cli.output import (
    number,
    print_json,
    print_table,
    progress_bar,
    sensitivity_text,
    working,
)
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import BLT, Mechanism, save_mechanism
from dpftrl.optimize import (
    Objective,
    Optimized,
    RobustBlt,
    best_toeplitz_ratio,
    check_objective,
    optimize_band_inverse,
    optimize_band_toeplitz,
    optimize_bandmf,
    optimize_blt,
    optimize_general_blt,
    optimize_robust_blt,
)
from dpftrl.participation import MinSep
from dpftrl.workload import PREFIX_SUM, Workload

Command = TypeVar("Command", bound=Callable[..., Any])


class Range(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A number, or two with dots between: 2000 or 1000..4000."""

    name = "number[..number]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Both ends."""
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]
        low, dots, high = str(value).partition("..")
        first = Count().convert(low, param, ctx)
        return first, Count().convert(high, param, ctx) if dots else first


def target_options(command: Command) -> Command:
    """What every optimiser asks for."""
    options = [
        click.option("--rounds", type=Range(), required=True, help="Rounds of training."),
        click.option(
            "--min-sep",
            type=Range(),
            required=True,
            help="Least difference between two rounds of one client.",
        ),
        max_participations_option,
        click.option("--momentum", type=float, default=0.0, help="Of the server's optimiser."),
        click.option("--weight-decay", type=float, default=0.0, help="Of the server's optimiser."),
        click.option(
            "--schedule",
            help="Learning rates: numbers with commas, or cooldown:last-quarter:0.05.",
        ),
        click.option(
            "--out",
            type=click.Path(dir_okay=False, path_type=Path),
            callback=can_be_saved,
            help="Save it as FILE.json.",
        ),
        json_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def objective_option(default: Objective) -> Callable[[Command], Command]:
    """Which loss to make small."""
    return click.option(
        "--objective", default=default, show_default=True, help="max for MaxLoss, rms for RmsLoss."
    )


bands_option = click.option("--bands", type=Count(), required=True, help="How many bands.")


@click.group()
def optimize() -> None:
    """Find the best mechanism of a family for a participation.

    Results save to the same kind of .json that every other command reads.
    """


@optimize.command()
@click.option("--buffers", default="auto", show_default=True, help="How many, or auto.")
@objective_option("max")
@target_options
def blt(buffers: str, objective: str, as_json: bool, out: Path | None, **target: Any) -> None:
    """BLT, in milliseconds; or, for ranges, the BLT with the least regret.

    With --rounds 1000..4000 or --min-sep 200..800 it finds the BLT whose loss is never far above
    that of the BLT made for what turns out to be true, and prints the regrets.
    """
    size = "auto" if buffers == "auto" else Count().convert(buffers, None, None)
    chosen = check_objective(objective)
    if _is_range(target):
        if _workload(target) != PREFIX_SUM:
            raise InvalidInput("ranges are for the prefix sum: leave out momentum and schedule")
        with working("optimising over the ranges"):
            robust = optimize_robust_blt(
                target["rounds"], target["min_sep"], target["max_participations"], size, chosen
            )
        _print_robust(robust, as_json, out)
        return
    with working("optimising"):
        found = optimize_blt(_participation(target), size, chosen, _workload(target))
        ratio = best_toeplitz_ratio(found, _workload(target))
    extra: dict[str, Any] = {"theta": found.mechanism.theta, "omega": found.mechanism.omega}
    if ratio is not None:
        extra["ratio_to_best_toeplitz"] = ratio
    _print(found, extra, as_json, out)


@optimize.command()
@click.option("--buffers", type=Count(), default=4, show_default=True, help="How many.")
@objective_option("max")
@target_options
def gblt(buffers: int, objective: str, as_json: bool, out: Path | None, **target: Any) -> None:
    """Generalised BLT: scales of any sign, and decays in conjugate pairs; seconds."""
    if _workload(target) != PREFIX_SUM:
        raise InvalidInput("gblt is for the prefix sum: leave out momentum and schedule")
    with working("optimising"):
        found = optimize_general_blt(_participation(target), buffers, check_objective(objective))
    _print(found, found.mechanism.parameters(), as_json, out)


@optimize.command("band-toeplitz")
@bands_option
@objective_option("rms")
@target_options
def band_toeplitz(
    bands: int, objective: str, as_json: bool, out: Path | None, **target: Any
) -> None:
    """BandToep: banded Toeplitz coefficients."""
    with progress_bar("optimising") as progress:
        found = optimize_band_toeplitz(
            _participation(target), bands, check_objective(objective), _workload(target), progress
        )
    _print(found, {}, as_json, out)


@optimize.command()
@bands_option
@click.option("--seconds", type=float, help="Stop after so many.  [default: when it settles]")
@objective_option("rms")
@target_options
def bandmf(
    bands: int,
    seconds: float | None,
    objective: str,
    as_json: bool,
    out: Path | None,
    **target: Any,
) -> None:
    """BandMF: a general banded matrix for RmsLoss; a minute for 2,052 rounds and 342 bands.

    Interrupted, it goes on next time from where it was; done, it is remembered.
    """
    if check_objective(objective) != "rms":
        raise InvalidInput("BandMF is optimised for rms only; band-toeplitz and blt know max too")
    with progress_bar("optimising") as progress:
        found = optimize_bandmf(
            _participation(target), bands, _workload(target), progress, seconds=seconds
        )
    _print(found, {}, as_json, out)


@optimize.command("band-inverse")
@bands_option
@objective_option("rms")
@target_options
def band_inverse(
    bands: int, objective: str, as_json: bool, out: Path | None, **target: Any
) -> None:
    """BandInvMF: the coefficients of a banded inverse."""
    with progress_bar("optimising") as progress:
        found = optimize_band_inverse(
            _participation(target), bands, check_objective(objective), _workload(target), progress
        )
    _print(found, {}, as_json, out)


def _is_range(target: dict[str, Any]) -> bool:
    return any(low != high for low, high in (target["rounds"], target["min_sep"]))


def _participation(target: dict[str, Any]) -> MinSep:
    if _is_range(target):
        raise InvalidInput("only optimize blt takes ranges of rounds and min-sep")
    return MinSep(target["rounds"][0], target["min_sep"][0], target["max_participations"])


def _workload(target: dict[str, Any]) -> Workload:
    schedule: str | None = target["schedule"]
    momentum, weight_decay = target["momentum"], target["weight_decay"]
    if schedule is None:
        return Workload(momentum, weight_decay)
    try:
        rates: str | list[float] = [float(part) for part in schedule.split(",")]
    except ValueError:
        rates = schedule
    return Workload.with_schedule(rates, target["rounds"][0], momentum, weight_decay)


def _save(mechanism: Mechanism, out: Path | None, about: dict[str, Any]) -> None:
    if out is not None:
        save_mechanism(mechanism, out, about)
        click.echo(f"saved: {out}", err=True)


def _print(
    found: Optimized[Mechanism], extra: dict[str, Any], as_json: bool, out: Path | None
) -> None:
    facts = {
        **loss_as_json(found.mechanism, found.participation, found.error_report),
        "objective": found.objective,
        "gradient_norm": found.gradient_norm,
        "seconds": found.seconds,
        **extra,
    }
    _save(found.mechanism, out, {"optimised_for": str(found.participation), **facts})
    if as_json:
        print_json(facts)
        return
    table = Table(title=f"{found.mechanism.name}, {found.participation}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("value", repr(found.mechanism))
    table.add_row("max loss", number(found.error_report.max_loss))
    table.add_row("rms loss", number(found.error_report.rms_loss))
    kind = found.error_report.sensitivity.kind
    table.add_row("sensitivity", f"{sensitivity_text(found.error_report.sensitivity)} ({kind})")
    table.add_row("memory", f"{facts['memory']:,} model-sized vectors")
    table.add_row("gradient", f"{found.gradient_norm:.1e} (of the log {found.objective} loss)")
    if "ratio_to_best_toeplitz" in extra:
        table.add_row(
            "against Toeplitz", f"{extra['ratio_to_best_toeplitz']:.5f} of the best found"
        )
    table.add_row("seconds", f"{found.seconds:.3f}")
    print_table(table)


def _print_robust(robust: RobustBlt, as_json: bool, out: Path | None) -> None:
    rows = [
        {
            "rounds": regret.participation.rounds,
            "min_sep": regret.participation.min_sep,
            "max_participations": regret.participation.max_participations,
            "loss": regret.loss,
            "specialist_loss": regret.specialist,
            "regret": regret.ratio,
        }
        for regret in robust.regrets
    ]
    blt: BLT = robust.mechanism
    facts: dict[str, Any] = {
        "theta": blt.theta,
        "omega": blt.omega,
        "objective": robust.objective,
        "worst_regret": robust.worst.ratio,
        "gradient_norm": robust.gradient_norm,
        "seconds": robust.seconds,
    }
    _save(blt, out, facts)
    if as_json:
        print_json({**facts, "regrets": rows})
        return
    columns = sorted({row["min_sep"] for row in rows})
    table = Table(
        title=f"{robust.objective} loss over that of the specialist (worst here "
        f"{robust.worst.ratio:.4f}, {robust.seconds:.1f} s)"
    )
    table.add_column("rounds \\ min-sep", justify="right")
    for min_sep in columns:
        table.add_column(f"{min_sep:,}", justify="right")
    for rounds in sorted({row["rounds"] for row in rows}):
        cells = {row["min_sep"]: row["regret"] for row in rows if row["rounds"] == rounds}
        shown = (f"{cells[c]:.4f}" if c in cells else "" for c in columns)
        table.add_row(f"{rounds:,}", *shown)
    print_table(table)
    click.echo(repr(blt))
