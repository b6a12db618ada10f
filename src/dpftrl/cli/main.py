"""The command group, and how mistakes are told."""

import sys

import click

from dpftrl import __version__
from dpftrl.cli.account import account_command
from dpftrl.cli.calibrate import calibrate_command
from dpftrl.cli.compare import compare
from dpftrl.cli.compose import compose_command
from dpftrl.cli.export import export_command
from dpftrl.cli.loss import loss
from dpftrl.cli.mechanisms import mechanisms
from dpftrl.cli.observe import observe
from dpftrl.cli.optimize import optimize
from dpftrl.cli.plan import plan_command
from dpftrl.cli.reproduce import reproduce_command
from dpftrl.cli.show import show
from dpftrl.cli.statement import statement_command
from dpftrl.cli.train import train_command
from dpftrl.cli.verify import verify_command
from dpftrl.errors import DpftrlError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
    0 done, 1 when somebody broke a limit, 2 for input that makes no sense (one line on standard
    error says what to do), 130 when interrupted.
    """  # noqa: D301 (\b keeps click from reflowing the lines below it)


for command in (
    mechanisms,
    loss,
    compare,
    optimize,
    show,
    plan_command,
    account_command,
    calibrate_command,
    compose_command,
    observe,
    statement_command,
    train_command,
    verify_command,
    export_command,
    reproduce_command,
):
    dpftrl.add_command(command)


def main() -> None:
    """Run the command; a user's mistake is one line on standard error and exit code 2."""
    # A stream that has no ≤ gets a ?, not a traceback.
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")
    try:
        code = dpftrl.main(standalone_mode=False, prog_name="dpftrl")
        sys.stdout.flush()
    except DpftrlError as error:
        code = _mistake(str(error))
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" ({context.command_path} --help)" if context else ""
        code = _mistake(error.format_message() + hint)
    except MemoryError:
        code = _mistake("this needs more memory than there is; use fewer rounds")
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 130
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        sys.stderr.close()
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _mistake(message: str) -> int:
    click.echo(f"dpftrl: {' '.join(message.split())}", err=True)
    return 2
