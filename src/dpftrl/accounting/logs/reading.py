"""Read a participation log: from a file of any supported format to checked rows.

`open_source` and `stream` read the file in batches of rows. `clean` checks a batch, and
encodes its rounds and statuses as integers. What polars does not report about a text file, such as
joined lines and repeated JSON keys, is found by `text_lines`.

Polars is imported inside the functions that need it, because importing it is slow.
"""

import glob
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from dpftrl._internal.client_ids import (
    EXACT_FLOATS,
    CanonicalIds,
    canonical_ids,
    first_unfit,
    shown,
)
from dpftrl.accounting.logs.text_lines import (
    check_json_lines,
    count_csv_lines,
    count_json,
    json_lines,
    json_object,
    refuse_bomb,
)
from dpftrl.errors import InvalidInput
from dpftrl.participation import MOST_ROUNDS

if TYPE_CHECKING:
    import polars as pl

REQUIRED_COLUMNS: Final = ("round", "client")
COLUMNS: Final = (*REQUIRED_COLUMNS, "status")
COUNTED: Final = "counted"
STATUSES: Final = (COUNTED, "contacted", "abandoned")

ROWS_PER_BATCH = 500_000  # some ten MB per batch

# For each file ending: the format, and the fewest bytes that a row is likely to take. The estimate
# is low because too many partitions cost less than too few. Parquet states its number of rows.
ENDINGS: Final = {
    ".csv": ("csv", 12.0),
    ".csv.gz": ("csv", 1.0),
    ".jsonl": ("json", 24.0),
    ".ndjson": ("json", 24.0),
    ".json": ("json", 24.0),
    ".jsonl.gz": ("json", 1.0),
    ".ndjson.gz": ("json", 1.0),
    ".parquet": ("parquet", 1.0),
}
FORMAT_NAMES: Final = {"csv": "CSV", "json": "JSON lines", "parquet": "Parquet"}

# Bytes that decode to text with one of these are shown in hexadecimal instead.
CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x1f\x7f]")


