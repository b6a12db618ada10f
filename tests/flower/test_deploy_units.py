"""The systemd units and scripts in `deploy/`."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import BIN, free_port
from supervisor import UNITS, Unit

from dpftrl.verify import verify_run

SERVICES = sorted(UNITS.glob("*.service"))
NAMES = ("dpftrl-superlink", "dpftrl-serverapp", "dpftrl-supernode@0")


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """A folder that stands for /etc/dpftrl, with the shipped settings."""
    shutil.copy(UNITS / "flower.env", tmp_path / "flower.env")
    shutil.copy(UNITS / "supernode.env", tmp_path / "supernode-0.env")
    return tmp_path


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_units() -> None:
    assert len(SERVICES) == 3
    command = ["systemd-analyze", "verify", *map(str, SERVICES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_settings_complete_the_commands(etc: Path, name: str) -> None:
    program, *words = Unit(name, etc).command()
    assert program == "/usr/bin/env"
    assert not [word for word in words if re.search(r"[$%]", word)]


def test_which_exits_are_restarted(etc: Path) -> None:
    refused = 1  # of a SuperNode that came back too early; Flower logs "Exit Code: 305"
    for name in NAMES:
        unit = Unit(name, etc)
        for code in (refused, 305 % 256, -9):
            assert unit.restarts_after(code)
        assert unit.restarts_after(0) == (name != "dpftrl-serverapp"), "the training is over"


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_systemd_never_gives_up_restarting(path: Path) -> None:
    assert "\nStartLimitIntervalSec=0\n" in path.read_text(encoding="utf-8")


def test_a_node_keeps_one_name_and_records_its_contacts_outside_of_tmp(etc: Path) -> None:
    """The key is its name in the ledger; the contact records must survive a restart."""
    command = Unit("dpftrl-supernode@0", etc).command()
    assert command[command.index("--auth-supernode-private-key") + 1] == "/etc/dpftrl/keys/node-0"
    assert 'dpftrl-state="/var/lib/dpftrl/device-0"' in command[-1]
    assert "--enable-supernode-auth" in Unit("dpftrl-superlink", etc).command()
    assert "--insecure" not in " ".join(path.read_text() for path in SERVICES)


@pytest.mark.parametrize("script", sorted(UNITS.glob("*.sh")), ids=lambda path: path.name)
def test_the_shell_scripts_parse(script: Path) -> None:
    subprocess.run(["sh", "-n", script], check=True)


@pytest.mark.slow
def test_the_script_for_one_machine_trains_to_the_end(tmp_path: Path) -> None:
    """As the README of the PyTorch example says; the second call finds the training over."""
    example = UNITS.parent / "examples" / "flower_torch"
    app, place, plan = tmp_path / "app", tmp_path / "there", tmp_path / "small.json"
    shutil.copytree(example, app, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(free_port()),
        "DPFTRL_STATE": str(tmp_path / "witness"),
        "PYTHONWARNINGS": "ignore",
    }
    fleet = ("--population", "4", "--report-goal", "2", "--rounds", "3", "--delta", "1e-2")
    planned = [sys.executable, "-m", "dpftrl", "plan", *fleet, "--noise-multiplier", "1"]
    subprocess.run([*planned, "--out", plan], env=environment, check=True, capture_output=True)
    config = f"plan='{plan}' folder='{place / 'run'}'"
    for _ in range(2):
        with subprocess.Popen(
            [UNITS / "try.sh", app, place, "4", config],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=1800)
            finally:
                with contextlib.suppress(ProcessLookupError):  # mostly, all of it has ended
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, said
    assert said.splitlines()[-1].endswith("completed")
    verdict = verify_run(place / "run", tmp_path / "witness")
    assert verdict.passed
    assert verdict.rounds == 3
