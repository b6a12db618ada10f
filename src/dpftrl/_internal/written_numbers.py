"""Numbers as people write them: 4.21M, 6_500, 60%."""

import re
from decimal import Decimal
from typing import Final

from dpftrl.errors import InvalidInput

# A number with a comma before every three digits.
THOUSANDS: Final = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+")
SUFFIXES: Final = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}


def count_from_text(written: str) -> int:
    """The exact whole number that a text stands for.

    Raises:
        InvalidInput: It stands for none.

    >>> [count_from_text(text) for text in ("2052", "2_052", "2,052", "6.5K", "4.21M", "1e9")]
    [2052, 2052, 2052, 6500, 4210000, 1000000000]
    """
    text, factor = written.strip().replace("_", ""), 1
    if THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if text[-1:] in SUFFIXES:
        text, factor = text[:-1], SUFFIXES[text[-1]]
    try:
        number = Decimal(text) * factor
        whole = int(number)
    except (ArithmeticError, ValueError):
        raise InvalidInput(f"{written!r} is not a number like 2052, 6.5K or 4.21M") from None
    if whole != number or abs(whole) > 10**18:  # fits in 64 bits
        raise InvalidInput(f"{written!r} is not a whole number below 1e18")
    return whole


def share_from_text(written: str) -> float:
    """The share that a text stands for; the caller checks the range.

    Raises:
        InvalidInput: It stands for none.

    >>> share_from_text("0.6"), share_from_text("60%")
    (0.6, 0.6)
    """
    text = written.strip().replace("_", "")
    is_percent = text.endswith("%")
    try:
        return float(Decimal(text.removesuffix("%").strip()) / (100 if is_percent else 1))
    except (ArithmeticError, ValueError):
        raise InvalidInput(f"{written!r} is not a share like 0.6 or 60%") from None


def range_from_text(written: str) -> tuple[int, int | None]:
    """A whole number, or the two ends of a range, such as 400:800.

    Raises:
        InvalidInput: It is neither.

    >>> range_from_text("400"), range_from_text("400:800")
    ((400, None), (400, 800))
    """
    low, colon, high = written.partition(":")
    return count_from_text(low), count_from_text(high) if colon else None
