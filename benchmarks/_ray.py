"""Flower's simulation on Ray: where it may listen, and an end to what it leaves behind."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Generator
from pathlib import Path

# Nothing leaves this machine, and nothing listens but on its loopback.
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
}
# Of Linux's prctl: processes whose parent has ended become our children.
PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def nothing_left() -> Generator[None]:
    """Ray leaves its workers to end by themselves: nothing of them may run on beside the others."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        while left := _children():
            for child in left:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it was quicker
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)


def _children() -> list[int]:
    """The processes that this one has started, or that were left to it."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread may end while we look
            found += map(int, (thread / "children").read_text().split())
    return found
