"""The workload: the matrix A that the server's optimizer applies to the updates.

The model after round t is y_t = (1 - weight_decay * rate_t) y_(t-1) + rate_t m_t, with the momentum
m_t = momentum * m_(t-1) + x_t of the updates x. So y = A x with a lower triangular matrix A. By
default A is the prefix sum: the model is the sum of all updates so far.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.checks import all_within, finite_numbers
from dpftrl.errors import InvalidInput

# The names of fractions in a schedule such as cooldown:last-quarter:0.05.
FRACTIONS = {"half": 1 / 2, "third": 1 / 3, "quarter": 1 / 4, "fifth": 1 / 5, "tenth": 1 / 10}


@final
@dataclass(frozen=True)
class Workload:
    """A linear server optimizer.

    Attributes:
        momentum: The fraction of the last step that is added to the next one; from 0 to below 1.
        weight_decay: In each round the model shrinks by this times the learning rate; from 0 to 1.
        learning_rates: One per round; empty if all are 1.

    >>> Workload().matrix(3)
    array([[1., 0., 0.],
           [1., 1., 0.],
           [1., 1., 1.]])
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        (momentum,) = finite_numbers("momentum", [self.momentum])
        (weight_decay,) = finite_numbers("weight_decay", [self.weight_decay])
        if not 0 <= momentum < 1:
            raise InvalidInput(f"momentum must be at least 0 and below 1, got {momentum!r}")
        all_within("weight_decay", [weight_decay], 0, 1)
        rates = finite_numbers("learning_rates", self.learning_rates, at_least=0)
        all_within("learning_rates", rates, 0, float("inf"))
        if rates and not max(rates) > 0:
            raise InvalidInput("learning_rates must not all be zero")
        object.__setattr__(self, "momentum", momentum)
        object.__setattr__(self, "weight_decay", weight_decay)
        object.__setattr__(self, "learning_rates", rates)

    @classmethod
    def with_schedule(
        cls,
        schedule: str | Sequence[float],
        rounds: int,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> Self:
        """Create a workload with a schedule of learning rates.

        Args:
            schedule: The learning rates, or the name of a schedule. `cooldown:last-quarter:0.05`
                keeps the rate at 1, and lowers it to 0.05 in equal steps over the last quarter of
                the rounds. `constant` keeps the rate at 1.
            rounds: Number of rounds.
            momentum: See `Workload`.
            weight_decay: See `Workload`.

        >>> Workload.with_schedule("cooldown:last-half:0.5", rounds=4).learning_rates
        (1.0, 1.0, 0.75, 0.5)
        """
        if isinstance(schedule, str):
            schedule = _named_schedule(schedule, rounds)
        workload = cls(momentum, weight_decay, tuple(schedule))
        workload.rates(rounds)  # refuses a schedule that is too short
        return workload

    @property
    def is_prefix_sum(self) -> bool:
        """Whether A is the prefix sum."""
        return self.is_toeplitz and not self.momentum and not self.weight_decay

    @property
    def is_toeplitz(self) -> bool:
        """Whether A is a Toeplitz matrix, because all learning rates are 1."""
        return not self.learning_rates or set(self.learning_rates) == {1.0}

    def rates(self, rounds: int) -> Vector:
        """The learning rate of each round; raises InvalidInput if the schedule is too short."""
        if not self.learning_rates:
            return np.ones(rounds)
        if len(self.learning_rates) < rounds:
            raise InvalidInput(
                f"the schedule has {len(self.learning_rates)} learning rates, "
                f"fewer than the {rounds} rounds"
            )
        return np.array(self.learning_rates[:rounds])

    def kept(self, rounds: int) -> Vector:
        """The fraction of the model that is left after weight decay, for each round."""
        return 1 - self.weight_decay * self.rates(rounds)

    def coefficients(self, rounds: int) -> Vector:
        """The first column of A; raises InvalidInput if A is not Toeplitz."""
        if not self.is_toeplitz:
            raise InvalidInput("a workload with a schedule of learning rates is not Toeplitz")
        return self.apply(np.eye(1, rounds)[0][:, None])[:, 0]

    def apply(self, updates: Matrix) -> Matrix:
        """Multiply A by a matrix with one row per round."""
        rounds = len(updates)
        model, step = np.zeros(updates.shape[1]), np.zeros(updates.shape[1])
        result = np.empty(updates.shape)
        for t, (rate, kept) in enumerate(zip(self.rates(rounds), self.kept(rounds), strict=True)):
            step = self.momentum * step + updates[t]
            model = kept * model + rate * step
            result[t] = model
        return result

    def matrix(self, rounds: int) -> Matrix:
        """A as a dense matrix."""
        return self.apply(np.eye(rounds))


PREFIX_SUM = Workload()


def _named_schedule(text: str, rounds: int) -> tuple[float, ...]:
    """The learning rates of a schedule such as cooldown:last-quarter:0.05."""
    if text == "constant":
        return (1.0,) * rounds
    match = re.fullmatch(r"cooldown:last-(\w+):([0-9.e-]+)", text)
    fraction = FRACTIONS.get(match[1]) if match else None
    if match is None or fraction is None:
        raise InvalidInput(
            "a schedule is a list of learning rates, constant, or like cooldown:last-quarter:0.05 "
            f"({', '.join(FRACTIONS)}), got {text!r:.80}"
        )
    try:
        last = float(match[2])
    except ValueError:
        raise InvalidInput(f"{match[2]!r} in {text!r} is not a learning rate") from None
    cooldown_rounds = max(1, round(fraction * rounds))
    cooldown_rates = np.linspace(1.0, last, cooldown_rounds + 1)[1:]
    return tuple(np.append(np.ones(rounds - cooldown_rounds), cooldown_rates).tolist())
