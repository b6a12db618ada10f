"""What server and device say to each other, beside the model."""

import math
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any, Final, Literal, Self, final, get_args

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.errors import InvalidInput

# What Flower calls the .npy format.
KIND: Final = "numpy.ndarray"
# Headers of numbers have some 120 bytes; longer ones may take long to read, and much memory.
LONGEST_HEADER: Final = 2048


@final
class Draft:
    """An array that is written to where it will travel from.

    Attributes:
        values: Zeros, to be written to.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]):
        header, size = _header(shape, dtype), math.prod(shape)
        self._file = BytesIO(bytes(len(header) + size * dtype.itemsize))
        self._file.write(header)
        flat = np.frombuffer(self._file.getbuffer(), dtype, size, len(header))
        self.values: NDArray[Any] = flat.reshape(shape)

    def finished(self) -> Array:
        """The array as it travels; there are no values to write to any more."""
        dtype, shape = str(self.values.dtype), self.values.shape
        del self.values  # or Python would hand out a copy of the bytes that it shares
        return Array(dtype, shape, KIND, self._file.getvalue())


def to_numpy(array: Array) -> NDArray[Any]:
    """The numbers of an array, as a view into its bytes that cannot be written to."""
    if array.stype != KIND:
        raise InvalidInput(f"an array must come in numpy's format, got {array.stype!r:.40}")
    data = array.data
    if npy.read_magic(BytesIO(data[: npy.MAGIC_LEN])) != (1, 0):
        raise InvalidInput("an array of numbers comes in version 1.0 of numpy's format")
    start = npy.MAGIC_LEN + 2
    start += int.from_bytes(data[npy.MAGIC_LEN : start], "little")
    if start > LONGEST_HEADER:
        raise InvalidInput("the header of an array is longer than any that describes numbers")
    shape, by_column, dtype = _described(data[:start])
    flat = np.frombuffer(data, dtype, offset=start)
    return flat.reshape(shape, order="F" if by_column else "C")


# Headers are kept: they take longer than all else, and are the same for each client.
@lru_cache(maxsize=1024)
def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    written = BytesIO()
    described = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(
        written, {"descr": described, "fortran_order": False, "shape": shape}
    )
    return written.getvalue()


@lru_cache(maxsize=1024)
def _described(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    source = BytesIO(header)
    npy.read_magic(source)
    shape, by_column, dtype = npy.read_array_header_1_0(source)
    if dtype.hasobject:
        raise InvalidInput("an array must hold numbers, and this one holds objects")
    return shape, by_column, dtype


def from_numpy(values: NDArray[Any]) -> Array:
    """An array as it travels."""
    draft = Draft(values.shape, values.dtype)
    draft.values[...] = values
    return draft.finished()


@final
class TurnRule(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Turns of a device in a run are so far apart.

    Attributes:
        min_sep: Rows from one turn to the next.
        timer_hours: Hours instead; 0 if turns go by rows.
    """

    min_sep: int
    timer_hours: float

    def is_weaker(self, promised: "TurnRule") -> bool:
        """Whether it lets a device return that was promised more; hours do not stand for rows."""
        if promised.timer_hours > 0:
            return not self.timer_hours >= promised.timer_hours
        return self.timer_hours > 0 or not self.min_sep >= promised.min_sep


ARRAYS: Final = "arrays"
CONFIG: Final = "config"
OURS: Final = "dpftrl"
PREFIX: Final = "dpftrl refuses: "

# Why a device does not train. The server shows these words and no others, because what a device
# says of itself could be anything.
Refusal = Literal[
    "it is not this device's turn yet",
    "the server's rule for turns is weaker than what this device was promised",
    "the server's clip norm is not the one that this device was promised",
    "what was trained has other arrays than the model that was handed out",
    "the message is not one of dpftrl's strategy",
    "this device answers nothing but training, whose answers are protected",
    "the device could not write down that it took part",
]
REFUSALS: Final[tuple[str, ...]] = get_args(Refusal)


