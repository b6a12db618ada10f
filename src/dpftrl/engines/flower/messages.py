"""What server and device say to each other, beside the model."""

from dataclasses import dataclass
from typing import Any, Final, Literal, Self, final, get_args

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from numpy.typing import NDArray

from dpftrl.checks import positive_number, whole_number
from dpftrl.engines.flower.npy import from_numpy, to_numpy
from dpftrl.engines.flower.turn_rule import TurnRule
from dpftrl.errors import InvalidInput

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
