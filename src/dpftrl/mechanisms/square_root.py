"""The square-root factorization, complete or cut to its first bands (BandFHU)."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl._internal.checks import whole_number
from dpftrl.mechanisms.base import Rows, StreamState, Vector
from dpftrl.mechanisms.toeplitz import ToeplitzMechanism, divide_series, forward_substitution


@final
@dataclass(frozen=True)
class SquareRoot(ToeplitzMechanism):
    """C = A^(1/2), for the matrix A of prefix sums (Fichtenberger, Henzinger and Upadhyay 2022).

    The coefficients are those of (1 - x)^(-1/2): 1, 1/2, 3/8, 5/16, ... They are positive and
    decreasing, so that the sensitivity is exact.

    Attributes:
        bands: Number of coefficients to keep (Kalinin and Lampert 2024); None keeps all.

    >>> SquareRoot().coefficients(4)
    array([1.    , 0.5   , 0.375 , 0.3125])
    """

    family = "sqrt"

    bands: int | None = None

    def __post_init__(self) -> None:
        if self.bands is not None:
            object.__setattr__(self, "bands", whole_number("bands", self.bands))

    @property
    def name(self) -> str:
        """`sqrt`, or `band-sqrt` with the number of bands."""
        return "sqrt" if self.bands is None else f"band-sqrt:{self.bands}"

    def coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C, at most as many as there are bands."""
        return square_root_series(min(rounds, self.bands or rounds))

    def inverse_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C^-1: in closed form, or by division for bands."""
        if self.bands is None:
            return inverse_square_root_series(rounds)
        return divide_series(np.eye(1, rounds)[0], self.coefficients(rounds))

    def prefix_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of B = A C^-1; without bands, B = C."""
        if self.bands is None:
            return self.coefficients(rounds)
        return divide_series(np.ones(rounds), self.coefficients(rounds))

    def memory(self, rounds: int) -> int:
        """One vector for each coefficient except the first."""
        return min(self.check_rounds(rounds), self.bands or rounds) - 1

    @property
    def memory_grows(self) -> bool:
        """True without bands: every round then needs the noise of all earlier rounds."""
        return self.bands is None

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        rounds = state.round + 1
        keep = rounds if self.bands is None else self.bands - 1
        return forward_substitution(state, rows, self.coefficients(rounds), keep)

    def parameters(self) -> dict[str, Any]:
        """The number of bands, or None."""
        return {"bands": self.bands}


def square_root_series(terms: int) -> Vector:
    """The first `terms` coefficients of (1 - x)^(-1/2)."""
    i = np.arange(1.0, terms)
    return np.append(1.0, np.cumprod(1 - 0.5 / i))


def inverse_square_root_series(terms: int) -> Vector:
    """The first `terms` coefficients of (1 - x)^(1/2)."""
    i = np.arange(1.0, terms)
    return np.append(1.0, np.cumprod(1 - 1.5 / i))