@final
@dataclass(frozen=True)
class Instruction:
    """What a device is told with the model.

    Attributes:
        run: Identity of the run, which stays the same when the server starts again.
        attempt: Number of the attempt; it comes back with the update.
        row: The row of noise that the attempt is for.
        rounds: Rows that the run has in all.
        clip_norm: L2 norm that the update may have.
        min_sep: Rows from one turn of a device to its next.
        timer_hours: Hours from one turn to the next, instead; 0 if turns go by rows.
        nonce: A secret between the server and this device; it comes back with the update, and shows
            whose that is. (What Flower says of a reply's sender, the sender has written.)
    """

    run: str
    attempt: int
    row: int
    rounds: int
    clip_norm: float
    min_sep: int
    timer_hours: float
    nonce: str

    @property
    def rule(self) -> TurnRule:
        """How far apart turns are."""
        return TurnRule(self.min_sep, self.timer_hours)

    def record(self) -> ConfigRecord:
        """As it travels."""
        return ConfigRecord(vars(self).copy())

    @classmethod
    def of(cls, message: Message) -> Self:
        """What a message says, checked."""
        found = message.content.config_records.get(OURS) if message.has_content() else None
        if found is None or set(found) != set(cls.__dataclass_fields__):
            raise InvalidInput("the message has no instruction of dpftrl's strategy")
        told = cls(**{str(name): value for name, value in found.items()})  # pyright: ignore[reportArgumentType]  # checked next
        if not isinstance(told.run, str) or not told.run.isalnum():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput("the message names no run")
        for name, least in (("attempt", 0), ("row", 0), ("rounds", 1), ("min_sep", 1)):
            whole_number(name, getattr(told, name), at_least=least)
        if not told.row < told.rounds:
            raise InvalidInput("the run has no such row")
        positive_number("clip_norm", told.clip_norm)
        if not 0 <= told.timer_hours < float("inf"):
            raise InvalidInput("timer_hours must be a finite number that is not negative")
        return told


def record_of(arrays: dict[str, NDArray[Any]]) -> ArrayRecord:
    """Named arrays, as they travel."""
    return ArrayRecord({name: from_numpy(array) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """And back."""
    return {name: to_numpy(array) for name, array in record.items()}


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one record of arrays that a message holds."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise InvalidInput(f"a model is one record of arrays, and the message has {len(records)}")
    return records[0]


def report(message: Message, update: ArrayRecord, told: Instruction) -> Message:
    """The reply of a device that trained: its update, and nothing else of it."""
    stamp = ConfigRecord({"attempt": told.attempt, "nonce": told.nonce})
    return Message(RecordDict({ARRAYS: update, OURS: stamp}), reply_to=message)


def attempt_of(reply: Message) -> Any:
    """The attempt that a reply says it is for; anything at all may come here."""
    return reply.content.config_records.get(OURS, ConfigRecord()).get("attempt")


def nonce_of(reply: Message) -> str:
    """The nonce that a reply brings back."""
    found = reply.content.config_records.get(OURS, ConfigRecord()).get("nonce")
    return found if isinstance(found, str) else ""


def update_of(reply: Message) -> dict[str, NDArray[Any]] | None:
    """The update in a reply, or None where there is nothing to be read: that counts as zeros."""
    try:
        return arrays_of(only_arrays(reply.content))
    except Exception:  # whatever a device sends, it must not stop the round
        return None


def refusal(message: Message, why: Refusal) -> Message:
    """The reply of a device that does not train."""
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, PREFIX + why), reply_to=message)


def refusal_of(reply: Message) -> str | None:
    """Why a device refused, if that is what it says."""
    said = (reply.error.reason or "") if reply.has_error() else ""
    why = said.removeprefix(PREFIX)
    return why if said.startswith(PREFIX) and why in REFUSALS else None
