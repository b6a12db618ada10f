"""Canonical forms of client ids, to detect one client whose id is written in two ways.

Accounting counts how often each client took part. A client that appears as `a` in one row and as
` a` in another would be counted as two, and the stated epsilon would be too small. Two ids are
therefore compared by their canonical form. Ids are never rewritten: where two different ids have
the same canonical form, the log or the list of clients is refused.

The canonical form of an id:

1. Soft hyphens, zero-width spaces, word joiners and byte order marks are removed.
2. The text is in Unicode form NFC, and a no-break space is a space.
3. White space and invisible characters at both ends are removed.
4. A whole number is written with digits alone: `007`, `+7`, `7.0`, `7e0` and `7E+00` are `7`.

What stays different: upper and lower case; characters that look alike, or that only NFKC makes
equal (`x²` and `x2`); spaces inside an id; numbers with a fraction (`1.1` and `1.10` may be a
room or a version). `12e4` and `0e12` are not numbers: hexadecimal ids look like that, and a program
that writes a number like that puts one digit other than 0 before the `e`, a point, or a sign.
"""

import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple
from unicodedata import normalize

if TYPE_CHECKING:
    import polars as pl

# Characters that no id needs: soft hyphen, zero-width space, word joiner, byte order mark.
REMOVED: Final = "\u00ad\u200b\u2060\ufeff"
NO_BREAK_SPACES: Final = "\u00a0\u2007\u202f"
# Invisible characters that some scripts and emoji need within a word: joiners and directions.
_INVISIBLE: Final = (
    "\u180e\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e"
    "\u2061\u2062\u2063\u2064\u2066\u2067\u2068\u2069"
)
_WHITE_SPACE: Final = "".join(filter(str.isspace, map(chr, range(0x3001))))
TRIMMED: Final = _WHITE_SPACE + _INVISIBLE
_WITHOUT_REMOVED: Final = dict.fromkeys(map(ord, REMOVED))
_WITH_PLAIN_SPACES: Final = dict.fromkeys(map(ord, NO_BREAK_SPACES), " ")

# From here on, a 64-bit float may be the rounded value of another whole number.
EXACT_FLOATS: Final = 2**53
# Longest id of digits with leading zeros: `other_spellings` lists all lengths up to it.
MOST_PADDED_DIGITS: Final = 64

# Letters beyond ASCII that NFC never changes, whatever is next to them: Latin, Cyrillic, kana, the
# common Chinese characters and Hangul. Ids with other characters are normalized, which is slower.
_LETTERS: Final = (
    "\u00a1-\u00ac\u00ae-\u02ff\u0400-\u0482\u048a-\u052f"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
_ANY: Final = f"[ -~{_LETTERS}]"
_VISIBLE: Final = f"[!-~{_LETTERS}]"
# Visible characters that do not occur in numbers: all except the digits and + - . e E
_NOT_IN_NUMBERS: Final = f"[!-*,/:-DF-df-~{_LETTERS}]"
_PLAIN: Final = (
    f"{_NOT_IN_NUMBERS}(?:{_ANY}*{_VISIBLE})?"
    f"|{_VISIBLE}{_ANY}*{_NOT_IN_NUMBERS}(?:{_ANY}*{_VISIBLE})?"
    "|-?[1-9][0-9]*|0"
)
_is_plain: Final = re.compile(_PLAIN).fullmatch
_PADDED: Final = "^0[0-9]+$"
_number_parts: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<digits>[0-9]+)(?:(?P<point>\.)(?P<fraction>[0-9]*))?"
    r"(?:[eE](?P<exponent_sign>[+-]?)(?P<exponent>[0-9]{1,3}))?"
).fullmatch
_short_exponent: Final = re.compile(r"[1-9][eE](?:0|[1-9][0-9]{0,2})|0[eE]0").fullmatch


def is_plain_id(text: str) -> bool:
    """A fast check: if True, the id is its own canonical form. If False, it may still be.

    >>> [is_plain_id(text) for text in ("ann", "7", "007", " a")]
    [True, True, False, False]
    """
    if text.isascii():  # most ids: faster than a regular expression
        if text.isdigit():
            return text[0] != "0" or text == "0"
        if text.isidentifier():
            return True
    return _is_plain(text) is not None


