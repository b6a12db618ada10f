"""Run in a fresh process: FOLDER NODES; Flower's simulation on Ray, as JSON of its nodes' ids.

Ray keeps threads and files open to the end of the process, which no test should inherit.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from dpftrl.flower import Patience

HERE = Path(__file__).parent
# No telemetry, and all servers listen on the loopback interface only.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
    "PYTHONWARNINGS": "ignore",
}
# An option of Linux's prctl: processes whose parent has ended become our children.
PR_SET_CHILD_SUBREAPER = 36


def simulate(folder: Path, nodes: int) -> list[int]:
    """Train on Flower's simulation; return the ids of its nodes."""
    import tiny_apps

    app, ids = ServerApp(), list[int]()

    @app.main()
    def main(grid: Grid, _: Context) -> None:
        while len(online := list(grid.get_node_ids())) < nodes:  # they register one by one
            time.sleep(0.1)
        ids.extend(online)
        patient = Patience(replies=120, nodes=60, attempts=1)
        strategy = tiny_apps.strategy(
            folder, tiny_apps.plan(rounds=4, population=nodes), patience=patient
        )
        strategy.start(grid, tiny_apps.start_arrays())

    # A short path: Ray puts its sockets there, and socket paths have a length limit.
    with tempfile.TemporaryDirectory(prefix="ray") as place:
        run_simulation(
            app,
            tiny_apps.client_app(simulated=False),
            num_supernodes=nodes,
            backend_config={
                "client_resources": {"num_cpus": 1},
                "init_args": {"num_cpus": 2, "_temp_dir": place, "include_dashboard": False},
            },
        )
    return ids


def end_children() -> None:
    """Return our child processes. Ray's workers may end while this function runs."""
    while left := children():
        for child in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def children() -> list[int]:
    children: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            children += map(int, (thread / "children").read_text().split())
    return children


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        ids = simulate(Path(sys.argv[1]), int(sys.argv[2]))
    finally:
        end_children()
    sys.stdout.write(json.dumps(ids) + "\n")


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(HERE))
    main()
