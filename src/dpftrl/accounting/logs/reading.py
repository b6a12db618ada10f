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
from dpftrl.accounting.logs.layout import CLIENT, COUNTED, ROUND, STATUS, LogLayout
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

ROWS_PER_BATCH = 500_000  # some ten MB per batch

# For each file ending: the format, and the fewest bytes that a row is likely to take. The estimate
# is low because too many partitions cost less than too few. Parquet states its number of rows.
ENDINGS: Final = {
    ".csv": ("csv", 12.0),
    ".csv.gz": ("csv", 1.0),
    ".tsv": ("csv", 12.0),
    ".tsv.gz": ("csv", 1.0),
    ".txt": ("csv", 12.0),
    ".txt.gz": ("csv", 1.0),
    ".jsonl": ("json", 24.0),
    ".ndjson": ("json", 24.0),
    ".json": ("json", 24.0),
    ".jsonl.gz": ("json", 1.0),
    ".ndjson.gz": ("json", 1.0),
    ".parquet": ("parquet", 1.0),
}
FORMAT_NAMES: Final = {"csv": "CSV", "json": "JSON lines", "parquet": "Parquet"}
# Characters that people write between columns, which a message can propose.
COMMON_DELIMITERS: Final = {",": "','", ";": "';'", "\t": "'\\t'", "|": "'|'"}

# Bytes that decode to text with one of these are shown in hexadecimal instead.
CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x1f\x7f]")


class Source(NamedTuple):
    """A log file that can be streamed.

    Attributes:
        path: The file.
        kind: The format: csv, json or parquet.
        delimiter: The character between two columns of a CSV.
        layout: How the log is written.
        batches: The columns `client`, `round` or `time`, and, if there is one, `status`.
        rows: An estimate of the number of rows, which is seldom too small.
    """

    path: Path
    kind: str
    delimiter: str
    layout: LogLayout
    batches: "pl.LazyFrame"
    rows: int


def open_source(path: str | os.PathLike[str], layout: LogLayout) -> Source:
    """Open a log; the layout or the file's ending decides the format.

    Raises:
        InvalidInput: The file is not a log.
    """
    target, size = _existing_file(path)
    kind, bytes_per_row, delimiter = _format(target, layout)
    rows = None
    with _errors_in_one_line(target, kind):
        if kind != "parquet":
            refuse_bomb(target)
        if kind == "csv":
            batches = _scan_csv(target, layout, delimiter)
        elif kind == "json":
            batches = _scan_json(target, layout)
        else:
            batches, rows = _scan_parquet(target, layout)
    estimate = int(size / bytes_per_row) if rows is None else rows
    return Source(target, kind, delimiter, layout, batches, estimate)


def _format(path: Path, layout: LogLayout) -> tuple[str, float, str]:
    """The format of a file, the fewest bytes that a row is likely to take, and the delimiter."""
    ending = next((end for end in ENDINGS if path.name.lower().endswith(end)), None)
    if ending is None and layout.format is None:
        raise InvalidInput(
            f"{path} must end in one of {', '.join(ENDINGS)} to be read as a log; if its ending is "
            "another one, give --format"
        )
    kind, bytes_per_row = ENDINGS[ending] if ending is not None else (layout.format or "csv", 1.0)
    if layout.format not in (None, kind):
        raise InvalidInput(
            f"{path} is {FORMAT_NAMES[kind]} by its ending, but --format is {layout.format}; leave "
            "--format out, or rename the file"
        )
    if kind != "csv" and layout.delimiter is not None:
        raise InvalidInput(
            f"--delimiter is for CSV, but {path} is read as {FORMAT_NAMES[kind]}; leave it out"
        )
    text_ending = (ending or "").removesuffix(".gz")
    if text_ending == ".txt" and layout.delimiter is None:
        raise InvalidInput(
            f"{path} ends in .txt, which does not say what is between its columns; give "
            "--delimiter, such as ',', ';' or '\\t' for a tab"
        )
    return kind, bytes_per_row, layout.delimiter or ("\t" if text_ending == ".tsv" else ",")


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
    columns = source.layout.columns
    with _errors_in_one_line(source.path, source.kind):
        counts = count_json(source.path, columns)

    def check(tally: Tally) -> None:
        has_status = counts.keys[STATUS] or counts.escapes or not tally.rows
        if source.layout.needs_status and not has_status:
            raise InvalidInput(
                f"{source.path}: no line has the key {columns[STATUS]!r:.40}; --status-column "
                "names the key of the status"
            )
        if counts.exclude_ambiguity(tally.rows, tally.nulls):
            return
        lines = check_json_lines(source.path, columns)
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
        frame = pl.scan_csv(source.path, infer_schema=False, glob=False, separator=source.delimiter)
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