def canonical_id(text: str) -> str:
    """The canonical form of a client id.

    >>> [canonical_id(text) for text in (" a", "a" + chr(0x200B), "007", "7.0", "1e+3", "A")]
    ['a', 'a', '7', '7', '1000', 'A']
    """
    if text.isascii() and text.isdigit():  # by far the most common ids that are not plain
        return text.lstrip("0") or "0"
    if _is_plain(text):
        return text
    text = _canonical_text(text)
    number = _whole_number(text)
    return text if number is None else number


def shown(text: str) -> str:
    r"""An id for a message: in quotes, shortened, with invisible characters as escapes.

    >>> print(shown("a" + chr(0xA0) + "  b"))
    'a\xa0 \x20b'
    """
    # Error messages replace several spaces by one, so the second is written as an escape.
    return f"{text!a:.60}".replace("  ", " \\x20")


def why_unfit(text: str) -> str | None:
    """The reason why a text cannot be a client id, for a message; None if it can be one.

    >>> why_unfit("a" + chr(0))
    'has a NUL character; remove it, or write the file again if it is damaged'
    """
    if _is_plain(text):
        return None
    if "\n" in text or "\r" in text:
        return "has a line break; write it on one line (in CSV, a stray quote joins lines)"
    if "\0" in text:
        return "has a NUL character; remove it, or write the file again if it is damaged"
    text = _canonical_text(text)
    if not text:
        return "has no visible character; every client needs an id"
    parts = _number_parts(text)
    is_float = parts is not None and (parts["point"] or parts["exponent_sign"])
    if is_float and (number := _whole_number(text)) and _may_be_rounded(number):
        return "is a float of 2^53 or more, which may be rounded; write the number in digits alone"
    return None


def _canonical_text(text: str) -> str:
    """Steps 1 to 3 of the canonical form."""
    if not text.isascii():
        text = normalize("NFC", text.translate(_WITHOUT_REMOVED)).translate(_WITH_PLAIN_SPACES)
    return text.strip(TRIMMED)


def _may_be_rounded(number: str) -> bool:
    """Whether a whole number, in digits, is too large for a float to be exact."""
    digits = number.lstrip("-")
    # The length is checked first, since `int` refuses thousands of digits.
    return len(digits) > len(str(EXACT_FLOATS)) or int(digits) >= EXACT_FLOATS


def _whole_number(text: str) -> str | None:
    """A whole number, in any notation, as digits; None if the text is not a whole number."""
    parts = _number_parts(text)
    if parts is None:
        return None
    fraction, exponent = parts["fraction"] or "", parts["exponent"]
    is_ambiguous = exponent and not parts["point"] and not parts["exponent_sign"]
    if is_ambiguous and not _short_exponent(text.lstrip("+-")):
        return None
    digits = (parts["digits"] + fraction).lstrip("0")
    shift = int((parts["exponent_sign"] or "") + (exponent or "0")) - len(fraction)
    if shift >= 0:
        digits += "0" * shift if digits else ""
    elif digits[shift:].strip("0"):
        return None
    else:
        digits = digits[:shift]
    sign = "-" if parts["sign"] == "-" else ""
    return sign + digits if digits else "0"


def has_known_spellings(text: str) -> bool:
    """Whether an id is a whole number in one of the notations that `other_spellings` lists.

    These are digits with or without leading zeros, and forms such as 1e5, which hexadecimal
    counters can produce.

    >>> [has_known_spellings(text) for text in ("7", "007", "1e5", "+7", "7.0", "ann")]
    [True, True, True, False, False, False]
    """
    if text.isascii() and text.isdigit():
        return text[0] != "0" or len(text) <= MOST_PADDED_DIGITS
    return _short_exponent(text) is not None


