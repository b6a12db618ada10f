"""Exact sums: updates on a grid, added as whole numbers, and noise rounded to the same grid.

In floating point the last bits of a sum depend on the order of its terms, and those of a sum plus
noise on both: they can give away what the noise hides (Mironov 2012). On a grid there are no such
bits. Updates are cut off toward zero, so that no norm grows; their sum is exact, in any order; and
as the sum is a whole number of steps, adding noise rounded to the grid is the same as rounding the
sum plus the noise: post-processing, which costs nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Self, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.compiled import add_clipped, sum_of_squares
from dpftrl.errors import InvalidInput

Steps = NDArray[np.int64]

# Steps that a sum may reach; the noise has as much room again.
MOST_STEPS = 2**61
LARGEST = 2.0**400
KINDS = (np.dtype(np.float32), np.dtype(np.float64))
# More than all rounding in the norm and in scaling by it.
SLACK = 1e-12
# Steps in one standard deviation of the noise, unless chosen otherwise.
FINENESS = 2**24


@final
@dataclass(frozen=True)
class Grid:
    """Multiples of a step, which is a power of two.

    Attributes:
        step: The distance between neighbouring values.
        clip_norm: The L2 norm that no update may pass.
    """

    step: float
    clip_norm: float

    def __post_init__(self) -> None:
        for name in ("clip_norm", "step"):
            value = positive_number(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if not 1 / LARGEST <= value <= LARGEST:  # squares must neither vanish nor overflow
                raise InvalidInput(f"{name} must be between 2^-400 and 2^400, got {value!r}")
        if math.frexp(self.step)[0] != 0.5:
            raise InvalidInput(f"step must be a power of two, got {self.step!r}")
        if not self.clip_norm / self.step < MOST_STEPS:
            raise InvalidInput(f"step {self.step:g} is too fine for clip norm {self.clip_norm:g}")

    @classmethod
    def for_noise(cls, noise_multiplier: float, clip_norm: float, fineness: int = FINENESS) -> Self:
        """A step of at most one standard deviation of the noise, over `fineness`."""
        noise = positive_number("noise_multiplier", noise_multiplier) * positive_number(
            "clip_norm", clip_norm
        )
        finest = positive_number("sigma times clip norm", noise) / whole_number(
            "fineness", fineness
        )
        return cls(2.0 ** math.floor(math.log2(positive_number("the step", finest))), clip_norm)

    @property
    def most_updates(self) -> int:
        """How many updates a sum can hold without overflow, whatever they are."""
        return int(MOST_STEPS // math.ceil(self.clip_norm / self.step))

    def values(self, steps: Steps, divisor: float = 1.0) -> NDArray[np.float64]:
        """Back to numbers, over a divisor such as the report goal."""
        return steps.astype(np.float64) * (self.step / positive_number("divisor", divisor))


@final
class ExactSum:
    """The exact sum of clipped updates, in any order.

    >>> total = ExactSum(Grid(step=2**-20, clip_norm=1.0), size=2)
    >>> total.add(np.array([3.0, 4.0]))
    >>> total.add(np.array([0.0, -0.25]))
    >>> total.grid.values(total.steps).round(5).tolist()
    [0.6, 0.55]
    """

    def __init__(self, grid: Grid, size: int):
        self.grid = grid
        self.updates = 0
        self.steps: Steps = np.zeros(whole_number("size", size), dtype=np.int64)
        self._copy: NDArray[Any] | None = None

    def __repr__(self) -> str:
        return f"ExactSum({self.updates} updates of {self.steps.size:,} coordinates)"

    def add(self, *update: NDArray[Any]) -> None:
        """Clip an update in L2 and add it; it may come in parts that lie one behind the other.

        Guarantees:
            What is added has a norm of at most the clip norm, exactly: scaling leaves room for the
            rounding of the norm, and cutting off toward zero makes nothing larger. The update is
            copied before it is looked at, so that another thread that changes it meanwhile cannot
            get more than the clip norm into the sum.
        """
        parts = self._checked(update)
        norm = norm_of(parts)
        if not math.isfinite(norm):
            raise InvalidInput("an update must be finite, and so must its norm")
        grid = self.grid
        limit = grid.clip_norm / (1 + SLACK)
        factor = 1.0 if norm <= limit else limit / norm
        start = 0
        for part in parts:
            steps = self.steps[start : start + part.size]
            add_clipped(part, factor, 1 / grid.step, grid.clip_norm / grid.step, steps)
            start += part.size
        self.updates += 1

    def _checked(self, update: tuple[Any, ...]) -> list[NDArray[Any]]:
        if self.updates >= self.grid.most_updates:
            raise InvalidInput(
                f"a sum on this grid holds {self.grid.most_updates:,} updates; use a larger step"
            )
        wanted = f"an update has {self.steps.size:,} coordinates of float32 or float64, got"
        for part in update:
            if not isinstance(part, np.ndarray):
                raise InvalidInput(f"{wanted} {type(part).__name__}")
        given = cast("tuple[NDArray[Any], ...]", update)
        size = sum(part.size for part in given)
        if any(part.dtype not in KINDS for part in given) or size != self.steps.size:
            kinds = " and ".join(sorted({str(part.dtype) for part in given}))
            raise InvalidInput(f"{wanted} {size:,} of {kinds or 'nothing'}")
        return self._copies(given)

    def _copies(self, update: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Private copies, aligned and in order as the inner loops want them."""
        kind = np.result_type(*update)
        if self._copy is None or self._copy.dtype != kind:
            self._copy = np.empty(self.steps.size, kind)
        ends = list(accumulate(part.size for part in update))
        copies = [self._copy[end - part.size : end] for part, end in zip(update, ends, strict=True)]
        for copy, part in zip(copies, update, strict=True):
            np.copyto(copy.reshape(part.shape), part)
        return copies


def norm_of(parts: Sequence[NDArray[Any]]) -> float:
    """The L2 norm of arrays that lie one behind the other; infinite if it is too large to tell."""
    try:
        return math.sqrt(math.fsum(chain.from_iterable(map(sum_of_squares, parts))))
    except OverflowError:  # squares that have a place each, and none together
        return math.inf
