"""What the server's optimiser makes of the updates: the matrix A.

The model after round t is y_t = (1 - weight_decay * rate_t) y_(t-1) + rate_t m_t, with the momentum
m_t = momentum * m_(t-1) + x_t of the updates x. That is y = A x with A lower triangular. By default
A adds up: the prefix sum.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.checks import all_within, finite_numbers
from dpftrl.errors import InvalidInput

PARTS = {"half": 1 / 2, "third": 1 / 3, "quarter": 1 / 4, "fifth": 1 / 5, "tenth": 1 / 10}


@final
@dataclass(frozen=True)
class Workload:
    """A linear server optimiser.

    Attributes:
        momentum: Share of the last step that is taken again, from 0 to below 1.
        weight_decay: Shrinks the model each round, from 0 to 1 (times the learning rate).
        learning_rates: One for each round; empty for 1 throughout.

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
        """A workload whose learning rates are written out, or named.

        `cooldown:last-quarter:0.05` keeps the rate at 1, then lowers it in equal steps over the
        last quarter of the rounds, to 0.05.

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
        """Whether A just adds up."""
        return self.is_toeplitz and not self.momentum and not self.weight_decay

    @property
    def is_toeplitz(self) -> bool:
        """Whether every round is treated alike."""
        return not self.learning_rates or set(self.learning_rates) == {1.0}

    def rates(self, rounds: int) -> Vector:
        """The learning rate of each round."""
        if not self.learning_rates:
            return np.ones(rounds)
        if len(self.learning_rates) < rounds:
            raise InvalidInput(
                f"the schedule has {len(self.learning_rates)} learning rates, "
                f"fewer than the {rounds} rounds"
            )
        return np.array(self.learning_rates[:rounds])

    def kept(self, rounds: int) -> Vector:
        """The share of the model that each round keeps."""
        return 1 - self.weight_decay * self.rates(rounds)

    def coefficients(self, rounds: int) -> Vector:
        """The first column of A where it is Toeplitz."""
        if not self.is_toeplitz:
            raise InvalidInput("a schedule of learning rates makes no Toeplitz workload")
        return self.apply(np.eye(1, rounds)[0][:, None])[:, 0]

    def apply(self, updates: Matrix) -> Matrix:
        """A times a matrix with one row a round."""
        rounds = len(updates)
        model, step = np.zeros(updates.shape[1]), np.zeros(updates.shape[1])
        result = np.empty(updates.shape)
        for t, (rate, kept) in enumerate(zip(self.rates(rounds), self.kept(rounds), strict=True)):
            step = self.momentum * step + updates[t]
            model = kept * model + rate * step
            result[t] = model
        return result

    def matrix(self, rounds: int) -> Matrix:
        """A, written out."""
        return self.apply(np.eye(rounds))


PREFIX_SUM = Workload()


def _named_schedule(text: str, rounds: int) -> tuple[float, ...]:
    match = re.fullmatch(r"cooldown:last-(\w+):([0-9.e-]+)", text)
    share = PARTS.get(match[1]) if match else None
    if match is None or share is None:
        raise InvalidInput(
            "a schedule is a list of learning rates, or like cooldown:last-quarter:0.05 "
            f"({', '.join(PARTS)}), got {text!r:.80}"
        )
    try:
        last = float(match[2])
    except ValueError:
        raise InvalidInput(f"{match[2]!r} in {text!r} is not a learning rate") from None
    cooling = max(1, round(share * rounds))
    falling = np.linspace(1.0, last, cooling + 1)[1:]
    return tuple(np.append(np.ones(rounds - cooling), falling).tolist())
