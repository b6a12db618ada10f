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
# Nothing leaves this machine, and nothing listens but on its loopback.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONPATH": str(HERE),
    "PYTHONWARNINGS": "ignore",
}
# Of Linux's prctl: processes whose parent has ended become our children.
PR_SET_CHILD_SUBREAPER = 36


def simulate(folder: Path, nodes: int) -> list[int]:
    """Train; return the nodes' ids."""
    import tiny_apps

    app, ids = ServerApp(), list[int]()

    @app.main()
    def main(grid: Grid, _: Context) -> None:
        while len(found := list(grid.get_node_ids())) < nodes:  # they register one by one
            time.sleep(0.1)
        ids.extend(found)
        patient = Patience(replies=120, nodes=60, attempts=1)
        strategy = tiny_apps.strategy(
            folder, tiny_apps.plan(rounds=4, population=nodes), patience=patient
        )
        strategy.start(grid, tiny_apps.start_arrays())

    # Short: Ray's sockets lie in it, and their names have an end.
    with tempfile.TemporaryDirectory(prefix="ray") as place:
        run_simulation(
            app,
            tiny_apps.client_app(),
            num_supernodes=nodes,
            backend_config={
                "client_resources": {"num_cpus": 1},
                "init_args": {"num_cpus": 2, "_temp_dir": place, "include_dashboard": False},
            },
        )
    return ids


def end_children() -> None:
    """Ray leaves its workers to end by themselves; one may do so while we look."""
    while left := children():
        for child in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += map(int, (thread / "children").read_text().split())
    return found


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
