"""Run in a fresh process: STRATEGY GRID CLIENTS ROUNDS STEPS; times of rounds, and peak memory."""

import json
import logging
import os
import resource
import sys
import tempfile
from pathlib import Path

import _ray

# No thread of a library competes with the clients.
ENVIRONMENT = {
    **_ray.ENVIRONMENT,
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parent),
    "PYTHONWARNINGS": "ignore",
}


def in_process(private: bool, clients: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Rounds over our Grid."""
    import _flower_apps as apps

    from dpftrl.flower import InProcessGrid

    grid = InProcessGrid(apps.client_app(private, steps), range(1, clients + 1))
    with tempfile.TemporaryDirectory() as folder:
        run = apps.strategy(private, clients, rounds, Path(folder))
        return apps.timed(run, grid, rounds)


def on_ray(private: bool, clients: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Rounds in Flower's own simulation."""
    import _flower_apps as apps
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    app, found = ServerApp(), dict[str, list[float]]()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="ray") as place:

        @app.main()
        def main(grid: Grid, _: Context) -> None:  # pyright: ignore[reportUnusedFunction]
            run = apps.strategy(private, clients, rounds, Path(place) / "dpftrl")
            found.update(apps.timed(run, grid, rounds))

        run_simulation(
            app,
            apps.client_app(private, steps),
            num_supernodes=clients,
            backend_config={
                "client_resources": {"num_cpus": 1},
                "init_args": {"num_cpus": cores, "_temp_dir": place, "include_dashboard": False},
            },
        )
    return found


def main() -> None:
    """Print what was measured."""
    os.environ.update(ENVIRONMENT)
    strategy, grid, *sizes = sys.argv[1:]
    clients, rounds, steps = map(int, sizes)
    measure = in_process if grid == "in-process" else on_ray
    with _ray.nothing_left():
        found = measure(strategy == "dpftrl", clients, rounds, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    logging.shutdown()
    print(json.dumps({**found, "peak_MiB": peak}))


if __name__ == "__main__":
    main()
