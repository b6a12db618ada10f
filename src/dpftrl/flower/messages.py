"""The messages between server and client: arrays, instructions, reports and refusals.

Arrays travel in numpy's .npy format, read and written here without copies. Beside the model, the
server sends an `Instruction`. A client answers with a report (its update) or with a refusal.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any, Final, Literal, Self, final, get_args

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.flower._flwr_internals import ErrorCode

# Flower's name for the .npy format.
KIND: Final = "numpy.ndarray"
# Headers of numeric arrays have about 120 bytes. Parsing a much longer one, which only an attacker
# would send, could take much time and memory.
MAX_HEADER_BYTES: Final = 2048


@final
class Draft:
    """An array that is filled inside the buffer it is sent from, which saves a copy.

    Attributes:
        values: The array to fill; zeros at first.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]):
        header, size = _header(shape, dtype), math.prod(shape)
        self._file = BytesIO(bytes(len(header) + size * dtype.itemsize))
        self._file.write(header)
        flat = np.frombuffer(self._file.getbuffer(), dtype, size, len(header))
        self.values: NDArray[Any] = flat.reshape(shape)

    def finished(self) -> Array:
        """Return the array as Flower sends it. `values` is gone afterwards."""
        dtype, shape = str(self.values.dtype), self.values.shape
        del self.values  # with the buffer still exported, getvalue() would copy the bytes
        return Array(dtype, shape, KIND, self._file.getvalue())


def to_numpy(array: Array) -> NDArray[Any]:
    """Return the numbers of a Flower array, as a read-only view into its bytes.

    Raises:
        InvalidInput: The array is not in version 1.0 of the .npy format, or holds Python objects.
        ValueError: The bytes do not match the header.
    """
    if array.stype != KIND:
        raise InvalidInput(f"an array must be in numpy's format, got {array.stype!r:.40}")
    data = memoryview(array.data)
    if npy.read_magic(BytesIO(data[: npy.MAGIC_LEN])) != (1, 0):
        raise InvalidInput("an array must be in version 1.0 of numpy's format")
    start = npy.MAGIC_LEN + 2
    start += int.from_bytes(data[npy.MAGIC_LEN : start], "little")
    if start > MAX_HEADER_BYTES:
        raise InvalidInput(f"the header of an array has more than {MAX_HEADER_BYTES} bytes")
    shape, is_fortran, dtype = _parsed_header(bytes(data[:start]))
    flat = np.frombuffer(data, dtype, offset=start)
    return flat.reshape(shape, order="F" if is_fortran else "C")


def from_numpy(values: NDArray[Any]) -> Array:
    """Return a numpy array as Flower sends it."""
    draft = Draft(values.shape, values.dtype)
    draft.values[...] = values
    return draft.finished()


# Headers are cached: they are the same for every client, and parsing them dominates the cost.
@lru_cache(maxsize=1024)
def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return the .npy header of a C-ordered array."""
    header = BytesIO()
    description = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(
        header, {"descr": description, "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


@lru_cache(maxsize=1024)
def _parsed_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether the order is Fortran's, and the dtype that a header describes."""
    source = BytesIO(header)
    npy.read_magic(source)
    shape, is_fortran, dtype = npy.read_array_header_1_0(source)
    if dtype.hasobject:
        raise InvalidInput("an array must hold numbers, and this one holds objects")
    return shape, is_fortran, dtype


