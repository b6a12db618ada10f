"""How often each number occurs, gathered piece by piece, and shown in few rows."""

from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

# More distinct numbers than this are shown as ranges.
MOST_BINS = 50


class Bin(NamedTuple):
    """A range of numbers, both ends included, and how many fall into it."""

    low: int
    high: int
    number: int


@final
class Histogram:
    """A count for each distinct number seen."""

    def __init__(self) -> None:
        self.values = np.zeros(0, dtype=np.int64)
        self.numbers = np.zeros(0, dtype=np.int64)

    def add(self, values: Integers) -> None:
        """Count these as well."""
        more, times = np.unique(values, return_counts=True)
        together = np.concatenate([self.values, more])
        self.values, where = np.unique(together, return_inverse=True)
        numbers = np.zeros(len(self.values), dtype=np.int64)
        np.add.at(numbers, where, np.concatenate([self.numbers, times]))
        self.numbers = numbers

    def bins(self) -> tuple[Bin, ...]:
        """One for each value, or ranges of equal width where there are too many values."""
        width = 1
        if len(self.values) > MOST_BINS:
            spread = int(self.values[-1] - self.values[0])
            width = _round_width(spread // (MOST_BINS - 2) + 1)  # the ends may be cut off ranges
        low = self.values // width * width
        lows, where = np.unique(low, return_inverse=True)
        numbers = np.zeros(len(lows), dtype=np.int64)
        np.add.at(numbers, where, self.numbers)
        return tuple(
            Bin(start, start + width - 1, number)
            for start, number in zip(lows.tolist(), numbers.tolist(), strict=True)
        )


def _round_width(least: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least this.

    >>> [_round_width(least) for least in (1, 3, 14, 51)]
    [1, 5, 20, 100]
    """
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
