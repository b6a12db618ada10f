"""`dpftrl account`: the privacy guarantee of a mechanism with given noise."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from dpftrl._internal.checks import positive_number
from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.accounting import (
    Guarantee,
    Run,
    Spent,
    delta_for,
    guarantee_of,
    risk_of,
    save_guarantee,
)
from dpftrl.accounting.guarantee import BufferType, Hypothesis
from dpftrl.accounting.logs import LogLayout, Observed, WorstPattern, open_log
from dpftrl.cli.dataset import (
    DatasetRequest,
    account_for_dataset,
    dataset_options,
    is_dataset_plan,
    print_dataset_plan,
    refuse_next_to_plan,
    refuse_others,
)
from dpftrl.cli.enclosures import (
    enclose_guarantee,
    enclosure_table,
    require_interval_arithmetic,
)
from dpftrl.cli.files import Source, check_target, force_option, log_file, read_source
from dpftrl.cli.options import (
    Count,
    describe,
    json_option,
    log_layout_options,
    participation_or_log_options,
)
from dpftrl.cli.output import (
    print_json,
    print_table,
    progress_bar,
    risk_table,
    say,
    sensitivity_text,
    working,
)
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import FixedEpochs, Participation
from dpftrl.plan import mechanism as mechanism_by_name


class LogResult(NamedTuple):
    """The participation in a log, and its worst client.

    Attributes:
        observed: Summary of the participation in the log.
        worst: The client in the log with the largest sensitivity.
        lacks_first_round: Whether no row of the log is in its first round.
    """

    observed: Observed
    worst: WorstPattern
    lacks_first_round: bool


@click.command("account")
@click.argument("name", metavar="MECH|PLAN|GUARANTEE|RUN")
@participation_or_log_options
@click.option(
    "--noise-multiplier",
    type=float,
    help="Standard deviation of the independent noise Z, in units of the clip norm.  "
    "[required, unless PLAN is given]",
)
@click.option(
    "--delta", type=float, help="Delta at which epsilon is stated.  [default: the delta of PLAN]"
)
@click.option("--epsilon", type=float, help="Instead of --delta: state delta at this epsilon.")
@click.option(
    "--devices",
    type=Count(),
    help="Devices of one person that are protected together.  [default: 1, or those of GUARANTEE]",
)
@click.option("--first-round", type=Count(), help="Number that the log gives to the first round.")
@click.option(
    "--repeated-rows",
    is_flag=True,
    help="Accept repeated rows of one client and round in the log: only the row was written "
    "twice, and no update was summed twice.",
)
@log_layout_options
@dataset_options
@click.option(
    "--rigorous",
    is_flag=True,
    help="Also enclose the numbers in interval arithmetic, without sampling. Needs dpftrl[audit].",
)
@click.option("--out", type=click.Path(path_type=Path), help="Save the guarantee as FILE.json.")
@force_option()
@json_option
@click.pass_context
def account_command(
    context: click.Context,
    name: str,
    participation: Participation | None,
    rounds: int | None,
    log: Path | None,
    noise_multiplier: float | None,
    delta: float | None,
    epsilon: float | None,
    devices: int | None,
    repeated_rows: bool,
    first_round: int | None,
    layout: LogLayout,
    dataset_request: DatasetRequest | None,
    rigorous: bool,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compute epsilon, rho, mu and the risk of a mechanism with its noise.

    MECH is a name or a .json file. PLAN is a file that `dpftrl plan --out` saved: it contains the
    mechanism, the noise multiplier, the participation and delta. GUARANTEE is a file that
    `account --out` or a run saved, and RUN is the folder of a run, which states the guarantee of
    its released rounds, or of its plan before the first.

    With --log, the guarantee is computed for the smallest gap and the largest count in the log,
    over all planned rounds. A second row gives the tighter bound for the worst single client in
    the log. A third row gives the guarantee of the planned participation, if you state one. The
    exit code is 1 if the log breaks the planned participation. A mechanism that is built for a
    participation, such as `blt` or `banded`, is built for the planned one. The options from
    --client-column to --format are for logs that are not written as `dpftrl observe` expects.

    A second table says what epsilon means: how often the best possible attack detects that data
    was used (its true-positive rate, TPR), at three rates of false alarms (FPR), and how sure the
    attacker is after an alarm.

    With --dataset, --batch-size, --epochs and --sampling, the guarantee is that of training on
    secret random batches of a data set, for each example.

    With --rigorous, sensitivity, mu, epsilon and delta are computed again in interval arithmetic.
    Every interval contains the true value for certain, and the stated epsilon is not below the
    upper end of its interval. This does not cover amplification by sampling.
    """
    if rigorous:
        require_interval_arithmetic()
    if dataset_request is not None:
        refuse_others(
            {
                "--rounds": rounds,
                "--min-sep": participation,
                "--log": log,
                "--epsilon": epsilon,
                "--devices": devices,
                "--out": out,
                "--first-round": first_round,
                "--repeated-rows": repeated_rows,
            }
        )
        account_for_dataset(
            name, dataset_request, noise_multiplier, delta, as_json, rigorous=rigorous
        )
        return
    if is_dataset_plan(name):
        refuse_next_to_plan(
            {
                "--rounds": rounds,
                "--log": log,
                "--noise-multiplier": noise_multiplier,
                "--delta": delta,
                "--epsilon": epsilon,
                "--devices": devices,
                "--rigorous": rigorous or None,
                "--out": out,
            },
            name,
        )
        print_dataset_plan(name, as_json)
        return
    check_target(out, "guarantee", force=force)
    if log is None and (repeated_rows or first_round is not None):
        raise InvalidInput("--repeated-rows and --first-round need --log")
    if log is None and layout != LogLayout():
        raise InvalidInput(
            "the options from --client-column to --format describe a log: give --log"
        )
    request = _request(
        name, participation, rounds, noise_multiplier, delta, epsilon, log is not None
    )
    covered, log_result = request.planned, None
    if log is not None:
        log_result = _read_log(log, layout, request, first_round or 0, repeated_rows)
        observed = log_result.observed
        covered = observed.participation if covered is None else observed.within(covered)
    assert covered is not None  # `_request` requires a participation or a log
    with working(f"computing {name}"):
        run = Run.of(request.mechanism, covered, request.noise_multiplier, request.buffers)
        people = request.devices(devices)
        stated_delta = _delta(run, people, request.delta, epsilon)
        guarantee = guarantee_of([run], stated_delta, request.known).for_devices(people)
        planned = None
        if log_result is not None:
            guarantee = guarantee.resting_on(replace(run.hypothesis, basis="observed"))
            if request.planned is not None:
                planned_run = Run.of(
                    request.mechanism,
                    request.planned,
                    request.noise_multiplier,
                    request.buffers,
                )
                planned = guarantee_of([planned_run], stated_delta, request.known).for_devices(
                    people
                )
        enclosures = enclose_guarantee(guarantee) if rigorous else None
    if out is not None:
        save_guarantee(guarantee, out)
    if as_json:
        extra = {} if enclosures is None else {"rigorous": enclosures.as_json()}
        print_json({**_as_json(guarantee, log_result, planned), **extra})
    else:
        print_table(_table(guarantee, log_result, planned))
        if enclosures is not None:
            print_table(enclosure_table(enclosures))
        print_table(risk_table(risk_of(guarantee), guarantee.unit))
    if log_result is not None and request.planned is not None:
        observed = log_result.observed
        if _breaks(observed, request.planned):
            say(
                f"the log breaks the planned participation: min-sep {observed.min_sep:,} and "
                f"{observed.max_participations:,} participation(s) were observed"
                f"{_rounds_note(log_result, request.planned)}",
                err=True,
            )
            context.exit(1)


