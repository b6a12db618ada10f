"""`dpftrl train`: private training with simulated clients in one process."""

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dpftrl._internal.checks import whole_number
from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.cli.files import refuse_centralized
from dpftrl.cli.options import Count, SettingsCommand, state_folder_option
from dpftrl.cli.output import print_json, progress_bar, say
from dpftrl.errors import InvalidInput
from dpftrl.plan import Plan, load_plan

if TYPE_CHECKING:
    from dpftrl.auditing.canaries import CanaryKind
    from dpftrl.federated import Server
    from dpftrl.simulation.training import Training, TrainingProgress


@click.command("train", cls=SettingsCommand)
@click.argument("config_or_plan", metavar="[CONFIG.toml|PLAN.json]", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/run"),
    show_default=True,
    help="Folder of the run.",
)
@click.option("--resume", is_flag=True, help="Resume the run in --out.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="""Change a setting, in TOML syntax: --set privacy.rounds=100 --set 'task="poetry"'.""",
)
@click.option(
    "--clip-norm",
    metavar="NUMBER|adaptive",
    help="Largest norm of an update, or `adaptive`: it follows the median norm of the updates.",
)
@click.option(
    "--canaries",
    type=Count(),
    default=0,
    help="Add so many canaries, for `dpftrl audit run`: artificial clients, each included by a "
    "secret coin. They replace nobody.",
)
@click.option(
    "--canary-kind",
    type=click.Choice(["gradients", "sentences"]),
    help="`gradients`: updates in random directions, guessed from all releases (white-box). "
    "`sentences`: clients that train on unusual sentences, guessed from the model alone "
    "(black-box).  [default: gradients]",
)
@click.option("--show-config", is_flag=True, help="Print all settings and exit without training.")
@state_folder_option
@click.option(
    "--trust-folder",
    is_flag=True,
    help="Resume without the witness: you know that this folder is the newest state of the run.",
)
@click.option("--insecure-test-key", type=int, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def train_command(
    config_or_plan: str | None,
    out: Path,
    resume: bool,
    changes: tuple[str, ...],
    clip_norm: str | None,
    canaries: int,
    canary_kind: "CanaryKind | None",
    show_config: bool,
    state_folder: Path | None,
    trust_folder: bool,
    insecure_test_key: int | None,
    as_json: bool,
) -> None:
    """Train a language model privately, with simulated clients in this process.

    Without CONFIG it trains on the task chitchat: English chats of 1,315 people. PLAN is a file
    that `dpftrl plan --out` saved; it replaces the section [privacy] of the config. Ctrl-C stops
    after the current round. --resume continues a run that was stopped or that crashed.
    """
    from dpftrl.simulation.config import check_beside_plan, config_text, read_config

    if clip_norm is not None:
        changes = (_clip_norm_change(clip_norm), *changes)  # --set may add options
    if resume and (config_or_plan or changes or show_config or canaries or canary_kind):
        raise InvalidInput(
            "--resume uses the settings that the run was created with: leave out the config, "
            "--set, --clip-norm, --canaries, --canary-kind and --show-config"
        )
    if canary_kind and not canaries:
        raise InvalidInput("--canary-kind needs --canaries, the number of canaries")
    plan, config_file = None, None
    if config_or_plan and config_or_plan.endswith(".json"):
        plan = load_plan(config_or_plan)
    elif config_or_plan:
        config_file = Path(config_or_plan)
    config = read_config(config_file, changes)
    if plan is not None:
        check_beside_plan(changes)
    if show_config:
        if as_json:
            print_json(config)
        else:
            click.echo(config_text(config), nl=False)
        return
    check_extra()
    from dpftrl.simulation.training import Training

    with progress_bar("preparing") as on_progress:
        if resume:
            refuse_centralized(out)
            training = Training.resume(
                out, state_folder=state_folder, trust_folder=trust_folder, on_progress=on_progress
            )
        else:
            _check_new_folder(out, state_folder)
            training = Training.create(
                config,
                out,
                plan=plan,
                canaries=whole_number("--canaries", canaries, at_least=0),
                canary_kind=canary_kind or "gradients",
                state_folder=state_folder,
                insecure_test_key=insecure_test_key,
                on_progress=on_progress,
            )
    with training, _interruptible() as was_interrupted:
        if not as_json:
            _print_setting(training)
        with _show_progress(as_json) as on_round:
            end_reason = training.run(on_round, was_interrupted)
        _print_result(training, end_reason, out, as_json)
    if end_reason is None:
        sys.exit(130)  # the code for an interrupted program, as in `main`
    if _is_verified(training) is False:
        sys.exit(1)


def _check_new_folder(out: Path, state_folder: Path | None) -> None:
    """Refuse a folder that has a run or other files: a run must not be mixed with them.

    Hidden files are ignored, and so is `lost+found`, which every new file system has. A run that
    could not be created leaves its private folder, and its name can be used again.
    """
    from dpftrl.federated import RunFolder

    folder = RunFolder(out)
    if folder.exists:
        raise InvalidInput(
            f"a run has begun in {out}; resume it with --resume, or choose another folder with "
            "--out"
        )
    folder.refuse_if_begun()
    if not out.is_dir() or folder.private.exists():
        return
    witness = None if state_folder is None else state_folder.absolute()
    for path in sorted(out.iterdir()):
        is_ignored = path.name.startswith(".") or path.name == "lost+found"
        if not is_ignored and path.absolute() != witness:
            raise InvalidInput(
                f"{out} is not empty: it holds {path.name}; choose an empty folder with --out"
            )


def _clip_norm_change(clip_norm: str) -> str:
    """The option --clip-norm as a change of the configuration."""
    if clip_norm == "adaptive":
        return 'clip_norm="adaptive"'
    try:
        return f"clip_norm={float(clip_norm)!r}"
    except ValueError:
        raise InvalidInput(
            f"--clip-norm is a number or `adaptive`, got {clip_norm!r:.60}"
        ) from None


def check_extra() -> None:
    """Refuse to train without the packages of the extra `train`."""
    try:
        import equinox  # noqa: F401 # pyright: ignore[reportUnusedImport]
        import tensorboardX  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise InvalidInput(
            "training needs extra packages such as JAX: pip install 'dpftrl[train]'"
        ) from None


def _print_setting(training: "Training") -> None:
    from dpftrl.simulation.training import why_not_pretrained

    plan: Plan = training.server.plan
    train, heldout = training.task.train, training.task.heldout
    say(f"{training.task.source}")
    say(
        f"{len(train):,} clients to train on, {len(heldout):,} held out; "
        f"{training.server.layout.size:,} parameters"
    )
    say(
        f"{plan.mechanism.name}, noise multiplier {plan.noise_multiplier:.4g}, "
        f"{plan.participation}: "
        f"{_epsilon_text(plan.guarantee.epsilon, plan)}"
    )
    for line in _start_model_lines(training.server):
        say(line)
    if reason := why_not_pretrained(training.config.model, training.task):
        say(f"start model: new, without pre-training on public text: {reason}")
    for line in training.summary.lines():
        say(line)
    for warning in training.summary.warnings():
        say(f"warning: {warning}", err=True)
    if training.server.rounds:
        say(f"resuming after {training.server.rounds:,} rounds")


def _start_model_lines(server: "Server") -> Iterator[str]:
    """Yield lines about the start model: its earlier runs, and epsilon including those runs."""
    start = server.start
    if start is None:
        return
    if not start.earlier:
        yield "start model: of unknown origin; recorded as claimed to be public"
    for earlier in start.earlier:
        guarantee = earlier.guarantee
        epsilon = f"epsilon {rounded_up(guarantee.epsilon)} at delta {guarantee.delta:g}"
        if earlier.people == "same":
            people = "the same people: composed"
        else:
            people = "other people, as you state: not composed"
        yield f"start model: trained by run {earlier.name}, {epsilon}, on {people}"
    if start.composed:
        yield f"with the earlier runs: {_epsilon_text(server.planned.epsilon, server.plan)}"


@contextmanager
def _interruptible() -> Generator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed, or SIGTERM came: then stop after the round.

    A second Ctrl-C or SIGTERM stops at once. What `docker stop` and batch systems send is SIGTERM.
    """
    interrupted = False

    def on_interrupt(_: int, __: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        for number in signals:
            signal.signal(number, signal.default_int_handler)
        say("finishing this round; Ctrl-C again to stop at once", err=True)

    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, on_interrupt) for number in signals}
    try:
        yield lambda: interrupted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _show_progress(quiet: bool) -> Generator[Callable[["TrainingProgress"], None]]:
    """Yield a callback per round: a bar on a terminal, else one line per evaluation."""
    if quiet:
        yield lambda _: None
    elif not sys.stdout.isatty():
        yield lambda progress: _print_evaluation(progress)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console()) as bar:
            task = bar.add_task("", total=None)

            def on_round(progress: "TrainingProgress") -> None:
                done, total = progress.point.round, progress.rounds
                bar.update(task, completed=done, total=total, description=_progress_text(progress))

            yield on_round


