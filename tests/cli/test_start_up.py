"""Ctrl-C while a command is still loading ends it quietly."""

import subprocess
import sys

import pytest

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