def _scan_csv(path: Path, layout: LogLayout, delimiter: str) -> "pl.LazyFrame":
    import polars as pl

    frame = pl.scan_csv(path, infer_schema=False, glob=False, separator=delimiter)
    return _select(path, frame, layout, delimiter)


def _scan_parquet(path: Path, layout: LogLayout) -> tuple["pl.LazyFrame", int]:
    import polars as pl

    frame = pl.scan_parquet(path, glob=False, hive_partitioning=False)
    return _select(path, frame, layout), int(frame.select(pl.len()).collect().item())


def _scan_json(path: Path, layout: LogLayout) -> "pl.LazyFrame":
    """Scan a file of JSON lines. Columns are read as text: one column may hold both 7 and "7"."""
    import polars as pl

    first = next(json_lines(path), None)
    if first is not None:
        # A key may be missing in the first line and present in others, so only keys that every line
        # needs are looked for here.
        _check_columns(path, list(json_object(path, *first)), layout, with_status=False)
    # `scan_ndjson` has no `glob=False`. Without the escape, a name with brackets would match no
    # file, and polars would not report that.
    pattern = glob.escape(str(path))
    names = layout.columns.values()
    return _select(path, pl.scan_ndjson(pattern, schema=dict.fromkeys(names, pl.String)), layout)


def _select(
    path: Path, frame: "pl.LazyFrame", layout: LogLayout, delimiter: str | None = None
) -> "pl.LazyFrame":
    """The columns of a log under the names that the code uses."""
    import polars.selectors as cs

    names = frame.collect_schema().names()
    _check_columns(path, names, layout, delimiter=delimiter)
    # `by_name` takes a name as it is: in `select`, a name such as ^a$ is a regular expression.
    present = {role: name for role, name in layout.columns.items() if name in names}
    return frame.select(cs.by_name(name).as_expr().alias(role) for role, name in present.items())


def _check_columns(
    path: Path,
    names: list[str],
    layout: LogLayout,
    *,
    with_status: bool = True,
    delimiter: str | None = None,
) -> None:
    """Raise InvalidInput if a column is missing that the log must have, or is there twice."""
    with_status = with_status and layout.needs_status
    for role, name in layout.columns.items():
        if name not in names and (role != STATUS or with_status):
            present = ", ".join(repr(name[:40]) for name in names[:12]) or "none"
            advice = f"--{role}-column says which one has the {role}"
            if role == ROUND:
                advice += ", and --time-column is for logs with times"
            if delimiter is not None and (other := _other_delimiter(names, layout, delimiter)):
                advice = (
                    f"it seems to have {COMMON_DELIMITERS[other]} between its columns: give "
                    f"--delimiter {COMMON_DELIMITERS[other]}"
                )
            elif delimiter is not None and len(names) == 1:
                advice += "; --delimiter says what is between two columns"
            raise InvalidInput(
                f"{path} has no column {name!r:.40}; its columns are {present}; {advice}"
            )
        if f"{name}_duplicated_0" in names:
            raise InvalidInput(f"{path} has two columns {name!r:.40}; keep one of them")


