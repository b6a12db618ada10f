"""A small supervisor that starts and restarts processes as the systemd units in `deploy/` say.

It reads `ExecStart`, `Environment`, `EnvironmentFile`, `Restart` and `RestartSec`, and knows
nothing else about what it runs. Like systemd, it kills what is left of a service before it starts
the service again.
"""

import contextlib
import os
import shlex
import signal
import string
import subprocess
from pathlib import Path
from threading import Event, Lock, Thread

UNITS = Path(__file__).parents[2] / "deploy"


class Unit:
    """A service of a unit file.

    Args:
        name: Name of the unit, with its instance: `dpftrl-supernode@3`.
        etc: The folder that stands for /etc/dpftrl.
    """

    def __init__(self, name: str, etc: Path):
        template, _, self.instance = name.partition("@")
        file = f"{template}@.service" if "@" in name else f"{template}.service"
        sections = _read(UNITS / file)
        service = sections["Service"]
        self.name = name
        self.restart = service["Restart"][-1]
        self.restart_seconds = float(service["RestartSec"][-1])
        self._start = service["ExecStart"][-1]
        self._environment: dict[str, str] = {}
        for line in service.get("Environment", []):
            self._environment |= dict(word.split("=", 1) for word in shlex.split(line))
        for path in service["EnvironmentFile"]:
            there = etc / Path(path.replace("%i", self.instance)).relative_to("/etc/dpftrl")
            self._environment |= environment_file(there)

    def environment(self) -> dict[str, str]:
        """The environment of the service."""
        return {"HOME": os.environ["HOME"], **self._environment}

    def command(self) -> list[str]:
        """`ExecStart`, with its specifiers and variables replaced, each within its word."""
        words = shlex.split(self._start.replace("%i", self.instance))
        return [string.Template(word).substitute(self.environment()) for word in words]

    def restarts_after(self, code: int) -> bool:
        """Whether systemd restarts the service after this exit code, or signal if negative."""
        return {"always": True, "on-failure": code != 0, "no": False}[self.restart]


def _read(path: Path) -> dict[str, dict[str, list[str]]]:
    """Read a unit file; a key may be there more than once."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    sections: dict[str, dict[str, list[str]]] = {}
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), {})
        elif line and line[0] not in "#;":
            key, value = line.split("=", 1)
            current.setdefault(key.strip(), []).append(value.strip())
    return sections


def environment_file(path: Path) -> dict[str, str]:
    """Read a file as systemd reads an `EnvironmentFile`."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name: "".join(shlex.split(value)) for name, value in pairs}


class Service:
    """A service that is kept running, in a thread of its own."""

    def __init__(self, unit: Unit, log: Path):
        self.unit = unit
        self.starts = 0
        self.codes: list[int] = []
        self.ended = Event()
        self._log = log
        self._stopped = Event()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = Thread(target=self._keep_running, name=unit.name)
        self._thread.start()

    def _keep_running(self) -> None:
        while (process := self._started()) is not None:
            code = process.wait()
            self._kill_group(process)
            self.codes.append(code)
            if not self.unit.restarts_after(code):
                break
            self._stopped.wait(self.unit.restart_seconds)
        self.ended.set()

    def _started(self) -> subprocess.Popen[bytes] | None:
        with self._lock, self._log.open("ab") as log:
            if self._stopped.is_set():
                return None
            self._process = subprocess.Popen(
                self.unit.command(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.unit.environment(),
                cwd=self._log.parent,
                start_new_session=True,
            )
            self.starts += 1
            return self._process

    def kill(self) -> None:
        """kill -9 the main process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """End the service for good."""
        self._stopped.set()
        with self._lock:
            if self._process is not None:
                self._kill_group(self._process)
        self._thread.join(60)

    @staticmethod
    def _kill_group(process: subprocess.Popen[bytes]) -> None:
        """End all processes of the service's session, which stands for its control group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


class Supervisor:
    """The services of a deployment."""

    def __init__(self, etc: Path, logs: Path):
        self._etc = etc
        self._logs = logs
        self.services: dict[str, Service] = {}

    def start(self, name: str) -> Service:
        """Start a service and keep it running."""
        self.services[name] = Service(Unit(name, self._etc), self._logs / f"{name}.log")
        return self.services[name]

    def stop(self) -> None:
        """End all services."""
        for service in self.services.values():
            service.stop()
