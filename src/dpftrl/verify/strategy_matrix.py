"""The strategy C of a run: its sensitivity, its mu, and a check of its noise stream."""

from functools import cached_property, lru_cache
from typing import Final, NamedTuple, final

import numpy as np

from dpftrl._internal.arrays import Matrix
from dpftrl.errors import UnsafeState
from dpftrl.mechanisms import Mechanism, ToeplitzMechanism
from dpftrl.participation import MinSep
from dpftrl.verify.epsilon import MuRange, rounding_cost, worst_shift
from dpftrl.verify.sensitivity import (
    ROUNDING,
    Limits,
    SensitivityBounds,
    bound_sensitivity,
    nested_sensitivity,
)

MOST_ROUNDS: Final = 3_000  # up to here C and C^T C are computed as dense matrices (72 MB each)
PROBES: Final = 4  # random vectors that are sent through the noise stream
AGREEMENT: Final = 1e-6  # largest absolute error of the vectors that come out


class Sensitivity(NamedTuple):
    """The sensitivity of a strategy.

    Attributes:
        value: No client can move C X by more clip norms than this.
        claimable: The library's own value: a correct file does not state more.
        independent: Whether `value` was computed without the library's sensitivity.
    """

    value: float
    claimable: float
    independent: bool


@final
class Strategy:
    """The strategy matrix C of a mechanism, for a number of rounds."""

    def __init__(self, mechanism: Mechanism, rounds: int):
        self.mechanism = mechanism
        self.rounds = mechanism.check_rounds(rounds)
        self.sensitivity = lru_cache(self._sensitivity)

    def __repr__(self) -> str:
        return f"Strategy({self.mechanism.name}, {self.rounds} rounds)"

    @property
    def is_small(self) -> bool:
        """Whether C is small enough to be computed as a dense matrix."""
        return self.rounds <= MOST_ROUNDS

    def mu_range(self, limits: Limits, noise_multiplier: float, buffers: str) -> MuRange:
        """Return the mu that follows from the sensitivity, the noise and the rounding of buffers.

        Args:
            limits: The rounds that one client may take part in.
            noise_multiplier: The noise multiplier.
            buffers: The precision of the noise buffers.
        """
        sensitivity = self.sensitivity(limits)
        ideal = MuRange(
            sensitivity.value / noise_multiplier, sensitivity.claimable / noise_multiplier
        )
        if buffers == "float32":  # version 0.1 did not account for rounding
            return ideal
        return MuRange(self.least_mu(ideal.least), self.most_mu(ideal.most))

    def least_mu(self, ideal: float) -> float:
        """Return a lower bound on the stated mu: `ideal` plus the recomputed cost of rounding."""
        return ideal + (
            rounding_cost(self._worst_shift, self.rounds, ideal) if self.is_small else 0.0
        )

    def most_mu(self, ideal: float) -> float:
        """Return an upper bound on the stated mu: `ideal` plus the library's cost of rounding."""
        gain = self.mechanism.rounding_gain(self.rounds)
        return ideal + rounding_cost(gain, self.rounds, ideal)

    @cached_property
    def _worst_shift(self) -> float:
        return worst_shift(self.mechanism, self.rounds)

    @cached_property
    def dense(self) -> Matrix:
        """C as a dense matrix."""
        return self.mechanism.strategy(self.rounds)

    @cached_property
    def gram(self) -> Matrix:
        """The Gram matrix C^T C: the inner products of the columns of C."""
        return self.dense.T @ self.dense

    def check_noise(self) -> str:
        """Check that the noise stream of the mechanism multiplies by the inverse of C.

        Rows C x are sent through the noise stream. If it belongs to C, then x comes out.

        Raises:
            UnsafeState: Something else comes out.
        """
        generator = np.random.default_rng(0)
        inputs = generator.standard_normal((self.rounds, PROBES))
        rows, state = self.dense @ inputs, self.mechanism.init(PROBES)
        largest_error = 0.0
        for expected in inputs:
            noise, state = self.mechanism.step(state, lambda i: rows[i])
            largest_error = max(largest_error, float(np.abs(noise - expected).max()))
        if not largest_error <= AGREEMENT:
            raise UnsafeState(
                f"the noise stream of {self.mechanism.name} does not invert its strategy: the "
                f"error is {largest_error:.2g}, so its sensitivity is not that of the strategy"
            )
        return (
            f"the noise stream of {self.mechanism.name} inverts its strategy in {self.rounds:,} "
            "rounds"
        )

    def _sensitivity(self, limits: Limits) -> Sensitivity:
        claimed = self.mechanism.sensitivity(MinSep(self.rounds, limits.min_sep, limits.cap)).value
        bounds = self._bounds(limits)
        # Loose bounds around the library's value neither confirm nor refute it.
        settled = bounds is not None and not (
            bounds.attained * (1 - ROUNDING) <= claimed < bounds.bound * (1 - ROUNDING)
        )
        return Sensitivity(bounds.bound if settled and bounds else claimed, claimed, settled)

    def _bounds(self, limits: Limits) -> SensitivityBounds | None:
        """Return independent bounds, or None if there are none for this number of rounds."""
        if self.is_small:
            bounds = bound_sensitivity(self.gram, limits)
            if bounds.is_exact:
                return bounds
            exact = nested_sensitivity(self.dense, limits)
            return (
                bounds if exact is None else bounds.combined_with(SensitivityBounds(exact, exact))
            )
        if isinstance(self.mechanism, ToeplitzMechanism):
            return _by_coefficients(self.mechanism.coefficients(self.rounds), limits)
        return None


def _by_coefficients(c: Matrix, limits: Limits) -> SensitivityBounds:
    """Bound the sensitivity of a Toeplitz strategy from its coefficients.

    The upper bound is that of the smallest decreasing sequence above |c|: for decreasing
    coefficients, the earliest pattern is the worst one.
    """
    decreasing = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
    sums = np.zeros((2, limits.rounds))
    for start in limits.earliest_pattern():
        length = min(len(c), limits.rounds - start)
        sums[0, start : start + length] += c[:length]
        sums[1, start : start + length] += decreasing[:length]
    return SensitivityBounds(*(float(norm) for norm in np.linalg.norm(sums, axis=1)))
