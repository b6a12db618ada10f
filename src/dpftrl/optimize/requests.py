"""What the optimisers of banded mechanisms are asked for, and how they say how far they are."""

from collections.abc import Callable

from dpftrl.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.workload import Workload

# Called after every step with the share that is done (None where that cannot be known) and a line.
Progress = Callable[[float | None, str], None]


def check_bands(bands: int, rounds: int) -> int:
    """Refuse a number of bands that a matrix of so many rounds cannot have.

    >>> check_bands(9, rounds=8)
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: bands must be at most the 8 rounds, got 9
    """
    bands = whole_number("bands", bands)
    if bands > rounds:
        raise InvalidInput(f"bands must be at most the {rounds} rounds, got {bands}")
    return bands


def check_workload(workload: Workload, rounds: int) -> None:
    """Refuse a workload under which nothing that is added to updates ever shows."""
    if not workload.rates(rounds).max() > 0:
        raise InvalidInput(
            f"the learning rates of the first {rounds} rounds are all zero: "
            "any mechanism is as good as any other"
        )
