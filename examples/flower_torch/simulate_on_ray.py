"""All devices on Flower's own simulation, which uses Ray: simulate_on_ray.py PLAN FOLDER.

simulate.py does the same without Ray, faster, and can be resumed.
"""

import os
import sys

# Ray listens on every network interface, without a password, unless this is set before its import.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from blobs.client_app import app as client_app
from blobs.server_app import main
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from dpftrl.flower import load_plan


def simulate(plan: str, folder: str) -> None:
    told = {"plan": plan, "folder": folder, "lr": 0.1, "clip-norm": 1.0, "require-auth": False}
    app = ServerApp()

    @app.main()
    def start(grid: Grid, _: Context) -> None:
        main(grid, Context(1, 1, {}, RecordDict(), told))

    nodes = load_plan(plan).fleet.population
    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"include_dashboard": False}}
    run_simulation(app, client_app, num_supernodes=nodes, backend_config=backend)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: python simulate_on_ray.py PLAN FOLDER", file=sys.stderr)
        sys.exit(2)
    simulate(*sys.argv[1:])
