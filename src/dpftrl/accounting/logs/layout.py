"""How a participation log is written: its format, its columns, its statuses and its times."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Final, final

from dpftrl.errors import InvalidInput

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
