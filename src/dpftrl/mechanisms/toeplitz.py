"""Lower-triangular Toeplitz strategies, and the one that is given by its coefficients."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl._internal.checks import all_within, finite_numbers
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.mechanisms._sensitivity import Sensitivity, toeplitz_pattern_norm, toeplitz_sensitivity
from dpftrl.mechanisms.base import Matrix, Mechanism, Rows, StreamState, Vector
from dpftrl.participation import Participation, Pattern

# Multiplications in one division of power series: about a minute.
MOST_WORK = 1e11


class ToeplitzMechanism(Mechanism):
    """A mechanism whose strategy is LtToep(c): entry (i, j) is c[i - j]."""

    @abstractmethod
    def coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C."""

    @abstractmethod
    def inverse_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C^-1."""

    def prefix_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of B = A C^-1: the noise on prefix sums is B Z."""
        return np.cumsum(self.inverse_coefficients(rounds))

    def error_curve(self, rounds: int) -> Vector:
        """Prefix sum t carries the first t + 1 coefficients of B."""
        b = self.prefix_coefficients(self.check_curve(rounds))
        with np.errstate(over="ignore", invalid="ignore"):
            curve = np.sqrt(np.cumsum(b**2))
        if not np.isfinite(curve[-1]):
            raise InvalidInput(
                f"the noise of {self.name} grows without bound within {rounds} rounds; "
                "its coefficients need to fall off faster"
            )
        return curve

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """See `dpftrl.mechanisms._sensitivity.toeplitz_sensitivity`."""
        rounds = self.check_curve(participation.rounds)
        return toeplitz_sensitivity(self.coefficients(rounds), participation)

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """The norm of the sum of the columns (in absolute value)."""
        return toeplitz_pattern_norm(self.coefficients(self.check_curve(rounds)), pattern, rounds)

    def strategy(self, rounds: int) -> Matrix:
        """LtToep(c)."""
        return lower_toeplitz(self.coefficients(self.check_dense(rounds)), rounds)

    def decoder(self, rounds: int) -> Matrix:
        """C^-1, which is lower-triangular Toeplitz too."""
        return lower_toeplitz(self.inverse_coefficients(self.check_dense(rounds)), rounds)


@final
@dataclass(frozen=True, repr=False)
class Toeplitz(ToeplitzMechanism):
    """Any non-negative coefficients, followed by zeros. With P of them C has P bands.

    >>> Toeplitz([1.0, 0.5, 0.25])
    Toeplitz(coefficients=(1.0, 0.5, 0.25))
    """

    family = "toeplitz"

    c: tuple[float, ...]

    def __init__(self, coefficients: Sequence[float]):
        c = finite_numbers("coefficients", coefficients)
        all_within("coefficients", c, 0, float("inf"))
        if not c[0] > 0:
            raise InvalidInput(f"the first coefficient must be positive, got {c[0]!r}")
        object.__setattr__(self, "c", c)

    def coefficients(self, rounds: int) -> Vector:
        """The given ones, cut off at `rounds` (zeros at the end are left out)."""
        return np.array(self.c[:rounds])

    def inverse_coefficients(self, rounds: int) -> Vector:
        """The reciprocal power series."""
        return divide_series(np.eye(1, rounds)[0], np.array(self.c))

    def prefix_coefficients(self, rounds: int) -> Vector:
        """Solved for directly, which adds up fewer rounding errors than summing the inverse."""
        return divide_series(np.ones(rounds), np.array(self.c))

    def memory(self, rounds: int) -> int:
        """One vector for each coefficient but the first."""
        return min(len(self.c), self.check_rounds(rounds)) - 1

    def check_noise(self, rounds: int) -> None:
        """Coefficients that never rise have an inverse that never grows.

        (1 - x) c(x) is then c_0 minus a series of non-negative terms with sum c_0, so that prefix
        sums of the inverse are a renewal sequence over c_0: between 0 and 1 / c_0.
        """
        self.check_curve(rounds)
        size = 1 / self.c[0]
        if not np.all(np.diff(self.c) <= 0):
            with np.errstate(over="ignore", invalid="ignore"):
                size = float(np.abs(self.inverse_coefficients(rounds)).sum())
        self.refuse_noise(size * max(1.0, self.c[0]), rounds)

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        return forward_substitution(state, rows, np.array(self.c), keep=len(self.c) - 1)

    def parameters(self) -> dict[str, Any]:
        """The coefficients."""
        return {"coefficients": list(self.c)}

    def __repr__(self) -> str:
        return f"Toeplitz(coefficients={abridged(self.c)})"


def abridged(numbers: Sequence[float], most: int = 8) -> str:
    """A tuple as Python prints it, with the middle left out when it is long."""
    if len(numbers) <= most:
        return repr(tuple(numbers))
    head = ", ".join(repr(number) for number in numbers[: most - 1])
    return f"({head}, ... {len(numbers)} in all)"


def lower_toeplitz(c: Vector, rounds: int) -> Matrix:
    """The dense matrix with c[i - j] in row i and column j."""
    padded = np.zeros(2 * rounds)
    padded[rounds : rounds + len(c)] = c
    lag = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return padded[lag + rounds]


def invert_lower(dense: Matrix) -> Matrix:
    """The inverse of a lower-triangular matrix."""
    return np.tril(np.linalg.inv(dense)).astype(np.float64)


def divide_series(numerator: Vector, c: Vector) -> Vector:
    """The power series numerator / c, to as many terms as the numerator has."""
    if len(numerator) * min(len(numerator), len(c)) > MOST_WORK:
        raise TooLarge(
            f"dividing a series of {len(numerator):,} terms by one of {len(c):,} takes too long; "
            "use fewer rounds or fewer bands"
        )
    quotient = np.zeros(len(numerator))
    tail = np.ascontiguousarray(c[:0:-1])  # c without its first, last to first
    with np.errstate(over="ignore", invalid="ignore"):  # callers refuse what is not finite
        for i in range(len(numerator)):
            reach = min(i, len(tail))
            past = tail[len(tail) - reach :] @ quotient[i - reach : i]
            quotient[i] = (numerator[i] - past) / c[0]
    return quotient


def forward_substitution(
    state: StreamState, rows: Rows, row_of_c: Vector, keep: int
) -> tuple[Vector, StreamState]:
    """One row of C^-1 Z, from the `keep` rows before it, which are in the buffers, newest first.

    Args:
        state: The stream so far.
        rows: The source of Z.
        row_of_c: Row t of C from the diagonal leftwards; entries beyond its end are zero.
        keep: How many rows later steps will look back.
    """
    known = min(len(row_of_c) - 1, len(state.buffers))
    past = row_of_c[1 : known + 1] @ state.buffers[:known]
    noise = (rows(state.next_row) - past) / row_of_c[0]
    buffers = np.concatenate([noise[None], state.buffers])[:keep]
    return noise, StreamState(state.round + 1, state.next_row + 1, buffers)
