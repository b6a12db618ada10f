"""`dpftrl status`: tables, JSON, exit codes, watching a run, and metrics."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest
from command_line import refused_in_one_line, run
from small_runs import PEOPLE, create, one_round, small_plan
from small_training_runs import Trainer, fast_places

from dpftrl import Status
from dpftrl.cli import status as command
from dpftrl.federated import Server

PUBLIC = [
    "run",
    "rounds",
    "epsilon",
    "delta",
    "mechanism",
    "clip norm",
    "fleet",
    "reports",
    "timers",
]
PRIVATE = [
    *("process", "last change", "open round", "attempts", "drop-outs", "unfit updates", "clients"),
    *("eligible now", "eligible next", "last selection", "stand-still", "pace", "last round"),
    *("expected end", "disk", "permissions", "witness"),
]


@pytest.fixture
def server(tmp_path):
    with create(tmp_path, key=None) as created:
        for _ in range(3):
            one_round(created)
        yield created


def status(server: Server, *options) -> tuple[int, str, str]:
    root = server.folder.root
    return run("status", root, "--state-folder", root.parent / "state", *options)


def rows_of(out: str) -> list[list[str]]:
    """The first column of every table."""
    tables = re.split(r"[┌└].*\n", out)[1::2]
    return [re.findall(r"^│ (\S[^│]*?) *│", table, re.MULTILINE) for table in tables]


def test_figures_to_publish_and_private_ones_are_in_two_tables(server):
    code, out, err = status(server)
    assert (code, err) == (0, "")
    public, private = rows_of(out)
    assert public == PUBLIC
    assert private == PRIVATE
    titles = [line.strip() for line in out.splitlines() if line.startswith(" ")]
    assert titles == ["May be published", "For the operator only, not to be published"]
    assert "3 of 20 (15%)" in out
    assert "WARNING" not in out


def test_json_is_the_value(server):
    code, out, err = status(server, "--json")
    assert (code, err) == (0, "")
    value = msgspec.json.decode(out, type=Status)
    assert value.public.rounds == 3
    assert json.loads(out)["format"] == "dpftrl status"


def test_a_warning_is_a_line_and_an_exit_code(server):
    server.folder.log.chmod(0o644)
    code, out, err = status(server)
    assert (code, err) == (1, "")
    assert f"WARNING (permissions): others may read {server.folder.log}" in out
    code, out, _ = status(server, "--json")
    assert code == 1
    assert json.loads(out)["warnings"][0]["kind"] == "permissions"


def test_unknown_figures_are_said_to_be_unknown(tmp_path):
    with create(tmp_path, small_plan(population=12), key=None) as server:
        for number in range(5):
            one_round(server, PEOPLE[3 * number : 3 * number + 3])
        code, out, _ = status(server)
    assert code == 0
    assert "15 contacted so far" in out
    assert re.search(r"eligible now *│ not known, because.*; 6 that were contacted before", out)
    assert re.search(r"eligible next *│ not known", out)
    assert re.search(r"stand-still *│ not known", out)


def test_folders_without_a_run_are_refused_in_one_line(tmp_path, server):
    assert "holds no run" in refused_in_one_line("status", tmp_path / "missing")
    assert "holds no run" in refused_in_one_line("status", tmp_path)
    lines = server.folder.journal.read_bytes().splitlines(keepends=True)
    server.folder.journal.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    assert "line 3 was changed" in refused_in_one_line("status", server.folder.root)


def test_a_state_folder_that_is_a_file_is_named(server, tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    refused = refused_in_one_line("status", server.folder.root, "--state-folder", place)
    assert "run cannot be read" not in refused
    assert str(place) in refused


def test_two_ways_of_showing_at_once_are_refused(server):
    for options in (["--watch", "--json"], ["--json", "--prometheus", "0"]):
        refused = refused_in_one_line("status", server.folder.root, *options)
        assert "give one of --watch, --json and --prometheus" in refused


def test_a_centralized_run_has_steps_and_no_clients():
    with fast_places() as found:
        place = next(found)
        with Trainer.create(place, insecure_test_key=None) as trainer:
            trainer.train(until=7)
            code, out, _ = run("status", place.folder, "--state-folder", place.state)
    assert code == 0
    public, private = rows_of(out)
    assert public == ["run", "steps", "epsilon", "delta", "mechanism", "clip norm", "data set"]
    assert "clients" not in private
    assert "7 of 12 (58%)" in out
    assert "per step" in out


def test_watching_prints_every_change_until_the_end(server, monkeypatch):
    """Without a terminal there is a line for every change; rounds go on between two readings."""
    real = command._next

    def next_after_rounds(reader):
        for _ in range(min(6, 20 - server.rounds)):
            one_round(server)
        return real(reader)

    monkeypatch.setattr(command, "_next", next_after_rounds)
    monkeypatch.setattr(command, "WATCH_SECONDS", 0.0)
    code, out, err = status(server, "--watch")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[1] for line in lines] == ["3/20", "9/20", "15/20", "20/20"]
    assert lines[-1].endswith("all 20 rounds are done")


def test_watching_on_a_terminal_shows_the_tables_again(server, monkeypatch):
    class Terminal(command.Console):
        def __init__(self):
            super().__init__(force_terminal=True, width=100)

    monkeypatch.setattr(command, "Console", Terminal)
    monkeypatch.setattr(command, "WATCH_SECONDS", 0.0)
    real = command._next

    def next_after_rounds(reader):
        while not server.ended():
            one_round(server)
        return real(reader)

    monkeypatch.setattr(command, "_next", next_after_rounds)
    code, out, _ = status(server, "--watch")
    assert code == 0
    assert out.index("3 of 20") < out.index("20 of 20 (100%); ended: all 20 rounds are done")


def test_metrics_are_served_until_the_process_is_interrupted(server):
    root = server.folder.root
    program = [sys.executable, "-c", "from dpftrl.cli import start; start()", "status", str(root)]
    program += ["--state-folder", str(root.parent / "state"), "--prometheus", "0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        try:
            assert it.stdout is not None
            line = it.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+/metrics", line)
            assert address, line
            text = urllib.request.urlopen(address[0], timeout=30).read().decode()
            one_round(server)
            later = urllib.request.urlopen(address[0], timeout=30).read().decode()
            it.send_signal(signal.SIGINT)
            _, err = it.communicate(timeout=30)
        finally:
            it.kill()
    assert it.returncode == 130
    assert err.splitlines()[-1] == "interrupted"  # before it: how long reading took, if it was long
    assert re.search(r"^dpftrl_rounds\{.*\} 3\.0$", text, re.MULTILINE)
    assert re.search(r"^dpftrl_rounds\{.*\} 4\.0$", later, re.MULTILINE)


def test_without_the_package_the_message_names_the_extra(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    root = Path(server.folder.root)
    refused = refused_in_one_line("status", root, "--prometheus", "0")
    assert "pip install 'dpftrl[metrics]'" in refused