class Request(NamedTuple):
    """The run to account for, as the plan or the options describe it.

    Attributes:
        mechanism: The mechanism as it was run.
        noise_multiplier: Standard deviation of Z in units of the clip norm.
        delta: Delta at which epsilon is stated, if it was given.
        planned: The planned participation, if it is known.
        rounds: The planned number of rounds, if the options gave it.
        buffers: Floating-point type of the noise buffers.
        source: The plan, guarantee or run that all of this was taken from, if it was.
    """

    mechanism: Mechanism
    noise_multiplier: float
    delta: float | None
    planned: Participation | None
    rounds: int | None
    buffers: BufferType = "float64"
    source: Source | None = None

    @property
    def known(self) -> list[Hypothesis]:
        """What the source rests on, besides its participation."""
        if self.source is None:
            return []
        hypotheses = self.source.guarantee.hypotheses
        return [one for one in hypotheses if one.name != "participation"]

    def devices(self, given: int | None) -> int:
        """Devices of one person: the given number, or that of the source, or one."""
        if self.source is None:
            return 1 if given is None else given
        return self.source.devices(given)


def _request(
    name: str,
    stated: Participation | None,
    rounds: int | None,
    noise_multiplier: float | None,
    delta: float | None,
    epsilon: float | None,
    with_log: bool,
) -> Request:
    """Read the request from the plan or from the options, and refuse a mix of both."""
    if (source := read_source(name)) is not None:
        if stated is not None or rounds is not None or noise_multiplier is not None:
            raise InvalidInput(
                f"{name} is a {source.kind} and already states the rounds, the min-sep and the "
                "noise multiplier; leave these options out"
            )
        takes_delta = delta is None and epsilon is None
        also = ("delta",) if takes_delta else ()
        also += ("devices",) if source.guarantee.devices > 1 else ()
        source.announce("mechanism", "participation", "noise multiplier", *also)
        return Request(
            source.run.mechanism,
            source.run.noise_multiplier,
            source.guarantee.delta if takes_delta else delta,
            source.run.participation,
            rounds=None,
            buffers=source.run.buffers,
            source=source,
        )
    if noise_multiplier is None:
        raise InvalidInput("give --noise-multiplier, or a plan instead of the mechanism")
    positive_number("--noise-multiplier", noise_multiplier)
    if rounds is None and with_log:
        raise InvalidInput(
            "give the planned --rounds, or a plan instead of the mechanism: an update also affects "
            "the rounds after the last round in the log"
        )
    if rounds is None:
        raise InvalidInput("give --rounds and --min-sep, or a --log")
    if stated is None and not with_log:
        raise InvalidInput("give one of --min-sep and --rounds-between")
    return Request(mechanism_by_name(name, stated), noise_multiplier, delta, stated, rounds)


