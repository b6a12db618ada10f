"""`dpftrl optimize`: the best mechanism of a family for a participation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from dpftrl.cli.dataset import (
    DatasetRequest,
    dataset_options,
    optimize_for_dataset,
    refuse_others,
    refuse_without_dataset,
)
from dpftrl.cli.files import FORCE, check_target, force_option
from dpftrl.cli.loss import loss_as_json
from dpftrl.cli.options import Count, json_option, max_participations_option
from dpftrl.cli.output import (
    number,
    print_json,
    print_table,
    progress_bar,
    say,
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
    """A number or a range of numbers: 2000 or 1000..4000."""

    name = "number[..number]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Convert the text to the two ends of the range, which are equal for a number."""
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]
        low, dots, high = str(value).partition("..")
        first = Count().convert(low, param, ctx)
        return first, Count().convert(high, param, ctx) if dots else first


def target_options(command: Command, participation_required: bool = True) -> Command:
    """Add the options that all families share: participation, workload and output."""
    options = [
        click.option(
            "--rounds", type=Range(), required=participation_required, help="Rounds of training."
        ),
        click.option(
            "--min-sep",
            type=Range(),
            required=participation_required,
            help="Smallest difference between two rounds of one client.",
        ),
        max_participations_option,
        click.option(
            "--momentum", type=float, default=0.0, help="Momentum of the server optimizer."
        ),
        click.option(
            "--weight-decay", type=float, default=0.0, help="Weight decay of the server optimizer."
        ),
        click.option(
            "--schedule",
            help="Learning rates per round: numbers separated by commas, or "
            "cooldown:last-quarter:0.05.",
        ),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            callback=_check_out,
            help="Save the mechanism as FILE.json.",
        ),
        # Eager options are read first, so that `_check_out` knows the answer.
        force_option(is_eager=True, expose_value=False),
        json_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def target_or_dataset_options(command: Command) -> Command:
    """Add the same options, and those of a data set, which may replace the participation."""
    target = click.option("--epsilon", type=float, help="For --dataset: epsilon to optimize for.")(
        click.option("--delta", type=float, help="For --dataset: delta of that epsilon.")(command)
    )
    return target_options(dataset_options(target), participation_required=False)


def _optimized_for_dataset(
    name: str, target: dict[str, Any], as_json: bool, out: Path | None
) -> bool:
    """Optimize for a data set if the options name one, and return whether they did.

    Otherwise a participation is required. What is about the data set is removed from `target`.
    """
    request: DatasetRequest | None = target.pop("dataset_request")
    epsilon, delta = target.pop("epsilon"), target.pop("delta")
    if request is None:
        refuse_without_dataset({"--epsilon": epsilon, "--delta": delta})
        for option in ("rounds", "min_sep"):
            if target[option] is None:
                flag = "--" + option.replace("_", "-")
                raise click.UsageError(f"Missing option '{flag}', or --dataset for a data set.")
        return False
    refuse_others({"--rounds": target["rounds"], "--min-sep": target["min_sep"]})
    optimize_for_dataset(name, request, epsilon, delta, out, as_json)
    return True


def _check_out(context: click.Context, _: click.Parameter, out: Path | None) -> Path | None:
    """Refuse an `--out` that cannot be written before a long optimization, not after."""
    check_target(out, "mechanism", force=bool(context.meta.get(FORCE)))
    return out


def objective_option(default: Objective) -> Callable[[Command], Command]:
    """Add the option `--objective`: the loss to minimize."""
    return click.option(
        "--objective",
        default=default,
        show_default=True,
        help="Loss to minimize: max for MaxLoss, rms for RmsLoss.",
    )


bands_option = click.option("--bands", type=Count(), required=True, help="Number of bands.")


@click.group()
def optimize() -> None:
    """Optimize a mechanism of one family for a participation.

    --out saves the result as a .json file that every other command takes as MECH.
    """


@optimize.command()
@click.option("--buffers", default="auto", show_default=True, help="Number of buffers, or auto.")
@objective_option("max")
@target_or_dataset_options
def blt(buffers: str, objective: str, as_json: bool, out: Path | None, **target: Any) -> None:
    """Optimize a BLT, in milliseconds, or one BLT for a whole range of settings.

    With a range such as --rounds 1000..4000 or --min-sep 200..800, it finds the BLT with the
    smallest worst regret. Regret is the loss divided by the loss of a BLT that is optimized for
    exactly that number of rounds and min-sep. It prints the regret over the range.

    With --dataset, --batch-size, --epochs, --epsilon and --delta, it finds the BLT that needs the
    least noise under balls-in-bins sampling, in about a minute.
    """
    if _optimized_for_dataset("blt", target, as_json, out):
        return
    size = "auto" if buffers == "auto" else Count().convert(buffers, None, None)
    chosen = check_objective(objective)
    if _is_range(target):
        if _workload(target) != PREFIX_SUM:
            raise InvalidInput(
                "ranges work for the prefix sum only: leave out --momentum, --weight-decay and "
                "--schedule"
            )
        with working("optimizing over the ranges"):
            robust = optimize_robust_blt(
                target["rounds"], target["min_sep"], target["max_participations"], size, chosen
            )
        _print_robust(robust, as_json, out)
        return
    with working("optimizing"):
        optimized = optimize_blt(_participation(target), size, chosen, _workload(target))
        ratio = best_toeplitz_ratio(optimized, _workload(target))
    extra: dict[str, Any] = {"theta": optimized.mechanism.theta, "omega": optimized.mechanism.omega}
    if ratio is not None:
        extra["ratio_to_best_toeplitz"] = ratio
    _print(optimized, extra, as_json, out)


