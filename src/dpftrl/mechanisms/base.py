"""The protocol that every mechanism family implements.

A mechanism consists of a strategy matrix C and a decoder matrix D with D C = I. Row t of X is the
sum of the clipped updates of round t, and Z is a matrix of independent Gaussians. Training adds
row t of D Z to row t of X. The release X + D Z = D (C X + Z) is post-processing of C X + Z, so that
the Gaussian mechanism applied to C X gives the privacy guarantee. Let A be the matrix of prefix
sums. The released prefix sums are A X + B Z, where B = A D. For a square C, D is C^-1.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Self, final

import numpy as np

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.checks import whole_number
from dpftrl._internal.deprecation import warn
from dpftrl.errors import InvalidInput, RoundsExceeded, TooLarge
from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.participation import MinSep, Participation, Pattern

# A function that returns row i of Z (the independent Gaussians) for a block of coordinates. It must
# return the same numbers whenever it is called with the same i.
Rows = Callable[[int], Vector]

# How expensive `Mechanism.sensitivity` is; see `Mechanism.sensitivity_cost`.
Cost = Literal["low", "medium", "high"]

# Largest number of rounds for which a dense matrix is built: 10,000 x 10,000 float64 numbers take
# 0.8 GB.
DENSE_LIMIT = 10_000
# Largest number of rounds for which a vector with one entry per round is built: 160 MB in float64.
CURVE_LIMIT = 20_000_000
# Largest allowed ratio of the noise of one round to Z, and also to the part of that noise that
# comes from the round's own row of Z. Float64 has 53 bits, and the grid of an exact sum uses 25 of
# them for one standard deviation of Z. With much larger noise, float64 would no longer resolve Z in
# it, and the noise would not fit into the 63 bits of an exact sum.
MOST_NOISE = 2.0**20
# Safety factor on every rounding gain. It covers the rounding of the gain's own computation and the
# second-order terms (rounding of rounding errors).
ROUNDING_MARGIN = 1.001


class StreamState(NamedTuple):
    """State of a noise stream between two rounds: everything that the next step needs.

    The state is secret. Whoever has it and a released model can remove the noise from the model.

    Attributes:
        round: Number of rounds completed so far.
        next_row: Number of rows of Z used so far, which is the index of the next row.
        buffers: One row for each model-sized vector that the stream keeps.
    """

    round: int
    next_row: int
    buffers: Matrix


class DecayingBuffers(NamedTuple):
    """Parameters of a stream whose buffers decay independently, as those of a BLT do.

    In each round, the noise is the next row of Z minus sum_j scales[j] * buffer_j. Then buffer_j
    becomes decays[j] * buffer_j + noise. The noise kernel can do both in one pass over the memory.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]