def _print_evaluation(progress: "TrainingProgress") -> None:
    if progress.point.accuracy is not None:
        say(f"{_progress_text(progress)}  {progress.seconds_left:.0f} s left")


def _progress_text(progress: "TrainingProgress") -> str:
    return (
        f"round {progress.point.round:,}/{progress.rounds:,}  {progress.reports:,} clients  "
        f"accuracy {progress.accuracy:.2%}  epsilon {rounded_up(progress.point.epsilon)}"
    )


def _print_result(training: "Training", end_reason: str | None, out: Path, as_json: bool) -> None:
    server = training.server
    evaluation = training.evaluate()
    result: dict[str, Any] = {
        "run": str(out),
        "ended": end_reason,
        "rounds": server.rounds,
        "accuracy": evaluation.accuracy,
        "perplexity": evaluation.perplexity,
        "epsilon": server.epsilon,
        "delta": server.plan.guarantee.delta,
        "statement": str(out / "statement.md"),
        "verified": _is_verified(training),
        # Statistics of the text, for the operator alone.
        "private": {
            "accuracy_of_all_words": evaluation.accuracy_of_all_words,
            **msgspec.to_builtins(training.summary),
            "warnings": training.summary.warnings(),
        },
    }
    if as_json:
        print_json(result)
        return
    if end_reason is None:
        say(f"stopped after {server.rounds:,} rounds; to resume: {_resume_command(out)}")
    else:
        say(end_reason)
    say(
        f"accuracy {evaluation.accuracy:.2%}, perplexity {evaluation.perplexity:.1f}, "
        f"{_epsilon_text(server.epsilon, server.plan)}"
    )
    say(
        "private, for your eyes: with unknown words counted as wrong, accuracy "
        f"{evaluation.accuracy_of_all_words:.2%}; always guessing the most common word: "
        f"{training.summary.baseline:.2%} of the known words, "
        f"{training.summary.baseline_of_all_words:.2%} of all"
    )
    if server.rounds:
        say(f"statement: {out / 'statement.md'}")
    if _is_verified(training) is False:
        say(f"this run failed verification; for details: dpftrl verify {out}", err=True)


def _is_verified(training: "Training") -> bool | None:
    """Whether the run verified when its statement was written; None if there is no statement."""
    statement = training.statement
    return None if statement is None else statement.facts.evidence == "verified"


def _epsilon_text(epsilon: float, plan: Plan) -> str:
    return f"epsilon {rounded_up(epsilon)} at delta {in_full(plan.guarantee.delta)}"


def _resume_command(out: Path) -> str:
    return f"dpftrl train --out {out} --resume"