class Source(NamedTuple):
    """A log file that can be streamed.

    Attributes:
        path: The file.
        kind: The format: csv, json or parquet.
        batches: The columns `round`, `client` and, if there is one, `status`.
        rows: An estimate of the number of rows, which is seldom too small.
    """

    path: Path
    kind: str
    batches: "pl.LazyFrame"
    rows: int


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a log; the file's ending decides the format.

    Raises:
        InvalidInput: The file is not a log.
    """
    target, size = _existing_file(path)
    ending = next((end for end in ENDINGS if target.name.lower().endswith(end)), None)
    if ending is None:
        raise InvalidInput(f"{target} must end in one of {', '.join(ENDINGS)} to be read as a log")
    kind, bytes_per_row = ENDINGS[ending]
    with _errors_in_one_line(target, kind):
        if kind != "parquet":
            refuse_bomb(target)
        scan = {"csv": _scan_csv, "json": _scan_json, "parquet": _scan_parquet}[kind]
        batches, rows = scan(target)
    return Source(target, kind, batches, int(size / bytes_per_row) if rows is None else rows)


def stream(source: Source, receive: Callable[["pl.DataFrame"], None]) -> None:
    """Call `receive` with each batch of the log, in order.

    Guarantees:
        A text log is refused if one of its lines did not become a row, or if a line of JSON is
        ambiguous. The batches that were handed over before the refusal must not be used.
    """
    check = _CHECKS[source.kind](source)
    tally = Tally()

    def count(batch: "pl.DataFrame") -> None:
        tally.rows += len(batch)
        tally.nulls.update({name: batch[name].null_count() for name in batch.columns})
        receive(batch)

    with _errors_in_one_line(source.path, source.kind):
        # `collect_batches` would stop early and without an error where polars panics on a damaged
        # file.
        source.batches.sink_batches(count, chunk_size=ROWS_PER_BATCH)
    check(tally)


@dataclass
class Tally:
    """The number of rows handed over, and how many of them have no value in each column."""

    rows: int = 0
    nulls: Counter[str] = field(default_factory=Counter[str])


def _csv_check(source: Source) -> Callable[[Tally], None]:
    """Count the lines of a CSV file; the returned function compares the count with the rows."""
    with _errors_in_one_line(source.path, source.kind):
        lines = count_csv_lines(source.path)

    def check(tally: Tally) -> None:
        if tally.rows < lines:
            _refuse_lost_lines(source, lines, tally.rows)

    return check


def _json_check(source: Source) -> Callable[[Tally], None]:
    """Count the lines and keys of a file of JSON lines, and return the check of the rows."""
    with _errors_in_one_line(source.path, source.kind):
        counts = count_json(source.path, COLUMNS)

    def check(tally: Tally) -> None:
        if counts.exclude_ambiguity(tally.rows, tally.nulls):
            return
        lines = check_json_lines(source.path, COLUMNS)
        if tally.rows < lines:
            _refuse_lost_lines(source, lines, tally.rows)

    return check


def _no_check(_: Source) -> Callable[[Tally], None]:
    """Check nothing: Parquet states its number of rows."""
    return lambda _: None


_CHECKS = {"csv": _csv_check, "json": _json_check, "parquet": _no_check}


def _refuse_lost_lines(source: Source, lines: int, rows: int) -> None:
    """Raise InvalidInput for lines that became part of another row; name that row if possible."""
    import polars as pl

    place = ""
    if source.kind == "csv":
        frame = pl.scan_csv(source.path, infer_schema=False, glob=False)
        has_break = pl.any_horizontal(pl.all().str.contains("\n", literal=True))
        first = frame.select(has_break.arg_true().first()).collect().item()
        place = "" if first is None else f", and row {first + 1:,} has a field with a line break"
    raise InvalidInput(
        f"{source.path} has {lines:,} lines of data and {rows:,} rows{place}; a stray quote joins "
        "lines: remove it, and write each row on one line"
    )


def _existing_file(path: str | os.PathLike[str]) -> tuple[Path, int]:
    """The absolute path and the size of a file that exists and is not empty."""
    target = Path(path).absolute()
    try:
        status = target.stat()
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        raise InvalidInput(f"{path} is a folder; name the log itself")
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(f"{path} is not a file; a log is read from a file, not from a pipe")
    if status.st_size == 0:
        raise InvalidInput(f"{path} is empty (0 bytes); a log has columns round and client")
    return target, status.st_size


def _scan_csv(path: Path) -> tuple["pl.LazyFrame", None]:
    import polars as pl

    frame = pl.scan_csv(path, infer_schema=False, glob=False)
    return frame.select(_present_columns(path, frame.collect_schema().names())), None


def _scan_parquet(path: Path) -> tuple["pl.LazyFrame", int]:
    import polars as pl

    frame = pl.scan_parquet(path, glob=False, hive_partitioning=False)
    columns = frame.select(_present_columns(path, frame.collect_schema().names()))
    return columns, int(frame.select(pl.len()).collect().item())


def _scan_json(path: Path) -> tuple["pl.LazyFrame", None]:
    """Scan a file of JSON lines. Columns are read as text: one column may hold both 7 and "7"."""
    import polars as pl

    first = next(json_lines(path), None)
    if first is not None:
        _present_columns(path, list(json_object(path, *first)))
    # `scan_ndjson` has no `glob=False`. Without the escape, a name with brackets would match no
    # file, and polars would not report that.
    pattern = glob.escape(str(path))
    return pl.scan_ndjson(pattern, schema=dict.fromkeys(COLUMNS, pl.String)), None


def _present_columns(path: Path, names: list[str]) -> list[str]:
    """The columns `round`, `client` and `status`, as far as the log has them.

    Raises:
        InvalidInput: A required column is missing, or one is there twice.
    """
    for required in REQUIRED_COLUMNS:
        if required not in names:
            present = ", ".join(repr(name[:40]) for name in names[:12]) or "none"
            raise InvalidInput(f"{path} has no column {required!r}; its columns are {present}")
    for name in COLUMNS:
        if f"{name}_duplicated_0" in names:
            raise InvalidInput(f"{path} has two columns {name!r}; keep one of them")
    return [name for name in COLUMNS if name in names]


@contextmanager
def _errors_in_one_line(path: Path, kind: str) -> Generator[None]:
    """Turn errors of polars or the system about a bad file into InvalidInput with one line."""
    import polars as pl

    polars_errors = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
    try:
        yield
    except (*polars_errors, OSError, EOFError, zlib.error) as error:
        if kind == "json" and isinstance(error, polars_errors):
            # Polars does not say which line is wrong: read the lines again to find it.
            for number, line in json_lines(path):
                json_object(path, number, line)
        reason = _reason(error)
        raise InvalidInput(f"{path} cannot be read as {FORMAT_NAMES[kind]}: {reason}") from None


def _reason(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters of it."""
    text = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
    return text[:200] or type(error).__name__


