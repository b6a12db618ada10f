"""The command group, and how mistakes are told."""

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TextIO

import click

from dpftrl import __version__
from dpftrl.errors import DpftrlError

# Each is in a file of its name, imported only when it is asked for: that takes up to a second, in
# which Ctrl-C has to be told as it is later.
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
    "observe": "observe",
    "statement": "statement_command",
    "train": "train_command",
    "verify": "verify_command",
    "export": "export_command",
    "reproduce": "reproduce_command",
}
INTERRUPTED = 130
# What a shell says of a program that ended by SIGPIPE. Not 0: the reader has had enough, but a
# `verify` whose last lines nobody read, or a `train` that stopped there, has not succeeded.
READER_LEFT = 141


@contextmanager
def _until_the_reader_leaves() -> Generator[None]:
    """Turn a broken pipe into its exit code, before click makes it a 1, which means a limit."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(READER_LEFT) from None
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # so rich tells it
            raise click.exceptions.Exit(READER_LEFT) from None
        raise


class Commands(click.Group):
    """All commands, none of them imported yet."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's)
        """Their names."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the one asked for, or all, from which click offers the nearest."""
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
            self.add_command(getattr(import_module(f"dpftrl.cli.{name}"), COMMANDS[name]))
        return super().get_command(ctx, cmd_name)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Where --help is printed."""
        with _until_the_reader_leaves():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Where a command runs, until all it printed is written."""
        with _until_the_reader_leaves():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="dpftrl %(version)s")
def dpftrl() -> None:
    """Correlated noise for private learning: which mechanism, how much noise, what guarantee.

    A mechanism (MECH) is named, like `blt-b400` or `band-sqrt:342`, or is a .json file. A
    participation says how often one client may take part: --rounds of training, --min-sep rounds
    from one participation to the next (1 allows every round), and --max-participations.

    \b
    What is there, and what does it need?     dpftrl mechanisms
    How much noise does one of them add?      dpftrl loss blt-b400 --rounds 2052 --min-sep 342
    Which is best for my training?            dpftrl compare --rounds 2052 --min-sep 342
    Can one be made for it?                   dpftrl optimize blt --rounds 2052 --min-sep 342
    What is in this file?                     dpftrl show best.json

    Before training, and after:

    \b
    How much noise for my devices?            dpftrl plan --population 4.21M --report-goal 6500 ...
    What does this noise guarantee?           dpftrl account blt-b400 ... --noise-multiplier 7.379
    How much noise does it take?              dpftrl calibrate blt-b400 ... --epsilon 4
    What do several runs come to?             dpftrl compose first.json second.json --delta 1e-10
    Who really took part, and how often?      dpftrl observe ledger.csv
    What may be published about it?           dpftrl statement plan.json

    The training itself:

    \b
    Train on people's text, privately         dpftrl train --out run
    Did the run keep what it promised?        dpftrl verify run
    The model, and nothing else of the run    dpftrl export run model.safetensors

    Numbers may be written 2052, 2_052, 6.5k, 4.21M or 1e9. Every command takes --json. Exit codes:
    0 done, 1 when somebody broke a limit, 2 for input that makes no sense or output that cannot be
    written (one line on standard error says what to do), 130 when interrupted, 141 when whoever
    reads the output leaves before its end, as `head` does.
    """  # noqa: D301 (\b keeps click from reflowing the lines below it)


def main() -> None:
    """Run the command; a user's mistake is one line on standard error and exit code 2."""
    _make_streams_safe()
    try:
        code = dpftrl.main(standalone_mode=False, prog_name="dpftrl")
    except (click.Abort, KeyboardInterrupt):
        code = _interrupted()
    except DpftrlError as error:
        code = _mistake(str(error))
    except click.ClickException as error:
        code = _usage(error)
    except MemoryError:
        code = _mistake("this needs more memory than there is; use fewer rounds")
    except OSError as error:
        _discard(sys.stdout)
        what = error.filename or "the output cannot be written"
        code = _mistake(f"{what}: {error.strerror or error}")
    if code == READER_LEFT:
        _discard(sys.stdout)
    sys.exit(code if isinstance(code, int) else 0)


def _make_streams_safe() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by `>&-`: nobody wants to read it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for good)
    # A stream that has no ≤ gets a ?, not a traceback.
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")


def _interrupted() -> int:
    with suppress(ValueError):  # signals are for the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ending already; once is enough
    _tell("interrupted")
    return INTERRUPTED


def _usage(error: click.ClickException) -> int:
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        _tell(error.format_message())  # a manual has lines
        return error.exit_code
    context = getattr(error, "ctx", None)
    hint = f" ({context.command_path} --help)" if context else ""
    return _mistake(error.format_message() + hint)


def _mistake(message: str) -> int:
    _tell(f"dpftrl: {' '.join(message.split())}")
    return 2


def _tell(message: str) -> None:
    try:
        click.echo(message, err=True)
    except OSError:  # nobody to tell; the exit code remains
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drop what could not be written, which Python would try again, loudly, when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
