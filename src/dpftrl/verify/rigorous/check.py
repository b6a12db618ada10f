"""The check `rigorous` of `dpftrl verify`: the stated epsilon is not below the enclosure."""

from collections.abc import Iterable
from typing import Final

from dpftrl.errors import TooLarge, UnsafeState
from dpftrl.verify.rigorous.numbers import NoiseStream, enclose, is_installed
from dpftrl.verify.verdict import Check

NAME: Final = "rigorous"
MISSING: Final = "not checked rigorously: install dpftrl[audit]"
SAMPLED: Final = "not checked rigorously: interval arithmetic covers no amplification by sampling"


def check_epsilon(
    streams: Iterable[NoiseStream], delta: float, stated_epsilon: float, devices: int = 1
) -> str | Check:
    """Check a stated epsilon against an enclosure of the true one.

    Args:
        streams: The noise streams that the guarantee covers, without sampling.
        delta: The delta of the guarantee.
        stated_epsilon: The epsilon of the guarantee.
        devices: The number of clients that are protected as one unit.

    Returns:
        The enclosure in words, or a skipped check if python-flint is missing or this takes too
        long.

    Raises:
        UnsafeState: The enclosure reaches above the stated epsilon.
    """
    if not is_installed():
        return Check(NAME, "skipped", MISSING)
    try:
        numbers = enclose(streams, delta, stated_epsilon, devices)
    except TooLarge as error:
        return Check(NAME, "skipped", f"not checked rigorously: {error}")
    epsilon = numbers.epsilon
    if not stated_epsilon >= epsilon.high:
        raise UnsafeState(
            f"the stated epsilon {stated_epsilon!r} is not above all numbers that the true one can "
            f"be: {epsilon}"
        )
    return (
        f"epsilon is in {epsilon} by interval arithmetic, at most the stated {stated_epsilon!r}; "
        f"mu is in {numbers.mu}"
    )
