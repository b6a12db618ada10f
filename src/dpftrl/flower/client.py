"""The device's side: a mod around any ClientApp that trains."""

import math
import os
from collections.abc import Mapping
from logging import ERROR
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.supercore import log
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.flower.device_timer import DeviceTimer, device_folder
from dpftrl.flower.messages import (
    Draft,
    Instruction,
    Refusal,
    TurnRule,
    arrays_of,
    only_arrays,
    refusal,
    report,
)

BLOCK: Final = 32_768

Arrays = Mapping[str, NDArray[Any]]


def write_update(update: Arrays, handed: Arrays, trained: Arrays, clip_norm: float) -> None:
    """Write the difference, scaled down to the clip norm; the norm is computed in float64.

    The server clips again: this keeps more than that from leaving the device. A model that
    diverged is passed on, and the server counts it as zeros.

    Args:
        update: Contiguous arrays of float32, which are written to.
        handed: The model that the device was handed.
        trained: What became of it.
        clip_norm: The L2 norm that the update may have.
    """
    if _shapes(handed) != _shapes(trained):
        raise InvalidInput("the arrays of the trained model are not those of the model handed out")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = (_write(update[name], trained[name], handed[name]) for name in update)
        norm = math.sqrt(sum(squares))
        if not norm <= clip_norm:  # NaN stays NaN
            factor = _rounded_down(clip_norm / norm)
            for change in update.values():
                np.multiply(change, factor, out=change)


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _rounded_down(factor: float) -> np.float32:
    """In float32, so that scaling takes no copy; never larger, so that no norm is.

    Compared in float64: numpy would compare a float32 with a number of Python's in float32.
    """
    near = np.float32(factor)
    return np.nextafter(near, np.float32(0)) if float(near) > factor else near


def _write(change: NDArray[Any], trained: NDArray[Any], handed: NDArray[Any]) -> float:
    """Write a difference, rounded once to float32; return its sum of squares, in float64.

    A block at a time, so that a number is still in the cache when it is squared.
    """
    to, minuend, subtrahend = change.reshape(-1), trained.reshape(-1), handed.reshape(-1)
    room, total = np.empty(min(to.size, BLOCK)), 0.0
    for start in range(0, to.size, BLOCK):
        here = slice(start, start + BLOCK)
        part = to[here]
        np.subtract(minuend[here], subtrahend[here], out=part, casting="same_kind")
        block = room[: part.size]
        block[:] = part
        total += float(np.dot(block, block))
    return total


# In a SuperNode's --node-config: the folder where this device remembers its turns.
FOLDER: Final = "dpftrl-state"
# What updates travel in.
FLOAT32: Final = np.dtype(np.float32)


def client_mod(
    *,
    clip_norm: float | None = None,
    min_sep: int | None = None,
    timer_hours: float | None = None,
    timer_folder: str | os.PathLike[str] | None = None,
    simulated: bool = False,
) -> Mod:
    """A Flower mod that turns a trained model into a clipped update, when it is the device's turn.

    The ClientApp stays as it is: it reads the one ArrayRecord of the message, trains, and replies
    with one ArrayRecord of the same names and shapes. What else is in its reply (losses, numbers of
    examples) is dropped: no noise protects it.

    Args:
        clip_norm: What the device was promised; a server that says otherwise is refused.
        min_sep: Rows between its turns that it was promised; a server with fewer, or one that goes
            by time, is refused. By default, what the server says first must hold in that run.
        timer_hours: Hours between its turns that it was promised, instead; they hold by the
            device's own clock, and across runs.
        timer_folder: Where this device remembers its turns, on a disk that outlives restarts. By
            default the `dpftrl-state` of the node's config, or else a folder named after the node's
            id in $DPFTRL_STATE or the user's state folder.
        simulated: Remember nothing, because there is no device: the server's ledger is enough.
    """
    promised = None if clip_norm is None else positive_number("clip_norm", clip_norm)
    rule = _promised_rule(min_sep, timer_hours)

    def mod(message: Message, context: Context, train: ClientAppCallable) -> Message:
        try:
            told, handed = _read(message, promised)
            if not simulated:
                timer = DeviceTimer(_folder(timer_folder, context), rule)
                _take_turn(timer, told, message.metadata.ttl)
            update = _update(_trained(train, message, context), handed, told.clip_norm)
            return report(message, update, told)
        except _Refused as refused:
            return refusal(message, refused.why)

    return mod


def _promised_rule(min_sep: int | None, timer_hours: float | None) -> TurnRule | None:
    if min_sep is not None and timer_hours is not None:
        raise InvalidInput("turns go by rows or by time: give min_sep or timer_hours, not both")
    if timer_hours is not None:
        return TurnRule(1, positive_number("timer_hours", timer_hours))
    return None if min_sep is None else TurnRule(whole_number("min_sep", min_sep), 0.0)


class _Refused(Exception):
    def __init__(self, why: Refusal):
        self.why: Refusal = why


def _read(message: Message, promised: float | None) -> tuple[Instruction, Arrays]:
    if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
        raise _Refused("this device answers nothing but training, whose answers are protected")
    try:
        told = Instruction.of(message)
        handed = arrays_of(only_arrays(message.content))
    except (ValueError, TypeError):  # numpy has many words for what is no array
        raise _Refused("the message is not one of dpftrl's strategy") from None
    if promised is not None and told.clip_norm != promised:
        raise _Refused("the server's clip norm is not the one that this device was promised")
    return told, handed


def _take_turn(timer: DeviceTimer, told: Instruction, ttl: float) -> None:
    try:
        why = timer.take_turn(told, ttl)
    except (InvalidInput, OSError):
        raise _Refused("the device could not write down that it took part") from None
    if why is not None:
        raise _Refused(why)


def _trained(train: ClientAppCallable, message: Message, context: Context) -> Arrays | None:
    """What the app makes of it, or None; what it says when it fails stays on the device."""
    try:
        reply = train(message, context)
        if not reply.has_error():
            return arrays_of(only_arrays(reply.content))
        log(ERROR, "Training failed: %s", reply.error.reason)
    except Exception as error:  # an app may raise anything
        log(ERROR, "Training failed", exc_info=error)
    return None


def _update(trained: Arrays | None, handed: Arrays, clip_norm: float) -> ArrayRecord:
    """The clipped update. Training that failed counts as zeros.

    Whether it fails may depend on what is in the device's data, and who is counted must not.
    """
    drafts = {name: Draft(array.shape, FLOAT32) for name, array in handed.items()}
    if trained is not None:
        update = {name: draft.values for name, draft in drafts.items()}
        try:
            write_update(update, handed, trained, clip_norm)
        except (InvalidInput, TypeError):
            raise _Refused(
                "what was trained has other arrays than the model that was handed out"
            ) from None
        del update  # nobody else may hold what is finished next
    return ArrayRecord({name: draft.finished() for name, draft in drafts.items()})


def _folder(given: str | os.PathLike[str] | None, context: Context) -> Path:
    if given is not None:
        return Path(given)
    if FOLDER in context.node_config:
        return Path(str(context.node_config[FOLDER])).expanduser()
    return device_folder(context.node_id)
