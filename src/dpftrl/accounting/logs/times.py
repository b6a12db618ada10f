"""Times in a log: from the three notations that are accepted to microseconds in UTC.

The notations are ISO 8601 with a time zone, ISO 8601 without one if the layout says that the times
are in UTC, and Unix seconds. All times of a log have the same notation.

Polars is imported inside the functions that need it, because importing it is slow.
"""

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from dpftrl.accounting.logs.layout import MICROSECONDS
from dpftrl.errors import InvalidInput

if TYPE_CHECKING:
    import polars as pl

# Names of the notations, for messages.
ZONED, NAIVE, UNIX = "ISO 8601 with a time zone", "ISO 8601 without a time zone", "Unix seconds"
_NAMES: Final = (ZONED, NAIVE, UNIX)

_ISO: Final = (
    r"^(?<day>[0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ](?<clock>[0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:[.,](?<fraction>[0-9]+))? ?"
    r"(?<zone>Z|z|UTC|[+-](?:0[0-9]|1[0-4])(?::?[0-5][0-9])?)?$"
)
_UNIX: Final = r"^(?<whole>[0-9]{9,10})(?:\.(?<fraction>[0-9]+))?$"
# Unix seconds from 1973 to a day from now. Milliseconds of this century, and dates written as
# 20260131 or 2026013118, are outside. Milliseconds that were read as seconds would make every gap
# 1000 times too large.
_FIRST_SECOND = 10**8
_DAY = 86_400
_EXAMPLES: Final = "2026-01-31T18:00:00Z, 2026-01-31T18:00:00+02:00 or 1769882400"


class Times(NamedTuple):
    """Times of a batch.

    Attributes:
        microseconds: Microseconds since 1970 in UTC, rounded down; null where a value is no time.
        notation: The notation of each time, as an index into the names; null where it has none.
        inexact: Whether any time was rounded.
    """

    microseconds: "pl.Series"
    notation: "pl.Series"
    inexact: bool


def read_times(column: "pl.Series", zone: str | None, seen: str | None, rows_before: int) -> "Read":
    """Read a column of times.

    Args:
        column: Text, numbers or timestamps.
        zone: UTC if times without a time zone are in UTC; None if they are refused.
        seen: The notation of the rows before this batch, if there are any.
        rows_before: Rows in the batches before this one, to number the rows in messages.

    Raises:
        InvalidInput: A value is not a time, or it has another notation than the rows before it.
    """
    times = _times(column)
    bad = times.microseconds.is_null().arg_true()
    if len(bad):
        _refuse(column, bad[0], rows_before)
    notation = _NAMES.index(seen) if seen is not None else int(times.notation[0])
    other = (times.notation != notation).arg_true()
    if len(other):
        position = other[0]
        raise InvalidInput(
            f"row {rows_before + position + 1:,}: the time {_shown(column, position)} is in "
            f"{_NAMES[int(times.notation[position])]}, but the rows before it are in "
            f"{_NAMES[notation]}; write all times in the same way"
        )
    if _NAMES[notation] == NAIVE and zone is None:
        raise InvalidInput(
            f"row {rows_before + 1:,}: the time {_shown(column, 0)} has no time zone; local times "
            "are ambiguous where clocks change: add the offset to every time, or give --time-zone "
            "UTC if the times are in UTC"
        )
    if _NAMES[notation] == ZONED and zone is not None:
        raise InvalidInput(
            f"row {rows_before + 1:,}: the time {_shown(column, 0)} has a time zone; leave "
            "--time-zone out, which is for times without one"
        )
    return Read(times.microseconds, _NAMES[notation], times.inexact)


class Read(NamedTuple):
    """A column of times that was checked: microseconds, their notation, whether any was rounded."""

    microseconds: "pl.Series"
    notation: str
    inexact: bool


def read_first_time(given: str | float, zone: str | None) -> int:
    """The start of the first round in microseconds; a finer time is refused."""
    import polars as pl

    text = str(given).strip()
    if not text or not text.isprintable():
        raise InvalidInput(f"--first-time takes a time such as {_EXAMPLES}, got {text!a:.60}")
    column = pl.Series([text], dtype=pl.String)
    try:
        read = read_times(column, None if _has_zone(column) else zone, None, 0)
    except InvalidInput as error:
        raise InvalidInput(f"--first-time: {str(error).removeprefix('row 1: ')}") from None
    if read.inexact:
        raise InvalidInput(f"--first-time must be in whole microseconds, got {str(given)!r:.60}")
    return int(read.microseconds[0])


def _has_zone(column: "pl.Series") -> bool:
    return _times(column).notation[0] == _NAMES.index(ZONED)


def as_text(microseconds: int) -> str:
    """A time in UTC, for a message.

    >>> as_text(1769882400000000)
    '2026-01-31T18:00:00Z'
    """
    from datetime import UTC, datetime, timedelta

    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
    return moment.isoformat().replace("+00:00", "Z")


def _latest() -> float:
    """The latest time that a log can have, in microseconds: a day from now.

    A wrong clock that is far ahead would make the gap before it too large.
    """
    return (time.time() + _DAY) * MICROSECONDS


