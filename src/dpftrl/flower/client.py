"""The client side: a Flower mod that turns any ClientApp that trains into a private client.

`DeviceTimer` decides when a device takes part again. The device records its own contacts on its
disk, for two reasons. Flower's `Context.state` is lost after a crash, in a new run, and when the
SuperNode restarts. Without its own record, the device would have to trust the server alone.
"""

import fcntl
import math
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from logging import ERROR
from pathlib import Path
from typing import Any, Final, Literal, final

import msgspec
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MessageType
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.storage import default_state_folder, read_json, replace_file
from dpftrl.errors import InvalidInput
from dpftrl.flower._flwr_internals import ClientAppCallable, Mod, is_ray_actor, log
from dpftrl.flower.messages import (
    ContactRule,
    Draft,
    Instruction,
    Refusal,
    arrays_of,
    only_arrays,
    refusal,
    report,
)

# Numbers per block of `_write_difference`: 256 KiB in float64, which fits into a core's L2 cache.
BLOCK: Final = 32_768
# Key in a SuperNode's --node-config: the folder where this device records its contacts.
FOLDER: Final = "dpftrl-state"
# Updates are sent in this type.
FLOAT32: Final = np.dtype(np.float32)
# Whether this thread runs a node of an `InProcessGrid`.
IN_PROCESS: Final = ContextVar("dpftrl_in_process", default=False)
SECONDS_PER_HOUR: Final = 3600.0
TOO_EARLY: Final = "it is not this device's turn yet"
WEAKER_RULE: Final = "the server's rule for turns is weaker than what this device was promised"

Arrays = Mapping[str, NDArray[Any]]


def client_mod(
    *,
    clip_norm: float | None = None,
    min_sep: int | None = None,
    timer_hours: float | None = None,
    timer_folder: str | os.PathLike[str] | None = None,
    simulated: bool = False,
) -> Mod:
    """Return a Flower mod that sends clipped updates and refuses contacts that come too early.

    The ClientApp stays as it is: it reads the one ArrayRecord of the message, trains, and replies
    with one ArrayRecord of the same names and shapes. The mod replaces that model by the clipped
    update. It drops everything else in the reply (losses, numbers of examples), because no noise
    protects it.

    Args:
        clip_norm: Clip norm that the client was promised. A server with another one is refused, and
            so is one with adaptive clipping, whose norm moves.
        min_sep: Rows (rounds) between two contacts that the client was promised. A server with
            fewer, or with a timer in hours, is refused. By default, the rule that the server names
            first must hold for the rest of that run.
        timer_hours: Hours between two contacts that the client was promised, instead of `min_sep`.
            They are counted by the device's own clock, and hold across runs.
        timer_folder: Folder where this device records its contacts, on a disk that survives
            restarts. By default the `dpftrl-state` of the node's config, or else a folder named
            after the node's id in $DPFTRL_STATE or in the user's state folder; a simulated node
            (of an `InProcessGrid`, or of Flower's simulation) has no such folder.
        simulated: Record no contacts, because there is no device. In a simulation the server's
            ledger is enough.

    Raises:
        InvalidInput: A promise is not a positive number, or both `min_sep` and `timer_hours` are
            given.
    """
    promised_clip_norm = None if clip_norm is None else positive_number("clip_norm", clip_norm)
    promised_rule = _promised_rule(min_sep, timer_hours)

    def mod(message: Message, context: Context, train: ClientAppCallable) -> Message:
        try:
            instruction, received = _read(message, promised_clip_norm)
            folder = None if simulated else _folder(timer_folder, context)
            timer = DeviceTimer(folder, promised_rule)
            _accept_contact(timer, instruction, message.metadata.ttl)
            trained = _trained(train, message, context)
            update = _update(trained, received, instruction.clip_norm)
            return report(message, update, instruction)
        except _Refused as refused:
            return refusal(message, refused.reason)

    return mod


def _promised_rule(min_sep: int | None, timer_hours: float | None) -> ContactRule | None:
    if min_sep is not None and timer_hours is not None:
        raise InvalidInput(
            "contacts are limited by rows or by hours: give min_sep or timer_hours, not both"
        )
    if timer_hours is not None:
        return ContactRule(1, positive_number("timer_hours", timer_hours))
    return None if min_sep is None else ContactRule(whole_number("min_sep", min_sep), 0.0)


class _Refused(Exception):
    """The client refuses the message."""

    def __init__(self, reason: Refusal):
        self.reason: Refusal = reason


def _read(message: Message, promised_clip_norm: float | None) -> tuple[Instruction, Arrays]:
    """Return the instruction and the model in a message; refuse anything else."""
    if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
        raise _Refused("this device answers nothing but training, whose answers are protected")
    try:
        instruction = Instruction.of(message)
        received = arrays_of(only_arrays(message.content))
    except (ValueError, TypeError):  # numpy raises both for bytes that are not an array
        raise _Refused("the message is not one of dpftrl's strategy") from None
    if promised_clip_norm is not None and instruction.clip_norm != promised_clip_norm:
        raise _Refused("the server's clip norm is not the one that this device was promised")
    return instruction, received