@optimize.command()
@click.option("--buffers", type=Count(), default=4, show_default=True, help="Number of buffers.")
@objective_option("max")
@target_options
def gblt(buffers: int, objective: str, as_json: bool, out: Path | None, **target: Any) -> None:
    """Optimize a generalized BLT: output scales of any sign, complex decays. Takes seconds."""
    if _workload(target) != PREFIX_SUM:
        raise InvalidInput(
            "gblt works for the prefix sum only: leave out --momentum, --weight-decay and "
            "--schedule"
        )
    with working("optimizing"):
        optimized = optimize_general_blt(
            _participation(target), buffers, check_objective(objective)
        )
    _print(optimized, optimized.mechanism.parameters(), as_json, out)


@optimize.command("band-toeplitz")
@click.option("--bands", type=Count(), help="Number of bands.  [required, except with --dataset]")
@objective_option("rms")
@target_or_dataset_options
def band_toeplitz(
    bands: int | None, objective: str, as_json: bool, out: Path | None, **target: Any
) -> None:
    """Optimize BandToep: a banded Toeplitz matrix.

    With --dataset, --batch-size, --epochs, --epsilon and --delta, it finds the number of bands and
    the coefficients that need the least noise under cyclic Poisson sampling.
    """
    if _optimized_for_dataset("band-toeplitz", target, as_json, out):
        return
    if bands is None:
        raise click.UsageError("Missing option '--bands'.")
    _optimize_bands(optimize_band_toeplitz, bands, objective, as_json, out, target)


@optimize.command()
@bands_option
@click.option("--seconds", type=float, help="Time limit in seconds.  [default: until it converges]")
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
    """Optimize BandMF: a general banded matrix, for RmsLoss.

    2,052 rounds and 342 bands take up to a minute. An interrupted optimization resumes where it
    stopped, and a finished one is cached.
    """
    if check_objective(objective) != "rms":
        raise InvalidInput("BandMF takes --objective rms only; band-toeplitz and blt also take max")
    with progress_bar("optimizing") as on_progress:
        optimized = optimize_bandmf(
            _participation(target), bands, _workload(target), on_progress, seconds=seconds
        )
    _print(optimized, {}, as_json, out)


@optimize.command("band-inverse")
@bands_option
@objective_option("rms")
@target_options
def band_inverse(
    bands: int, objective: str, as_json: bool, out: Path | None, **target: Any
) -> None:
    """Optimize BandInvMF: a Toeplitz matrix whose inverse is banded."""
    _optimize_bands(optimize_band_inverse, bands, objective, as_json, out, target)


def _optimize_bands(
    optimizer: Callable[..., Optimized[Mechanism]],
    bands: int,
    objective: str,
    as_json: bool,
    out: Path | None,
    target: dict[str, Any],
) -> None:
    """Optimize a family that is described by its bands, with a progress bar, and print it."""
    with progress_bar("optimizing") as on_progress:
        optimized = optimizer(
            _participation(target),
            bands,
            check_objective(objective),
            _workload(target),
            on_progress,
        )
    _print(optimized, {}, as_json, out)


def _is_range(target: dict[str, Any]) -> bool:
    return any(low != high for low, high in (target["rounds"], target["min_sep"]))


def _participation(target: dict[str, Any]) -> MinSep:
    if _is_range(target):
        raise InvalidInput("only `dpftrl optimize blt` takes ranges of --rounds and --min-sep")
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
        say(f"saved: {out}", err=True)


def _print(
    optimized: Optimized[Mechanism], extra: dict[str, Any], as_json: bool, out: Path | None
) -> None:
    facts = {
        **loss_as_json(optimized.mechanism, optimized.participation, optimized.error_report),
        "objective": optimized.objective,
        "gradient_norm": optimized.gradient_norm,
        "seconds": optimized.seconds,
        **extra,
    }
    _save(optimized.mechanism, out, {"optimised_for": str(optimized.participation), **facts})
    if as_json:
        print_json(facts)
        return
    table = Table(title=f"{optimized.mechanism.name}, {optimized.participation}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("Python value", repr(optimized.mechanism))
    table.add_row("max loss", number(optimized.error_report.max_loss))
    table.add_row("rms loss", number(optimized.error_report.rms_loss))
    kind = optimized.error_report.sensitivity.kind
    table.add_row("sensitivity", f"{sensitivity_text(optimized.error_report.sensitivity)} ({kind})")
    table.add_row("memory", f"{facts['memory']:,} model-sized vectors")
    gradient = f"{optimized.gradient_norm:.1e} (of the logarithm of the {optimized.objective} loss)"
    table.add_row("gradient norm", gradient)
    if "ratio_to_best_toeplitz" in extra:
        table.add_row("ratio to the best Toeplitz", f"{extra['ratio_to_best_toeplitz']:.5f}")
    table.add_row("seconds", f"{optimized.seconds:.3f}")
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
        title=f"regret: {robust.objective} loss / loss of the BLT optimized for that cell "
        f"(worst {robust.worst.ratio:.4f}, {robust.seconds:.1f} s)"
    )
    table.add_column("rounds \\ min-sep", justify="right")
    for min_sep in columns:
        table.add_column(f"{min_sep:,}", justify="right")
    for rounds in sorted({row["rounds"] for row in rows}):
        cells = {row["min_sep"]: row["regret"] for row in rows if row["rounds"] == rounds}
        shown = (f"{cells[c]:.4f}" if c in cells else "" for c in columns)
        table.add_row(f"{rounds:,}", *shown)
    print_table(table)
    say(repr(blt))