def _times(column: "pl.Series") -> Times:
    """Convert a column of any type. Values that are not times become null."""
    import polars as pl

    if isinstance(column.dtype, pl.Datetime):
        # Polars stores the moment in UTC where there is a time zone.
        notation = NAIVE if column.dtype.time_zone is None else ZONED
        exact = column.to_physical()
        factor = {"ms": 1000, "us": 1, "ns": 1}[column.dtype.time_unit]
        microseconds = exact * factor if column.dtype.time_unit != "ns" else exact // 1000
        inexact = column.dtype.time_unit == "ns" and bool((exact % 1000 != 0).any())
        valid = ((microseconds >= 0) & (microseconds < _latest())).fill_null(False)
        return Times(
            microseconds.set(~valid, None), _constant(_NAMES.index(notation), column), inexact
        )
    if column.dtype.is_float():
        return _float_seconds(column)
    if not column.dtype.is_integer() and column.dtype != pl.String:
        empty = pl.Series([None] * len(column), dtype=pl.Int64)
        return Times(empty, empty, False)
    text = column.cast(pl.String).str.strip_chars()
    iso, unix = _iso(text), _unix(text)
    notation = unix.notation.fill_null(iso.notation)
    microseconds = unix.microseconds.fill_null(iso.microseconds)
    return Times(microseconds, notation, iso.inexact or unix.inexact)


def _constant(value: int, column: "pl.Series") -> "pl.Series":
    import polars as pl

    return pl.Series([value], dtype=pl.Int64).new_from_index(0, len(column))


def _float_seconds(column: "pl.Series") -> Times:
    """Unix seconds as floats, which are exact only if they are whole."""
    import polars as pl

    seconds = column.cast(pl.Float64)
    valid = ((seconds >= _FIRST_SECOND) & (seconds < _latest() / MICROSECONDS)).fill_null(False)
    # A float of 32 bits is minutes away from the time that was meant.
    if column.dtype != pl.Float64:
        valid = valid & False
    whole = seconds.floor()
    fraction = ((seconds - whole) * MICROSECONDS).floor()
    total = whole.set(~valid, None).cast(pl.Int64) * MICROSECONDS
    total = total + fraction.set(~valid, None).cast(pl.Int64)
    inexact = bool(((seconds != whole) & valid).any())
    return Times(total, _constant(_NAMES.index(UNIX), column), inexact)


def _iso(text: "pl.Series") -> Times:
    """Read ISO 8601; a leap second is the first second of the next minute, as in Unix time."""
    import polars as pl

    parts = text.str.extract_groups(_ISO).struct.unnest()
    moment = (parts["day"] + "T" + parts["clock"]).str.to_datetime(
        "%Y-%m-%dT%H:%M:%S", strict=False, time_unit="us"
    )
    fraction, inexact = _fraction(parts["fraction"])
    zone = parts["zone"].fill_null("")
    digits = zone.str.replace_all(":", "", literal=True)
    hours = digits.str.slice(1, 2).cast(pl.Int64, strict=False).fill_null(0)
    minutes = digits.str.slice(3, 2).cast(pl.Int64, strict=False).fill_null(0)
    offset = (hours * 60 + minutes) * (60 * MICROSECONDS)
    sign = digits.str.starts_with("-").cast(pl.Int64) * 2 - 1
    microseconds = moment.to_physical() + fraction + sign * offset
    valid = ((microseconds >= 0) & (microseconds < _latest())).fill_null(False)
    notation = (zone == "").cast(pl.Int64) * _NAMES.index(NAIVE)
    return Times(microseconds.set(~valid, None), notation.set(~valid, None), inexact)


def _unix(text: "pl.Series") -> Times:
    import polars as pl

    parts = text.str.extract_groups(_UNIX).struct.unnest()
    fraction, inexact = _fraction(parts["fraction"])
    seconds = parts["whole"].cast(pl.Int64, strict=False)
    valid = ((seconds >= _FIRST_SECOND) & (seconds < _latest() / MICROSECONDS)).fill_null(False)
    microseconds = (seconds * MICROSECONDS + fraction).set(~valid, None)
    notation = _constant(_NAMES.index(UNIX), text).set(~valid, None)
    return Times(microseconds, notation, inexact)


def _fraction(digits: "pl.Series") -> tuple["pl.Series", bool]:
    """The digits after the point as microseconds, and whether any digit beyond them is not 0."""
    import polars as pl

    digits = digits.fill_null("")
    microseconds = digits.str.slice(0, 6).str.pad_end(6, "0").cast(pl.Int64, strict=False)
    inexact = digits.str.slice(6).str.contains("[1-9]").any()
    return microseconds.fill_null(0), bool(inexact)


def _shown(column: "pl.Series", position: int) -> str:
    return f"{str(column[position])!a:.60}"


def _refuse(column: "pl.Series", position: int, rows_before: int) -> None:
    """Raise InvalidInput for a value that is not a time."""
    row, value = rows_before + position + 1, column[position]
    if value is None or value == "":
        raise InvalidInput(f"row {row:,} has no time (a blank line?)")
    text, reason = str(value), ""
    digits = text.partition(".")[0]
    if digits.isdigit():
        reason = "; Unix times are seconds, not milliseconds, from 1973 to now"
    elif len(text) <= len("2026-01-31T18:00"):
        reason = "; it needs the date, and the time of day with its seconds"
    raise InvalidInput(
        f"row {row:,}: a time is written like {_EXAMPLES}, got {_shown(column, position)}{reason}"
    )
