"""Run in a fresh process: FOLDER; time the rounds of Flower's simulation, on Ray."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

# Nothing leaves this machine, and nothing listens but on its loopback.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
}
# Of Linux's prctl: processes whose parent has ended become our children.
PR_SET_CHILD_SUBREAPER = 36


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


def children() -> list[int]:
    """Processes whose parent is this one."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found += map(int, (thread / "children").read_text().split())
    return found


def end_children() -> None:
    """Ray leaves its workers to end by themselves: nothing of them may run on beside the others."""
    while left := children():
        for child in left:
            # Ray may be quicker, for those that it started itself.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def main() -> None:
    """Print the seconds of each round."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="ray") as place:
        os.environ.update(ENVIRONMENT, FLWR_HOME=place)
        try:
            seconds = simulate(Path(sys.argv[1]), place)
        finally:
            end_children()
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
