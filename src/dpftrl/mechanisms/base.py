"""The one protocol that every mechanism family meets.

A mechanism is a strategy C and a decoder D with D C = I. Training adds the rows of D Z to the sums
of clipped updates, for Z of independent Gaussians; the release is then post-processing of C X + Z.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self, final

import numpy as np

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.checks import whole_number
from dpftrl._internal.deprecation import warn
from dpftrl.errors import InvalidInput, RoundsExceeded, TooLarge
from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.participation import Participation, Pattern

# Gives row i of Z, the independent Gaussians, for a block of coordinates. Asked twice for the same
# row, it must give the same numbers.
Rows = Callable[[int], Vector]

# Rounds to which dense matrices, and vectors with one entry a round, are kept.
DENSE_LIMIT = 10_000
CURVE_LIMIT = 20_000_000
# The noise of a round over Z, and over what the round's own row of Z adds to it. Float64 has 53
# bits, a grid 25 to a standard deviation of Z: much beyond this Z would be lost in the noise, and
# the noise would not fit into the 63 bits of a sum.
MOST_NOISE = 2.0**20
# What a rounding gain is multiplied by, for its own rounding and for rounding of errors.
ROUNDING_MARGIN = 1.001


class StreamState(NamedTuple):
    """Where a stream of noise stands: all that the next step needs.

    Whoever holds it together with a released model can take the noise off again: keep it secret.

    Attributes:
        round: Rounds made so far.
        next_row: Rows of Z taken so far; the next one has this index.
        buffers: One row for each model-sized vector that is kept.
    """

    round: int
    next_row: int
    buffers: Matrix


@final
@dataclass(frozen=True)
class ErrorReport:
    """Error at a fixed privacy level: what mechanisms are compared by.

    `max_loss` and `rms_loss` are the standard deviation of the noise on prefix sums, the largest
    and the root mean square over rounds, with noise scaled to the sensitivity. Never squared.
    """

    max_error: float
    rms_error: float
    sensitivity: Sensitivity

    @property
    def max_loss(self) -> float:
        """MaxError times sensitivity."""
        return self.max_error * self.sensitivity.value

    @property
    def rms_loss(self) -> float:
        """RmsError times sensitivity."""
        return self.rms_error * self.sensitivity.value


class Mechanism(ABC):
    """A correlated noise mechanism: an immutable value."""

    family: ClassVar[str]
    # Whether the stream refills a buffer in one fused multiply-add of its decay and the noise, and
    # so rounds it once a round. Otherwise it rounds after every product of a weighted sum.
    rounds_buffers_once: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What to call it in a table or on the command line."""
        return self.family

    @property
    def rounds(self) -> int | None:
        """The last number of rounds it supports; None if it runs on for ever."""
        return None

    @abstractmethod
    def sensitivity(self, participation: Participation) -> Sensitivity:
        """How far one client can move C X, at clip norm 1."""

    @final
    def pattern_norm(self, pattern: Sequence[int], rounds: int) -> float:
        """The most that one client with exactly this pattern can move C X, at clip norm 1.

        A bound where the strategy has entries of both signs.
        """
        taken = tuple(whole_number("a round of the pattern", t, at_least=0) for t in pattern)
        last = self.check_rounds(rounds) - 1
        if (
            any(later <= sooner for sooner, later in pairwise(taken))
            or max(taken, default=0) > last
        ):
            raise InvalidInput(
                f"a pattern has increasing rounds from 0 to {last}, got {taken!s:.80}"
            )
        return self._pattern_norm(taken, rounds)

    @abstractmethod
    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float: ...

    @abstractmethod
    def error_curve(self, rounds: int) -> Vector:
        """Standard deviation of the noise on each of the first `rounds` prefix sums, for unit Z."""

    def max_error(self, rounds: int) -> float:
        """The largest value of the error curve."""
        return float(self.error_curve(rounds).max())

    def rms_error(self, rounds: int) -> float:
        """The root mean square of the error curve."""
        return float(np.sqrt(np.mean(self.error_curve(rounds) ** 2)))

    @final
    def error_report(self, participation: Participation) -> ErrorReport:
        """Errors and sensitivity for one participation."""
        self.check_rounds(participation.rounds)
        return ErrorReport(
            max_error=self.max_error(participation.rounds),
            rms_error=self.rms_error(participation.rounds),
            sensitivity=self.sensitivity(participation),
        )

    def loss(self, participation: Participation) -> ErrorReport:
        """The old name of `error_report`."""
        warn("Mechanism.loss", "Mechanism.error_report")
        return self.error_report(participation)

    @abstractmethod
    def memory(self, rounds: int) -> int:
        """Model-sized vectors that a stream keeps between rounds."""

    def rounding_gain(self, rounds: int) -> float:
        """How far rounding in the kept buffers can shift Z, in units of the rounding.

        The stream keeps its buffers in float64. If each row of Z is at most r in every coordinate,
        rounding changes what the release says of one coordinate of Z by at most
        2 * 2^-53 * r * `rounding_gain`, as an L2 norm over all rounds; see `docs/guarantees.md`.
        It is 0 for a mechanism whose buffers are earlier rows of noise or of Z: those are float64
        numbers already, and storing them rounds nothing. Otherwise it grows at least as the square
        root of the rounds, so that more rounds of a smaller model never have a smaller mu.
        """
        self.check_rounds(rounds)
        return 0.0

    def check_noise(self, rounds: int) -> None:
        """Refuse a strategy whose noise is so large that float64 no longer resolves Z in it.

        Most families cannot grow: their parameters are refused when they are built.
        """
        self.check_rounds(rounds)

    @final
    def refuse_noise(self, size: float, rounds: int) -> None:
        """Raise if the noise of a round can be so many times as large as Z, or as its own row."""
        if not size <= MOST_NOISE:
            raise InvalidInput(
                f"the noise of {self.name} grows to {size:.2g} times Z within {rounds:,} rounds, "
                f"and above {MOST_NOISE:.2g} float64 would lose Z in it; use a first coefficient "
                "near 1, and others that fall off faster"
            )

    @final
    def init(self, size: int) -> StreamState:
        """A stream at round 0, for `size` coordinates."""
        return StreamState(0, 0, np.zeros((0, whole_number("size", size))))

    @final
    def step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """The next row of D Z, and the state after it.

        A reference in float64, one block of coordinates at a time.
        """
        if self.rounds is not None and state.round >= self.rounds:
            raise RoundsExceeded(
                f"{self.name} was built for {self.rounds} rounds and has made them all; "
                "build one for more rounds, or use a mechanism that runs on, such as blt"
            )
        return self._step(state, rows)

    @abstractmethod
    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]: ...

    @abstractmethod
    def strategy(self, rounds: int) -> Matrix:
        """C as a dense matrix, for few rounds."""

    @abstractmethod
    def decoder(self, rounds: int) -> Matrix:
        """D as a dense matrix, for few rounds: D C is the identity."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """What distinguishes it within its family, ready for JSON (arrays may be numpy's)."""

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> Self:
        """The mechanism with these parameters, checked."""
        return cls(**parameters)

    @final
    def check_rounds(self, rounds: int) -> int:
        """Refuse a number of rounds that this mechanism does not support."""
        rounds = whole_number("rounds", rounds)
        if self.rounds is not None and rounds > self.rounds:
            raise RoundsExceeded(
                f"{self.name} supports {self.rounds} rounds, got {rounds}; "
                "build one for more rounds, or use a mechanism that runs on, such as blt"
            )
        return rounds

    @final
    def check_curve(self, rounds: int) -> int:
        """Refuse to make a vector with one entry a round that would fill the memory."""
        if self.check_rounds(rounds) > CURVE_LIMIT:
            raise TooLarge(
                f"{self.name} needs one number a round, kept to {CURVE_LIMIT:,} rounds, "
                f"got {rounds:,}; blt, tree and independent have closed forms for any number"
            )
        return rounds

    @final
    def check_dense(self, rounds: int) -> int:
        """Refuse to write down a matrix that would fill the memory."""
        if self.check_rounds(rounds) > DENSE_LIMIT:
            raise TooLarge(
                f"a dense {self.name} is kept to {DENSE_LIMIT} rounds, got {rounds}; "
                "use the coefficients, the error curve or the stream instead"
            )
        return rounds

    def __str__(self) -> str:
        return self.name
