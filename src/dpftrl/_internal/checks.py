"""Checks of input values. They are written so that NaN fails them."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from dpftrl.errors import InvalidInput


def whole_number(name: str, value: SupportsIndex, at_least: int = 1) -> int:
    """Return `value` as an int; raise InvalidInput if it is not one, or below `at_least`.

    >>> whole_number("rounds", 0)
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: rounds must be a whole number of at least 1, got 0
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not number >= at_least:
        raise InvalidInput(f"{name} must be a whole number of at least {at_least}, got {value!r}")
    return number


def positive_number(name: str, value: float) -> float:
    """Return `value` as a float; raise InvalidInput unless it is positive and finite.

    >>> positive_number("noise_multiplier", float("nan"))
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: noise_multiplier must be a positive finite number, got nan
    """
    number = _float_or_nan(value)
    if not 0 < number < math.inf:
        raise InvalidInput(f"{name} must be a positive finite number, got {_shown(value)}")
    return number


def fraction(name: str, value: float) -> float:
    """Return `value` as a float; raise InvalidInput unless it is above 0 and below 1.

    >>> fraction("delta", 1)
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: delta must be between 0 and 1, got 1
    """
    number = _float_or_nan(value)
    if not 0 < number < 1:
        raise InvalidInput(f"{name} must be between 0 and 1, got {_shown(value)}")
    return number


def _shown(value: object) -> str:
    """Return `value` for a message: text in quotes, so that '4' is not taken for a number."""
    return f"{value!r:.40}" if isinstance(value, str) else f"{value!s:.40}"


def _float_or_nan(value: float) -> float:
    """Return `value` as a float; NaN, which fails every check, if it is not a number."""
    try:
        return as_float(value)
    except (TypeError, ValueError, InvalidInput):
        return math.nan


def as_float(value: float) -> float:
    """Return any kind of number as a Python float; infinity if it is too large for one."""
    if isinstance(value, str | bytes | bytearray):
        raise InvalidInput(f"expected a number, got the text {value!r:.60}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def finite_numbers(name: str, values: Iterable[float], at_least: int = 1) -> tuple[float, ...]:
    """Return `values` as a tuple of finite floats; raise InvalidInput for the first that is not.

    >>> finite_numbers("theta", [0.5, float("nan")])
    Traceback (most recent call last):
    dpftrl.errors.InvalidInput: theta must be finite numbers, got nan at position 1
    """
    try:
        given = tuple(values)
        numbers = tuple(float(value) for value in given)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{name} must be a sequence of numbers ({error})") from None
    if isinstance(values, str | dict) or any(isinstance(value, str | bool) for value in given):
        raise InvalidInput(f"{name} must be a sequence of numbers, got {values!r:.60}")
    for position, number in enumerate(numbers):
        if not math.isfinite(number):
            raise InvalidInput(
                f"{name} must be finite numbers, got {number} at position {position}"
            )
    if len(numbers) < at_least:
        raise InvalidInput(f"{name} needs at least {at_least} number(s), got {len(numbers)}")
    return numbers


def all_within(name: str, values: Sequence[float], low: float, high: float) -> None:
    """Raise InvalidInput for the first value outside [low, high]."""
    for position, value in enumerate(values):
        if not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise InvalidInput(f"{name} must be {limits}, got {value!r} at position {position}")
