"""Lower-triangular Toeplitz strategies: the base class, and `Toeplitz` with given coefficients."""

import math
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

# Largest number of multiplications in one division of power series; so many take about a minute.
MOST_WORK = 1e11


class ToeplitzMechanism(Mechanism):
    """A mechanism whose strategy C is lower-triangular Toeplitz: C[i, j] = c[i - j]."""

    @abstractmethod
    def coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C. Zeros at the end may be left out."""

    @abstractmethod
    def inverse_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C^-1."""

    def prefix_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of B = A C^-1: the noise on prefix sums is B Z."""
        return np.cumsum(self.inverse_coefficients(rounds))

    def error_curve(self, rounds: int) -> Vector:
        """Entry t is the norm of the first t + 1 coefficients of B."""
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
        """Sensitivity from the coefficients; see `_sensitivity.toeplitz_sensitivity`."""
        rounds = self.check_curve(participation.rounds)
        return toeplitz_sensitivity(self.coefficients(rounds), participation)

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """Norm of the sum of the columns of |C| for the rounds of the pattern."""
        return toeplitz_pattern_norm(self.coefficients(self.check_curve(rounds)), pattern, rounds)

    def first_column(self, rounds: int) -> Vector:
        """The coefficients, followed by zeros."""
        column = np.zeros(self.check_curve(rounds))
        coefficients = self.coefficients(rounds)
        column[: len(coefficients)] = coefficients
        return column

    def strategy(self, rounds: int) -> Matrix:
        """The dense lower-triangular Toeplitz matrix C."""
        return lower_toeplitz(self.coefficients(self.check_dense(rounds)), rounds)

    def decoder(self, rounds: int) -> Matrix:
        """The dense matrix C^-1, which is lower-triangular Toeplitz too."""
        return lower_toeplitz(self.inverse_coefficients(self.check_dense(rounds)), rounds)


@final
@dataclass(frozen=True, repr=False)
class Toeplitz(ToeplitzMechanism):
    """The strategy with the given non-negative coefficients; C has one band per coefficient.

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
        """The given coefficients, at most `rounds` of them; the zeros after them are left out."""
        return np.array(self.c[:rounds])

    def inverse_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C^-1: the reciprocal power series."""
        return divide_series(np.eye(1, rounds)[0], np.array(self.c))

    def prefix_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of B = A C^-1.

        They are computed by one division, which has smaller rounding errors than prefix sums of the
        coefficients of C^-1.
        """
        return divide_series(np.ones(rounds), np.array(self.c))

    def memory(self, rounds: int) -> int:
        """One vector for each coefficient except the first."""
        return min(len(self.c), self.check_rounds(rounds)) - 1

    def check_noise(self, rounds: int) -> None:
        """Refuse coefficients whose noise grows too large.

        Non-increasing coefficients are refused only if c_0 is too small. For them, (1 - x) c(x) is
        c_0 minus a series of non-negative terms with sum c_0. The prefix sums of the inverse are
        then a renewal sequence divided by c_0, and so between 0 and 1 / c_0. Their differences, the
        inverse coefficients, are at most 1 / c_0, and the noise has a standard deviation of at most
        sqrt(rounds) / c_0. For all other coefficients, the sum of the absolute inverse coefficients
        bounds the noise.
        """
        self.check_curve(rounds)
        size = math.sqrt(rounds) / self.c[0]
        if not np.all(np.diff(self.c) <= 0):
            with np.errstate(over="ignore", invalid="ignore"):
                size = float(np.abs(self.inverse_coefficients(rounds)).sum())
        self.refuse_noise(size * max(1.0, self.c[0]), rounds)

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        return forward_substitution(state, rows, np.array(self.c), keep=len(self.c) - 1)

    def parameters(self) -> dict[str, Any]:
        """The list of coefficients."""
        return {"coefficients": list(self.c)}

    def __repr__(self) -> str:
        return f"Toeplitz(coefficients={abridged(self.c)})"


def abridged(numbers: Sequence[float], most: int = 8) -> str:
    """The `repr` of a tuple; of more than `most` numbers, only the first ones and the count."""
    if len(numbers) <= most:
        return repr(tuple(numbers))
    head = ", ".join(repr(number) for number in numbers[: most - 1])
    return f"({head}, ... {len(numbers)} in all)"


def lower_toeplitz(c: Vector, rounds: int) -> Matrix:
    """Dense matrix with c[i - j] in row i and column j."""
    padded = np.zeros(2 * rounds)
    padded[rounds : rounds + len(c)] = c
    lag = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return padded[lag + rounds]


def invert_lower(dense: Matrix) -> Matrix:
    """Inverse of a lower-triangular matrix, with exact zeros above the diagonal."""
    return np.tril(np.linalg.inv(dense)).astype(np.float64)


def divide_series(numerator: Vector, c: Vector) -> Vector:
    """Divide the power series `numerator` by `c`, to as many terms as the numerator has."""
    if len(numerator) * min(len(numerator), len(c)) > MOST_WORK:
        raise TooLarge(
            f"dividing a power series of {len(numerator):,} terms by one of {len(c):,} terms takes "
            "too long; use fewer rounds or fewer bands"
        )
    quotient = np.zeros(len(numerator))
    tail = np.ascontiguousarray(c[:0:-1])  # c without its first entry, in reverse order
    with np.errstate(over="ignore", invalid="ignore"):  # callers check that results are finite
        for i in range(len(numerator)):
            reach = min(i, len(tail))
            past = tail[len(tail) - reach :] @ quotient[i - reach : i]
            quotient[i] = (numerator[i] - past) / c[0]
    return quotient


def forward_substitution(
    state: StreamState, rows: Rows, row_of_c: Vector, keep: int
) -> tuple[Vector, StreamState]:
    """Compute the next row of C^-1 Z from its earlier rows.

    Args:
        state: State of the stream. The buffers are earlier rows of C^-1 Z, newest first.
        rows: Source of the rows of Z.
        row_of_c: The row of C for this round, from the diagonal to the left; entries beyond the end
            of the array are zero.
        keep: Number of rows to keep in the buffers for later steps.

    Returns:
        The row of C^-1 Z, and the state after the round.
    """
    known = min(len(row_of_c) - 1, len(state.buffers))
    past = row_of_c[1 : known + 1] @ state.buffers[:known]
    noise = (rows(state.next_row) - past) / row_of_c[0]
    buffers = np.concatenate([noise[None], state.buffers])[:keep]
    return noise, StreamState(state.round + 1, state.next_row + 1, buffers)
