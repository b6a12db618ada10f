"""Adaptive clipping: the clip norm follows a quantile of the update norms, without restarts.

Each update is clipped to the clip norm of its round and divided by it, and one further coordinate
says whether it was clipped (`dpftrl.clipping.JointClip`). The noise of the mechanism covers both.
So the noisy sum of the bits is part of the release, and the next clip norm is computed from
releases alone. docs/adaptive_clipping.md has the proof, and what a moving clip norm costs.
"""

import math
from typing import Literal, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import as_float, fraction, positive_number
from dpftrl.clipping import FINENESS, LARGEST, MOST_BETA, ExactSum, Grid, JointClip
from dpftrl.errors import InvalidInput

# The clip norm of the joint vector of update and bit.
JOINT_NORM = 1.0
# With a larger rate, the bits of one round move the clip norm by more than a factor of e^5.
MOST_RATE = 10.0


@final
class ClipState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The clip norm of a round, and how long ago the search for it ended.

    Attributes:
        clip_norm: The clip norm of the round.
        settled: Number of rounds since the search ended; 0 during the search.
    """

    clip_norm: float
    settled: int = 0


@final
class AdaptiveClipping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A clip norm that follows a quantile of the update norms (Andrew et al. 2021).

    After each round, the clip norm is multiplied by exp(-rate * (share - quantile)), where the
    share is a noisy estimate of the share of updates that were not clipped. The rate is
    `learning_rate` during the search, until the share crosses the quantile for the first time or
    the clip norm meets a bound. k rounds later it is `learning_rate` / sqrt(k + 1): noise of
    different rounds cancels only as far as their clip norms are equal.

    The noise of a round is in proportion to its clip norm. While the search goes on to smaller
    norms, the model does not change: the noise could be far larger than the updates.

    Attributes:
        start: The clip norm of the first round.
        quantile: The share of updates that shall not be clipped.
        beta: The share of the norm that is for the bits: the noise on the updates grows by
            1 / sqrt(1 - beta^2), and the noise of the share falls with 1 / beta.
        learning_rate: How fast the logarithm of the clip norm moves; see above.
        minimum: The clip norm never falls below this value.
        maximum: The clip norm never rises above this value.
    """

    start: float = 0.1
    quantile: float = 0.5
    beta: float = 0.1
    learning_rate: float = 1.0
    minimum: float = 1e-6
    maximum: float = 1e6

    def check(self) -> None:
        """Refuse options that are out of range."""
        for name in ("start", "minimum", "maximum"):
            value = positive_number(f"clip_norm.{name}", getattr(self, name))
            if not 1 / LARGEST <= value <= LARGEST:
                raise InvalidInput(f"clip_norm.{name} must be from 2^-400 to 2^400, got {value!r}")
        if not self.minimum <= self.start <= self.maximum:
            raise InvalidInput(
                f"clip_norm.start must be from minimum to maximum, {self.minimum:g} to "
                f"{self.maximum:g}, got {self.start:g}"
            )
        fraction("clip_norm.quantile", self.quantile)
        if not 0 < as_float(self.beta) <= MOST_BETA:
            raise InvalidInput(
                f"clip_norm.beta must be above 0 and at most {MOST_BETA}, got {self.beta!r}"
            )
        if not 0 < as_float(self.learning_rate) <= MOST_RATE:
            raise InvalidInput(
                f"clip_norm.learning_rate must be above 0 and at most {MOST_RATE:g}, got "
                f"{self.learning_rate!r}"
            )

    def grid(self, noise_multiplier: float, fineness: int = FINENESS) -> Grid:
        """The grid of the sums: its clip norm is that of update and bit together.

        Args:
            noise_multiplier: The noise multiplier.
            fineness: The smallest number of steps per standard deviation of the noise.

        Raises:
            InvalidInput: The bit is smaller than a step of this grid.
        """
        grid = Grid.for_noise(noise_multiplier, JOINT_NORM, fineness)
        if not self.beta >= grid.step:
            raise InvalidInput(
                f"the noise multiplier {noise_multiplier:g} is too large for adaptive clipping "
                f"with beta {self.beta:g}"
            )
        return grid

    def following(self, state: ClipState, share: float) -> ClipState:
        """The state after a round, from its own state and its share."""
        # The search goes from the start in one direction, until the share says to turn back.
        turns = (state.clip_norm < self.start and share < self.quantile) or (
            state.clip_norm > self.start and share > self.quantile
        )
        settled = state.settled + 1 if state.settled or turns else 0
        rate = self.learning_rate / math.sqrt(settled + 1)
        moved = math.log(state.clip_norm) - rate * (share - self.quantile)
        kept = min(max(moved, math.log(self.minimum)), math.log(self.maximum))
        if kept != moved:  # the search ends at a bound, too
            settled = max(settled, 1)
        return ClipState(min(max(math.exp(kept), self.minimum), self.maximum), settled)

    def holds(self, state: ClipState, share: float) -> bool:
        """Whether the model stays as it is in a round: the search goes on to smaller norms."""
        return share > self.quantile and not self.following(state, share).settled


