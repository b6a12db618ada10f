"""Where output goes, readers that leave early, and mistakes reported in one line."""

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
from command_line import run

from dpftrl.cli import main as command
from dpftrl.paper import page

PROGRAM = [sys.executable, "-m", "dpftrl"]
SETTING = ["--rounds", "100", "--min-sep", "10"]
EXAMPLES = Path(__file__).parents[2] / "examples"
FULL = Path("/dev/full")


@pytest.mark.parametrize("arguments", [["--help"], ["mechanisms"], ["mechanisms", "--json"]])
def test_a_closed_pipe_gives_exit_code_141(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*PROGRAM, *arguments], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_closed_standard_error_does_not_change_the_exit_code():
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with (
        patch.object(sys, "argv", ["dpftrl", "loss"]),
        contextlib.redirect_stderr(Gone()),
        pytest.raises(SystemExit) as stop,
    ):
        command.main()
    assert stop.value.code == 2


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["mechanisms"], ["loss", "blt-b400", *SETTING, "--json"]])
def test_a_full_disk_is_one_line_and_exit_code_2(arguments):
    with FULL.open("wb") as full:
        done = subprocess.run(
            [*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 2
    assert re.fullmatch(rb"dpftrl: the output cannot be written: .*\n", done.stderr)


def test_a_full_disk_inside_the_command_names_its_file():
    def fail(_: str) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    with patch.object(command, "import_module", fail):
        assert run("loss") == (2, "", "dpftrl: somewhere: No space left on device\n")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_closed_streams_are_ignored(closed):
    line = f'exec "$0" -m dpftrl compare blt {" ".join(SETTING)} {closed}'
    done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def _signals_as_before():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_signals_as_before")
def test_an_interruption_during_the_imports_is_reported():
    with patch.object(command, "import_module", side_effect=KeyboardInterrupt):
        code, out, err = run("mechanisms")
    assert (code, out, err.strip()) == (130, "", "interrupted")


def test_a_second_interruption_is_reported_once():
    # A shell's background jobs ignore SIGINT, and so would what they start.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from dpftrl.cli.main import main; print('ready', flush=True); main()"
    arguments = ["optimize", "bandmf", "--rounds", "2000", "--min-sep", "400", "--bands", "400"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.1)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    _, err = process.communicate()
    assert (process.returncode, err.strip()) == (130, b"interrupted")


@pytest.mark.parametrize("arguments", [[], ["optimize"]])
def test_without_arguments_the_help_text_is_printed(arguments):
    code, out, err = run(*arguments)
    _, manual, _ = run(*arguments, "--help")
    assert (code, out, err) == (2, "", manual)
    assert err.startswith("Usage: dpftrl")


class Terminal(io.StringIO):
    """Somebody is looking."""

    def isatty(self) -> bool:
        return True


BUDGET = ["--epsilon", "4", "--delta", "1e-10"]
TABLES = {
    "compare": (
        ["compare", *SETTING],
        ["band-sqrt:10", "tree-vanilla", "sensitivity"],
    ),
    "mechanisms": (["mechanisms"], ["banded-inverse:C0,C1,...", "2,047", "memory"]),
    "calibrate": (["calibrate", "blt-b400", *SETTING, *BUDGET], ["multiplier", "(exact)"]),
    "show": (["show", "blt-b400"], ["0.9944453083640997,", "-0.0007721"]),
}


@pytest.mark.parametrize("columns", [20, 40, 80])
@pytest.mark.parametrize(("arguments", "whole"), TABLES.values(), ids=TABLES.keys())
def test_a_narrow_terminal_loses_nothing(monkeypatch, arguments, whole, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    with (
        patch.object(sys, "argv", ["dpftrl", *arguments]),
        contextlib.redirect_stdout(screen),
        pytest.raises(SystemExit),
    ):
        command.main()
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert "…" not in shown
    if columns >= 40:
        assert set(whole) <= set(shown.split())
    if columns == 80 or (columns == 40 and arguments[0] in ("calibrate", "show")):
        assert max(map(len, shown.splitlines())) <= columns


def test_the_paper_page_reports_an_error_in_one_line(capsys, tmp_path):
    for arguments in ([], ["results"], [str(tmp_path), str(tmp_path / "no.md")]):
        assert page.main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


# The apps around it need packages that are not ours: here they are empty.
APPS = {
    "flower_jax": ["nextword", "nextword.client_app", "nextword.server_app", "nextword.task"],
    "flower_torch": ["blobs", "blobs.client_app", "blobs.server_app"],
}


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("arguments", [[], ["no.json"], ["no.json", "run"]])
def test_a_simulation_reports_an_error_in_one_line(monkeypatch, capsys, tmp_path, name, arguments):
    flower = pytest.importorskip("dpftrl.flower")
    app = MagicMock()
    app.task.task.return_value.train = ["somebody"]
    app.server_app.train.side_effect = lambda _, plan, *__, **___: flower.load_plan(plan)
    for module in APPS[name]:
        monkeypatch.setitem(sys.modules, module, app)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["simulate.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / name / "simulate.py"), run_name="__main__")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert ("no.json cannot be read" if len(arguments) == 2 else "PLAN FOLDER") in message
