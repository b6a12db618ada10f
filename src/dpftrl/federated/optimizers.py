"""Server optimizers: how the noisy mean of a round changes the model.

They only see noisy means, so they are post-processing and cost no privacy. They keep their state in
float32 between rounds, so that a resumed run continues from the same bits, and add in float64.
"""

from functools import lru_cache
from typing import Any, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector
from dpftrl._internal.checks import positive_number
from dpftrl.errors import InvalidInput
from dpftrl.workload import Workload

Mean = NDArray[np.float64]
State = dict[str, Float32Vector]


@final
class Sgd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="sgd"):
    """Gradient descent, with momentum: m = momentum * m + mean; model += rate * m.

    Attributes:
        learning_rate: The learning rate; the schedule multiplies it round by round.
        momentum: The share of the last step that is repeated, from 0 to below 1.
        nesterov: Whether to use Nesterov momentum: the step is mean + momentum * m.
        schedule: None, or a schedule such as `cooldown:last-quarter:0.05`; see
            `Workload.with_schedule`.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    schedule: str | None = None

    def check(self, rounds: int) -> None:
        """Refuse parameters that are out of range or do not fit the number of rounds."""
        _rates(self.learning_rate, self.schedule, rounds)
        _share("momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise InvalidInput("nesterov needs momentum; give both, or neither")

    def start(self, size: int) -> State:
        """The state of the optimizer before the first round."""
        return {"momentum": np.zeros(size, np.float32)} if self.momentum else {}

    def step(
        self, model: Float32Vector, mean: Mean, state: State, row: int, rounds: int
    ) -> tuple[Float32Vector, State]:
        """The model and the state of the optimizer after one step.

        Args:
            model: The model before the step.
            mean: The noisy mean of the updates of this round.
            state: The state of the optimizer before the step.
            row: The number of the round, from 0.
            rounds: Rounds of the plan, over which the schedule extends.
        """
        rate = _rates(self.learning_rate, self.schedule, rounds)[row]
        if not self.momentum:
            return _moved(model, rate * mean), {}
        velocity = (self.momentum * state["momentum"].astype(np.float64) + mean).astype(np.float32)
        ahead = velocity.astype(np.float64)
        if self.nesterov:
            ahead = mean + self.momentum * ahead
        return _moved(model, rate * ahead), {"momentum": velocity}


@final
class Adam(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="adam"):
    """FedAdam (Reddi et al. 2021, Algorithm 2): adaptive steps, without bias correction.

    Attributes:
        learning_rate: The learning rate; the schedule multiplies it round by round.
        beta1: Decay of the running average of means, from 0 to below 1.
        beta2: Decay of the running average of squared means, from 0 to below 1.
        tau: Added to the root of the latter average; larger values adapt less.
        schedule: As for `Sgd`.
    """

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    schedule: str | None = None

    def check(self, rounds: int) -> None:
        """Refuse parameters that are out of range or do not fit the number of rounds."""
        _rates(self.learning_rate, self.schedule, rounds)
        _share("beta1", self.beta1)
        _share("beta2", self.beta2)
        positive_number("tau", self.tau)

    def start(self, size: int) -> State:
        """The state of the optimizer before the first round."""
        return {"first": np.zeros(size, np.float32), "second": np.zeros(size, np.float32)}

    def step(
        self, model: Float32Vector, mean: Mean, state: State, row: int, rounds: int
    ) -> tuple[Float32Vector, State]:
        """The model and the state of the optimizer after one step.

        Args:
            model: The model before the step.
            mean: The noisy mean of the updates of this round.
            state: The state of the optimizer before the step.
            row: The number of the round, from 0.
            rounds: Rounds of the plan, over which the schedule extends.
        """
        rate = _rates(self.learning_rate, self.schedule, rounds)[row]
        first = _average(self.beta1, state["first"], mean)
        second = _average(self.beta2, state["second"], mean * mean)
        step = first.astype(np.float64) / (np.sqrt(second.astype(np.float64)) + self.tau)
        return _moved(model, rate * step), {"first": first, "second": second}


Optimizer = Sgd | Adam


@lru_cache(maxsize=8)
def _rates(learning_rate: float, schedule: str | None, rounds: int) -> NDArray[np.float64]:
    rate = positive_number("learning_rate", learning_rate)
    if schedule is None:
        return np.full(rounds, rate)
    return rate * Workload.with_schedule(schedule, rounds).rates(rounds)


def _share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise InvalidInput(f"{name} must be at least 0 and below 1, got {value!r}")


def _average(kept: float, old: Float32Vector, new: NDArray[Any]) -> Float32Vector:
    return (kept * old.astype(np.float64) + (1 - kept) * new).astype(np.float32)


def _moved(model: Float32Vector, step: Mean) -> Float32Vector:
    return (model + step).astype(np.float32)
