"""The commands for a data set: `account`, `calibrate`, `compare`, `optimize` and `plan --dataset`.

A trainer with a data set chooses the batches. The options `--dataset`, `--batch-size`, `--epochs`
and `--sampling` say how, in place of the rounds and the min-sep of a fleet.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import click
from rich.markup import escape
from rich.table import Table

from dpftrl._internal.formatting import in_full, number, rounded_up
from dpftrl._internal.storage import read_json
from dpftrl.accounting import risk_of
from dpftrl.accounting.amplification import SampledGuarantee
from dpftrl.cli.enclosures import enclose_guarantee, enclosure_table
from dpftrl.cli.files import Header
from dpftrl.cli.options import Count
from dpftrl.cli.output import (
    print_json,
    print_table,
    progress_bar,
    rich_table,
    risk_table,
    say,
)
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.mechanisms import save_mechanism
from dpftrl.plan import (
    SAMPLINGS,
    Dataset,
    DatasetAnswer,
    DatasetOption,
    DatasetPlan,
    DatasetPlanRequest,
    Missing,
    SamplingName,
    account_dataset,
    best_first,
    calibrate_dataset,
    dataset_fields,
    dataset_row,
    load_dataset_plan,
    mechanism_for_dataset,
    save_dataset_plan,
    solve_dataset,
)
from dpftrl.plan.request import Effort
from dpftrl.plan.tables import dataset_tables, epsilon_text
from dpftrl.verify.rigorous import SAMPLED

# The field `format` of the file of a plan for a data set.
PLAN_FORMAT = "dpftrl dataset plan"

Command = TypeVar("Command", bound=Callable[..., Any])


@final
@dataclass(frozen=True)
class DatasetRequest:
    """What the options say about a data set.

    Attributes:
        dataset: The data set.
        sampling: The sampling; None if the option was left out.
    """

    dataset: Dataset
    sampling: SamplingName | None

    def plan_request(
        self, epsilon: float, delta: float, effort: Effort = "normal"
    ) -> DatasetPlanRequest:
        """The same as a request for a plan."""
        return DatasetPlanRequest(
            size=self.dataset.size,
            batch_size=self.dataset.batch_size,
            epochs=self.dataset.epochs,
            epsilon=epsilon,
            delta=delta,
            max_batch_size=self.dataset.max_batch_size,
            sampling=self.sampling,
            effort=effort,
        )

    @property
    def sampling_or_none(self) -> SamplingName:
        """The sampling; `none`, which promises the least, if the option was left out."""
        return self.sampling or "none"


def dataset_options(command: Command) -> Command:
    """Add --dataset and related options; the command gets a `dataset_request`, or None."""

    @functools.wraps(command)
    def with_request(
        *args: Any,
        dataset: int | None,
        batch_size: int | None,
        epochs: int | None,
        sampling: SamplingName | None,
        max_batch_size: int | None,
        **kwargs: Any,
    ) -> Any:
        request = _request(dataset, batch_size, epochs, sampling, max_batch_size)
        return command(*args, dataset_request=request, **kwargs)

    flags = (
        click.option("--dataset", type=Count(), help="Examples of a data set, instead of a fleet."),
        click.option("--batch-size", type=Count(), help="For --dataset: examples per batch."),
        click.option("--epochs", type=Count(), help="For --dataset: epochs of training."),
        click.option(
            "--sampling",
            type=click.Choice(SAMPLINGS),
            help="For --dataset: how batches are drawn, with a secret key. With none, they are the "
            "same in every epoch.",
        ),
        click.option(
            "--max-batch-size",
            type=Count(),
            help="For --dataset: largest physical batch. Larger batches are cut, which costs a "
            "part of delta.",
        ),
    )
    decorated: Any = with_request
    for flag in reversed(flags):
        decorated = flag(decorated)
    return decorated


def _request(
    size: int | None,
    batch_size: int | None,
    epochs: int | None,
    sampling: SamplingName | None,
    max_batch_size: int | None,
) -> DatasetRequest | None:
    others = {
        "--batch-size": batch_size,
        "--epochs": epochs,
        "--sampling": sampling,
        "--max-batch-size": max_batch_size,
    }
    if size is None:
        for name, value in others.items():
            if value is not None:
                raise InvalidInput(f"{name} goes with --dataset, the number of examples")
        return None
    if batch_size is None or epochs is None:
        raise InvalidInput("--dataset needs --batch-size and --epochs")
    return DatasetRequest(Dataset(size, batch_size, epochs, max_batch_size), sampling)


def refuse_others(given: Mapping[str, object]) -> None:
    """Refuse options that are for a fleet, next to --dataset.

    Args:
        given: Options and their values; those that are None, False or empty were left out.
    """
    for name, value in given.items():
        if value is not None and value is not False and value != ():
            raise InvalidInput(f"{name} does not go with --dataset")


def is_dataset_plan(name: str) -> bool:
    """Whether an argument is the file of a plan for a data set."""
    if not name.endswith(".json") or Path(name).is_dir():
        return False
    return read_json(Path(name), Header, "plan, guarantee or mechanism").format == PLAN_FORMAT


def refuse_next_to_plan(given: Mapping[str, object], plan: str) -> None:
    """Refuse options that a plan for a data set states already, or that do not apply to it."""
    for option, value in given.items():
        if value is not None:
            raise InvalidInput(f"{plan} is a plan for a data set; leave out {option}")


def refuse_without_dataset(given: Mapping[str, object]) -> None:
    """Refuse options that are for a data set, without --dataset."""
    for name, value in given.items():
        if value is not None:
            raise InvalidInput(f"{name} goes with --dataset, the number of examples")


def account_for_dataset(
    name: str,
    request: DatasetRequest,
    noise_multiplier: float | None,
    delta: float | None,
    as_json: bool,
    *,
    rigorous: bool = False,
) -> None:
    """`dpftrl account --dataset`."""
    if noise_multiplier is None or delta is None:
        raise InvalidInput("account --dataset needs --noise-multiplier and --delta")
    sampling = request.sampling_or_none
    with progress_bar(f"computing {name}"):
        chosen = mechanism_for_dataset(name, request.dataset, sampling)
        guarantee = account_dataset(chosen, request.dataset, sampling, noise_multiplier, delta)
    option = DatasetOption(sampling, guarantee, chosen.name)
    if not rigorous:
        _print_one(option, request, as_json)
    elif isinstance(guarantee, SampledGuarantee):
        _print_one(option, request, as_json, {"rigorous": None, "rigorous_note": SAMPLED})
        say(SAMPLED, err=True)
    else:
        numbers = enclose_guarantee(guarantee)
        _print_one(option, request, as_json, {"rigorous": numbers.as_json()})
        if not as_json:
            print_table(enclosure_table(numbers))


def calibrate_for_dataset(
    name: str,
    request: DatasetRequest,
    epsilon: float | None,
    delta: float | None,
    as_json: bool,
) -> None:
    """`dpftrl calibrate --dataset`."""
    if epsilon is None or delta is None:
        raise InvalidInput("calibrate --dataset needs --epsilon and --delta")
    _print_one(_calibrated(name, request, epsilon, delta), request, as_json)


def _calibrated(name: str, request: DatasetRequest, epsilon: float, delta: float) -> DatasetOption:
    sampling = request.sampling_or_none
    with progress_bar(f"calibrating {name}") as on_progress:
        chosen = mechanism_for_dataset(name, request.dataset, sampling, epsilon, delta, on_progress)
        guarantee = calibrate_dataset(chosen, request.dataset, sampling, epsilon, delta)
    return DatasetOption(sampling, guarantee, chosen.name)


def compare_for_dataset(
    names: Sequence[str],
    request: DatasetRequest,
    epsilon: float | None,
    delta: float | None,
    as_json: bool,
) -> None:
    """`dpftrl compare --dataset`."""
    if epsilon is None or delta is None:
        raise InvalidInput("compare --dataset needs --epsilon and --delta")
    rows = list[DatasetOption | Missing]()
    for name in dict.fromkeys(names):
        try:
            rows.append(_calibrated(name, request, epsilon, delta))
        except DpftrlError as error:
            if len(names) == 1:
                raise
            rows.append(Missing(name, str(error)))
    _print_all(best_first(request.plan_request(epsilon, delta), rows), as_json)


def plan_for_dataset(
    request: DatasetRequest,
    epsilon: float | None,
    delta: float,
    effort: Effort,
    out: Path | None,
    choose: str | None,
    as_json: bool,
) -> None:
    """`dpftrl plan --dataset`."""
    if epsilon is None:
        raise InvalidInput("plan --dataset needs --epsilon")
    with progress_bar("planning") as on_progress:
        answer = solve_dataset(request.plan_request(epsilon, delta, effort), on_progress)
    if out is not None:
        saved = _row_to_save(answer.computed, choose)
        plan = DatasetPlan(saved.sampling, saved.guarantee, request.dataset)
        save_dataset_plan(plan, out)
        say(f"saved: {out}: {saved.label} with {saved.sampling} sampling", err=True)
    _print_all(answer, as_json)


def _row_to_save(rows: Sequence[DatasetOption], choose: str | None) -> DatasetOption:
    """The row with the least noise, of those with the chosen name; the least noise comes first."""
    for row in rows:
        if choose in (None, row.label):
            return row
    raise InvalidInput(f"there is no row {choose!r} to save; leave out --choose")


def print_dataset_plan(name: str, as_json: bool) -> None:
    """`dpftrl account` of a plan for a data set, whose guarantee is computed again."""
    with progress_bar(f"checking {name}"):
        plan = load_dataset_plan(name)
    request = DatasetRequest(plan.dataset, plan.sampling)
    row = DatasetOption(plan.sampling, plan.guarantee, plan.mechanism.name)
    _print_one(row, request, as_json)


def optimize_for_dataset(
    name: str,
    request: DatasetRequest,
    epsilon: float | None,
    delta: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """`dpftrl optimize blt --dataset` and `dpftrl optimize band-toeplitz --dataset`."""
    if epsilon is None or delta is None:
        raise InvalidInput("optimize --dataset needs --epsilon and --delta")
    needed: SamplingName = "balls-in-bins" if name == "blt" else "cyclic-poisson"
    if request.sampling is None:
        request = DatasetRequest(request.dataset, needed)
    if request.sampling != needed and (name != "blt" or request.sampling != "none"):
        raise InvalidInput(f"{name} is optimized for --sampling {needed}, got {request.sampling}")
    row = _calibrated(name, request, epsilon, delta)
    if out is not None:
        about = {"optimised_for": str(_sampling_text(row, request.dataset)), **dataset_row(row)}
        save_mechanism(row.mechanism, out, about)
        say(f"saved: {out}", err=True)
    _print_one(row, request, as_json)


def _sampling_text(row: DatasetOption, dataset: Dataset) -> str:
    one = row.guarantee
    return str(one.sampling) if isinstance(one, SampledGuarantee) else str(dataset.in_order)


def _print_one(
    row: DatasetOption,
    request: DatasetRequest,
    as_json: bool,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print one guarantee; `extra` are further fields of its JSON."""
    guarantee = row.guarantee
    if as_json:
        hypotheses = [asdict(hypothesis) for hypothesis in guarantee.hypotheses]
        fields = {**dataset_fields(request.dataset), **dataset_row(row)}
        print_json({**fields, "hypotheses": hypotheses, **(extra or {})})
        return
    table = Table(title=f"{row.label}, {_sampling_text(row, request.dataset)}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("noise multiplier", rounded_up(row.noise_multiplier))
    table.add_row("epsilon", epsilon_text(row))
    table.add_row("delta", in_full(guarantee.delta))
    table.add_row("adjacency", f"{guarantee.adjacency}, for each example")
    table.add_row("confidence", _confidence(row))
    table.add_row("sensitivity", f"{number(row.sensitivity)} ({row.sensitivity_kind})")
    effective = row.noise_multiplier / row.sensitivity
    table.add_row("effective noise multiplier", number(effective))
    table.add_row("rms noise", number(row.rms_noise))
    table.add_row("Python value", escape(repr(row.mechanism)))
    print_table(table)
    print_table(risk_table(risk_of(guarantee), "example"))


def _confidence(row: DatasetOption) -> str:
    if not row.failure:
        return "1: no part of it is estimated"
    return f"certified by samples; wrong with a probability of at most {row.failure:g}"


def _print_all(answer: DatasetAnswer, as_json: bool) -> None:
    for warning in answer.request.warnings:
        say(f"warning: {warning}", err=True)
    if as_json:
        print_json(answer.as_json())
        return
    for table in dataset_tables(answer):
        print_table(rich_table(table))
