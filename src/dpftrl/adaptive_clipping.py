"""Adaptive clipping: the clip norm follows a quantile of the update norms, without restarts.

Each update is clipped to the clip norm of its round and divided by it, and one further coordinate
says whether it was clipped (`dpftrl.clipping.JointClip`). The noise of the mechanism covers both.
So the noisy sum of the bits is part of the release, and the next clip norm is computed from
releases alone. docs/adaptive_clipping.md has the proof, and what a moving clip norm costs.
"""

import math
from typing import Literal, final

import msgspec

from dpftrl._internal.checks import as_float, fraction, positive_number
from dpftrl.clipping import LARGEST, MOST_BETA, Grid, JointClip
from dpftrl.errors import InvalidInput

# The clip norm of the joint vector of update and bit.
JOINT_NORM = 1.0
# With a larger rate, the bits of one round move the clip norm by more than a factor of e^5.
MOST_RATE = 10.0


@final
class AdaptiveClipping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A clip norm that follows a quantile of the update norms (Andrew et al. 2021).

    After round t, counted from 0, the clip norm is multiplied by
    exp(-learning_rate / sqrt(t + 1) * (share - quantile)). The share is a noisy estimate of the
    share of updates that were not clipped.

    Attributes:
        start: The clip norm of the first round. Too small a start only loses the first rounds; too
            large a start adds too much noise to the model in these rounds.
        quantile: The share of updates that shall not be clipped.
        beta: The share of the privacy budget for the bits: the noise on the updates grows by
            1 / sqrt(1 - beta^2), and the noise on the share falls with 1 / beta.
        learning_rate: How far the logarithm of the clip norm moves; see above.
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

    def grid(self, noise_multiplier: float) -> Grid:
        """The grid of the sums: its clip norm is that of update and bit together.

        Raises:
            InvalidInput: The bit is smaller than a step of this grid.
        """
        grid = Grid.for_noise(noise_multiplier, JOINT_NORM)
        if not self.beta >= grid.step:
            raise InvalidInput(
                f"the noise multiplier {noise_multiplier:g} is too large for adaptive clipping "
                f"with beta {self.beta:g}"
            )
        return grid

    def first(self) -> JointClip:
        """The clip norm of the first round."""
        return JointClip(self.start, self.beta)

    def share(self, bits: int, step: float, goal: int) -> float:
        """A noisy estimate of the share of updates that were not clipped.

        Args:
            bits: The noisy sum of the bits, in steps of the grid.
            step: The step of the grid.
            goal: The report goal, or the expected batch size; never the number of reports, which
                nothing protects.
        """
        return (1 + bits * step / (self.beta * goal)) / 2

    def following(self, last: float, bits: int, grid: Grid, goal: int, number: int) -> JointClip:
        """The clip norm after a round.

        Args:
            last: The clip norm of the round.
            bits: The noisy sum of the bits of the round, in steps of the grid.
            grid: The grid of the sum.
            goal: The report goal, or the expected batch size.
            number: The number of the round, from 0.
        """
        rate = self.learning_rate / math.sqrt(number + 1)
        moved = math.log(last) - rate * (self.share(bits, grid.step, goal) - self.quantile)
        kept = min(max(moved, math.log(self.minimum)), math.log(self.maximum))
        return JointClip(min(max(math.exp(kept), self.minimum), self.maximum), self.beta)


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
