"""Running a command line in this process, as several tests do."""

import contextlib
import io
import json
import sys
from unittest.mock import patch

import pytest

from dpftrl.cli.main import main


def run(*arguments) -> tuple[int, str, str]:
    """Run a command line; return its exit code, output and error output."""
    # Not StringIO: a command may also write bytes.
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    with (
        patch.object(sys, "argv", ["dpftrl", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        main()
    return stop.value.code, _text(out), _text(err)


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def answer(*arguments) -> dict:
    """Run a command that succeeds; return its JSON output."""
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    assert all(line.startswith("from the ") for line in err.splitlines())
    return json.loads(out)


def refused_in_one_line(*arguments) -> str:
    """Run a command that refuses its input; return its one line of error output."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dpftrl: ")
    assert err.count("\n") == 1
    return err
