"""Running a command line in this process, as several tests do."""

import contextlib
import io
import json
import sys
from unittest.mock import patch

import pytest

from dpftrl.cli.main import main


def run(*arguments) -> tuple[int, str, str]:
    """The exit code, the output and the error output."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["dpftrl", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        main()
    return stop.value.code, out.getvalue(), err.getvalue()


def answer(*arguments) -> dict:
    """The JSON of a command that works."""
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def told_in_one_line(*arguments) -> str:
    """The one line of a command that refuses."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dpftrl: ")
    assert err.count("\n") == 1
    return err