def _read_log(
    log: Path, layout: LogLayout, request: Request, first_round: int, repeated_rows: bool
) -> LogResult:
    """Summarize the log; refuse rows that count one client twice in a round."""
    with (
        progress_bar("reading the log") as on_progress,
        log_file(log) as path,
        open_log(
            path,
            rounds=request.rounds,
            first_round=first_round,
            layout=layout,
            on_progress=on_progress,
        ) as opened,
    ):
        observed = opened.summary()
        example = observed.duplicate_example
        if example is not None and not repeated_rows:
            advice = ""
            if observed.from_times and layout.first_time is None:
                advice = (
                    ", or at times less than a round length apart; if these are two rounds, give "
                    "--first-time, the start of the first round"
                )
            name = "standard input" if str(log) == "-" else log
            raise InvalidInput(
                f"{name}: client {example.client} is counted {example.rows} times in round "
                f"{example.round}{advice}; the guarantee does not hold for an update summed twice; "
                "if only the row was written twice, give --repeated-rows"
            )
        planned = request.planned
        rounds = observed.rounds if planned is None else observed.within(planned).rounds
        worst = opened.worst_pattern(request.mechanism, rounds)
        return LogResult(observed, worst, opened.lacks_first_round)


def _breaks(observed: Observed, planned: Participation) -> bool:
    """Whether the observed participation is outside the planned one."""
    count, gap = observed.max_participations, planned.min_sep
    if count > planned.max_participations or (count > 1 and observed.min_sep < gap):
        return True
    if observed.rounds > planned.rounds:
        return True
    return isinstance(planned, FixedEpochs) and not observed.comes_back_after(gap)


def _rounds_note(log_result: LogResult, planned: Participation) -> str:
    """What to add to a message if the log has more rounds than were planned."""
    observed = log_result.observed
    if observed.rounds <= planned.rounds:
        return ""
    last = observed.first_round + planned.rounds - 1
    note = f"; the log goes up to round {last + observed.rounds - planned.rounds:,}, but the last "
    note += f"planned round is {last:,}, counted from {observed.first_round:,}"
    is_one_past = observed.rounds == planned.rounds + 1 and observed.first_round == 0
    if is_one_past and log_result.lacks_first_round:
        note += ": the log has no round 0; if it counts rounds from 1, give --first-round 1"
    return note