@final
class ClippedRound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a round of adaptive clipping releases beside the noisy mean. The next state follows.

    Attributes:
        state: The clip norm of the round.
        bits: The noisy sum of its bits, in steps of the grid.
    """

    state: ClipState
    bits: int


@final
class MovingClipNorm:
    """The clip norm of a run, which moves after each round.

    Args:
        options: The options of adaptive clipping.
        grid: The grid of the sums.
        goal: The report goal, or the expected batch size. Bits are divided by this number, never
            by the number of reports, which nothing protects.
        last: What the last committed round released; None before the first.
    """

    def __init__(self, options: AdaptiveClipping, grid: Grid, goal: int, last: ClippedRound | None):
        self._options, self._grid, self._goal = options, grid, goal
        self.state = ClipState(options.start)
        if last is not None:
            self.follow(last)

    @property
    def joint(self) -> JointClip:
        """How the next round clips updates and adds their bits."""
        return JointClip(self.state.clip_norm, self._options.beta)

    def release(self, total: ExactSum) -> tuple[NDArray[np.float64], ClippedRound]:
        """The mean of the updates in a noisy sum, and what is released beside it.

        Args:
            total: The sum of updates and bits, with the noise.
        """
        clipped = ClippedRound(self.state, int(total.steps[-1]))
        if self._options.holds(self.state, self._share(clipped)):
            return np.zeros(total.steps.size - 1), clipped
        divisor = self._goal * self.joint.scale
        return self._grid.values(total.steps[:-1], divisor), clipped

    def follow(self, clipped: ClippedRound) -> None:
        """Move the clip norm after a committed round."""
        self.state = self._options.following(clipped.state, self._share(clipped))

    def _share(self, clipped: ClippedRound) -> float:
        """The noisy estimate of the share of updates that were not clipped."""
        return (1 + clipped.bits * self._grid.step / (self._options.beta * self._goal)) / 2


# What the settings of a run accept as a clip norm.
ClipNorm = float | AdaptiveClipping | Literal["adaptive"]


def adaptive(clip_norm: ClipNorm) -> AdaptiveClipping | None:
    """The options of adaptive clipping, or None for a fixed clip norm.

    >>> adaptive(0.5), adaptive("adaptive").quantile
    (None, 0.5)
    """
    if isinstance(clip_norm, AdaptiveClipping):
        return clip_norm
    return AdaptiveClipping() if clip_norm == "adaptive" else None


def check_clip_norm(clip_norm: ClipNorm) -> None:
    """Refuse a clip norm that is neither a positive number nor adaptive clipping."""
    if isinstance(clip_norm, str) and clip_norm != "adaptive":
        raise InvalidInput(f'clip_norm must be a number or "adaptive", got {clip_norm!r:.60}')
    options = adaptive(clip_norm)
    if options is not None:
        options.check()
    elif not isinstance(clip_norm, str | AdaptiveClipping):
        positive_number("clip_norm", clip_norm)
