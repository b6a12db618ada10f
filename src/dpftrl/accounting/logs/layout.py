"""How a participation log is written: its format, its columns, its statuses and its times.

Three notations of times are accepted, and are turned into microseconds in UTC: ISO 8601 with a time
zone, ISO 8601 without one if the layout says that the times are in UTC, and Unix seconds. All times
of a log have the same notation.

Polars is imported inside the functions that need it, because importing it is slow.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, final

from dpftrl.errors import InvalidInput

if TYPE_CHECKING:
    import polars as pl

FORMATS: Final = ("csv", "json", "parquet")
COUNTED: Final = "counted"
# What a row can mean. A log that uses these words needs no mapping of statuses.
STATUSES: Final = (COUNTED, "contacted", "abandoned")
# The columns of a log, under the names that the code uses.
CLIENT, ROUND, STATUS, TIME = "client", "round", "status", "time"

MICROSECONDS: Final = 10**6
_UNITS: Final = {
    **dict.fromkeys(("", "s", "sec"), 1),
    "min": 60,
    "h": 3600,
    "d": 86_400,
}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)")
# Longer than any training, and short enough that no sum of times overflows 64 bits.
_LONGEST_ROUND: Final = 100 * 366 * 86_400 * MICROSECONDS
_UNFIT_DELIMITER: Final = re.compile(r'[A-Za-z0-9"\x00-\x08\x0a-\x1f\x7f]')

# Names of the notations of times, for messages.
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
# In the year 2286. Later times are refused as unreadable, earlier ones for lying in the future.
_END_OF_TIMES: Final = 10**10 * MICROSECONDS
_EXAMPLES: Final = "2026-01-31T18:00:00Z, 2026-01-31T18:00:00+02:00 or 1769882400"


@final
@dataclass(frozen=True)
class LogLayout:
    """How a participation log is written. The default is the ledger that a run of dpftrl writes.

    Guarantees:
        With `time_column`, no observed gap is larger than the gap of the real rounds. Two contacts
        at a distance d in time are at least floor(d / round_length) rounds apart, wherever the
        rounds began, if no round was longer than `round_length`. Contacts that are closer count as
        two participations in neighboring rounds. Because they can also be in one round, they are
        reported as repeated rows, unless `first_time` shows that they are in two. A time without
        a time zone is refused unless `time_zone` says that it is UTC: where clocks change, local
        times look further apart than they were.

    Attributes:
        client_column: Name of the column with the client's id.
        round_column: Name of the column with the number of the round. Default: `round`.
        status_column: Name of the column with the status. Default: `status`, if the log has it.
            A log without statuses has only counted rows.
        statuses: The log's own words for each status, for example {"counted": ["ok", "done"]}. The
            words counted, contacted and abandoned are always known. An empty status is counted.
        time_column: Name of a column with times, which is read instead of round numbers.
        round_length: Length of a round: seconds, a text such as 30min, 6h or 1d, or a timedelta. It
            must not be shorter than any round of the training. A longer one is safe, if the number
            of rounds is stated and `first_time` is not.
        first_time: Start of the first round, if every round had exactly the round length. Two
            contacts that are closer than that can then be known to be in two rounds. Default: the
            first time in the log, and rounds can begin anywhere.
        time_zone: UTC, if the times in the log have no time zone but are in UTC.
        delimiter: The character between two columns of a CSV. Default: a comma, and a tab in files
            that end in .tsv.
        format: csv, json or parquet. Default: the file's ending decides.
    """

    client_column: str = CLIENT
    round_column: str | None = None
    status_column: str | None = None
    statuses: Mapping[str, Iterable[str]] = field(default_factory=dict[str, Iterable[str]])
    time_column: str | None = None
    round_length: float | str | timedelta | None = None
    first_time: str | float | None = None
    time_zone: str | None = None
    delimiter: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "statuses", _checked_statuses(self.statuses))
        self._check_columns()
        self._check_times()
        if self.delimiter is not None:
            object.__setattr__(self, "delimiter", _checked_delimiter(self.delimiter))
        if self.format is not None and self.format not in FORMATS:
            raise InvalidInput(
                f"the format of a log is {', '.join(FORMATS)}, got {self.format!r:.40}"
            )

    @property
    def columns(self) -> dict[str, str]:
        """The names in the log of the columns client, round or time, and status."""
        others = {CLIENT: self.client_column, STATUS: self.status_column or STATUS}
        if self.time_column is not None:
            return {TIME: self.time_column, **others}
        return {ROUND: self.round_column or ROUND, **others}

    @property
    def needs_status(self) -> bool:
        """Whether the log must have a status column, because the layout describes it."""
        return self.status_column is not None or bool(self.statuses)

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each status value that is known, including the empty one."""
        own = {value: meaning for meaning, values in self.statuses.items() for value in values}
        return {"": COUNTED, **{word: word for word in STATUSES}, **own}

    @property
    def round_microseconds(self) -> int:
        """Length of a round in microseconds."""
        assert self.round_length is not None  # checked when the layout was made
        return _microseconds(self.round_length)

    def _check_columns(self) -> None:
        if self.time_column is not None and self.round_column is not None:
            raise InvalidInput(
                "a log has rounds or times: give --round-column or --time-column, not both"
            )
        names = dict[str, str]()
        for role, name in self.columns.items():
            option = f"--{role}-column"
            if not name or not _is_text(name):
                raise InvalidInput(f"{option} takes the name of a column, got {name!a:.40}")
            if name in names:
                raise InvalidInput(
                    f"{names[name]} and {option} are both {name!r:.40}; each needs its own column"
                )
            names[name] = option

    def _check_times(self) -> None:
        if self.time_column is None:
            options = {
                "--round-length": self.round_length,
                "--first-time": self.first_time,
                "--time-zone": self.time_zone,
            }
            for option, value in options.items():
                if value is not None:
                    raise InvalidInput(f"{option} is for logs with times: give --time-column too")
            return
        if self.round_length is None:
            raise InvalidInput(
                "--time-column needs --round-length, such as 6h: the length of the longest round"
            )
        _microseconds(self.round_length)
        if self.time_zone is not None and self.time_zone != "UTC":
            raise InvalidInput(
                f"--time-zone can only be UTC, got {self.time_zone!r:.40}; where clocks change, "
                "local times are ambiguous: write the log in UTC, or with the offset in each time"
            )