def _delta(run: Run, devices: int, delta: float | None, epsilon: float | None) -> float:
    if delta is not None and epsilon is None:
        return delta
    if epsilon is None or delta is not None:
        raise InvalidInput("give one of --delta and --epsilon")
    smallest_delta = delta_for(
        run.mechanism, run.participation, run.noise_multiplier, epsilon, devices
    )
    if not 0 < smallest_delta < 1:
        raise InvalidInput(
            f"delta at epsilon {epsilon:g} is {smallest_delta:g}: give a --delta instead"
        )
    return smallest_delta


def _as_json(
    guarantee: Guarantee, log_result: LogResult | None, planned: Guarantee | None
) -> dict[str, Any]:
    run = guarantee.runs[0]
    content: dict[str, Any] = {
        "mechanism": run.mechanism.name,
        **describe(run.participation),
        "noise_multiplier": run.noise_multiplier,
        "sensitivity": run.sensitivity.value,
        "sensitivity_kind": run.sensitivity.kind,
        "rounding": run.rounding,
        **_numbers(guarantee),
        **risk_of(guarantee).as_json(),
        "sampler_delta": guarantee.sampler_delta,
        "unit": guarantee.unit,
        "adjacency": guarantee.adjacency,
        "hypotheses": [asdict(hypothesis) for hypothesis in guarantee.hypotheses],
    }
    if log_result is not None:
        content["basis"] = "observed"
        content["observed"] = log_result.observed.as_json()
        worst = _worst(guarantee, log_result.worst)
        content["worst_pattern"] = {
            "client": log_result.worst.client,
            "pattern": log_result.worst.pattern,
            "sensitivity": log_result.worst.value,
            "sensitivity_kind": log_result.worst.kind,
            "mu": worst.mu,
            "rho": worst.rho,
            "epsilon": worst.epsilon(guarantee.delta) if worst.mu > 0 else 0.0,
        }
    if planned is not None:
        content["stated"] = {
            **describe(planned.runs[0].participation),
            "sensitivity": planned.runs[0].sensitivity.value,
            **_numbers(planned),
        }
    return content


def _numbers(guarantee: Guarantee) -> dict[str, float]:
    return {
        "mu": guarantee.mu,
        "rho": guarantee.rho,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
    }


def _worst(guarantee: Guarantee, worst: WorstPattern) -> Spent:
    """The privacy spent by the worst client in the log."""
    run = guarantee.runs[0]
    # The two norms are computed in different ways: equal ones may differ in the last bit.
    norm = min(worst.value, run.sensitivity.value)
    return Spent(run.participation.rounds, run.mu_of(norm) * guarantee.devices)


def _table(guarantee: Guarantee, log_result: LogResult | None, planned: Guarantee | None) -> Table:
    run = guarantee.runs[0]
    noise = f"noise multiplier {run.noise_multiplier:g}"
    title = f"{run.mechanism.name}, {noise}, {run.participation}"
    table = Table(
        title=title,
        min_width=len(title),
        caption=f"for each {guarantee.unit}, {guarantee.adjacency} adjacency, "
        f"delta {in_full(guarantee.delta)}",
    )
    table.add_column("")
    for heading in ("sensitivity", "mu", "rho", "epsilon"):
        table.add_column(heading, justify="right")

    def add_row(label: str, sensitivity: str, mu: float, epsilon: float) -> None:
        numbers = (mu, mu * (mu / 2), epsilon)
        table.add_row(label, sensitivity, *(rounded_up(number) for number in numbers))

    label = "guarantee" if log_result is None else "observed gap and count"
    add_row(label, sensitivity_text(run.sensitivity), guarantee.mu, guarantee.epsilon)
    if log_result is not None:
        worst = _worst(guarantee, log_result.worst)
        epsilon = worst.epsilon(guarantee.delta) if worst.mu > 0 else 0.0
        sign = "≤ " if log_result.worst.value > 0 else ""
        norm = sign + rounded_up(log_result.worst.value, 5)
        add_row("worst client in the log", norm, worst.mu, epsilon)
    if planned is not None:
        planned_run = planned.runs[0]
        label = f"planned: min-sep {planned_run.participation.min_sep:,}"
        add_row(label, sensitivity_text(planned_run.sensitivity), planned.mu, planned.epsilon)
    return table
