"""The result type of the optimisers, and checks of their arguments."""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, final

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import ErrorReport, Mechanism
from dpftrl.participation import Participation
from dpftrl.workload import Workload

# The loss to minimise. A loss is error times sensitivity: `max` stands for MaxLoss (the largest
# error of a round), `rms` for RmsLoss (the root mean square error over the rounds).
Objective = Literal["max", "rms"]
MechanismType = TypeVar("MechanismType", bound=Mechanism, covariant=True)


@final
@dataclass(frozen=True)
class Optimized(Generic[MechanismType]):
    """An optimised mechanism, and how well the optimisation went.

    Attributes:
        mechanism: The optimised mechanism.
        participation: The participation for which it was optimised.
        objective: The loss that was minimised.
        error_report: Error and sensitivity, recomputed from the final mechanism.
        gradient_norm: The largest derivative of the log loss by a free parameter at the end of the
            search. It is near zero at a local optimum.
        seconds: Duration of the optimisation.
    """

    mechanism: MechanismType
    participation: Participation
    objective: Objective
    error_report: ErrorReport
    gradient_norm: float
    seconds: float

    @property
    def value(self) -> float:
        """The loss that was minimised."""
        return loss_value(self.error_report, self.objective)


def loss_value(error_report: ErrorReport, objective: Objective) -> float:
    """MaxLoss or RmsLoss, as the objective says."""
    return error_report.max_loss if objective == "max" else error_report.rms_loss


def check_objective(objective: str) -> Objective:
    """Return the objective, or raise `InvalidInput` if it does not exist."""
    if objective not in ("max", "rms"):
        raise InvalidInput(f"objective must be max or rms, got {objective!r}")
    return objective


def check_bands(bands: int, rounds: int) -> int:
    """Return the number of bands, or raise `InvalidInput` if it is not between 1 and `rounds`.

    >>> check_bands(9, rounds=8)
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: bands must be at most the 8 rounds, got 9
    """
    bands = whole_number("bands", bands)
    if bands > rounds:
        raise InvalidInput(f"bands must be at most the {rounds} rounds, got {bands}")
    return bands


def check_workload(workload: Workload, rounds: int) -> None:
    """Raise `InvalidInput` if all learning rates are zero: no mechanism then has any error."""
    if not workload.rates(rounds).max() > 0:
        raise InvalidInput(
            f"the learning rates of the first {rounds} rounds are all zero: "
            "every mechanism has the same error"
        )