def _is_text(name: str) -> bool:
    """Whether the name is on one line and can be written in UTF-8, which surrogates cannot."""
    return name.isprintable()


def _checked_statuses(statuses: Mapping[str, Iterable[str]]) -> Mapping[str, tuple[str, ...]]:
    """The mapping with tuples as values; refuse words that are mapped in a doubtful way."""
    meanings, checked = dict[str, str](), dict[str, tuple[str, ...]]()
    for meaning, given in statuses.items():
        if meaning not in STATUSES:
            raise InvalidInput(
                f"--status maps values to {', '.join(STATUSES)}, got {meaning!r:.40}; write for "
                "example --status counted=ok,done"
            )
        values = (given,) if isinstance(given, str) else tuple(given)
        if not values or "" in values:
            raise InvalidInput(
                f"--status {meaning}= needs a value that is not empty; an empty status always "
                "means counted"
            )
        for value in values:
            if not _is_text(value):
                raise InvalidInput(
                    f"--status takes values of printable characters, got {value!a:.40}"
                )
            known = meanings.setdefault(value, meaning)
            if known != meaning:
                raise InvalidInput(
                    f"--status maps {value!r:.40} to {known} and to {meaning}; keep one of them"
                )
            # A row that counts is the safe reading, so only that one may be chosen for our words.
            if value in STATUSES and meaning not in (value, COUNTED):
                raise InvalidInput(
                    f"--status maps {value!r} to {meaning}, but {value!r} is itself a status; it "
                    "can only be mapped to counted: use another word in the log"
                )
        checked[meaning] = values
    return MappingProxyType(checked)


def _checked_delimiter(given: str) -> str:
    r"""The delimiter; the two characters \t stand for a tab."""
    delimiter = "\t" if given in ("\\t", "tab") else given
    if len(delimiter) != 1 or not delimiter.isascii() or _UNFIT_DELIMITER.match(delimiter):
        raise InvalidInput(
            "--delimiter takes one character, such as ';' or '\\t' for a tab, and no letter, "
            f"digit or quote, got {given!r:.40}"
        )
    return delimiter


