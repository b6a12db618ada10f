"""`dpftrl web`: the address it prints, the token, and what it refuses."""

import http.client
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from dpftrl.cli.web import web_command
from dpftrl.errors import InvalidInput


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command without a browser; yield the process and the address that it prints."""
    command = [sys.executable, "-m", "dpftrl", "web", "--no-browser", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match is not None
        yield process, match[0]
    finally:
        process.kill()
        process.communicate()


def status_of(address: str, **headers: str) -> int:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_it_listens_on_this_machine_and_ends_with_ctrl_c():
    with served() as (process, address):
        assert urlsplit(address).hostname == "127.0.0.1"
        assert "token" not in address
        assert status_of(address) == 200
        assert status_of(address, Host="evil.example") == 421
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_another_address_needs_the_printed_token(tmp_path):
    with served("--host", "0.0.0.0", "--runs", str(tmp_path)) as (_, address):
        local = address.replace("0.0.0.0", "127.0.0.1")
        assert urlsplit(address).path == "/runs"
        assert re.fullmatch(r"token=[\w-]{32}", urlsplit(address).query)
        assert status_of(local) == 303
        assert status_of(local.partition("?")[0]) == 401
        assert status_of(local[:-1]) == 401


def test_the_token_can_be_asked_for_on_this_machine():
    with served("--token") as (_, address):
        assert "token=" in address
        assert status_of(address.partition("?")[0]) == 401


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runs", "missing"], "missing is not a folder"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--host", "no such host"], "cannot listen on no such host"),
    ],
)
def test_what_cannot_be_served_is_refused(options, message):
    outcome = CliRunner().invoke(web_command, ["--no-browser", *options])
    assert isinstance(outcome.exception, InvalidInput)
    assert message in str(outcome.exception)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    outcome = CliRunner().invoke(web_command, ["--no-browser"])
    assert "pip install 'dpftrl[web]'" in str(outcome.exception)
