"""`dpftrl train`: a private training in one process."""

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.cli.output import print_json, progress_bar
from dpftrl.errors import InvalidInput
from dpftrl.plan import Plan, load_plan

if TYPE_CHECKING:
    from dpftrl.federated import Server
    from dpftrl.simulation.training import Progress, Training


@click.command("train")
@click.argument("what", metavar="[CONFIG.toml|PLAN.json]", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/run"),
    show_default=True,
    help="Folder of the run.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="""Change a setting, as TOML: --set privacy.rounds=100 --set 'task="poetry"'.""",
)
@click.option("--show-config", is_flag=True, help="Print all settings, and train nothing.")
@click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="Where the run's witness is kept.",
    show_default="$DPFTRL_STATE, or ~/.local/state/dpftrl",
)
@click.option(
    "--trust-folder",
    is_flag=True,
    help="Resume without the witness: you know that this folder is the newest state of the run.",
)
@click.option("--insecure-test-key", type=int, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def train_command(
    what: str | None,
    out: Path,
    resume: bool,
    changes: tuple[str, ...],
    show_config: bool,
    state_folder: Path | None,
    trust_folder: bool,
    insecure_test_key: int | None,
    as_json: bool,
) -> None:
    """Train a model on people's text, privately, with simulated clients in this process.

    Without CONFIG it trains on chitchat, 1,315 people chatting in English. A PLAN, which `dpftrl
    plan --out` writes, takes the place of the config's [privacy]. Ctrl-C finishes the round;
    --resume goes on, after a crash too.
    """
    _check_extra()
    from dpftrl.simulation.config import check_beside_plan, config_text, read_config
    from dpftrl.simulation.training import Training

    if resume and (what or changes or show_config):
        raise InvalidInput("--resume goes on as the run began: leave the config and --set away")
    plan = load_plan(what) if what and what.endswith(".json") else None
    config = read_config(Path(what) if what and plan is None else None, changes)
    if plan is not None:
        check_beside_plan(changes)
    if show_config:
        if as_json:
            print_json(config)
        else:
            click.echo(config_text(config), nl=False)
        return
    with progress_bar("getting ready") as report:
        if resume:
            training = Training.resume(
                out, state_folder=state_folder, trust_folder=trust_folder, report=report
            )
        else:
            training = Training.begin(
                config,
                out,
                plan=plan,
                state_folder=state_folder,
                insecure_test_key=insecure_test_key,
                report=report,
            )
    with training, _interruptible() as was_interrupted:
        if not as_json:
            _announce(training)
        with _live(as_json) as show:
            ended = training.run(show, was_interrupted)
        _tell(training, ended, out, as_json)
    if ended is None:
        sys.exit(130)
    if _is_verified(training) is False:
        sys.exit(1)


def _check_extra() -> None:
    try:
        import equinox  # noqa: F401 # pyright: ignore[reportUnusedImport]
        import tensorboardX  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise InvalidInput("training needs JAX and more: pip install 'dpftrl[train]'") from None


def _announce(training: "Training") -> None:
    plan: Plan = training.server.plan
    train, heldout = training.task.train, training.task.heldout
    click.echo(f"{training.task.source}")
    click.echo(
        f"{len(train):,} people to train on, {len(heldout):,} held out; "
        f"{training.server.layout.size:,} parameters"
    )
    click.echo(
        f"{plan.mechanism.name}, noise multiplier {plan.noise_multiplier:.4g}, "
        f"{plan.participation}: "
        f"{_promise(plan.guarantee.epsilon, plan)}"
    )
    for line in _start_model(training.server):
        click.echo(line)
    if training.server.rounds:
        click.echo(f"going on after {training.server.rounds:,} rounds")


def _start_model(server: "Server") -> Iterator[str]:
    """What the model file that a run started from means for its epsilon."""
    start = server.start
    if start is None:
        return
    if not start.earlier:
        yield "start model: its origin is not known to dpftrl; recorded as claimed public"
    for one in start.earlier:
        own = f"epsilon {rounded_up(one.guarantee.epsilon)} at delta {one.guarantee.delta:g}"
        same = "the same people: composed"
        how = same if one.people == "same" else "other people, as you state: not composed"
        yield f"start model: made by run {one.name}, {own}, on {how}"
    if start.composed:
        yield f"with the earlier runs: {_promise(server.planned.epsilon, server.plan)}"


@contextmanager
def _interruptible() -> Generator[Callable[[], bool]]:
    """The first Ctrl-C lets the round end; the second one does not wait."""
    interrupted = False

    def note(_: int, __: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        click.echo("finishing this round; Ctrl-C again to stop at once", err=True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _live(quiet: bool) -> Generator[Callable[["Progress"], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    if quiet:
        yield lambda _: None
    elif not sys.stdout.isatty():
        yield lambda progress: _line(progress)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console()) as bar:
            task = bar.add_task("", total=None)

            def show(progress: "Progress") -> None:
                done, total = progress.point.round, progress.rounds
                bar.update(task, completed=done, total=total, description=_words(progress))

            yield show


def _line(progress: "Progress") -> None:
    if progress.point.accuracy is not None:
        click.echo(f"{_words(progress)}  {progress.seconds_left:.0f} s left")


def _words(progress: "Progress") -> str:
    return (
        f"round {progress.point.round:,}/{progress.rounds:,}  {progress.reports:,} clients  "
        f"accuracy {progress.accuracy:.2%}  epsilon {rounded_up(progress.point.epsilon)}"
    )


def _tell(training: "Training", ended: str | None, out: Path, as_json: bool) -> None:
    server = training.server
    found = training.evaluate()
    result: dict[str, Any] = {
        "run": str(out),
        "ended": ended,
        "rounds": server.rounds,
        "accuracy": found.accuracy,
        "perplexity": found.perplexity,
        "epsilon": server.epsilon,
        "delta": server.plan.guarantee.delta,
        "statement": str(out / "statement.md"),
        "verified": _is_verified(training),
    }
    if as_json:
        print_json(result)
        return
    if ended is None:
        click.echo(f"stopped after {server.rounds:,} rounds; to go on: {_resume(out)}")
    else:
        click.echo(ended)
    click.echo(
        f"accuracy {found.accuracy:.2%}, perplexity {found.perplexity:.1f}, "
        f"{_promise(server.epsilon, server.plan)}"
    )
    if server.rounds:
        click.echo(f"statement: {out / 'statement.md'}")
    if _is_verified(training) is False:
        click.echo(f"this run does not verify; to see why: dpftrl verify {out}", err=True)


def _is_verified(training: "Training") -> bool | None:
    """Whether the run's files verified when its statement was written; None if there is none."""
    made = training.statement
    return None if made is None else made.facts.evidence == "verified"


def _promise(epsilon: float, plan: Plan) -> str:
    return f"epsilon {rounded_up(epsilon)} at delta {in_full(plan.guarantee.delta)}"


def _resume(out: Path) -> str:
    return f"dpftrl train --out {out} --resume"
