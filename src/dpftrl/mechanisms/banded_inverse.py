"""Mechanisms whose *inverse* is banded Toeplitz: few buffers suffice, although C has all bands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from dpftrl._internal.checks import finite_numbers, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms._sensitivity import Sensitivity, toeplitz_sensitivity
from dpftrl.mechanisms.base import Rows, StreamState, Vector
from dpftrl.mechanisms.square_root import inverse_square_root_series
from dpftrl.mechanisms.toeplitz import ToeplitzMechanism, abridged, divide_series
from dpftrl.participation import Participation

# Relative rounding error that a coefficient of C can have from the recursion that computes it.
ROUNDING = 1e-13


@final
@dataclass(frozen=True, repr=False)
class BandedInverse(ToeplitzMechanism):
    """A mechanism whose C^-1 is Toeplitz with a few coefficients of any sign.

    The optimized mechanism is called BandInvMF. The noise is a short moving average of Z, so that a
    stream keeps one vector less than there are coefficients. The sensitivity is an
    upper bound, unless the coefficients of C are non-negative and non-increasing.

    >>> BandedInverse([1.0, -0.5]).coefficients(4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """

    family = "banded-inverse"

    c_hat: tuple[float, ...]

    def __init__(self, inverse_coefficients: Sequence[float]):
        c_hat = finite_numbers("inverse_coefficients", inverse_coefficients)
        if not c_hat[0] > 0:
            raise InvalidInput(f"the first inverse coefficient must be positive, got {c_hat[0]!r}")
        object.__setattr__(self, "c_hat", c_hat)

    @classmethod
    def square_root(cls, bands: int) -> Self:
        """The coefficients of the inverse square root, cut to the first bands (BISR)."""
        return cls(inverse_square_root_series(whole_number("bands", bands)).tolist())

    @classmethod
    def one_parameter(cls, decay: float) -> Self:
        """Noise z_t - decay * z_(t-1), for a decay from 0 to 1; C has the coefficients decay^i."""
        if not 0 <= decay <= 1:
            raise InvalidInput(f"lambda must be between 0 and 1, got {decay!r}")
        return cls([1.0, -decay])

    @property
    def name(self) -> str:
        """`lambda` or `inv-sqrt` with its parameter if it is one of those, otherwise the family."""
        if len(self.c_hat) == 2 and self.c_hat[0] == 1 and -1 <= self.c_hat[1] <= 0:
            return f"lambda:{abs(self.c_hat[1])!r}"
        if self == BandedInverse.square_root(len(self.c_hat)):
            return f"inv-sqrt:{len(self.c_hat)}"
        return self.family

    def coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C: the reciprocal power series."""
        c = divide_series(np.eye(1, rounds)[0], np.array(self.c_hat))
        if not np.all(np.isfinite(c)):
            raise InvalidInput(
                f"the strategy of {self.name} grows without bound within {rounds} rounds; "
                "its inverse coefficients need to be smaller"
            )
        return c

    def inverse_coefficients(self, rounds: int) -> Vector:
        """The given coefficients, followed by zeros."""
        c_hat = np.zeros(rounds)
        c_hat[: len(self.c_hat)] = self.c_hat[:rounds]
        return c_hat

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Sensitivity as for any Toeplitz strategy, with an allowance for rounding in C."""
        c = self.coefficients(self.check_curve(participation.rounds))
        return toeplitz_sensitivity(c, participation, rounding=ROUNDING)

    def memory(self, rounds: int) -> int:
        """One vector for each coefficient of the inverse except the first."""
        return min(len(self.c_hat), self.check_rounds(rounds)) - 1

    def check_noise(self, rounds: int) -> None:
        """Refuse coefficients whose absolute sum, which bounds the noise, is too large."""
        self.check_rounds(rounds)
        self.refuse_noise(sum(map(abs, self.c_hat)) * max(1.0, 1 / self.c_hat[0]), rounds)

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """Moving average over the newest rows of Z, which are the buffers, newest first."""
        window = np.concatenate([rows(state.next_row)[None], state.buffers])
        noise = np.array(self.c_hat[: len(window)]) @ window
        buffers = window[: len(self.c_hat) - 1]
        return noise, StreamState(state.round + 1, state.next_row + 1, buffers)

    def parameters(self) -> dict[str, Any]:
        """The list of coefficients of the inverse."""
        return {"inverse_coefficients": list(self.c_hat)}

    def __repr__(self) -> str:
        return f"BandedInverse(inverse_coefficients={abridged(self.c_hat)})"
