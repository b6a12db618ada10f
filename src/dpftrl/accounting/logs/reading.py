"""Read a participation log: from a file of any supported format to checked, partitioned rows.

The steps, in the order of this file:

1. `open_source` and `stream`: hand over the file in batches of rows.
2. `clean`: check a batch, and encode its rounds and statuses as integers.
3. `Partitions`: collect the rows so that all rows of a client are together.
4. `count_csv_lines`, `count_json` and `check_json_lines`: look at the bytes of a text file, to find
   what polars does not report, such as joined lines and repeated JSON keys.

Polars is imported inside the functions that need it, because importing it is slow.
"""

import glob
import gzip
import io
import json
import os
import re
import stat
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from dpftrl._internal.client_ids import (
    EXACT_FLOATS,
    CanonicalIds,
    canonical_ids,
    first_unfit,
    shown,
)
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.participation import MOST_ROUNDS

if TYPE_CHECKING:
    import polars as pl

REQUIRED_COLUMNS: Final = ("round", "client")
COLUMNS: Final = (*REQUIRED_COLUMNS, "status")
COUNTED: Final = "counted"
STATUSES: Final = (COUNTED, "contacted", "abandoned")

ROWS_PER_BATCH = 500_000  # some ten MB per batch
BYTES_PER_PIECE: Final = 2**23  # 8 MB of text at a time
# With more partitions, each batch would be cut into very small pieces. Logs of more than some
# billion rows have larger partitions instead.
MOST_PARTITIONS: Final = 1000

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

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
# Bytes that decode to text with one of these are shown in hexadecimal instead.
CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x1f\x7f]")

# The two usual ways to write an id as text in JSON. If every line has one, no id is unusual.
_COMPACT_TEXT_ID: Final = b'"client":"'
_SPACED_TEXT_ID: Final = b'"client": "'
# Ids that different programs read differently, such as 7.0 and 1e20, and values that are no ids.
_UNUSUAL_ID: Final = re.compile(rb'"client"\s*:\s*(?:[^\s"0-9-]|-?[0-9]+[.eE])')
# JSON keys can contain escapes, such as \u0063lient. The letters of our keys are \u0061 to \u0075.
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[67]")


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
    """Count the lines of a CSV; the returned function compares them with the rows."""
    with _errors_in_one_line(source.path, source.kind):
        lines = count_csv_lines(source.path)

    def check(tally: Tally) -> None:
        if tally.rows < lines:
            _refuse_lost_lines(source, lines, tally.rows)

    return check


def _json_check(source: Source) -> Callable[[Tally], None]:
    """Count lines and keys of JSON lines; the returned function compares them with the rows."""
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
    """All columns are read as text, since one column may hold both 7 and "7"."""
    import polars as pl

    first = next(_json_lines(path), None)
    if first is not None:
        _present_columns(path, list(_json_object(path, *first)))
    # `scan_ndjson` has no `glob=False`. Without the escape, a name with brackets would match no
    # file, and polars would not report that.
    pattern = glob.escape(str(path))
    return pl.scan_ndjson(pattern, schema=dict.fromkeys(COLUMNS, pl.String)), None


