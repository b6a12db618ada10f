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

from dpftrl._internal.storage import default_state_folder, read_json, replace_durably
from dpftrl.flower.messages import Instruction, Refusal, TurnRule

SECONDS: Final = 3600.0
EARLY: Final = "it is not this device's turn yet"
WEAKER: Final = "the server's rule for turns is weaker than what this device was promised"


class TurnFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The last turn that a device had in a run.

    Attributes:
        row: The row of noise it was for.
        attempt: And the attempt.
        began: When it began, in seconds since 1970 by the device's clock.
        rule: What the server said of turns, the first time.
        rounds: What it said of the rounds of the run, the first time.
    """

    format: Literal["dpftrl turn"]
    version: Literal[1]
    row: int
    attempt: int
    began: float
    rule: TurnRule
    rounds: int


@final
class DeviceTimer:
    """The turns of one device.

    Guarantees:
        A turn is on the disk before the device trains. Two turns in a run are as far apart as the
        rule of its first turn says, or as the device was promised: by rows, as the server names
        them; or by hours of the device's own clock, from which at most the time that a message may
        take is taken off, and never more than half. No turn goes back. Only the same attempt may be
        repeated, which a server that was interrupted does. Hours that were promised hold across
        runs; otherwise each run has turns of its own.

    Args:
        folder: Of this device alone; it must outlive restarts.
        promised: What the device's owner insists on, whatever the server says.
    """

    def __init__(self, folder: Path, promised: TurnRule | None = None):
        self._folder = folder
        self._promised = promised

    def take_turn(self, told: Instruction, ttl: float) -> Refusal | None:
        """Write down that the device takes part now, unless it must not; then say why.

        Args:
            told: What the server says.
            ttl: Seconds that its message may take.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{told.run}.json"
        with _alone(self._folder / "lock"):
            now = time.time()
            last = _read(path) if path.exists() else None
            if self._is_weaker(told, last):
                return WEAKER
            if last is not None and (told.row, told.attempt) == (last.row, last.attempt):
                return None
            if not _may_return(last, told, now) or not self._promised_hours_passed(now):
                return EARLY
            rule, rounds = (last.rule, last.rounds) if last else (told.rule, told.rounds)
            began = _began(self._promised or told.rule, ttl, now)
            turn = TurnFile("dpftrl turn", 1, told.row, told.attempt, began, rule, rounds)
            replace_durably(path, msgspec.json.encode(turn))
        return None

    def _is_weaker(self, told: Instruction, last: TurnFile | None) -> bool:
        promised = self._promised or (last.rule if last else None)
        is_weaker = promised is not None and told.rule.is_weaker(promised)
        return is_weaker or (last is not None and told.rounds > last.rounds)

    def _promised_hours_passed(self, now: float) -> bool:
        """In all runs: a server could say that every message begins another."""
        if self._promised is None or not self._promised.timer_hours > 0:
            return True
        rest = self._promised.timer_hours * SECONDS
        return all(now - _read(path).began >= rest for path in self._folder.glob("*.json"))


def _may_return(last: TurnFile | None, told: Instruction, now: float) -> bool:
    if last is None:
        return True
    if told.timer_hours > 0:
        return told.row > last.row and now - last.began >= told.timer_hours * SECONDS
    return told.row - last.row >= told.min_sep


def _began(rule: TurnRule, ttl: float, now: float) -> float:
    """When the server may have begun to count, at the earliest, on the device's clock.

    Counted from its arrival, a message that took long would make the device refuse the next one,
    which the server sends in time. When it was sent only the server's clock knows. The rule is what
    was promised, if anything was: what the server says takes nothing off that.
    """
    longest = min(ttl, rule.timer_hours * SECONDS / 2)
    return now - longest if longest > 0 else now


def _read(path: Path) -> TurnFile:
    return read_json(path, TurnFile, "turn")


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
