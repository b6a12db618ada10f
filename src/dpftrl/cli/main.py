"""The command group `dpftrl`, its exit codes, and how errors are printed."""

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TextIO

import click

from dpftrl import __version__
from dpftrl.cli import INTERRUPTED, allow_interrupts
from dpftrl.errors import DpftrlError, visible

# Command name -> name of the click command in the module `dpftrl.cli.<command name>`. A module is
# imported only when its command is used: an import takes up to a second, and `main` must already
# handle Ctrl-C during that time.
COMMANDS = {
    "mechanisms": "mechanisms",
    "loss": "loss",
    "compare": "compare",
    "optimize": "optimize",
    "show": "show",
    "plan": "plan_command",
    "account": "account_command",
    "calibrate": "calibrate_command",
    "compose": "compose_command",
    "ledger": "ledger_command",
    "observe": "observe",
    "statement": "statement_command",
    "status": "status_command",
    "train": "train_command",
    "verify": "verify_command",
    "audit": "audit_command",
    "export": "export_command",
    "reproduce": "reproduce_command",
}
# What `dpftrl --help` says about each command: the first sentence of its own help text. It is
# written here so that the help can be shown without importing all commands.
SUMMARIES = {
    "mechanisms": "List the mechanisms, the memory they need and the rounds they support.",
    "loss": "Compute error, sensitivity and loss of one mechanism.",
    "compare": "Compare the losses of mechanisms for one participation, the smallest loss first.",
    "optimize": "Optimize a mechanism of one family for a participation.",
    "show": "Show the family, the parameters and the coefficients of a mechanism.",
    "plan": "Compare mechanisms for your fleet, and recommend one.",
    "account": "Compute epsilon, rho, mu and the risk of a mechanism with its noise.",
    "calibrate": "Compute the smallest noise multiplier for an epsilon, a rho or a risk.",
    "compose": "Compute one guarantee for several runs that the same clients could take part in.",
    "observe": "Summarize who took part in a run, from a participation log.",
    "ledger": "Write the ledger of RUN: which client was contacted and counted in which round.",
    "status": "Show how a run is doing: rounds, epsilon, drop-outs, eligible clients, expected "
    "end, disk.",
    "statement": "Write the privacy statement of a plan, a guarantee or a run, as Markdown, HTML "
    "and JSON.",
    "train": "Train a language model privately, with simulated clients in this process.",
    "verify": "Check that the files of a run were not changed, and that its epsilon is correct.",
    "audit": "Attack a mechanism or a finished run, and compare what that shows with the claim.",
    "export": "Write the released model of RUN to a file that can be shared.",
    "reproduce": "Recompute the tables and figures of the paper, and check each claim of the "
    "paper.",
}
# The exit code that a shell reports for a program that SIGPIPE ended: 128 + 13. It is not 0,
# because a `verify` whose last lines nobody read, or a `train` that stopped there, has not
# succeeded.
READER_LEFT = 141


@contextmanager
def _broken_pipe_to_exit_code() -> Generator[None]:
    """Exit with 141 on a broken pipe; click would exit with 1, which means a broken limit."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(READER_LEFT) from None
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich raises SystemExit instead
            raise click.exceptions.Exit(READER_LEFT) from None
        raise


class Commands(click.Group):
    """Command group that imports a command when it is first used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's)
        """Names of all commands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; for an unknown name import all, so that click can suggest one."""
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
            self.add_command(getattr(import_module(f"dpftrl.cli.{name}"), COMMANDS[name]))
        allow_interrupts()
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's)
        """Write the list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SUMMARIES.items()))

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the arguments. `--help` is printed here."""
        with _broken_pipe_to_exit_code():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and flush what it printed."""
        with _broken_pipe_to_exit_code():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="dpftrl %(version)s")
def dpftrl() -> None:
    """Differentially private training with correlated noise: plan it, run it, account for it.

    MECH is the name of a mechanism, such as `blt`, `blt-b400` or `band-sqrt:342`, or a .json file.
    Three options say how often one client can take part: --rounds of training, --min-sep (the
    smallest difference between two rounds of one client; 1 allows every round) and
    --max-participations.

    Choose a mechanism:

    \b
    Which mechanisms are there?               dpftrl mechanisms
    How large is the error of one of them?    dpftrl loss blt-b400 --rounds 2052 --min-sep 342
    Which one is best for my training?        dpftrl compare --rounds 2052 --min-sep 342
    Optimize one for my training              dpftrl optimize blt --rounds 2052 --min-sep 342
    What does this file contain?              dpftrl show best.json

    Before and after training:

    \b
    How much noise does my fleet need?        dpftrl plan --population 4.21M --report-goal 6500 ...
    What does this noise guarantee?           dpftrl account plan.json
    How much noise does this epsilon need?    dpftrl calibrate blt-b400 ... --epsilon 4
    What do several runs guarantee together?  dpftrl compose first.json second.json --delta 1e-10
    Who took part, and how often?             dpftrl observe run
    What can I publish about the privacy?     dpftrl statement plan.json

    Training:

    \b
    Train on the text of simulated clients    dpftrl train --out run
    How is the run doing?                     dpftrl status run
    Did the run keep its guarantee?           dpftrl verify run
    What does an attack on it achieve?        dpftrl audit run run
    Write the model alone, to share it        dpftrl export run model.safetensors
    Write who took part in which round        dpftrl ledger run --out ledger.csv

    Numbers can be written 2052, 2_052, 6.5k, 4.21M or 1e9. Every command takes --json. Exit codes:
    0 success; 1 a limit was broken or a check failed; 2 invalid input, or output that cannot be
    written (one line on standard error says what to do); 130 interrupted; 141 the reader of the
    output closed it early, as `head` does.
    """  # noqa: D301 (\b keeps click from reflowing the lines below it)


def main() -> None:
    """Run the command line; an error of the user is one line on standard error and exit code 2."""
    _make_streams_safe()
    try:
        code = dpftrl.main(standalone_mode=False, prog_name="dpftrl")
    except (click.Abort, KeyboardInterrupt):
        code = _exit_interrupted()
    except DpftrlError as error:
        code = _print_error(str(error))
    except click.ClickException as error:
        code = _print_usage_error(error)
    except MemoryError:
        code = _print_error("not enough memory for this computation; use fewer rounds")
    except OSError as error:
        _discard(sys.stdout)
        subject = error.filename or "the output cannot be written"
        code = _print_error(f"{subject}: {error.strerror or error}")
    if code == READER_LEFT:
        _discard(sys.stdout)
    sys.exit(code if isinstance(code, int) else 0)


def _make_streams_safe() -> None:
    """Make writing to standard output and error never raise for a closed or narrow stream."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell with `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (stays open)
    # A stream whose encoding has no ≤ gets a ? instead of a traceback.
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")


def _exit_interrupted() -> int:
    with suppress(ValueError):  # only the main thread can set signal handlers
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program already ends
    _print_to_stderr("interrupted")
    return INTERRUPTED


def _print_usage_error(error: click.ClickException) -> int:
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        _print_to_stderr(error.format_message())  # the whole help text, over several lines
        return error.exit_code
    context = getattr(error, "ctx", None)
    hint = f" ({context.command_path} --help)" if context else ""
    return _print_error(error.format_message() + hint)


def _print_error(message: str) -> int:
    _print_to_stderr(f"dpftrl: {' '.join(message.split())}")
    return 2


def _print_to_stderr(message: str) -> None:
    try:
        click.echo(visible(message), err=True)
    except OSError:  # standard error is closed; the exit code still says what happened
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drop unwritten output, or Python would try to write it at exit and print a traceback."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