def _present_columns(path: Path, names: list[str]) -> list[str]:
    """Those of our columns that the log has.

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


def _json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    with _open_bytes(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The JSON object in a line."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        text = line.strip()[:60].decode(errors="replace")
        raise InvalidInput(
            f"{path}: line {number:,} is not one JSON object, got {text!r}"
        ) from None


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
            for number, line in _json_lines(path):
                _json_object(path, number, line)
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
    """Any column as text."""
    import polars as pl

    if column.dtype == pl.Binary:
        return column.bin.encode("hex")
    if column.dtype.is_float():
        column = column.fill_nan(None)
    return column.cast(pl.String)


def _bytes_as_text(column: "pl.Series") -> "pl.Series":
    """Bytes that are readable as text become that text; others are written in hexadecimal."""
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


class Partitions:
    """The rows of a log, split so that all rows of a client are in the same partition.

    All ids with the same canonical form are in the same partition too. A single partition is held
    in memory, several are held in one temporary file. The file has no name in its folder, so the
    system removes it however the program ends.
    """

    def __init__(self, number: int):
        self._number = min(number, MOST_PARTITIONS)
        self._frames: list[pl.DataFrame] = []
        self._file: IO[bytes] | None = None
        if self._number > 1:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._end = 0
        # For each partition, the start and the length of each of its pieces, alternating.
        self._pieces = [array("q") for _ in range(self._number)]

    def __len__(self) -> int:
        return self._number

    def add(self, rows: "pl.DataFrame", forms: "pl.Series") -> None:
        """Add rows to their partitions.

        Args:
            rows: The columns `client` and `contact`.
            forms: The canonical form of each row's client id.
        """
        if self._file is None:
            self._frames.append(rows)
            return
        # The hash only chooses the partition. Clients are distinguished by their ids.
        partitions = (forms.hash() % self._number).alias("partition")
        labelled = rows.with_columns(partitions)
        parts = labelled.partition_by("partition", as_dict=True, include_key=False)
        for (partition,), part in parts.items():
            self._write(self._file, partition, part)

    def _write(self, file: IO[bytes], partition: int, part: "pl.DataFrame") -> None:
        """Append rows of one partition to the temporary file."""
        packed = io.BytesIO()
        part.rechunk().write_ipc_stream(packed)
        try:
            file.write(packed.getbuffer())
            file.flush()
        except OSError as error:
            raise TooLarge(
                f"the log is sorted on disk in {tempfile.gettempdir()}, which failed "
                f"({error.strerror}); point TMPDIR to a folder with room for twice the log"
            ) from None
        self._pieces[partition].extend((self._end, packed.tell()))
        self._end += packed.tell()

    def rows(self, partition: int) -> "pl.DataFrame":
        """All rows of one partition, in no particular order."""
        import polars as pl

        if self._file is None:
            parts = self._frames
        else:
            parts: list[pl.DataFrame] = []
            pieces = self._pieces[partition]
            for start, length in zip(pieces[::2], pieces[1::2], strict=True):
                self._file.seek(start)
                parts.append(pl.read_ipc_stream(io.BytesIO(self._file.read(length))))
        empty = pl.DataFrame(schema={"client": pl.String, "contact": pl.Int64})
        return pl.concat([empty, *parts], rechunk=True)

    def close(self) -> None:
        """Release the memory and the temporary file."""
        self._frames.clear()
        if self._file is not None:
            self._file.close()


def count_csv_lines(path: Path) -> int:
    """The number of lines after the header of a CSV.

    Empty lines before the header do not count, since polars skips them.
    """
    breaks, started, last = 0, False, b"\n"
    with _open_bytes(path) as file:
        while block := file.read(BYTES_PER_PIECE):
            if not started:
                block = block.removeprefix(BYTE_ORDER_MARK).lstrip(b"\r\n")
                started = bool(block)
            _refuse_nul(path, breaks + 1, block)
            breaks += block.count(b"\n")
            last = block[-1:] or last
    return breaks + (last != b"\n") - 1


class JsonCounts(NamedTuple):
    """Counts of byte strings in a file of JSON lines: fast, and enough for almost all logs.

    Attributes:
        lines: Number of lines, including blank ones.
        keys: How often each key occurs in quotes.
        text_ids: How often a client id is written as text.
        escapes: Whether there is any backslash.
    """

    lines: int
    keys: Counter[str]
    text_ids: int
    escapes: bool

    def exclude_ambiguity(self, rows: int, nulls: Counter[str]) -> bool:
        """Whether the counts prove that no row repeats a key and that every id is text.

        Every row has a round and a client: other rows were refused. So a key that occurs twice in
        one line makes its count larger than the number of values.

        Args:
            rows: Number of rows that polars read from the lines.
            nulls: For each key, the number of rows without a value.
        """
        return (
            not self.escapes
            and self.lines == self.text_ids == rows
            and all(count == rows - nulls[key] for key, count in self.keys.items())
        )


def count_json(path: Path, keys: tuple[str, ...]) -> JsonCounts:
    """Count the lines, the given keys and the text ids in a file of JSON lines."""
    lines, text_ids, escapes = 0, 0, False
    key_counts = Counter[str]()
    for first_line, piece_lines, content in _pieces(path):
        lines = first_line + piece_lines - 1
        key_counts.update({key: content.count(_quoted(key)) for key in keys})
        compact = content.count(_COMPACT_TEXT_ID)
        spaced = 0 if compact == piece_lines else content.count(_SPACED_TEXT_ID)
        text_ids += compact + spaced
        escapes |= b"\\" in content
    return JsonCounts(lines, key_counts, text_ids, escapes)


def check_json_lines(path: Path, keys: tuple[str, ...]) -> int:
    """Check every line that may be ambiguous, and return the number of lines that are not blank.

    Raises:
        InvalidInput: A line has one of the keys twice, or an id that is neither text nor a number
            that all programs read in the same way.
    """
    repeated_key = b"|".join(b"%b[^\\n]*%b" % (_quoted(key), _quoted(key)) for key in keys)
    suspicious = (re.compile(repeated_key), _UNUSUAL_ID, _ESCAPED_LETTER)
    not_blank = 0
    for first_line, _, content in _pieces(path):
        lines = content.split(b"\n")
        not_blank += sum(bool(line.strip()) for line in lines)
        if any(pattern.search(content) for pattern in suspicious):
            for position, line in enumerate(lines):
                _refuse_ambiguous(path, first_line + position, line, keys)
    return not_blank


def _quoted(key: str) -> bytes:
    return b'"%b"' % key.encode()


def _refuse_ambiguous(path: Path, number: int, line: bytes, keys: tuple[str, ...]) -> None:
    """Refuse a line with a repeated key, or with an id that two programs may read differently."""
    try:
        pairs: Any = json.loads(line, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return  # polars reports what is wrong with the line
    if not isinstance(pairs, _Pairs):
        return
    given_keys = [key for key, _ in pairs]
    for key in keys:
        if given_keys.count(key) > 1:
            values = " and ".join(f"{value!a:.40}" for name, value in pairs if name == key)
            raise InvalidInput(
                f"{path}: line {number:,} has the key {key!r} {given_keys.count(key)} times, with "
                f"{values:.120}; keep one of them"
            )
    client = dict(pairs).get("client")
    if isinstance(client, list):
        raise InvalidInput(
            f"{path}: line {number:,}: a client's id is a text or a number, got a JSON array or "
            "object; write it as text"
        )
    if isinstance(client, float) and not abs(client) < EXACT_FLOATS:
        raise InvalidInput(
            f"{path}: line {number:,}: client {client} is a float of 2^53 or more, which may be "
            "rounded; write the number in digits alone, or as text"
        )


class _Pairs(list[tuple[str, Any]]):
    """The (key, value) pairs of a JSON object as written: a key may occur twice."""


def _open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading, and decompress it if its name ends in .gz."""
    is_compressed = path.suffix.lower() == ".gz"
    return cast("IO[bytes]", gzip.open(path)) if is_compressed else path.open("rb")


class Piece(NamedTuple):
    """Some whole lines of a file: the number of the first line, their count, and their bytes."""

    first_line: int
    lines: int
    content: bytes


def _pieces(path: Path) -> Iterator[Piece]:
    """Read a file in pieces of about BYTES_PER_PIECE; a NUL byte is refused."""
    first_line = 1
    with _open_bytes(path) as file:
        while content := file.read(BYTES_PER_PIECE):
            content += file.readline()
            _refuse_nul(path, first_line, content)
            lines = content.count(b"\n") + (not content.endswith(b"\n"))
            yield Piece(first_line, lines, content)
            first_line += lines


def _refuse_nul(path: Path, first_line: int, content: bytes) -> None:
    """Refuse bytes that contain NUL; `first_line` is the number of the first line in them."""
    position = content.find(b"\0")
    if position >= 0:
        line = first_line + content.count(b"\n", 0, position)
        raise InvalidInput(
            f"{path}: line {line:,} has a NUL byte, which happens when a file was not completely "
            "written; write the log again, or delete everything from that line on"
        )
