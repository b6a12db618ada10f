"""`dpftrl audit`: attack a mechanism or a finished run, and compare that with the claim."""

from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from dpftrl._internal.checks import fraction
from dpftrl._internal.formatting import rounded_up
from dpftrl.accounting.amplification import SampledGuarantee
from dpftrl.auditing.lower_bounds import DEFAULT_FAILURE
from dpftrl.auditing.mechanism import MechanismAudit, audit_mechanism
from dpftrl.auditing.run import DEFAULT_CONFIDENCE, RunAudit, audit_run
from dpftrl.auditing.sampled import SampledAudit, audit_sampled
from dpftrl.cli.dataset import (
    DatasetRequest,
    dataset_options,
    is_dataset_plan,
    refuse_next_to_plan,
    refuse_others,
)
from dpftrl.cli.files import check_target, force_option, read_source
from dpftrl.cli.options import Count, json_option, participation_or_source_options
from dpftrl.cli.output import print_json, print_table, progress_bar, say
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation, Sampling
from dpftrl.plan import load_dataset_plan, mechanism_for_dataset
from dpftrl.plan import mechanism as mechanism_by_name
from dpftrl.plots import plot_canary_scores

# Delta of mechanism audits: the default of `--delta`.
DELTA = 0.01

confidence_option = click.option(
    "--confidence",
    type=float,
    default=1 - DEFAULT_FAILURE,
    show_default=True,
    help="Probability that the lower bounds hold.",
)


@click.group("audit")
def audit_command() -> None:
    """Attack a mechanism or a finished run, and compare what that shows with the claim.

    An audit computes a lower bound on epsilon. A lower bound above the claimed epsilon proves that
    the claim is false: the exit code is then 1. A lower bound below it proves nothing about other
    attacks.
    """


@audit_command.command("mechanism")
@click.argument("name", metavar="MECH|PLAN|GUARANTEE|RUN")
@participation_or_source_options
@click.option(
    "--noise-multiplier",
    type=float,
    help="Standard deviation of the independent noise Z, in units of the clip norm.  "
    "[required, unless PLAN is given]",
)
@click.option(
    "--delta",
    type=float,
    default=DELTA,
    show_default=True,
    help="Delta at which epsilon is claimed and bounded. Trials say little about a very small one.",
)
@click.option(
    "--trials",
    type=Count(),
    help="Trials with the target, and as many without.  [default: enough for about 94% of the "
    "claim, if that takes seconds]",
)
@confidence_option
@dataset_options
@json_option
@click.pass_context
def audit_mechanism_command(
    context: click.Context,
    name: str,
    participation: Participation | None,
    noise_multiplier: float | None,
    delta: float,
    trials: int | None,
    confidence: float,
    dataset_request: DatasetRequest | None,
    as_json: bool,
) -> None:
    """Attack the noise of a mechanism with everything known but the noise.

    The best possible attack, the likelihood ratio, tells runs with the worst participation of one
    client from runs without it. It sees what the noise stream of training releases, with fresh
    keys. Its rates of right and wrong alarms bound epsilon from below (Clopper and Pearson).

    With --dataset, --batch-size, --epochs and --sampling, batches come from the sampler of training
    too, and the attack does not know them. PLAN, GUARANTEE and RUN stand for the mechanism, the
    participation and the noise multiplier that they state.

    The exit code is 1 if a lower bound exceeds its claim.
    """
    failure = 1 - fraction("--confidence", confidence)
    chosen, how, scale = _subject(name, participation, noise_multiplier, dataset_request)
    with progress_bar(f"auditing {chosen.name}") as on_progress:
        if isinstance(how, Sampling):
            audit = audit_sampled(
                chosen, how, scale, delta, trials=trials, failure=failure, on_progress=on_progress
            )
        else:
            audit = audit_mechanism(
                chosen, how, scale, delta, trials=trials, failure=failure, on_progress=on_progress
            )
    if as_json:
        print_json(audit.as_json())
    else:
        _print_mechanism_audit(audit, how)
    if audit.exceeds_claim:
        context.exit(1)


