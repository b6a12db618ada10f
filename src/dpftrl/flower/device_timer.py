"""The contact timer of a device: when it last took part in a run, kept on its own disk.

The device keeps this record itself, for two reasons. Flower's `Context.state` is lost after a
crash, in a new run, and when the SuperNode restarts. Without its own record, the device would have
to trust the server alone.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, final

import msgspec

from dpftrl._internal.storage import default_state_folder, read_json, replace_file
from dpftrl.flower.messages import ContactRule, Instruction, Refusal

SECONDS_PER_HOUR: Final = 3600.0
TOO_EARLY: Final = "it is not this device's turn yet"
WEAKER_RULE: Final = "the server's rule for turns is weaker than what this device was promised"


class ContactFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The last contact of a device in one run, as it is stored on the device's disk.

    Attributes:
        row: Row of the noise matrix (the round) that the contact was for.
        attempt: Attempt that the contact was for.
        began: Earliest time at which the server may have sent the message of the contact, in
            seconds since 1970 by the device's clock (see `_earliest_start`).
        rule: Contact rule that the server stated at the first contact of the run.
        rounds: Number of rounds that the server stated at the first contact of the run.
    """

    format: Literal["dpftrl turn"]
    version: Literal[1]
    row: int
    attempt: int
    began: float
    rule: ContactRule
    rounds: int


@final
class DeviceTimer:
    """Decides whether a device may accept a contact, and records the contacts it accepts.

    Guarantees:
        A contact is on the disk before the device trains. Two contacts in one run are at least as
        far apart as the promised rule requires or, without a promise, the rule of the run's first
        contact. A rule in rows uses the row numbers that the server sends. A rule in hours uses the
        device's own clock; the hours may be shorter by the time that a message may take, but never
        by more than half of the timer. Row numbers never decrease. An attempt may be repeated,
        because a server that was interrupted sends it again. Promised hours hold across runs; any
        other rule holds in each run separately.

    Args:
        folder: Folder of this device alone. It must survive restarts.
        promised: Rule that the device's owner insists on, whatever the server says.
    """

    def __init__(self, folder: Path, promised: ContactRule | None = None):
        self._folder = folder
        self._promised = promised

    def accept_contact(self, instruction: Instruction, ttl: float) -> Refusal | None:
        """Record that the device takes part now, unless a rule forbids it.

        Args:
            instruction: The instruction that the server sent.
            ttl: Time to live of the server's message, in seconds.

        Returns:
            None if the device may train; otherwise the reason for the refusal.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{instruction.run}.json"
        with _exclusive_lock(self._folder / "lock"):
            now = time.time()
            last = _read(path) if path.exists() else None
            if self._is_weaker(instruction, last):
                return WEAKER_RULE
            if last is not None and _same_attempt(instruction, last):
                return None
            if not _may_return(last, instruction, now) or not self._promised_hours_passed(now):
                return TOO_EARLY
            contact = ContactFile(
                "dpftrl turn",
                1,
                row=instruction.row,
                attempt=instruction.attempt,
                began=_earliest_start(self._promised or instruction.rule, ttl, now),
                rule=last.rule if last else instruction.rule,
                rounds=last.rounds if last else instruction.rounds,
            )
            replace_file(path, msgspec.json.encode(contact), private=True)
        return None

    def _is_weaker(self, instruction: Instruction, last: ContactFile | None) -> bool:
        """Whether the rule is weaker, or the number of rounds larger, than the device accepts."""
        promised = self._promised or (last.rule if last else None)
        is_weaker = promised is not None and instruction.rule.is_weaker(promised)
        return is_weaker or (last is not None and instruction.rounds > last.rounds)

    def _promised_hours_passed(self, now: float) -> bool:
        """Whether the promised hours have passed since the last contact of every run.

        All runs count, because a server could claim that every message starts a new run.
        """
        if self._promised is None or not self._promised.timer_hours > 0:
            return True
        rest = self._promised.timer_hours * SECONDS_PER_HOUR
        return all(now - _read(path).began >= rest for path in self._folder.glob("*.json"))


def device_folder(node_id: int) -> Path:
    """Return the default folder for the contact records of a device."""
    return default_state_folder() / "devices" / str(node_id)


def _same_attempt(instruction: Instruction, last: ContactFile) -> bool:
    return (instruction.row, instruction.attempt) == (last.row, last.attempt)


def _may_return(last: ContactFile | None, instruction: Instruction, now: float) -> bool:
    """Whether the rule in the instruction allows a contact after the last one of this run."""
    if last is None:
        return True
    if instruction.timer_hours > 0:
        rest = instruction.timer_hours * SECONDS_PER_HOUR
        return instruction.row > last.row and now - last.began >= rest
    return instruction.row - last.row >= instruction.min_sep


def _earliest_start(rule: ContactRule, ttl: float, now: float) -> float:
    """Return the earliest time, by the device's clock, from which the server may count the timer.

    The server counts from the time it sent the message, which the device does not know. If the
    device counted from the arrival of a slow message, it would refuse the next message although the
    server sent it in time. At most half of the timer is subtracted. `rule` is the promised rule if
    there is one, so that nothing the server says can shorten a promised timer.
    """
    longest_delivery = min(ttl, rule.timer_hours * SECONDS_PER_HOUR / 2)
    return now - longest_delivery if longest_delivery > 0 else now


def _read(path: Path) -> ContactFile:
    return read_json(path, ContactFile, "turn")  # "turn": the file's `format` is "dpftrl turn"


@contextmanager
def _exclusive_lock(path: Path) -> Generator[None]:
    """Hold a file lock, so that two messages cannot both be accepted at the same time."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