@final
class ContactRule(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How far apart two contacts of a device in one run must be.

    Attributes:
        min_sep: Rows of the noise matrix (rounds) from one contact to the next.
        timer_hours: Hours from one contact to the next, instead of rows; 0 if rows count.
    """

    min_sep: int
    timer_hours: float

    def is_weaker(self, promised: "ContactRule") -> bool:
        """Whether this rule allows a contact that the promised rule forbids.

        A rule in hours never satisfies a promise in rows, nor a rule in rows a promise in hours.
        """
        if promised.timer_hours > 0:
            return not self.timer_hours >= promised.timer_hours
        return self.timer_hours > 0 or not self.min_sep >= promised.min_sep


# Names of the records in a message: the model, the app's own configuration, and dpftrl's record.
ARRAYS: Final = "arrays"
CONFIG: Final = "config"
OURS: Final = "dpftrl"
REFUSAL_PREFIX: Final = "dpftrl refuses: "

# Why a device does not train. These texts are part of the protocol: the server logs them and no
# others, because a device could send any text at all. A "turn" in them is a contact.
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
# Flower's codes for a ClientApp that failed. `client_mod` lets no exception of an app pass.
FAILURES: Final[dict[int, str]] = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its ClientApp cannot be loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its ClientApp raised an error; is client_mod missing?",
}


@final
@dataclass(frozen=True)
class Instruction:
    """The instruction that the server sends to a client with the model.

    Attributes:
        run: Identity of the run. It stays the same when the server restarts.
        attempt: Number of the attempt. The client returns it with the update.
        row: Row of the noise matrix (the round) that the attempt is for.
        rounds: Total number of rows of the run.
        clip_norm: Largest L2 norm that the update may have. With adaptive clipping it is twice the
            clip norm of the round, so that the server sees which updates are longer.
        min_sep: Rows from one contact of a client to its next.
        timer_hours: Hours from one contact to the next, instead of rows; 0 if rows count.
        nonce: Secret between the server and this client. The client returns it with the update,
            which proves whose update it is. (The sender that Flower names in a reply proves
            nothing: the sender wrote it.)
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
    def rule(self) -> ContactRule:
        """The contact rule that the server names."""
        return ContactRule(self.min_sep, self.timer_hours)

    def record(self) -> ConfigRecord:
        """Return the instruction as Flower sends it."""
        return ConfigRecord(vars(self).copy())

    @classmethod
    def of(cls, message: Message) -> Self:
        """Read and check the instruction in a message.

        Raises:
            InvalidInput: The message has no instruction, or one that makes no sense.
        """
        record = message.content.config_records.get(OURS) if message.has_content() else None
        if record is None or set(record) != set(cls.__dataclass_fields__):
            raise InvalidInput("the message has no instruction from dpftrl's strategy")
        instruction = cls(**{str(name): value for name, value in record.items()})  # pyright: ignore[reportArgumentType]  # checked next
        if not isinstance(instruction.run, str) or not instruction.run.isalnum():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput("the message names no run")
        for name, minimum in (("attempt", 0), ("row", 0), ("rounds", 1), ("min_sep", 1)):
            whole_number(name, getattr(instruction, name), at_least=minimum)
        if not instruction.row < instruction.rounds:
            raise InvalidInput(
                f"row must be below rounds, got {instruction.row} and {instruction.rounds}"
            )
        positive_number("clip_norm", instruction.clip_norm)
        if not 0 <= instruction.timer_hours < float("inf"):
            raise InvalidInput("timer_hours must be a finite number that is not negative")
        return instruction


def record_of(arrays: dict[str, NDArray[Any]]) -> ArrayRecord:
    """Return named numpy arrays as Flower sends them."""
    return ArrayRecord({name: from_numpy(array) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the arrays of a Flower record as numpy arrays; the inverse of `record_of`."""
    return {name: to_numpy(array) for name, array in record.items()}


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Return the only array record of a message; refuse a message with none or several."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise InvalidInput(f"a message must have exactly one array record, got {len(records)}")
    return records[0]


def report(message: Message, update: ArrayRecord, instruction: Instruction) -> Message:
    """Return the reply of a client that trained: its update, and nothing else about it."""
    stamp = ConfigRecord({"attempt": instruction.attempt, "nonce": instruction.nonce})
    return Message(RecordDict({ARRAYS: update, OURS: stamp}), reply_to=message)


def attempt_of(reply: Message) -> Any:
    """Return the attempt that a reply claims to be for; not checked, it may be of any type."""
    return reply.content.config_records.get(OURS, ConfigRecord()).get("attempt")


def is_marked(reply: Message) -> bool:
    """Whether a reply comes from `client_mod`: a report or a refusal."""
    if reply.has_content():
        return OURS in reply.content.config_records
    return refusal_of(reply) is not None


def nonce_of(reply: Message) -> str:
    """Return the nonce in a reply, or an empty string if there is none."""
    nonce = reply.content.config_records.get(OURS, ConfigRecord()).get("nonce")
    return nonce if isinstance(nonce, str) else ""


def update_of(reply: Message) -> dict[str, NDArray[Any]] | None:
    """Return the update in a reply; None, which counts as zeros, if it cannot be read."""
    try:
        return arrays_of(only_arrays(reply.content))
    except Exception:  # no reply, however malformed, may stop the round
        return None


def refusal(message: Message, reason: Refusal) -> Message:
    """Return the reply of a client that refuses to train."""
    error = Error(ErrorCode.MOD_FAILED_PRECONDITION, REFUSAL_PREFIX + reason)
    return Message(error, reply_to=message)


def failure_of(reply: Message) -> str | None:
    """Return why a ClientApp failed, or None if the reply does not say that it failed.

    The text that Flower sends is not returned: it is the app's, and may contain data.
    """
    return FAILURES.get(reply.error.code) if reply.has_error() else None


def refusal_of(reply: Message) -> str | None:
    """Return the reason why a client refused, or None if the reply is not a known refusal."""
    text = (reply.error.reason or "") if reply.has_error() else ""
    reason = text.removeprefix(REFUSAL_PREFIX)
    return reason if text.startswith(REFUSAL_PREFIX) and reason in REFUSALS else None
