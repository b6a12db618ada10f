"""`Banded`: general lower-triangular strategies with few bands, such as those of BandMF."""

import hashlib
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from numpy.typing import ArrayLike

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.mechanisms._banded_sensitivity import banded_pattern_norm, banded_sensitivity
from dpftrl.mechanisms._sensitivity import Sensitivity, brute_force, brute_force_is_cheap
from dpftrl.mechanisms.base import Matrix, Mechanism, Rows, StreamState, Vector
from dpftrl.mechanisms.square_root import square_root_series
from dpftrl.mechanisms.toeplitz import forward_substitution, invert_lower
from dpftrl.participation import MinSep, Participation, Pattern

# Largest number of multiplications for one error curve; so many take about a minute.
MOST_WORK = 3e11
# Largest number of entries of the array of columns, which take 1.6 GB in float64.
MOST_ENTRIES = 2e8
# Smallest number of columns that are solved for at once. BLAS is slow on narrower blocks.
SMALLEST_BLOCK = 64
# Number of random sign sequences with which `check_noise` measures the noise.
PROBES = 16


@final
@dataclass(frozen=True, eq=False, repr=False)
class Banded(Mechanism):
    """A lower-triangular C with entries on the diagonal and the P - 1 diagonals below it.

    Attributes:
        columns: A read-only array of P x n numbers; columns[p, j] is C[j + p, j]. Entries that
            would be below the last row must be zero. BandMF gives all columns the same norm.

    >>> Banded([[1.0, 1.0, 1.0], [0.5, 0.5, 0.0]]).strategy(3)
    array([[1. , 0. , 0. ],
           [0.5, 1. , 0. ],
           [0. , 0.5, 1. ]])
    """

    family = "banded"
    sensitivity_cost = "high"

    columns: Matrix
    _digest: str

    def __init__(self, columns: ArrayLike):
        entries = _numbers(columns)
        if entries.ndim != 2 or not 1 <= entries.shape[0] <= entries.shape[1]:
            raise InvalidInput(
                "columns must be an array of P bands by n >= P rounds, "
                f"got one of shape {entries.shape}"
            )
        if not np.all(np.isfinite(entries)):
            raise InvalidInput("columns must be finite numbers, got NaN or infinity")
        if not np.all(entries[0] > 0):
            raise InvalidInput("the diagonal of C, columns[0], must be positive")
        if np.any(entries[_below_last_row(*entries.shape)]):
            raise InvalidInput("columns must be zero where they would reach below the last row")
        entries.flags.writeable = False
        digest = hashlib.sha256(repr(entries.shape).encode() + entries.tobytes()).hexdigest()
        object.__setattr__(self, "columns", entries)
        object.__setattr__(self, "_digest", digest)

    @classmethod
    def square_root(cls, bands: int, rounds: int) -> Self:
        """The square-root factorization cut to its first bands, with columns scaled to norm 1.

        The optimization of BandMF starts from this strategy, and improves it only a little.
        """
        rounds = whole_number("rounds", rounds)
        bands = min(whole_number("bands", bands), rounds)
        if bands * rounds > MOST_ENTRIES:
            raise TooLarge(
                f"{bands:,} bands of {rounds:,} rounds are too many entries for a general matrix; "
                "use band-sqrt, whose coefficients do not depend on the round"
            )
        c = square_root_series(bands)
        columns = np.tile(c[:, None], rounds)
        columns[_below_last_row(*columns.shape)] = 0.0
        return cls(columns / np.linalg.norm(columns, axis=0))

    @property
    def name(self) -> str:
        """The family `banded`, with the number of bands."""
        return f"banded:{len(self.columns)}"

    @property
    def rounds(self) -> int:
        """Number of columns of C."""
        return self.columns.shape[1]

    def _leading(self, rounds: int) -> Matrix:
        """The array `columns` for the matrix of the first `rounds` rows and columns of C."""
        columns = self.columns[:rounds, : self.check_rounds(rounds)].copy()
        columns[_below_last_row(*columns.shape)] = 0.0
        return columns

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Sensitivity by `banded_sensitivity`.

        If the result is only a bound and brute force is cheap, brute force is used instead.
        """
        columns = self._leading(participation.rounds)
        sensitivity = banded_sensitivity(columns, participation)
        if sensitivity.kind == "exact" or not isinstance(participation, MinSep):
            return sensitivity
        if brute_force_is_cheap(participation):
            return brute_force(self.strategy(participation.rounds), participation)
        return sensitivity

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """Norm of the sum of the columns of |C| for the rounds of the pattern."""
        return banded_pattern_norm(self._leading(rounds), pattern)

    def error_curve(self, rounds: int) -> Vector:
        """Row norms of B = A C^-1.

        B C = A is solved for one block of columns of B at a time, from the last to the first.
        """
        columns = self._leading(self.check_curve(rounds))
        width = max(len(columns), SMALLEST_BLOCK)
        if rounds * rounds * width > MOST_WORK:
            raise TooLarge(
                f"the error of {self.name} at {rounds:,} rounds takes too long to compute; "
                "use fewer rounds, fewer bands, or a Toeplitz mechanism"
            )
        variance = np.zeros(rounds)
        later = np.zeros((rounds, 0))  # the block of B to the right of the current block
        for start in reversed(range(0, rounds, width)):
            stop = min(start + width, rounds)
            block = _dense_columns(columns, start, stop)
            prefix_sums = np.tri(rounds, stop - start, -start)
            reach = min(len(columns), later.shape[1])
            rest = prefix_sums - later[:, :reach] @ block[stop - start :][:reach]
            later = np.linalg.solve(block[: stop - start].T, rest.T).T
            variance += np.einsum("ij,ij->i", later, later)
        return np.sqrt(variance)

    def memory(self, rounds: int) -> int:
        """One vector for each band except the diagonal."""
        return min(len(self.columns), self.check_rounds(rounds)) - 1

    def check_noise(self, rounds: int) -> None:
        """Refuse columns whose noise grows too large, measured with random signs in place of Z."""
        self.check_rounds(rounds)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (rounds, PROBES))
        state, largest = self.init(PROBES), 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(rounds):
                noise, state = self._step(state, signs.__getitem__)
                own = max(1.0, float(self.columns[0, t]))
                largest = max(largest, float(np.abs(noise).max()) * own)
        self.refuse_noise(largest, rounds)

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        lags = np.arange(min(len(self.columns), state.round + 1))
        row_of_c = self.columns[lags, state.round - lags]
        return forward_substitution(state, rows, row_of_c, keep=len(self.columns) - 1)

    def strategy(self, rounds: int) -> Matrix:
        """The first `rounds` rows and columns of C."""
        columns = self._leading(self.check_dense(rounds))
        return _dense_columns(columns, 0, rounds)[:rounds]

    def decoder(self, rounds: int) -> Matrix:
        """The first `rounds` rows and columns of C^-1."""
        return invert_lower(self.strategy(rounds))

    def parameters(self) -> dict[str, Any]:
        """The array of columns."""
        return {"columns": self.columns}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Banded) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        bands, rounds = self.columns.shape
        return f"Banded({bands} bands, {rounds} rounds, sha256 {self._digest[:8]})"


def _numbers(columns: ArrayLike) -> Matrix:
    """Copy `columns` to a float64 array, or raise if it does not contain numbers."""
    try:
        entries = np.array(columns, order="C")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"columns must be an array of numbers ({error})") from None
    if entries.dtype.kind not in "iuf":
        raise InvalidInput(f"columns must be an array of numbers, got dtype {entries.dtype}")
    return entries.astype(np.float64)


def _dense_columns(columns: Matrix, start: int, stop: int) -> Matrix:
    """Columns `start` to `stop` of C as a dense matrix, in the rows from `start` on."""
    bands, width = len(columns), stop - start
    dense = np.zeros((width + bands, width))
    for p in range(bands):
        dense[np.arange(p, p + width), np.arange(width)] = columns[p, start:stop]
    return dense


def _below_last_row(bands: int, rounds: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mask of the entries of `columns` that would be below the last row of C."""
    return np.add.outer(np.arange(bands), np.arange(rounds)) >= rounds