def other_spellings(text: str) -> Iterator[str]:
    """All other ids with the same canonical form for which `has_known_spellings` holds.

    >>> list(other_spellings("007"))[:3], list(other_spellings("ann"))
    (['7', '07', '0007'], [])
    """
    number = _whole_number(text) if has_known_spellings(text) else None
    if number is None:
        return
    longest = max(len(number), MOST_PADDED_DIGITS)
    padded = (number.zfill(length) for length in range(len(number), longest + 1))
    is_short = _short_exponent(f"{number[0]}e{len(number) - 1}") and not number[1:].strip("0")
    short = (f"{number[0]}{e}{len(number) - 1}" for e in "eE" if is_short)
    yield from (spelling for spelling in chain(padded, short) if spelling != text)


class CanonicalIds(NamedTuple):
    """The canonical forms of a column of ids.

    Attributes:
        forms: The canonical form of each id.
        respelled: Whether any id differs from its canonical form.
        unusual: Positions of the ids that may be unfit; see `first_unfit`.
    """

    forms: "pl.Series"
    respelled: bool
    unusual: "pl.Series"


def canonical_ids(ids: "pl.Series") -> CanonicalIds:
    """The canonical form of each id in a text column without nulls: a fast `canonical_id`."""
    plain = ids.str.contains(f"^(?:{_PLAIN})$")
    if plain.all():
        return CanonicalIds(ids, False, (~plain).arg_true())
    padded = ids.str.contains(_PADDED)
    forms, any_padded = ids, padded.any()
    if any_padded:
        forms = _where(padded, _without_zeros(ids), ids)
    is_unusual = ~(plain | padded)
    unusual = is_unusual.arg_true()
    if not len(unusual):
        return CanonicalIds(forms, any_padded, unusual)
    unusual_ids = ids.gather(unusual)
    unusual_forms = _canonical_forms(unusual_ids)
    # Where an id is not unusual, the position is not used: any valid one will do.
    positions = is_unusual.cum_sum().cast(unusual.dtype).clip(1) - 1
    forms = _where(is_unusual, unusual_forms.gather(positions), forms)
    respelled = any_padded or bool((unusual_forms != unusual_ids).any())
    return CanonicalIds(forms, respelled, unusual)


def _canonical_forms(ids: "pl.Series") -> "pl.Series":
    """The canonical forms of ids, without the shortcuts for common ids."""
    import polars as pl

    if ids.str.contains("[^ -~]").any():
        ids = ids.str.replace_all(f"[{REMOVED}]", "").str.normalize("NFC")
        ids = ids.str.replace_all(f"[{NO_BREAK_SPACES}]", " ")
    ids = ids.str.strip_chars(TRIMMED)
    # Tables with a missing value in a column write 7 as 7.0.
    ids = _where(ids.str.contains(r"^[0-9]+\.0$"), ids.str.strip_suffix(".0"), ids)
    ids = _where(ids.str.contains(_PADDED), _without_zeros(ids), ids)
    # Signs, exponents and other fractions are rare, so they are converted one by one.
    rare = ids.filter(ids.str.contains(r"^(?:\+|-0|[+-]?[0-9]+[.eE])")).unique()
    if not len(rare):
        return ids
    forms = [text if (number := _whole_number(text)) is None else number for text in rare]
    return ids.replace(rare, pl.Series(forms, dtype=pl.String))


def _without_zeros(ids: "pl.Series") -> "pl.Series":
    """The ids without leading zeros; an id of zeros becomes its last 0."""
    stripped = ids.str.strip_chars_start("0")
    is_zero = stripped == ""
    return _where(is_zero, ids.str.tail(1), stripped) if is_zero.any() else stripped


def _where(condition: "pl.Series", if_true: "pl.Series", if_false: "pl.Series") -> "pl.Series":
    return if_true.zip_with(condition, if_false)


def first_unfit(ids: "pl.Series", canonical: CanonicalIds) -> tuple[int, str] | None:
    """The position of the first id that `why_unfit` refuses, and the reason; None if all fit."""
    unusual, forms = ids.gather(canonical.unusual), canonical.forms.gather(canonical.unusual)
    long_float = unusual.str.contains(r"[0-9](?:\.|[eE][+-])") & forms.str.contains("[0-9]{16}")
    suspect = (forms == "") | unusual.str.contains(r"[\n\r\x00]") | long_float
    for position in canonical.unusual.filter(suspect):
        if reason := why_unfit(ids[position]):
            return position, reason
    return None