def _accept_contact(timer: "DeviceTimer", instruction: Instruction, ttl: float) -> None:
    """Record the contact, or refuse it."""
    try:
        reason = timer.accept_contact(instruction, ttl)
    except (InvalidInput, OSError):
        raise _Refused("the device could not write down that it took part") from None
    if reason is not None:
        raise _Refused(reason)


def _trained(train: ClientAppCallable, message: Message, context: Context) -> Arrays | None:
    """Return the model that the app trained, or None if it failed; errors stay on the device."""
    try:
        reply = train(message, context)
        if not reply.has_error():
            return arrays_of(only_arrays(reply.content))
        log(ERROR, "Training failed: %s", reply.error.reason)
    except Exception as error:  # an app may raise any exception
        log(ERROR, "Training failed", exc_info=error)
    return None


def _update(trained: Arrays | None, received: Arrays, clip_norm: float) -> ArrayRecord:
    """Return the clipped update; zeros if training failed.

    Whether training fails may depend on the client's data. Who is counted must not depend on it.
    """
    drafts = {name: Draft(array.shape, FLOAT32) for name, array in received.items()}
    if trained is not None:
        update = {name: draft.values for name, draft in drafts.items()}
        try:
            write_update(update, received, trained, clip_norm)
        except (InvalidInput, TypeError):
            raise _Refused(
                "what was trained has other arrays than the model that was handed out"
            ) from None
        del update  # with other references left, `finished` would copy the arrays
    return ArrayRecord({name: draft.finished() for name, draft in drafts.items()})


def _folder(given: str | os.PathLike[str] | None, context: Context) -> Path | None:
    """Return the folder for the contact records, in the order that `client_mod` documents.

    None: there is no device, so nothing is recorded.
    """
    if given is not None:
        return Path(given)
    if FOLDER in context.node_config:
        return Path(str(context.node_config[FOLDER])).expanduser()
    return None if IN_PROCESS.get() or is_ray_actor() else device_folder(context.node_id)


def write_update(update: Arrays, received: Arrays, trained: Arrays, clip_norm: float) -> None:
    """Write `trained - received` into `update`, scaled down to the clip norm if it is larger.

    The norm is computed in float64. The server clips again; clipping here keeps a larger update
    from leaving the device at all. The update of a model that diverged (NaN or infinity) is sent as
    it is, and the server counts it as zeros.

    Args:
        update: Contiguous arrays of float32 that the result is written into.
        received: The model that the client received.
        trained: The same model after training.
        clip_norm: Largest L2 norm that the update may have.

    Raises:
        InvalidInput: The two models have different names or shapes.
    """
    if _shapes(received) != _shapes(trained):
        raise InvalidInput("the trained model has other arrays than the model that was sent")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = (
            _write_difference(update[name], trained[name], received[name]) for name in update
        )
        norm = math.sqrt(sum(squares))
        if not norm <= clip_norm:  # NaN stays NaN
            factor = _rounded_down(clip_norm / norm)
            for change in update.values():
                np.multiply(change, factor, out=change)


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _rounded_down(factor: float) -> np.float32:
    """Return the largest float32 that is not above the factor.

    In float32, scaling needs no copy; rounded down, it never leaves a norm above the clip norm. The
    comparison is in float64: numpy compares a float32 with a Python number in float32.
    """
    nearest = np.float32(factor)
    return np.nextafter(nearest, np.float32(0)) if float(nearest) > factor else nearest


def _write_difference(change: NDArray[Any], trained: NDArray[Any], received: NDArray[Any]) -> float:
    """Write a difference, rounded once to float32; return its sum of squares, in float64.

    It works block by block, so that a number is still in the cache when it is squared.
    """
    target, minuend, subtrahend = change.reshape(-1), trained.reshape(-1), received.reshape(-1)
    buffer, total = np.empty(min(target.size, BLOCK)), 0.0
    for start in range(0, target.size, BLOCK):
        span = slice(start, start + BLOCK)
        part = target[span]
        np.subtract(minuend[span], subtrahend[span], out=part, casting="same_kind")
        block = buffer[: part.size]
        block[:] = part
        total += float(np.dot(block, block))
    return total


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
        folder: Folder of this device alone. It must survive restarts. None for a simulated device,
            which records nothing.
        promised: Rule that the device's owner insists on, whatever the server says.
    """

    def __init__(self, folder: Path | None, promised: ContactRule | None = None):
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
        if self._folder is None:
            return WEAKER_RULE if self._is_weaker(instruction, None) else None
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{instruction.run}.json"
        with _exclusive_lock(self._folder / "lock"):
            now = time.time()
            last = _read_contact(path) if path.exists() else None
            if self._is_weaker(instruction, last):
                return WEAKER_RULE
            if last is not None and _same_attempt(instruction, last):
                return None
            has_rested = self._promised_hours_passed(self._folder, now)
            if not _may_return(last, instruction, now) or not has_rested:
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

    def _promised_hours_passed(self, folder: Path, now: float) -> bool:
        """Whether the promised hours have passed since the last contact of every run.

        All runs count, because a server could claim that every message starts a new run.
        """
        if self._promised is None or not self._promised.timer_hours > 0:
            return True
        rest = self._promised.timer_hours * SECONDS_PER_HOUR
        return all(now - _read_contact(path).began >= rest for path in folder.glob("*.json"))


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


def _read_contact(path: Path) -> ContactFile:
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
