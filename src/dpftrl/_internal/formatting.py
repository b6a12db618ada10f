"""Numbers as text: few digits, never too good for privacy, and delta in words.

Guarantees are rounded up and noise multipliers down. Other numbers are written in full.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Final


def rounded_up(value: float, digits: int = 4) -> str:
    """The value with at least `digits` significant digits, rounded up.

    >>> [rounded_up(value) for value in (3.9999999, 0.0139395, 12345.6, 2.00001e-28)]
    ['4.000', '0.01394', '12346', '2.001e-28']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exact = Decimal(repr(float(value)))
    plain = -5 <= exact.adjusted() < 9  # others are written with an exponent
    last = exact.adjusted() - digits + 1
    shown = exact.quantize(Decimal(1).scaleb(min(last, 0) if plain else last), ROUND_CEILING)
    return f"{shown:f}" if plain else f"{shown:e}".replace("e+", "e")


def percent_up(share: float) -> str:
    """A fraction in percent, rounded up to a tenth of a percent.

    >>> percent_up(0.61201)
    '61.3%'
    """
    tenths = (Decimal(repr(share)) * 100).quantize(Decimal("0.1"), ROUND_CEILING)
    return f"{min(tenths, Decimal(100)):f}%"


def in_full(value: float) -> str:
    """The value with all digits: reading the text gives the same float.

    >>> in_full(1e-5), in_full(0.1 + 0.2)
    ('1e-5', '0.30000000000000004')
    """
    return repr(float(value)).replace("e-0", "e-").replace("e+", "e")


MOST_DIGITS: Final = 4  # a number with more digits is rounded in the text of a statement


def short_up(value: float) -> str:
    """Return the value in full if that takes few digits, and rounded up otherwise.

    >>> short_up(1e-10), short_up(1.23456e-7), short_up(0.00012)
    ('1e-10', '1.235e-7', '0.00012')
    """
    digits = Decimal(repr(float(value))).normalize().as_tuple().digits
    return in_full(value) if len(digits) <= MOST_DIGITS else rounded_up(value)


def rounded_down(value: float, digits: int = 4) -> str:
    """Return the value with at least `digits` significant digits, rounded down.

    Less noise is less privacy, so a noise multiplier that is shown must not be too large.

    >>> [rounded_down(value) for value in (16.1, 4.99999, 12345.6, 0.00012345678)]
    ['16.1', '4.999', '12345', '0.0001234']
    """
    exact = Decimal(repr(float(value)))
    if not value or not math.isfinite(value) or len(exact.as_tuple().digits) <= digits:
        return in_full(value).removesuffix(".0")
    last = exact.adjusted() - digits + 1
    plain = -5 <= exact.adjusted() < 9  # others are written with an exponent
    shown = exact.quantize(Decimal(1).scaleb(min(last, 0) if plain else last), ROUND_FLOOR)
    return f"{shown:f}" if plain else f"{shown:e}".replace("e+", "e")


# The names of 1e3, 1e6 and so on.
POWERS: Final = ("thousand", "million", "billion", "trillion", "quadrillion", "quintillion")


def probability_in_words(probability: float) -> str:
    """Return a probability as "one in" a number of at most two digits, rounded up.

    >>> probability_in_words(1e-10), probability_in_words(1e-6)
    ('one in ten billion', 'one in a million')
    >>> probability_in_words(3e-8), probability_in_words(1e-30)
    ('at most one in 33 million', 'one in 1 followed by 30 zeros')
    """
    if not 0 < probability <= 0.5:
        return "zero" if probability == 0 else "more than one in two"
    inverse = 1 / Fraction(repr(float(probability)))
    whole = math.floor(inverse)
    zeros = max(len(str(whole)) - 2, 0)
    # A smaller number after "one in" is a larger probability.
    shown = whole // 10**zeros * 10**zeros
    return f"{'' if shown == inverse else 'at most '}one in {_number_in_words(shown)}"


def _number_in_words(number: int) -> str:
    """Return a whole number with at most two digits that are not zero, in words."""
    group = (len(str(number)) - 1) // 3
    is_power_of_ten = str(number).strip("0") == "1"
    if group > len(POWERS):
        digits = str(number).rstrip("0")
        return f"{digits} followed by {len(str(number)) - len(digits)} zeros"
    if group == 0:
        return str(number)
    if is_power_of_ten:
        leading = {1: "a", 10: "ten", 100: "a hundred"}[number // 1000**group]
        return f"{leading} {POWERS[group - 1]}"
    # 1.5 million, but 15 million: two digits can have one decimal place.
    shown = Decimal(number) / 1000**group
    return f"{shown.normalize():f} {POWERS[group - 1]}"


def plain_number(value: float) -> str:
    """Return a number that is not about privacy, with all digits and without an exponent.

    >>> plain_number(14.0), plain_number(0.125), plain_number(1200.5)
    ('14', '0.125', '1,200.5')
    """
    return f"{Decimal(repr(float(value))).normalize():,f}"


def number(value: float) -> str:
    """Return a number for a table, with three decimals or four significant digits.

    >>> number(1234.5678), number(0.00123456)
    ('1,234.568', '0.001235')
    """
    return f"{value:,.3f}" if 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share in percent, with all digits.

    >>> percent(0.25), percent(1.0), percent(0.125)
    ('25%', '100%', '12.5%')
    """
    return f"{(Decimal(repr(float(share))) * 100).normalize():,f}%"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> duration(0.5), duration(90), duration(7200), duration(400_000)
    ('0.5 s', '1.5 min', '2.0 h', '4.6 days')
    """
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= (2 if unit == "days" else 1) * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def memory_text(size: float) -> str:
    """Return a number of bytes with a unit.

    >>> memory_text(0), memory_text(32_000_000), memory_text(1.5e12)
    ('0 B', '32 MB', '1,500.0 GB')
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
