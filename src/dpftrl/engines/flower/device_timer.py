"""When a device took part last, on its own disk.

Flower's `Context.state` is gone after a crash, with a new run, and when the SuperNode starts again;
the server would have to be trusted alone.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, final

import msgspec

from dpftrl.engines.flower.messages import Instruction
from dpftrl.storage import default_state_folder, read_json, replace_durably

SECONDS: Final = 3600.0


class TurnFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The last turn that a device had in a run.

    Attributes:
        row: The row of noise it was for.
        attempt: And the attempt.
        time: When it began, in seconds since 1970.
    """

    format: Literal["dpftrl turn"]
    version: Literal[1]
    row: int
    attempt: int
    time: float


@final
class DeviceTimer:
    """The turns of one device.

    Guarantees:
        A turn is on the disk before the device trains. Rows of two turns in a run are min-sep or
        more apart (or hours, where the run goes by time), as the server names them; only the same
        attempt may be repeated, which a server that was interrupted does. It guards against a
        server that lost its ledger, not against one that lies.

    Args:
        folder: Of this device alone; it must outlive restarts.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def take_turn(self, told: Instruction) -> bool:
        """Write down that the device takes part now, unless it is too early for that."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{told.run}.json"
        with _alone(self._folder / f"{told.run}.lock"):
            now = time.time()
            last = read_json(path, TurnFile, "turn") if path.exists() else None
            if last is not None and (told.row, told.attempt) == (last.row, last.attempt):
                return True
            if last is not None and not _may_return(last, told, now):
                return False
            turn = TurnFile("dpftrl turn", 1, told.row, told.attempt, now)
            replace_durably(path, msgspec.json.encode(turn))
        return True


def _may_return(last: TurnFile, told: Instruction, now: float) -> bool:
    if told.timer_hours > 0:
        return told.row > last.row and now - last.time >= told.timer_hours * SECONDS
    return told.row - last.row >= told.min_sep


@contextmanager
def _alone(path: Path) -> Generator[None]:
    """One at a time: two messages to one device must not both find that it is its turn."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def device_folder(node_id: int) -> Path:
    """Where a device's turns are kept unless it says otherwise."""
    return default_state_folder() / "devices" / str(node_id)