class Cleaned(NamedTuple):
    """A batch that was checked.

    Attributes:
        rows: The columns `client` and `contact`. A contact is an integer: 2 * round, counted from
            0, plus 1 if the client was counted.
        forms: The canonical form of each row's client id.
        respelled: Whether any id differs from its canonical form.
    """

    rows: "pl.DataFrame"
    forms: "pl.Series"
    respelled: bool


def clean(batch: "pl.DataFrame", first_round: int, rounds: int | None, rows_before: int) -> Cleaned:
    """Check a batch and encode its rounds and statuses.

    Args:
        batch: The columns of `Source.batches`.
        first_round: The number of the first round in the log.
        rounds: Number of training rounds, if it is known.
        rows_before: Rows in the batches before this one, to number the rows in messages.

    Raises:
        InvalidInput: A row is not valid; the message names the first one.
    """
    import polars as pl

    last = first_round + (rounds or MOST_ROUNDS) - 1
    number = _whole_numbers(batch["round"])
    _refuse_rounds(batch["round"], number, first_round, last, rows_before)
    client = client_ids(batch["client"])
    canonical = _canonical(batch["client"], client, rows_before)
    contact = (number - first_round) * 2
    if "status" in batch.columns:
        status = _text(batch["status"]).fill_null("")
        _refuse_statuses(status, rows_before)
        contact += status.is_in(["", COUNTED]).cast(pl.Int64)
    else:
        contact += 1
    rows = pl.DataFrame({"client": client, "contact": contact})
    return Cleaned(rows, canonical.forms, canonical.respelled)


def client_ids(column: "pl.Series") -> "pl.Series":
    """The client ids of a log as text; different values give different texts."""
    import polars as pl

    if column.dtype == pl.Binary:
        return _bytes_as_text(column)
    if column.dtype.is_float():
        column = column.set(column == 0, 0.0)  # -0.0 is 0.0
    return _text(column)


def last_round(cleaned: "pl.DataFrame") -> int:
    """The last round, counted from 0, of a cleaned batch that is not empty."""
    return int(cleaned["contact"].to_numpy().max()) >> 1


def _whole_numbers(column: "pl.Series") -> "pl.Series":
    """The column as integers, in whatever notation; null where a value is not a whole number."""
    import polars as pl

    if column.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if not column.dtype.is_float():
        column = _text(column).str.strip_chars()
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() == 0:
            return whole
        # Tables with a missing value in a column write 3 as 3.0.
        return whole.fill_null(_whole_numbers(column.cast(pl.Float64, strict=False)))
    exact = (column == column.floor()) & (column.abs() <= EXACT_FLOATS)
    return column.set(~exact.fill_null(False), None).cast(pl.Int64, strict=False)