@audit_command.command("run")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--confidence",
    type=float,
    default=DEFAULT_CONFIDENCE,
    show_default=True,
    help="Probability that the lower bounds hold.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw the scores to FILE.png, .svg or .pdf."
)
@force_option()
@json_option
@click.pass_context
def audit_run_command(
    context: click.Context,
    run: Path,
    confidence: float,
    plot: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Guess which canaries were in a run, and compare that with its claim.

    RUN is the folder of a run that was trained with canaries: `dpftrl train --canaries 1000`, or
    `canaries=1000` in `make_private`. Each canary was included or not by a secret coin. The attack
    knows everybody else's data, and guesses all coins from the noisy means that the run released.

    Canary sentences (`dpftrl train --canaries 1000 --canary-kind sentences`) are guessed from the
    released model alone: the attack compares their losses with those under the start model, and
    guesses half of the coins, where the losses fell most and least.

    The general test assumes nothing but the claimed trade-off curve (f-DP in one run). The test for
    independent noise uses that the noise of different coordinates is claimed to be independent: it
    is sharper, has a confidence of its own of 0.99999, and does not apply to sentences.

    The exit code is 1 if a lower bound exceeds the claim.
    """
    check_target(plot, "picture", force=force)
    with progress_bar(f"auditing {run}"):
        audit = audit_run(run, confidence=confidence)
    if plot is not None:
        plot_canary_scores(audit.scores, audit.included, plot, audit.kind)
    if as_json:
        print_json(audit.as_json())
    else:
        _print_run_audit(run, audit)
        if plot is not None:
            say(f"plot: {plot}", err=True)
    if audit.exceeds_claim:
        context.exit(1)


def _print_run_audit(run: Path, audit: RunAudit) -> None:
    claim, guesses, found = audit.claim, audit.guesses, audit.as_json()
    what = "canaries" if audit.kind == "gradients" else "canary sentences"
    table = Table(title=escape(f"{run}: {guesses.canaries:,} {what}, {audit.rounds:,} rounds"))
    for heading in ("", "epsilon", "mu"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    claimed = f"{rounded_up(claim.epsilon)} at delta {claim.delta:g}"
    table.add_row("claimed", claimed, rounded_up(claim.mu))
    for name, key in (("general", "general"), ("independent noise", "independent")):
        if f"mu_{key}" not in found:
            continue
        numbers = (found[f"epsilon_{key}"], found[f"mu_{key}"])
        table.add_row(f"lower bound, {name}", *(f"{one:.4g}" for one in numbers))
    print_table(table)
    say(
        f"{guesses.correct:,} of {guesses.guesses:,} coins guessed right "
        f"({int(audit.included.sum()):,} canaries were included); confidence "
        f"{audit.confidence:g}; p-value of the claim {audit.p_value:.2g}"
    )
    say(_verdict(audit.exceeds_claim))


def _verdict(exceeds: bool) -> str:
    if exceeds:
        return "EXCEEDED: the claim is false, or the trials were not what they should be"
    return "consistent: the attack did not exceed the claim"


def _subject(
    name: str,
    participation: Participation | None,
    noise_multiplier: float | None,
    request: DatasetRequest | None,
) -> tuple[Mechanism, Participation | Sampling, float]:
    """The mechanism, how clients or examples take part, and the noise multiplier."""
    if request is not None:
        refuse_others({"--rounds": participation})
        if noise_multiplier is None:
            raise InvalidInput("audit mechanism --dataset needs --noise-multiplier")
        sampling = request.sampling_or_none
        chosen = mechanism_for_dataset(name, request.dataset, sampling)
        if sampling == "none":
            return chosen, request.dataset.in_order, noise_multiplier
        return chosen, request.dataset.sampling_for(chosen, sampling), noise_multiplier
    given = {"--rounds": participation, "--noise-multiplier": noise_multiplier}
    if is_dataset_plan(name):
        refuse_next_to_plan(given, name)
        plan = load_dataset_plan(name)
        one = plan.guarantee
        how = one.sampling if isinstance(one, SampledGuarantee) else plan.dataset.in_order
        return plan.mechanism, how, plan.noise_multiplier
    if (source := read_source(name, planned=True)) is not None:
        for option, value in given.items():
            if value is not None:
                raise InvalidInput(f"{name} is a {source.kind} and states {option}; leave it out")
        source.announce("mechanism", "participation", "noise multiplier")
        run = source.run
        return run.mechanism, run.participation, run.noise_multiplier
    if noise_multiplier is None or participation is None:
        raise InvalidInput(
            "give --rounds, --min-sep and --noise-multiplier, or a plan in place of the mechanism"
        )
    return mechanism_by_name(name, participation), participation, noise_multiplier


def _print_mechanism_audit(
    audit: MechanismAudit | SampledAudit, how: Participation | Sampling
) -> None:
    counts, claim = audit.counts, audit.claim
    run = audit.claim if isinstance(audit, SampledAudit) else audit.claim.runs[0]
    table = Table(title=f"{run.mechanism.name}, {how}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("claimed epsilon", f"{rounded_up(claim.epsilon)} at delta {claim.delta:g}")
    table.add_row("lower bound", f"{audit.lower_bound:.4g}, {audit.ratio:.1%} of the claim")
    if isinstance(audit, MechanismAudit):
        table.add_row("claimed mu", rounded_up(audit.claim.mu))
        share = audit.mu_lower_bound / audit.claim.mu
        table.add_row("lower bound on mu", f"{audit.mu_lower_bound:.4g}, {share:.1%} of the claim")
    table.add_row("confidence", f"{audit.confidence:g}")
    table.add_row("trials", f"{counts.trials:,} with the target, {counts.trials:,} without")
    table.add_row(
        'alarms "took part"',
        f"{counts.present_with:,} right, {counts.present_without:,} false",
    )
    table.add_row(
        'alarms "took no part"',
        f"{counts.absent_without:,} right, {counts.absent_with:,} false",
    )
    if isinstance(audit, MechanismAudit):
        table.add_row("target's rounds", _rounds_text(audit))
        if not audit.is_attained:
            table.add_row(
                "not attained",
                f"this target has mu {audit.attained_mu:.4g} at most: the claim is an upper bound",
            )
    print_table(table)
    say(_verdict(audit.exceeds_claim))


def _rounds_text(audit: MechanismAudit) -> str:
    shown = ", ".join(map(str, audit.pattern[:8]))
    return shown if len(audit.pattern) <= 8 else f"{shown}, ... ({len(audit.pattern):,} in all)"