def _other_delimiter(names: list[str], layout: LogLayout, delimiter: str) -> str | None:
    """A delimiter that gives the column of clients, or more than one column; None if none does."""
    header = delimiter.join(names)
    candidates = [other for other in COMMON_DELIMITERS if other != delimiter and other in header]
    for other in candidates:
        if layout.columns[CLIENT] in {part.strip().strip('"') for part in header.split(other)}:
            return other
    return candidates[0] if candidates and len(names) == 1 else None


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
        rows: The columns `client` and `contact`. A contact is an integer: 2 * the round, counted
            from 0, or 2 * the time in microseconds, plus 1 if the client was counted.
        forms: The canonical form of each row's client id.
        respelled: Whether any id differs from its canonical form.
    """

    rows: "pl.DataFrame"
    forms: "pl.Series"
    respelled: bool


def clean(
    batch: "pl.DataFrame",
    layout: LogLayout,
    number: "pl.Series",
    rows_before: int,
) -> Cleaned:
    """Check the clients and statuses of a batch and encode its rows.

    Args:
        batch: The columns of `Source.batches`.
        layout: How the log is written.
        number: The round of each row, counted from 0, or its time in microseconds.
        rows_before: Rows in the batches before this one, to number the rows in messages.

    Raises:
        InvalidInput: A row is not valid; the message names the first one.
    """
    import polars as pl

    client = client_ids(batch[CLIENT])
    canonical = _canonical(batch[CLIENT], client, rows_before)
    contact = number * 2
    if STATUS in batch.columns:
        status = _text(batch[STATUS]).fill_null("")
        meanings = layout.meanings
        _refuse_statuses(status, meanings, rows_before)
        counted = [value for value, meaning in meanings.items() if meaning == COUNTED]
        contact += status.is_in(counted).cast(pl.Int64)
    else:
        contact += 1
    rows = pl.DataFrame({"client": client, "contact": contact})
    return Cleaned(rows, canonical.forms, canonical.respelled)


def round_numbers(
    column: "pl.Series", first_round: int, rounds: int | None, rows_before: int
) -> "pl.Series":
    """The rounds of a batch, counted from 0.

    Args:
        column: The column `round`.
        first_round: The number of the first round in the log.
        rounds: Number of training rounds, if it is known.
        rows_before: Rows in the batches before this one, to number the rows in messages.

    Raises:
        InvalidInput: A value is not the number of a round; the message names the first one.
    """
    last = first_round + (rounds or MOST_ROUNDS) - 1
    number = _whole_numbers(column)
    _refuse_rounds(column, number, first_round, last, rows_before)
    return number - first_round


def client_ids(column: "pl.Series") -> "pl.Series":
    """The client ids of a log as text; different values give different texts."""
    import polars as pl

    if column.dtype == pl.Binary:
        return _bytes_as_text(column)
    if column.dtype.is_float():
        column = column.set(column == 0, 0.0)  # -0.0 is 0.0
    return _text(column)


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
    is_one_past = first == 0 and whole == last + 1
    advice = "; if the log counts rounds from 1, give --first-round 1" if is_one_past else ""
    raise InvalidInput(
        f"row {row:,}: the last of {last - first + 1:,} rounds that count from {first:,} is "
        f"{last:,}, got {whole:,}{advice}"
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


def _refuse_statuses(status: "pl.Series", meanings: dict[str, str], rows_before: int) -> None:
    bad = (~status.is_in(list(meanings))).arg_true()
    if not len(bad):
        return
    known = [
        value if value == meaning else f"{value!r:.30} ({meaning})"
        for value, meaning in meanings.items()
        if value
    ]
    listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    raise InvalidInput(
        f"row {rows_before + bad[0] + 1:,}: a status is {listed} or empty (counted), got "
        f"{status[bad[0]]!r:.60}; --status says what other values mean, for example --status "
        "counted=ok,done"
    )
