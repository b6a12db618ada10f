"""A SuperLink and SuperNodes as processes on this machine, with TLS and authentication.

Their commands are those of the systemd units in `deploy/`.
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from supervisor import UNITS, Supervisor, Unit, environment_file

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
MAKE_KEYS = UNITS / "make_keys.sh"
SECONDS = 180.0
# A Flower SuperNode that announces its replies but never uploads their contents.
KEEPS_ALL = """
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode
start_client_internal.push_object_contents_from_iterable = lambda *_, **__: None
flower_supernode()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(holds: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if result := holds():
                return result
        time.sleep(0.1)
    raise TimeoutError(f"{what} did not happen within {seconds:g} s")


def _write(path: Path, settings: Mapping[str, str]) -> None:
    lines = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    path.write_text("\n".join(lines) + "\n")


class Deployment:
    """A deployment: its processes and its files.

    Args:
        place: A folder of its own.
        nodes: How many SuperNodes there are keys for.
        authenticated: Whether the SuperLink knows its SuperNodes.
    """

    def __init__(self, place: Path, nodes: int = 3, authenticated: bool = True):
        self.place = place
        self.keys = place / "keys"
        self.port = free_port()
        self.nodes = nodes
        self.authenticated = authenticated
        self.last_run = 0
        self.started: list[subprocess.Popen[bytes]] = []
        subprocess.run([MAKE_KEYS, self.keys, "127.0.0.1", str(nodes)], check=True)
        self.app = place / "app"
        shutil.copytree(HERE / "deployed_app", self.app, ignore=shutil.ignore_patterns("__py*"))
        (place / "flwr").mkdir()
        config = (UNITS / "config.toml").read_text()
        for shipped, ours in (("9092", str(self.port)), ("/etc/dpftrl/keys", str(self.keys))):
            config = config.replace(shipped, ours)
        (place / "flwr" / "config.toml").write_text(config)
        self._write_settings()
        self.supervisor = Supervisor(place / "etc", place)

    def _write_settings(self, **app: str) -> None:
        """Write the environment files of the units; the shipped ones say which there are."""
        ours = {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.place / "flwr"),
            "DPFTRL_STATE": str(self.place / "devices"),
            "DPFTRL_KEYS": str(self.keys),
            "DPFTRL_DATA": str(self.place),
            "DPFTRL_DEPLOY": str(UNITS),
            "SUPERLINK_HOST": "127.0.0.1",
            "SUPERLINK_PORT": str(self.port),
            "SUPERLINK_ADDRESS": f"127.0.0.1:{self.port}",
            "DPFTRL_APP": str(self.app),
            "DPFTRL_RUN_CONFIG": "",
            **app,
        }
        assert set(ours) == set(environment_file(UNITS / "flower.env"))
        more = {"PYTHONWARNINGS": "ignore", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        (self.place / "etc").mkdir(exist_ok=True)
        _write(self.place / "etc" / "flower.env", {**ours, **more})
        for node in range(self.nodes):
            state = self.place / f"device-{node}"
            config = f'partition-id={node} num-partitions={self.nodes} dpftrl-state="{state}"'
            own = {"SUPERNODE_PORT": str(free_port()), "SUPERNODE_CONFIG": config}
            assert set(own) == set(environment_file(UNITS / "supernode.env"))
            _write(self.place / "etc" / f"supernode-{node}.env", own)

    def unit(self, name: str) -> Unit:
        return Unit(name, self.place / "etc")

    def start(self, unit: Unit, command: list[str]) -> None:
        """Start a process once, without a supervisor."""
        with (self.place / f"{unit.name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=unit.environment(),
                cwd=self.place,
                start_new_session=True,
            )
        self.started.append(process)

    def start_superlink(self) -> None:
        unit = self.unit("dpftrl-superlink")
        command = unit.command()
        if not self.authenticated:
            command.remove("--enable-supernode-auth")
        self.start(unit, command)
        until(self._listens, "the SuperLink's start")

    def _listens(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True

    def register(self) -> None:
        for node in range(self.nodes):
            self.flwr("supernode", "register", self.keys / f"node-{node}.pub", "here")

    def start_node(self, node: int, uploads: bool = True) -> None:
        """Start a node; one that does not upload announces its replies but keeps their contents."""
        unit = self.unit(f"dpftrl-supernode@{node}")
        command = unit.command()
        if not self.authenticated:
            at = command.index("--auth-supernode-private-key")
            del command[at : at + 2]
        if not uploads:
            at = command.index("flower-supernode")
            command[at : at + 1] = ["python", "-c", KEEPS_ALL]
        self.start(unit, command)

    def start_all(self, silent: tuple[int, ...] = ()) -> None:
        self.start_superlink()
        if self.authenticated:
            self.register()
        for node in range(self.nodes):
            self.start_node(node, uploads=node not in silent)
        until(lambda: self.activations() == self.nodes, "the SuperNodes' start")

    def activations(self) -> int:
        log = self.place / "dpftrl-superlink.log"
        return log.read_text().count("Activated node_id")

    def flwr(self, *arguments: object) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, arguments)],
            capture_output=True,
            text=True,
            env=self.unit("dpftrl-serverapp").environment(),
            cwd=self.place,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"flwr {arguments}: {done.stdout} {done.stderr}")
        return done.stdout

    def supervise(self, **config: object) -> None:
        """Start the whole deployment under the supervisor, which nobody touches from now on."""
        self._write_settings(DPFTRL_RUN_CONFIG=self._run_config(config))
        self.supervisor.start("dpftrl-superlink")
        until(self._listens, "the SuperLink's start")
        self.register()
        for node in range(self.nodes):
            self.supervisor.start(f"dpftrl-supernode@{node}")
        self.supervisor.start("dpftrl-serverapp")

    def _run_config(self, config: Mapping[str, object]) -> str:
        options = {"folder": str(self.place), **config}
        return " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in options.items())

    def run(self, **config: object) -> int:
        text = self._run_config(config)
        answer = self.flwr("run", self.app, "here", "--run-config", text, "--format", "json")
        self.last_run = int(json.loads(answer[answer.index("{") :])["run-id"])
        return self.last_run

    def status(self, run: int) -> str:
        answer = self.flwr("ls", "here", "--run-id", run, "--format", "json")
        return str(json.loads(answer[answer.index("{") :])["runs"][0]["status"])

    def released(self) -> int:
        """Return the number of rounds at the ServerApp's last evaluation."""
        return self.losses()[-1][0]

    def losses(self) -> list[tuple[int, float]]:
        """Return the number of rounds and the loss of each evaluation."""
        lines = (self.place / "losses.jsonl").read_text().splitlines()
        return [(int(rounds), float(loss)) for rounds, loss in map(json.loads, lines)]

    def journal(self) -> list[dict[str, Any]]:
        lines = (self.place / "run/private/journal.jsonl").read_bytes().splitlines()
        return [json.loads(line)["record"] for line in lines]

    def server_app(self) -> int:
        """Return the id of the process that holds the run, from its lock file."""
        return int((self.place / "run/private/lock").read_text())

    def names(self) -> dict[str, int]:
        """Return the nodes by their ledger names, before these are hashed."""
        node_by_key: dict[str, int] = {}
        for node in range(self.nodes):
            key = load_ssh_public_key((self.keys / f"node-{node}.pub").read_bytes())
            pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            node_by_key[hashlib.sha256(pem).hexdigest()] = node
        return node_by_key

    def stop(self) -> None:
        """End the processes that this deployment started, each by its own session."""
        self.supervisor.stop()
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def deployed(place: Path, silent: tuple[int, ...] = (), **options: Any) -> Iterator[Deployment]:
    deployment = Deployment(place, **options)
    try:
        deployment.start_all(silent)
        yield deployment
    finally:
        deployment.stop()
