"""What every optimiser returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, final

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import ErrorReport, Mechanism
from dpftrl.participation import Participation
from dpftrl.workload import Workload

# Called after every step with the share that is done (None where that cannot be known) and a line.
Progress = Callable[[float | None, str], None]


def check_bands(bands: int, rounds: int) -> int:
    """Refuse a number of bands that a matrix of so many rounds cannot have.

    >>> check_bands(9, rounds=8)
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: bands must be at most the 8 rounds, got 9
    """
    bands = whole_number("bands", bands)
    if bands > rounds:
        raise InvalidInput(f"bands must be at most the {rounds} rounds, got {bands}")
    return bands


def check_workload(workload: Workload, rounds: int) -> None:
    """Refuse a workload under which nothing that is added to updates ever shows."""
    if not workload.rates(rounds).max() > 0:
        raise InvalidInput(
            f"the learning rates of the first {rounds} rounds are all zero: "
            "any mechanism is as good as any other"
        )


Objective = Literal["max", "rms"]
Found = TypeVar("Found", bound=Mechanism, covariant=True)


@final
@dataclass(frozen=True)
class Optimized(Generic[Found]):
    """A mechanism, what it was optimised for, and how well that went.

    Attributes:
        mechanism: The mechanism found.
        participation: What it was optimised for.
        objective: Which loss was made small.
        loss: Its losses, recomputed from the finished mechanism.
        gradient_norm: The largest derivative of the log loss by the free parameters at the end:
            near zero at a local optimum.
        seconds: How long it took.
    """

    mechanism: Found
    participation: Participation
    objective: Objective
    error_report: ErrorReport
    gradient_norm: float
    seconds: float

    @property
    def value(self) -> float:
        """The loss that was made small."""
        return loss_value(self.error_report, self.objective)


def loss_value(loss: ErrorReport, objective: Objective) -> float:
    """The loss that an objective names."""
    return loss.max_loss if objective == "max" else loss.rms_loss


def check_objective(objective: str) -> Objective:
    """Refuse an objective that does not exist."""
    if objective not in ("max", "rms"):
        raise InvalidInput(f"objective must be max or rms, got {objective!r}")
    return objective
