"""Ctrl-C while a command is still loading ends it quietly, and help is shown without loading."""

import subprocess
import sys

import click
import pytest

from dpftrl.cli.main import COMMANDS as ALL_COMMANDS
from dpftrl.cli.main import SUMMARIES, dpftrl

PROGRAM = """
import builtins, os, signal, sys
real = builtins.__import__

def importing(name, *rest, **options):
    if name == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **options)

builtins.__import__ = importing
from dpftrl.cli import start
sys.argv = ["dpftrl", *{arguments!r}]
start()
"""
COMMANDS = {
    "account": [
        "account",
        "blt-b400",
        "--rounds",
        "9",
        "--min-sep",
        "3",
        "--noise-multiplier",
        "5",
        "--delta",
        "1e-6",
    ],
    "mechanisms": ["mechanisms"],
    "observe": ["observe", "missing.csv"],
    "plan": ["plan", "--help"],
    "statement": ["statement", "missing.json"],
    "status": ["status", "missing"],
    "train": ["train", "--show-config"],
    "verify": ["verify", "missing"],
}


def run(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(module=module, arguments=arguments)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["click", "numpy", "msgspec"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_while_loading_is_quiet(command, module):
    ended = run(module, COMMANDS[command])
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_without_an_interrupt_the_command_runs():
    """The control: a module that nobody imports."""
    ended = run("no_such_module", COMMANDS["account"])
    assert ended.returncode == 0
    assert "epsilon" in ended.stdout


def test_the_help_text_has_the_first_sentence_of_every_command():
    context = click.Context(dpftrl)
    for name in ALL_COMMANDS:
        command = dpftrl.get_command(context, name)
        assert command is not None
        assert SUMMARIES[name] == command.get_short_help_str(limit=1000)


def test_the_help_text_is_shown_without_importing_any_command():
    program = """
import sys
sys.argv = ["dpftrl", "--help"]
from dpftrl.cli import start
try:
    start()
finally:
    print(*(name for name in ("numpy", "rich", "dpftrl.cli.plan") if name in sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *manual, loaded = ended.stdout.splitlines()
    assert loaded == ""
    assert any("Check that the files of a run" in line for line in manual)
