"""The epsilon of a centralized run, recomputed: for batches in order, and for sampled batches."""

import math
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, final

import numpy as np

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.participation import FixedEpochs
from dpftrl.verify.centralized_files import (
    CentralizedFiles,
)
from dpftrl.verify.check_guarantee import check_epsilon
from dpftrl.verify.epsilon import MuRange
from dpftrl.verify.rigorous import NoiseStream
from dpftrl.verify.sampled_epsilon import (
    DeltaEstimate,
    estimate_bins_delta,
    overflow_probability,
    poisson_epsilon,
)
from dpftrl.verify.sensitivity import ROUNDING, SensitivityBounds
from dpftrl.verify.strategy_matrix import MOST_ROUNDS, Strategy
from dpftrl.verify.verdict import Check

# A claimed epsilon of Poisson sampling may be smaller than the recomputed one by this share. Both
# are upper bounds that exceed the true value by about 1e-5 of it; where delta is very small, the
# rounding errors of the Fourier transforms are larger.
POISSON_TOLERANCE: Final = 1e-3
# An estimate of delta whose standard error is a larger share of delta than this decides nothing.
MOST_STANDARD_ERROR: Final = 0.15
MOST_BINS: Final = 4096  # the Gram matrix of more bins would not fit into memory
# The name of the check of epsilon if it rests on an estimate: nothing is recomputed exactly.
ESTIMATE: Final = "epsilon estimate"


class StatedRange(NamedTuple):
    """The smallest and the largest epsilon that a correct file may state.

    Attributes:
        least: The smallest one.
        most: The largest one.
        note: What was not recomputed independently; empty if nothing.
    """

    least: float
    most: float
    note: str = ""