@final
@dataclass(frozen=True)
class ErrorReport:
    """Errors and sensitivity of a mechanism, to compare mechanisms at equal privacy.

    `max_error` and `rms_error` are standard deviations of the noise on prefix sums for unit Z: the
    largest one, and the root mean square over rounds. `max_loss` and `rms_loss` are the same
    numbers with Z scaled to the sensitivity, that is, at a fixed privacy level. None of the four
    is squared.
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
    """A correlated noise mechanism: an immutable, comparable value.

    Attributes:
        family: Name of the family in mechanism files. It is unique to the class.
        rounds_buffers_once: Whether the noise stream refills a buffer with one fused multiply-add,
            and so rounds each buffer once per round. Otherwise it rounds after every product of a
            weighted sum.
        sensitivity_cost: How expensive `sensitivity` is. "low" takes about one pass over the
            rounds or less. "medium" grows with rounds times participations, to a minute. "high"
            works on matrices, and is too slow to repeat for many participations.
        has_jagged_error: Whether the error curve goes up and down from round to round, so that a
            plot needs a thin line.
    """

    family: ClassVar[str]
    rounds_buffers_once: ClassVar[bool] = False
    sensitivity_cost: ClassVar[Cost] = "low"
    has_jagged_error: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the mechanism in tables and on the command line."""
        return self.family

    @property
    def rounds(self) -> int | None:
        """Largest number of rounds that the mechanism supports; None if there is no limit."""
        return None

    @abstractmethod
    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Largest L2 norm by which one client can change C X, at clip norm 1."""

    def sensitivity_by_round(self, min_sep: int, max_participations: int) -> Iterator[float]:
        """Yield the sensitivity of a run of 1, 2, 3, ... rounds, up to the mechanism's limit."""
        for rounds in count(1) if self.rounds is None else range(1, self.rounds + 1):
            yield self.sensitivity(MinSep(rounds, min_sep, max_participations)).value

    @final
    def pattern_norm(self, pattern: Sequence[int], rounds: int) -> float:
        """Largest L2 norm by which one client with exactly this pattern can change C X.

        The clip norm is 1. The result is an upper bound if the strategy has entries of both signs.
        """
        checked = tuple(whole_number("a round of the pattern", t, at_least=0) for t in pattern)
        last = self.check_rounds(rounds) - 1
        increasing = all(earlier < later for earlier, later in pairwise(checked))
        if not increasing or max(checked, default=0) > last:
            raise InvalidInput(
                f"a pattern must be increasing rounds from 0 to {last}, got {checked!s:.80}"
            )
        return self._pattern_norm(checked, rounds)

    @abstractmethod
    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """`pattern_norm` for a pattern that was checked."""

    @abstractmethod
    def error_curve(self, rounds: int) -> Vector:
        """Standard deviation of the noise on each of the first `rounds` prefix sums, for unit Z."""

    def max_error(self, rounds: int) -> float:
        """Maximum of the error curve."""
        return float(self.error_curve(rounds).max())

    def rms_error(self, rounds: int) -> float:
        """Root mean square of the error curve."""
        return float(np.sqrt(np.mean(self.error_curve(rounds) ** 2)))

    @final
    def error_report(self, participation: Participation) -> ErrorReport:
        """Errors and sensitivity under one participation."""
        self.check_rounds(participation.rounds)
        report = ErrorReport(
            max_error=self.max_error(participation.rounds),
            rms_error=self.rms_error(participation.rounds),
            sensitivity=self.sensitivity(participation),
        )
        if not (math.isfinite(report.max_loss) and math.isfinite(report.rms_loss)):
            raise InvalidInput(
                f"the error or the sensitivity of {self.name} is too large for float64 over "
                f"{participation.rounds:,} rounds; use coefficients nearer to 1"
            )
        return report

    def loss(self, participation: Participation) -> ErrorReport:
        """Deprecated name of `error_report`."""
        warn("Mechanism.loss", "Mechanism.error_report")
        return self.error_report(participation)

    @abstractmethod
    def memory(self, rounds: int) -> int:
        """Number of model-sized vectors that a stream keeps between rounds."""

    @property
    def memory_grows(self) -> bool:
        """Whether a stream keeps one more vector in every round, so that memory has no limit."""
        return False

    @property
    def decaying_buffers(self) -> DecayingBuffers | None:
        """Parameters for the fused noise kernel; None if the buffers do not decay independently."""
        return None

    def buffered_noise(self, rounds: int) -> float:
        """Bound on what `decaying_buffers` add to the noise of a round, whatever their signs.

        It is the sum over buffers of the scale times the largest absolute value, if all entries of
        Z are from -1 to 1. It is 0 if no buffers decay.
        """
        self.check_rounds(rounds)
        return 0.0

    def rounding_gain(self, rounds: int) -> float:
        """How far rounding in the stream's buffers can shift Z, in units of the rounding.

        The stream keeps its buffers in float64. If every entry of Z is at most r in absolute value,
        then rounding shifts one coordinate of Z, as the release shows it, by at most
        2 * 2^-53 * r * `rounding_gain`. This is an L2 norm over all rounds; `docs/guarantees.md`
        has the derivation. The gain is 0 if the buffers are earlier rows of the noise or of Z:
        those are float64 numbers already, and storing them rounds nothing. Otherwise it grows at
        least as the square root of the rounds, so that more rounds of a smaller model never give a
        smaller mu.
        """
        self.check_rounds(rounds)
        return 0.0

    def check_noise(self, rounds: int) -> None:
        """Refuse a strategy whose noise is so large that float64 no longer resolves Z in it.

        Most families cannot have such noise, because their constructors check the parameters.

        Raises:
            InvalidInput: The noise can exceed `MOST_NOISE` within this number of rounds.
        """
        self.check_rounds(rounds)

    @final
    def refuse_noise(self, size: float, rounds: int) -> None:
        """Raise if `size` is too large for float64.

        Args:
            size: Bound on the noise of a round, in multiples of Z and of the round's own row.
            rounds: Number of rounds, for the message.
        """
        if not size <= MOST_NOISE:
            raise InvalidInput(
                f"the noise of {self.name} grows to {size:.2g} times Z within {rounds:,} rounds, "
                f"and above {MOST_NOISE:.2g} float64 would lose Z in it; use a first coefficient "
                "near 1, and others that fall off faster"
            )

    @final
    def init(self, size: int) -> StreamState:
        """State of a stream before round 0, for `size` coordinates."""
        return StreamState(0, 0, np.zeros((0, whole_number("size", size))))

    @final
    def step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """Compute the next row of D Z.

        This is the reference implementation in float64, for one block of coordinates. It takes no
        secret key. Use `dpftrl.NoiseStream` for training.

        Args:
            state: State after the previous round, or what `init` returned.
            rows: Source of the rows of Z.

        Returns:
            The noise of the round, and the state after it.
        """
        if self.rounds is not None and state.round >= self.rounds:
            raise RoundsExceeded(
                f"{self.name} was built for {self.rounds} rounds, and all of them are done; "
                "build one for more rounds, or use a mechanism without a limit, such as blt"
            )
        return self._step(state, rows)

    @abstractmethod
    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """`step`, for a round that the mechanism supports."""

    def first_column(self, rounds: int) -> Vector | None:  # noqa: ARG002
        """The first column of C, if C is a lower-triangular Toeplitz matrix; None otherwise.

        It determines C, and is known where C itself would be too large.
        """
        return None

    @abstractmethod
    def strategy(self, rounds: int) -> Matrix:
        """C as a dense matrix; refused above `DENSE_LIMIT` rounds."""

    @abstractmethod
    def decoder(self, rounds: int) -> Matrix:
        """D as a dense matrix, so that D C is the identity; refused above `DENSE_LIMIT` rounds."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Parameters that define the mechanism within its family: JSON values or numpy arrays."""

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> Self:
        """Build the mechanism from what `parameters` returned, and check the values."""
        return cls(**parameters)

    @final
    def check_rounds(self, rounds: int) -> int:
        """Return `rounds` as an int, or raise if the mechanism does not support that many."""
        rounds = whole_number("rounds", rounds)
        if self.rounds is not None and rounds > self.rounds:
            raise RoundsExceeded(
                f"{self.name} supports {self.rounds} rounds, got {rounds}; "
                "build one for more rounds, or use a mechanism without a limit, such as blt"
            )
        return rounds

    @final
    def check_curve(self, rounds: int) -> int:
        """Like `check_rounds`, but also refuse more rounds than `CURVE_LIMIT`."""
        if self.check_rounds(rounds) > CURVE_LIMIT:
            raise TooLarge(
                f"{self.name} needs one number per round, which is limited to {CURVE_LIMIT:,} "
                f"rounds, got {rounds:,}; blt, tree and independent have closed forms for any "
                "number of rounds"
            )
        return rounds

    @final
    def check_dense(self, rounds: int) -> int:
        """Like `check_rounds`, but also refuse more rounds than `DENSE_LIMIT`."""
        if self.check_rounds(rounds) > DENSE_LIMIT:
            raise TooLarge(
                f"a dense matrix of {self.name} is limited to {DENSE_LIMIT} rounds, got {rounds}; "
                "use the coefficients, the error curve or the stream instead"
            )
        return rounds

    def __str__(self) -> str:
        return self.name
