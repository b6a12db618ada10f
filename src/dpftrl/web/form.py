"""The form of the planner: its fields, how they are read, and the same request as a command line.

A field has the name of the field of the request, and its value is written as on the command line:
`4.21M`, `60%`, `300:600`. An empty field is left open.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final, get_args

from dpftrl._internal.written_numbers import count_from_text, range_from_text, share_from_text
from dpftrl.errors import InvalidInput
from dpftrl.plan import SAMPLINGS, PlanRequest, plan_request
from dpftrl.plan.request import Effort

Mode = Literal["fleet", "dataset"]
Kind = Literal["count", "number", "share", "range", "choice"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
LONGEST_VALUE: Final = 60  # characters of a field


class FieldError(InvalidInput):
    """A field of the form is wrong.

    Attributes:
        field: The name of the field; empty if it is not about one field.
    """

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


@final
@dataclass(frozen=True)
class Field:
    """A field of the form.

    Attributes:
        name: The field of the request.
        label: Its label on the page.
        kind: How its text is read.
        help: One sentence below the label.
        default: The text in a new form; empty to leave it open.
        standard: The text that means the same as leaving it out.
        option: The option of the command line.
        low: The left end of the slider; None for a field without a slider.
        high: The right end of the slider.
        choices: The values of a choice, with their labels.
        advanced: Whether it is among the further settings.
    """

    name: str
    label: str
    kind: Kind
    help: str
    default: str = ""
    standard: str = ""
    option: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[tuple[str, str], ...] = ()
    advanced: bool = False

    @property
    def flag(self) -> str:
        """The option of the command line."""
        return self.option or f"--{self.name.replace('_', '-')}"

    def read(self, text: str) -> dict[str, Any]:
        """The fields of the request that the text stands for.

        Raises:
            FieldError: It stands for no value.
        """
        try:
            if self.kind == "count":
                return {self.name: count_from_text(text)}
            if self.kind == "share":
                return {self.name: share_from_text(text)}
            if self.kind == "range":
                low, high = range_from_text(text)
                return {self.name: low, f"max_{self.name}": high}
            if self.kind == "choice":
                return {self.name: text}
            return {self.name: _float(text)}
        except InvalidInput as error:
            raise FieldError(self.name, str(error)) from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is not a number like 0.5, 14 or 1e-10") from None


EPSILON: Final = Field(
    "epsilon", "Target epsilon", "number", "The privacy loss allowed.", "4", low=0.1, high=20
)
FLEET: Final = (
    Field(
        "population",
        "Population",
        "count",
        "Clients that may take part.",
        "3M",
        low=1_000,
        high=1e9,
    ),
    Field(
        "availability",
        "Availability",
        "share",
        "Share of the clients that can be contacted.",
        "60%",
        standard="1",
        low=0.05,
        high=1,
    ),
    Field(
        "report_goal",
        "Report goal",
        "count",
        "Reports per round. Empty: the largest that costs no privacy.",
        low=10,
        high=100_000,
    ),
    Field(
        "timer_days",
        "Timer (days)",
        "number",
        "Days that a client waits between two contacts.",
        "3",
        low=0.25,
        high=60,
    ),
    Field(
        "rounds_per_day",
        "Rounds per day",
        "number",
        "Needed for the timer and for days.",
        "120",
        low=1,
        high=1_000,
    ),
    Field("days", "Days of training", "number", "Instead of the rounds.", "14", low=1, high=120),
    Field(
        "rounds",
        "Rounds",
        "count",
        "Empty: days times rounds per day.",
        low=10,
        high=100_000,
    ),
    Field(
        "devices",
        "Devices per person",
        "count",
        "Also states epsilon per person.",
        "2",
        standard="1",
        low=1,
        high=10,
    ),
    EPSILON,
    Field(
        "delta",
        "Delta",
        "number",
        "Choose it well below 1 / population.",
        "1e-10",
        low=1e-14,
        high=1e-4,
    ),
    Field(
        "parameters",
        "Model size",
        "count",
        "Parameters of the model, for the memory.",
        "1M",
        standard="1M",
        low=10_000,
        high=1e10,
    ),
    Field(
        "min_sep",
        "Min-sep",
        "range",
        "The min-sep that is enforced, instead of that of the fleet; 300:600 is a range.",
        advanced=True,
    ),
    Field(
        "max_participations",
        "Most participations",
        "count",
        "If the server enforces a cap per client.",
        advanced=True,
    ),
    Field(
        "over_selection",
        "Over-selection",
        "share",
        "Clients contacted per report needed, such as 1.3.",
        standard="1",
        advanced=True,
    ),
    Field(
        "noise_multiplier",
        "Noise multiplier",
        "number",
        "Instead of epsilon: that of the row blt.",
        advanced=True,
    ),
    Field(
        "buffers",
        "Buffers of a BLT",
        "count",
        "Empty: the fewest that are nearly as good as more.",
        advanced=True,
    ),
    Field(
        "objective",
        "Loss to minimise",
        "choice",
        "RmsLoss is about all rounds, MaxLoss about the worst.",
        "rms",
        standard="rms",
        choices=(("rms", "RmsLoss"), ("max", "MaxLoss")),
        advanced=True,
    ),
)
SAMPLING_LABELS: Final = {
    "none": "none: the same batches in every epoch",
    "poisson": "Poisson",
    "cyclic-poisson": "cyclic Poisson",
    "balls-in-bins": "balls-in-bins",
}
DATASET: Final = (
    Field(
        "size",
        "Examples",
        "count",
        "Examples in the data set.",
        "50k",
        option="--dataset",
        low=1_000,
        high=1e8,
    ),
    Field(
        "batch_size",
        "Batch size",
        "count",
        "Expected number of examples per batch.",
        "500",
        low=8,
        high=65_536,
    ),
    Field("epochs", "Epochs", "count", "How often every example takes part.", "10", low=1, high=50),
    Field(
        "sampling",
        "Sampling",
        "choice",
        "How batches are drawn, with a secret key.",
        choices=(("", "compare all"), *((name, SAMPLING_LABELS[name]) for name in SAMPLINGS)),
    ),
    Field(
        "epsilon",
        "Target epsilon",
        "number",
        "The privacy loss allowed, for one example.",
        "1",
        low=0.1,
        high=20,
    ),
    Field(
        "delta",
        "Delta",
        "number",
        "Choose it well below 1 / examples.",
        "1e-6",
        low=1e-14,
        high=1e-4,
    ),
    Field(
        "max_batch_size",
        "Largest batch",
        "count",
        "Larger batches are cut, which costs a part of delta.",
        advanced=True,
    ),
)
FIELDS: Final[dict[Mode, tuple[Field, ...]]] = {"fleet": FLEET, "dataset": DATASET}

# Where a message that names no field belongs.
HINTS: Final = {
    "use a larger max_batch_size": "max_batch_size",
    "one round contacts": "report_goal",
    "cannot take turns": "population",
    "a timer of": "timer_days",
    "exactly one of epsilon": "epsilon",
    "say the same thing twice": "rounds",
}


@final
@dataclass(frozen=True)
class Form:
    """A filled-in form.

    Attributes:
        mode: Whether it is about a fleet or a data set.
        values: The texts of its fields, by name, without empty ones.
    """

    mode: Mode
    values: Mapping[str, str]

    @classmethod
    def read(cls, content: Any) -> "Form":
        """Read a form from JSON: `{"mode": "fleet", "values": {"population": "4.21M", ...}}`.

        Raises:
            FieldError: There is no such mode or field, or a value is no text.
        """
        if not isinstance(content, dict):
            raise FieldError("", "send an object with mode and values")
        given: dict[str, Any] = content  # pyright: ignore[reportUnknownVariableType]
        mode, values = given.get("mode"), given.get("values")
        if mode not in MODES:
            raise FieldError("mode", f"mode must be one of {', '.join(MODES)}, got {mode!r:.60}")
        if not isinstance(values, dict):
            raise FieldError("", "values must be an object with the fields of the form")
        known, texts = {field.name for field in FIELDS[mode]}, dict[str, str]()
        for name, value in values.items():  # pyright: ignore[reportUnknownVariableType]
            if name not in known:
                raise FieldError("", f"there is no field {name!r:.60} for a {mode}")
            if not isinstance(value, str) or len(value) > LONGEST_VALUE:
                raise FieldError(
                    str(name),  # pyright: ignore[reportUnknownArgumentType]
                    f"{name} must be a text of at most {LONGEST_VALUE} characters",
                )
            if text := value.strip():
                texts[str(name)] = text  # pyright: ignore[reportUnknownArgumentType]
        return cls(mode, texts)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of this mode."""
        return FIELDS[self.mode]

    def request(self, effort: Effort, *, extrapolate: bool) -> PlanRequest:
        """The request for a plan.

        Args:
            effort: How much time the answer may take.
            extrapolate: Whether to compute epsilon for other settings of a fleet.

        Raises:
            FieldError: A field is wrong.
        """
        content: dict[str, Any] = {"kind": self.mode, "effort": effort}
        if self.mode == "fleet":
            content["extrapolate"] = extrapolate
        for field in self.fields:
            if field.name in self.values:
                content |= field.read(self.values[field.name])
        for name in ("population", "delta", "size", "batch_size", "epochs"):
            if name not in content and any(field.name == name for field in self.fields):
                raise FieldError(name, f"{self.label(name)} is missing: give a number")
        if self.mode == "dataset" and "epsilon" not in content:
            raise FieldError("epsilon", "Target epsilon is missing: give a number")
        try:
            return plan_request(content)
        except InvalidInput as error:
            raise self.error(error) from None

    def label(self, name: str) -> str:
        """The label of a field."""
        return next(field.label for field in self.fields if field.name == name)

    def error(self, error: Exception) -> FieldError:
        """The error with the field that it is about."""
        if isinstance(error, FieldError):
            return error
        message = str(error)
        names = [field.name for field in self.fields]
        aliases = {"max_min_sep": "min_sep", "dataset_size": "size", "steps": "epochs"}
        for text, field in HINTS.items():
            if text in message and field in names:
                return FieldError(field, message)
        for name in sorted([*names, *aliases], key=len, reverse=True):
            for written in (name, name.replace("_", " ")):
                if message.startswith((f"{written} ", f"{written}:")):
                    return FieldError(aliases.get(name, name), message)
        return FieldError("", message)

    def command(self, effort: Effort) -> str:
        """The command line that gives the same answer."""
        words = ["dpftrl", "plan"]
        for field in self.fields:
            text = self.values.get(field.name, "")
            if not text or self._is_standard(field, text):
                continue
            words += [field.flag, shlex.quote(text)]
        words += [] if effort == "normal" else ["--effort", effort]
        return " ".join(words)

    @staticmethod
    def _is_standard(field: Field, text: str) -> bool:
        """Whether the text means what the command line takes if the option is left out."""
        if not field.standard:
            return False
        try:
            return field.read(text) == field.read(field.standard)
        except FieldError:
            return False
