"""Run in a fresh process: FOLDER; time the rounds of Flower's simulation, on Ray."""

import json
import os
import sys
import tempfile
from pathlib import Path

import _ray


def simulate(folder: Path, place: str) -> list[float]:
    """Train the same cohorts with one worker a processor; seconds of each round."""
    import _train_flower_apps as apps
    import _train_setting as setting
    from flwr.simulation import run_simulation

    seconds: list[float] = []
    run_simulation(
        apps.server_app(folder, seconds),
        apps.client_app,
        num_supernodes=len(setting.cohorts(str(folder))[0]),
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": len(os.sched_getaffinity(0)), "_temp_dir": place},
        },
    )
    return seconds


def main() -> None:
    """Print the seconds of each round."""
    with tempfile.TemporaryDirectory(prefix="ray") as place, _ray.nothing_left():
        os.environ.update(_ray.ENVIRONMENT, FLWR_HOME=place)
        seconds = simulate(Path(sys.argv[1]), place)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