@final
class InOrder:
    """Epsilon without sampling: every unit takes part once per epoch, at a fixed place."""

    def __init__(self, files: CentralizedFiles):
        self._files = files
        self._spacing = files.plan.dataset.steps_per_epoch
        self.range = lru_cache(self._range)

    def __repr__(self) -> str:
        return f"InOrder({self._files})"

    def _range(self, steps: int) -> StatedRange:
        """Return which epsilon a correct file may state for the first steps."""
        mechanism, scale = self._files.mechanism, self._files.plan.noise_multiplier
        strategy = Strategy(mechanism, steps)
        epochs = -(-steps // self._spacing)
        claimable = mechanism.sensitivity(FixedEpochs(steps, self._spacing, epochs)).value
        bounds = self._bounds(strategy)
        # Loose bounds around the library's value neither confirm nor refute it.
        is_settled = bounds is not None and not (
            bounds.attained * (1 - ROUNDING) <= claimable < bounds.bound * (1 - ROUNDING)
        )
        value = bounds.bound if bounds is not None and is_settled else claimable
        mu = MuRange(strategy.least_mu(value / scale), strategy.most_mu(claimable / scale))
        least, most = mu.epsilons(self._files.plan.delta, is_v1=False)
        note = "the library's own sensitivity was used, as there is no independent one"
        return StatedRange(least, most, "" if is_settled else note)

    def _bounds(self, strategy: Strategy) -> SensitivityBounds | None:
        """Bound how far a unit can move the release, at clip norm 1; None if C is too large."""
        if strategy.is_small:
            starts = range(min(self._spacing, strategy.rounds))
            norms = [
                _pattern_bounds(strategy.gram[start :: self._spacing, start :: self._spacing])
                for start in starts
            ]
            attained = max(norm.attained for norm in norms)
            return SensitivityBounds(attained, max(norm.bound for norm in norms))
        column = strategy.mechanism.first_column(strategy.rounds)
        if column is None or not np.all(column >= 0):
            return None
        # Later starts have the same sequence, cut off earlier.
        norm = float(np.linalg.norm(_repeated(column, self._spacing)))
        return SensitivityBounds(norm, norm)

    def noise_stream(self, steps: int) -> NoiseStream:
        """Return the noise stream of the first steps, for interval arithmetic."""
        steps = min(steps, self._files.plan.dataset.steps)
        participation = FixedEpochs(steps, self._spacing, -(-steps // self._spacing))
        return NoiseStream(self._files.mechanism, participation, self._files.plan.noise_multiplier)

    def check(self, claimed: float, steps: int, source: str) -> str | Check:
        """Check an epsilon that a file states for the first steps.

        Raises:
            UnsafeState: It is too small, or larger than the library's own value.
        """
        allowed = self.range(steps)
        text = check_epsilon(claimed, allowed.least, allowed.most, source)
        return Check("epsilon", "warning", f"{text}; {allowed.note}") if allowed.note else text


def _pattern_bounds(gram: Matrix) -> SensitivityBounds:
    """Bound the norm of a sum of columns of C with coefficients of at most 1, by their Gram matrix.

    The coefficients are vectors: the gradients of a unit in the steps of its pattern.
    """
    return SensitivityBounds(
        math.sqrt(max(float(gram.sum()), 0.0)), math.sqrt(float(np.abs(gram).sum()))
    )


def _repeated(column: Vector, spacing: int) -> Vector:
    """Return the sum of a Toeplitz matrix's columns 0, spacing, 2 spacing, ..."""
    total = np.zeros(len(column))
    for start in range(0, len(column), spacing):
        total[start:] += column[: len(column) - start]
    return total


@final
class Sampled:
    """Epsilon of secret random batches, for all planned steps."""

    def __init__(self, files: CentralizedFiles):
        self._files = files

    def __repr__(self) -> str:
        return f"Sampled({self._files})"

    def check_strategy(self) -> str:
        """Check that the sampling covers the strategy.

        Raises:
            UnsafeState: The strategy has too many bands, or negative entries.
        """
        plan, mechanism = self._files.plan, self._files.mechanism
        column, strategy = self._column, self._strategy
        if plan.sampling == "balls-in-bins":
            entries = column if column is not None else strategy
            if not np.all(entries >= 0):
                raise UnsafeState(
                    f"{mechanism.name} has negative entries, which balls-in-bins sampling does not "
                    "cover"
                )
            return f"no entry of {mechanism.name} is negative, as balls-in-bins sampling needs"
        groups = plan.groups or 1
        if column is not None:
            is_covered = not column[groups:].any()
        else:
            rows, columns = strategy.shape
            is_covered = rows == columns and not (
                np.tril(strategy, -groups).any() or np.triu(strategy, 1).any()
            )
        if not is_covered:
            raise UnsafeState(
                f"{mechanism.name} has more than {groups:,} band(s), and {plan.sampling} sampling "
                f"with {groups:,} group(s) covers at most as many: two steps of one unit could "
                "share noise"
            )
        return f"{mechanism.name} has at most {groups:,} band(s), as {plan.sampling} sampling needs"

    @cached_property
    def _column(self) -> Vector | None:
        return self._files.mechanism.first_column(self._files.plan.dataset.steps)

    @cached_property
    def _strategy(self) -> Matrix:
        """C as a dense matrix, if it is not given by its first column."""
        steps = self._files.plan.dataset.steps
        if steps > MOST_ROUNDS:
            raise InvalidInput(
                f"a strategy of {steps:,} steps is too large for a dense matrix, and "
                f"{self._files.mechanism.name} is not given by one column: epsilon cannot be "
                "recomputed"
            )
        return self._files.mechanism.strategy(steps)

    @property
    def _ideal_delta(self) -> float:
        """What is left of delta if batches may be cut, at the epsilon of the plan."""
        plan = self._files.plan
        data = plan.dataset
        if data.max_batch_size is None:
            return plan.delta
        groups, bins = plan.groups or 1, data.steps_per_epoch
        if plan.sampling == "balls-in-bins":
            cut = overflow_probability(
                data.size, 1 / bins, min(bins, data.steps), data.max_batch_size
            )
        else:
            trials = -(-data.size // groups)
            cut = overflow_probability(trials, self._probability, data.steps, data.max_batch_size)
        left = plan.delta - (1 + math.exp(min(plan.epsilon, 700.0))) * cut  # exp(710) overflows
        if not left > 0:
            raise UnsafeState(
                f"batches are cut with probability {cut:.2g}, which leaves nothing of delta "
                f"{plan.delta:g} at epsilon {plan.epsilon:.6g}"
            )
        return left

    @property
    def _probability(self) -> float:
        """The probability that a unit is in a batch of its group."""
        data = self._files.plan.dataset
        return min(1.0, data.batch_size * (self._files.plan.groups or 1) / data.size)

    def check_poisson(self) -> str:
        """Recompute epsilon of all planned steps, for Poisson or cyclic Poisson sampling.

        Raises:
            UnsafeState: The plan's epsilon is too small.
        """
        self.check_strategy()
        plan, column = self._files.plan, self._column
        squares = np.sum((self._strategy if column is None else column[:, None]) ** 2, axis=0)
        norm = math.sqrt(float(squares.max()))
        blocks = -(-plan.dataset.steps // (plan.groups or 1))
        claimed = plan.epsilon
        recomputed = poisson_epsilon(
            plan.noise_multiplier / norm, self._probability, blocks, self._ideal_delta
        )
        if not claimed >= recomputed * (1 - POISSON_TOLERANCE):
            raise UnsafeState(
                f"the plan states epsilon {claimed:.7g}, less than recomputed: {recomputed:.7g}"
            )
        return (
            f"the plan states epsilon {claimed:.6g} for all planned steps; recomputed: "
            f"{recomputed:.6g}, to {POISSON_TOLERANCE:.1%}"
        )

    def check_bins(self) -> str | Check:
        """Estimate delta at the plan's epsilon, for balls-in-bins sampling.

        Raises:
            UnsafeState: Delta is larger than stated, by more than 4 standard errors.
        """
        plan = self._files.plan
        self.check_strategy()
        bins = plan.dataset.steps_per_epoch
        if bins > MOST_BINS:
            raise InvalidInput(
                f"delta is estimated for at most {MOST_BINS:,} bins, and there are {bins:,}: "
                "epsilon cannot be recomputed"
            )
        gram = bins_gram(self._strategy if self._column is None else self._column, bins)
        allowed = self._ideal_delta
        estimates = estimate_bins_delta(gram, plan.noise_multiplier, plan.epsilon)
        text = "; ".join(
            f"{direction}: {_words(estimate)}"
            for direction, estimate in zip(
                ("with against without a unit", "without against with"), estimates, strict=True
            )
        )
        text = (
            f"delta at the plan's epsilon {plan.epsilon:.6g}, estimated from "
            f"{estimates[0].samples:,} samples per direction (no certificate): {text}; "
            f"stated: {plan.delta:.3g}"
        )
        # A NaN fails.
        if not all(estimate.least <= allowed for estimate in estimates):
            raise UnsafeState(f"epsilon is too small: {text}")
        error = max(estimate.standard_error for estimate in estimates)
        is_seen = any(estimate.value > 0 for estimate in estimates)  # some sample had a weight
        if not (is_seen and error <= MOST_STANDARD_ERROR * allowed):
            return Check(ESTIMATE, "warning", f"too imprecise to decide: {text}")
        return text


def _words(estimate: DeltaEstimate) -> str:
    return f"{estimate.value:.3g} with standard error {estimate.standard_error:.2g}"


def bins_gram(strategy: Vector | Matrix, bins: int) -> Matrix:
    """Return the inner products of the m_i: m_i is the sum of the columns i, i + bins, ... of C.

    Args:
        strategy: C, or the first column of a lower-triangular Toeplitz matrix C.
        bins: The number of bins.
    """
    steps = strategy.shape[-1]
    if strategy.ndim == 2:
        sums = np.stack([strategy[:, start::bins].sum(axis=1) for start in range(bins)], axis=1)
        return sums.T @ sums
    # m_i is m_0, moved down by i steps and cut off at the last step. So the product of m_i and m_j
    # is that of m_(i-1) and m_(j-1), less what the last step cuts off.
    sequence = _repeated(strategy, bins)
    used = min(bins, steps)  # later bins have no step
    gram = np.zeros((bins, bins))
    gram[0, :used] = [sequence[lag:] @ sequence[: steps - lag] for lag in range(used)]
    for i in range(1, used):
        cut_off = sequence[steps - i] * sequence[steps - np.arange(i, used)]
        gram[i, i:used] = gram[i - 1, i - 1 : used - 1] - cut_off
    return np.triu(gram) + np.triu(gram, 1).T