def _microseconds(length: float | str | timedelta) -> int:
    """A duration in whole microseconds.

    >>> [_microseconds(length) for length in ("6h", "30min", "1d", 90)]
    [21600000000, 1800000000, 86400000000, 90000000]
    """
    if isinstance(length, timedelta):
        number = Decimal(length // timedelta(microseconds=1))
    else:
        match = _DURATION.fullmatch(str(length).strip())
        unit = None if match is None else _UNITS.get(match[2])
        if match is None or unit is None:
            raise InvalidInput(
                "--round-length takes a length such as 6h, 30min, 1d or 90s, or seconds as a plain "
                f"number, got {str(length)!r:.40}"
            )
        number = Decimal(match[1]) * unit * MICROSECONDS
    if number != int(number) or not 0 < number <= _LONGEST_ROUND:
        raise InvalidInput(
            "--round-length must be from 1 microsecond to 100 years, in whole microseconds, got "
            f"{str(length)!r:.40}"
        )
    return int(number)


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


def _times(column: "pl.Series", latest: float | None = None) -> Times:
    """Convert a column of any type. Values that are not times before `latest` become null.

    Args:
        column: Text, numbers or timestamps.
        latest: In microseconds. Default: a day from now.
    """
    import polars as pl

    latest = _latest() if latest is None else latest
    if isinstance(column.dtype, pl.Datetime):
        # Polars stores the moment in UTC where there is a time zone.
        notation = NAIVE if column.dtype.time_zone is None else ZONED
        exact = column.to_physical()
        factor = {"ms": 1000, "us": 1, "ns": 1}[column.dtype.time_unit]
        microseconds = exact * factor if column.dtype.time_unit != "ns" else exact // 1000
        inexact = column.dtype.time_unit == "ns" and bool((exact % 1000 != 0).any())
        valid = ((microseconds >= 0) & (microseconds < latest)).fill_null(False)
        return Times(
            microseconds.set(~valid, None), _constant(_NAMES.index(notation), column), inexact
        )
    if column.dtype.is_float():
        return _float_seconds(column, latest)
    if not column.dtype.is_integer() and column.dtype != pl.String:
        empty = pl.Series([None] * len(column), dtype=pl.Int64)
        return Times(empty, empty, False)
    text = column.cast(pl.String).str.strip_chars()
    iso, unix = _iso(text, latest), _unix(text, latest)
    notation = unix.notation.fill_null(iso.notation)
    microseconds = unix.microseconds.fill_null(iso.microseconds)
    return Times(microseconds, notation, iso.inexact or unix.inexact)


def _constant(value: int, column: "pl.Series") -> "pl.Series":
    import polars as pl

    return pl.Series([value], dtype=pl.Int64).new_from_index(0, len(column))


def _float_seconds(column: "pl.Series", latest: float) -> Times:
    """Unix seconds as floats, which are exact only if they are whole."""
    import polars as pl

    seconds = column.cast(pl.Float64)
    valid = ((seconds >= _FIRST_SECOND) & (seconds < latest / MICROSECONDS)).fill_null(False)
    # A float of 32 bits is minutes away from the time that was meant.
    if column.dtype != pl.Float64:
        valid = valid & False
    whole = seconds.floor()
    fraction = ((seconds - whole) * MICROSECONDS).floor()
    total = whole.set(~valid, None).cast(pl.Int64) * MICROSECONDS
    total = total + fraction.set(~valid, None).cast(pl.Int64)
    inexact = bool(((seconds != whole) & valid).any())
    return Times(total, _constant(_NAMES.index(UNIX), column), inexact)


def _iso(text: "pl.Series", latest: float) -> Times:
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
    valid = ((microseconds >= 0) & (microseconds < latest)).fill_null(False)
    notation = (zone == "").cast(pl.Int64) * _NAMES.index(NAIVE)
    return Times(microseconds.set(~valid, None), notation.set(~valid, None), inexact)


def _unix(text: "pl.Series", latest: float) -> Times:
    import polars as pl

    parts = text.str.extract_groups(_UNIX).struct.unnest()
    fraction, inexact = _fraction(parts["fraction"])
    seconds = parts["whole"].cast(pl.Int64, strict=False)
    valid = ((seconds >= _FIRST_SECOND) & (seconds < latest / MICROSECONDS)).fill_null(False)
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
    is_unix = digits.isdigit()
    future = _times(column.slice(position, 1), _END_OF_TIMES).microseconds[0]
    if future is not None:
        reading = f" ({as_text(future)} as Unix seconds)" if is_unix else ""
        milliseconds = "; Unix times are seconds, not milliseconds" if is_unix else ""
        raise InvalidInput(
            f"row {row:,}: the time {_shown(column, position)}{reading} lies in the future: now it "
            f"is {as_text(int(time.time()) * MICROSECONDS)}; check the clock and the time zone of "
            f"the log{milliseconds}"
        )
    if is_unix:
        reason = "; Unix times are seconds, not milliseconds, from 1973 to now"
    elif len(text) <= len("2026-01-31T18:00"):
        reason = "; it needs the date, and the time of day with its seconds"
    raise InvalidInput(
        f"row {row:,}: a time is written like {_EXAMPLES}, got {_shown(column, position)}{reason}"
    )