def _text(column: "pl.Series") -> "pl.Series":
    """Convert a column of any type to text."""
    import polars as pl

    if column.dtype == pl.Binary:
        return column.bin.encode("hex")
    if column.dtype.is_float():
        column = column.fill_nan(None)
    return column.cast(pl.String)


def _bytes_as_text(column: "pl.Series") -> "pl.Series":
    """Convert bytes that are readable as text to that text, and others to hexadecimal digits."""
    import polars as pl

    try:
        text = column.cast(pl.String)
        if not text.str.contains(CONTROL_CHARACTERS.pattern).any():
            return text
    except pl.exceptions.PolarsError:
        pass
    texts = [None if content is None else _as_text(content) for content in column]
    return pl.Series(texts, dtype=pl.String)


def _as_text(content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return f"0x{content.hex()}"
    return f"0x{content.hex()}" if CONTROL_CHARACTERS.search(text) else text


def _canonical(column: "pl.Series", ids: "pl.Series", rows_before: int) -> CanonicalIds:
    """The canonical forms of a column's ids; raises InvalidInput for the first unfit id."""
    import polars as pl

    _refuse_missing(ids, rows_before)
    if column.dtype.is_float():
        _refuse_inexact(column, rows_before)
    if column.dtype.is_numeric():  # equal numbers of one type give equal texts
        return CanonicalIds(ids, respelled=False, unusual=pl.Series(dtype=pl.UInt32))
    canonical = canonical_ids(ids)
    if len(canonical.unusual):
        if unfit := first_unfit(ids, canonical):
            position, reason = unfit
            raise InvalidInput(
                f"row {rows_before + position + 1:,}: client {shown(ids[position])} {reason}"
            )
        _refuse_quotes(ids, rows_before)
    return canonical


def _refuse_rounds(
    given: "pl.Series", number: "pl.Series", first: int, last: int, rows_before: int
) -> None:
    """Raise InvalidInput for the first round that is not a whole number from `first` to `last`."""
    bad = (number.is_null() | (number < first) | (number > last)).arg_true()
    if not len(bad):
        return
    row, value, whole = rows_before + bad[0] + 1, given[bad[0]], number[bad[0]]
    if value is None or value == "":
        raise InvalidInput(f"row {row:,} has no round (a blank line?)")
    if whole is None:
        raise InvalidInput(f"row {row:,}: a round is a whole number, got {value!r:.60}")
    if whole < first:
        raise InvalidInput(
            f"row {row:,}: rounds count from {first:,} (--first-round changes this), got {whole}"
        )
    raise InvalidInput(
        f"row {row:,}: the last of {last - first + 1:,} rounds that count from {first:,} is "
        f"{last:,}, got {whole:,}"
    )


def _refuse_missing(ids: "pl.Series", rows_before: int) -> None:
    bad = (ids.is_null() | (ids == "")).arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,} has no client; every row needs an id, "
            "since without it one cannot count how often a client took part"
        )


def _refuse_inexact(column: "pl.Series", rows_before: int) -> None:
    """Refuse floats so large that two different ids may be rounded to the same number."""
    import polars as pl

    # The bits of the significand of float64, float32 and float16.
    bits = 53 if column.dtype == pl.Float64 else 24 if column.dtype == pl.Float32 else 11
    bad = (~(column.abs() < 2.0**bits)).arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,}: client {column[bad[0]]} is a float of 2^{bits} or "
            "more, which may be rounded; write the ids as integers or as text"
        )


def _refuse_quotes(ids: "pl.Series", rows_before: int) -> None:
    """Refuse ids with a space before a quote: CSV makes the quotes part of the id."""
    bad = ids.str.contains(r'^\s+"').arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,}: client {shown(ids[bad[0]])} has a space before its "
            "quote, which makes the quotes part of the id; remove the space"
        )


def _refuse_statuses(status: "pl.Series", rows_before: int) -> None:
    bad = (~status.is_in(["", *STATUSES])).arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,}: a status is {', '.join(STATUSES)} or empty, "
            f"got {status[bad[0]]!r:.60}"
        )
