"""Numbers as text in statements: guarantees are rounded up, other numbers are written in full."""

import math
from decimal import ROUND_CEILING, Decimal


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
