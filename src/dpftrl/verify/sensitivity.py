"""The strategy of a run: its columns, and how far a client can move the sum of some of them."""

from functools import cached_property, lru_cache
from typing import Final, NamedTuple, final

import numpy as np

from dpftrl._internal.arrays import Matrix
from dpftrl.errors import UnsafeState
from dpftrl.mechanisms import Mechanism, ToeplitzMechanism
from dpftrl.participation import MinSep
from dpftrl.verify.gaussian import MuRange
from dpftrl.verify.patterns import ROUNDING, Limits, Reach, worst_of_all
from dpftrl.verify.rounding import rounding_of, worst_shift
from dpftrl.verify.trees import worst_nested

# Rounds to which the Gram matrix is written down.
MOST_ROUNDS: Final = 3_000
# Vectors that are sent through the noise stream, and how far they may come out changed.
PROBES: Final = 4
AGREEMENT: Final = 1e-6


class Sensitivity(NamedTuple):
    """What was found out about the worst client.

    Attributes:
        value: No client can move the release further.
        claimable: The most that an honest file says: the library's own value.
        independent: Whether `value` was found without the library's sensitivity.
    """

    value: float
    claimable: float
    independent: bool


@final
class Strategy:
    """C of a mechanism, for the rounds that were released."""

    def __init__(self, mechanism: Mechanism, rounds: int):
        self.mechanism = mechanism
        self.rounds = mechanism.check_rounds(rounds)
        self.sensitivity = lru_cache(self._sensitivity)

    def __repr__(self) -> str:
        return f"Strategy({self.mechanism.name}, {self.rounds} rounds)"

    @property
    def is_small(self) -> bool:
        """Whether it can be written down."""
        return self.rounds <= MOST_ROUNDS

    def mu_range(self, limits: Limits, noise_multiplier: float, buffers: str) -> MuRange:
        """What sensitivity, noise and the rounding of the buffers give."""
        found = self.sensitivity(limits)
        ideal = MuRange(found.value / noise_multiplier, found.claimable / noise_multiplier)
        if buffers == "float32":  # version 0.1: rounding was not in it
            return ideal
        return MuRange(self.least_mu(ideal.least), self.most_mu(ideal.most))

    def least_mu(self, ideal: float) -> float:
        """At least this is the mu of the stream with its float64 buffers, at an ideal mu."""
        return ideal + (rounding_of(self._gain, self.rounds, ideal) if self.is_small else 0.0)

    def most_mu(self, ideal: float) -> float:
        """At most this is what an honest file says: with the library's own bound on rounding."""
        gain = self.mechanism.rounding_gain(self.rounds)
        return ideal + rounding_of(gain, self.rounds, ideal)

    @cached_property
    def _gain(self) -> float:
        return worst_shift(self.mechanism, self.rounds)

    @cached_property
    def dense(self) -> Matrix:
        """C itself."""
        return self.mechanism.strategy(self.rounds)

    @cached_property
    def gram(self) -> Matrix:
        """The inner products of its columns."""
        return self.dense.T @ self.dense

    def check_noise(self) -> str:
        """Send C x through the noise stream: what comes out must be x, or C is another strategy."""
        generator = np.random.default_rng(0)
        wanted = generator.standard_normal((self.rounds, PROBES))
        rows, state = self.dense @ wanted, self.mechanism.init(PROBES)
        worst = 0.0
        for number in wanted:
            made, state = self.mechanism.step(state, lambda i: rows[i])
            worst = max(worst, float(np.abs(made - number).max()))
        if not worst <= AGREEMENT:
            raise UnsafeState(
                f"the noise stream of {self.mechanism.name} does not undo its strategy: "
                f"off by {worst:.2g}; sensitivity says nothing about such noise"
            )
        return f"the stream of {self.mechanism.name} undoes its strategy in {self.rounds:,} rounds"

    def _sensitivity(self, limits: Limits) -> Sensitivity:
        claimed = self.mechanism.sensitivity(MinSep(self.rounds, limits.min_sep, limits.cap)).value
        found = self._reach(limits)
        settled = found is not None and not (
            found.attained * (1 - ROUNDING) <= claimed < found.bound * (1 - ROUNDING)
        )
        return Sensitivity(found.bound if settled and found else claimed, claimed, settled)

    def _reach(self, limits: Limits) -> Reach | None:
        if self.is_small:
            found = worst_of_all(self.gram, limits)
            if not found.exact and (best := worst_nested(self.dense, limits)) is not None:
                found = found.or_better(Reach(best, best))
            return found
        if isinstance(self.mechanism, ToeplitzMechanism):
            return _by_coefficients(self.mechanism.coefficients(self.rounds), limits)
        return None


def _by_coefficients(c: Matrix, limits: Limits) -> Reach:
    """Raise |c| until it falls; for coefficients that fall, earliest is worst."""
    raised = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
    sums = np.zeros((2, limits.rounds))
    for start in limits.earliest():
        reach = min(len(c), limits.rounds - start)
        sums[0, start : start + reach] += c[:reach]
        sums[1, start : start + reach] += raised[:reach]
    return Reach(*(float(norm) for norm in np.linalg.norm(sums, axis=1)))
