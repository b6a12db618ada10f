"""A participation log as a stream of batches, whatever its format.

Polars is imported where it is needed, since it takes a while.
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


BYTES_PER_PIECE: Final = 2**23
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

# The usual ways to write an id as text: if all are written like this, none is odd.
_COMPACT_TEXT_ID: Final = b'"client":"'
_SPACED_TEXT_ID: Final = b'"client": "'
# Ids that programs read in different ways, such as 7.0 and 1e20, and those that are none.
_ODD_ID: Final = re.compile(rb'"client"\s*:\s*(?:[^\s"0-9-]|-?[0-9]+[.eE])')
# Keys can be written with escapes: \u0063lient. The letters of ours are \u0061 to \u0075.
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[67]")


def count_csv_lines(path: Path) -> int:
    """Lines of a CSV after its header; polars skips empty lines in front of that."""
    breaks, started, last = 0, False, b"\n"
    with _opened(path) as file:
        while block := file.read(BYTES_PER_PIECE):
            if not started:
                block = block.removeprefix(BYTE_ORDER_MARK).lstrip(b"\r\n")
                started = bool(block)
            _refuse_nul(path, breaks + 1, block)
            breaks += block.count(b"\n")
            last = block[-1:] or last
    return breaks + (last != b"\n") - 1


class JsonCounts(NamedTuple):
    """What JSON lines hold, by counting bytes: fast, and enough for almost all logs.

    Attributes:
        lines: Lines, blank ones included.
        keys: How often the text of each key occurs, in quotes.
        text_ids: How often a client is given as text.
        escapes: Whether there is any backslash.
    """

    lines: int
    keys: Counter[str]
    text_ids: int
    escapes: bool

    def exclude_ambiguity(self, rows: int, nulls: Counter[str]) -> bool:
        """Whether the counts alone prove that each row has each key once, and its id as text.

        Every row has a round and a client, or else it was refused. So a key that is there twice in
        one line makes its count larger than the number of values.

        Args:
            rows: Rows that polars made of the lines.
            nulls: How many of them have no value for a key.
        """
        return (
            not self.escapes
            and self.lines == self.text_ids == rows
            and all(number == rows - nulls[key] for key, number in self.keys.items())
        )


def count_json(path: Path, keys: tuple[str, ...]) -> JsonCounts:
    """Count lines and keys of JSON lines."""
    lines, text_ids, escapes = 0, 0, False
    found = Counter[str]()
    for number, length, piece in _pieces(path):
        lines = number + length - 1
        found.update({key: piece.count(_quoted(key)) for key in keys})
        compact = piece.count(_COMPACT_TEXT_ID)
        text_ids += compact if compact == length else compact + piece.count(_SPACED_TEXT_ID)
        escapes |= b"\\" in piece
    return JsonCounts(lines, found, text_ids, escapes)


def check_json_lines(path: Path, keys: tuple[str, ...]) -> int:
    """Look at every line that may be ambiguous, and return how many lines are not blank.

    Raises:
        InvalidInput: A line has one of the keys twice, or an id that is neither text nor a number
            that all programs read alike.
    """
    again = b"|".join(b"%b[^\\n]*%b" % (_quoted(key), _quoted(key)) for key in keys)
    suspects = (re.compile(again), _ODD_ID, _ESCAPED_LETTER)
    filled = 0
    for number, _, piece in _pieces(path):
        lines = piece.split(b"\n")
        filled += sum(bool(line.strip()) for line in lines)
        if any(suspect.search(piece) for suspect in suspects):
            for position, line in enumerate(lines):
                _refuse_ambiguous(path, number + position, line, keys)
    return filled


def _quoted(key: str) -> bytes:
    return b'"%b"' % key.encode()


def _refuse_ambiguous(path: Path, number: int, line: bytes, keys: tuple[str, ...]) -> None:
    """Refuse a key that is there twice, and an id that two programs may read differently."""
    try:
        pairs: Any = json.loads(line, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return  # polars says what is wrong with it
    if not isinstance(pairs, _Pairs):
        return
    given = [key for key, _ in pairs]
    for key in keys:
        if given.count(key) > 1:
            values = " and ".join(f"{value!a:.40}" for name, value in pairs if name == key)
            raise InvalidInput(
                f"{path}: line {number:,} has the key {key!r} {given.count(key)} times, with "
                f"{values:.120}; leave one of them"
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
    """A JSON object as it is written: keys may be there twice."""


def _opened(path: Path) -> IO[bytes]:
    is_packed = path.suffix.lower() == ".gz"
    return cast("IO[bytes]", gzip.open(path)) if is_packed else path.open("rb")


class Piece(NamedTuple):
    """Whole lines of a file: the number of the first, how many there are, and the lines."""

    number: int
    lines: int
    content: bytes


def _pieces(path: Path) -> Iterator[Piece]:
    """A file some megabytes at a time; a NUL byte in it is refused."""
    number = 1
    with _opened(path) as file:
        while content := file.read(BYTES_PER_PIECE):
            content += file.readline()
            _refuse_nul(path, number, content)
            lines = content.count(b"\n") + (not content.endswith(b"\n"))
            yield Piece(number, lines, content)
            number += lines


def _refuse_nul(path: Path, number: int, piece: bytes) -> None:
    position = piece.find(b"\0")
    if position >= 0:
        line = number + piece.count(b"\n", 0, position)
        raise InvalidInput(
            f"{path}: line {line:,} has a NUL byte, as a file has that was not written to its end; "
            "write the log again, or cut it off before that line"
        )


# With more, each batch would fall into crumbs; beyond some billion rows partitions grow instead.
MOST_PARTITIONS = 1000


class Partitions:
    """All rows of a client are in the same partition: in memory if there is one, else on disk.

    So are all ids with the same canonical form, which are refused when the partition is read.

    The file on disk has no name: the system removes it however the program ends.
    """

    def __init__(self, number: int):
        self._number = min(number, MOST_PARTITIONS)
        self._frames: list[pl.DataFrame] = []
        self._file: IO[bytes] | None = None
        if self._number > 1:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does)
        self._end = 0
        # For each partition, where its pieces start and how long they are, in turn.
        self._pieces = [array("q") for _ in range(self._number)]

    def __len__(self) -> int:
        return self._number

    def add(self, rows: "pl.DataFrame", forms: "pl.Series") -> None:
        """Put rows where they belong.

        Args:
            rows: Columns `client` and `visit`.
            forms: The canonical form of each row's client.
        """
        if self._file is None:
            self._frames.append(rows)
            return
        # A hash only chooses the partition; who is who is decided by the ids themselves.
        chosen = (forms.hash() % self._number).alias("partition")
        split = rows.with_columns(chosen).partition_by("partition", as_dict=True, include_key=False)
        for (partition,), part in split.items():
            self._write(self._file, partition, part)

    def _write(self, file: IO[bytes], partition: int, part: "pl.DataFrame") -> None:
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
        empty = pl.DataFrame(schema={"client": pl.String, "visit": pl.Int64})
        return pl.concat([empty, *parts], rechunk=True)

    def close(self) -> None:
        """Forget all rows."""
        self._frames.clear()
        if self._file is not None:
            self._file.close()


COUNTED = "counted"
STATUSES = (COUNTED, "contacted", "abandoned")


# Bytes with any of these are not text.
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Cleaned(NamedTuple):
    """A batch that was checked.

    Attributes:
        rows: Columns `client` and `visit`.
        forms: The canonical form of each client's id.
        respelled: Whether any of them is not the id itself.
    """

    rows: "pl.DataFrame"
    forms: "pl.Series"
    respelled: bool


def clean(batch: "pl.DataFrame", first_round: int, rounds: int | None, rows_before: int) -> Cleaned:
    """The batch in a form to count with, or one line about its first bad row."""
    import polars as pl

    last = first_round + (rounds or MOST_ROUNDS) - 1
    number = _whole(batch["round"])
    _refuse_rounds(batch["round"], number, first_round, last, rows_before)
    client = client_ids(batch["client"])
    canonical = _canonical(batch["client"], client, rows_before)
    visit = (number - first_round) * 2
    if "status" in batch.columns:
        status = _text(batch["status"]).fill_null("")
        _refuse_statuses(status, rows_before)
        visit += status.is_in(["", COUNTED]).cast(pl.Int64)
    else:
        visit += 1
    rows = pl.DataFrame({"client": client, "visit": visit})
    return Cleaned(rows, canonical.forms, canonical.respelled)


def client_ids(column: "pl.Series") -> "pl.Series":
    """The ids of a log as text; what is not the same value is not the same text."""
    import polars as pl

    if column.dtype == pl.Binary:
        return _bytes_as_text(column)
    if column.dtype.is_float():
        column = column.set(column == 0, 0.0)  # -0.0 is 0.0
    return _text(column)


def last_round(cleaned: "pl.DataFrame") -> int:
    """The last round of a cleaned batch that has rows."""
    return int(cleaned["visit"].to_numpy().max()) >> 1


def _whole(column: "pl.Series") -> "pl.Series":
    """Whole numbers, however they are written; null where there is none."""
    import polars as pl

    if column.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if not column.dtype.is_float():
        column = _text(column).str.strip_chars()
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() == 0:
            return whole
        # 3.0 is what tables write for 3 once they have held a missing value.
        return whole.fill_null(_whole(column.cast(pl.Float64, strict=False)))
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
    """Bytes that are readable text as that text, since many programs write it so; others in hex."""
    import polars as pl

    try:
        text = column.cast(pl.String)
        if not text.str.contains(CONTROL.pattern).any():
            return text
    except pl.exceptions.PolarsError:
        pass
    return pl.Series([None if one is None else _as_text(one) for one in column], dtype=pl.String)


def _as_text(content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return f"0x{content.hex()}"
    return f"0x{content.hex()}" if CONTROL.search(text) else text


def _canonical(column: "pl.Series", ids: "pl.Series", rows_before: int) -> CanonicalIds:
    """The canonical forms of a column's ids, or one line about the first that cannot be an id."""
    import polars as pl

    _refuse_missing(ids, rows_before)
    if column.dtype.is_float():
        _refuse_inexact(column, rows_before)
    if column.dtype.is_numeric():  # equal numbers of one type are written alike
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
            f"row {row:,}: rounds count from {first:,} (--first-round says otherwise), got {whole}"
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
            "since without it nobody knows how often one client took part"
        )


def _refuse_inexact(column: "pl.Series", rows_before: int) -> None:
    """Refuse floats so large that two clients could have the same."""
    import polars as pl

    bits = 53 if column.dtype == pl.Float64 else 24 if column.dtype == pl.Float32 else 11
    bad = (~(column.abs() < 2.0**bits)).arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,}: client {column[bad[0]]} is a float of 2^{bits} or "
            "more, which may be rounded; write the ids as integers or as text"
        )


def _refuse_quotes(ids: "pl.Series", rows_before: int) -> None:
    """Refuse what CSV makes of a space before a quoted field: the quotes become part of the id."""
    bad = ids.str.contains(r'^\s+"').arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,}: client {shown(ids[bad[0]])} has a space before its "
            "quote, so that the quotes belong to the id; remove the space"
        )


def _refuse_statuses(status: "pl.Series", rows_before: int) -> None:
    bad = (~status.is_in(["", *STATUSES])).arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,}: a status is {', '.join(STATUSES)} or empty, "
            f"got {status[bad[0]]!r:.60}"
        )


NEEDED = ("round", "client")
COLUMNS = (*NEEDED, "status")
ROWS_PER_BATCH = 500_000

# By the ending: how it is read, and the fewest bytes that a row is likely to take in the file (low,
# since too many partitions cost less than too few). Parquet says how many rows it has.
ENDINGS = {
    ".csv": ("csv", 12.0),
    ".csv.gz": ("csv", 1.0),
    ".jsonl": ("json", 24.0),
    ".ndjson": ("json", 24.0),
    ".json": ("json", 24.0),
    ".jsonl.gz": ("json", 1.0),
    ".ndjson.gz": ("json", 1.0),
    ".parquet": ("parquet", 1.0),
}


class Source(NamedTuple):
    """A log that can be streamed.

    Attributes:
        path: Where it is.
        kind: How it is read.
        batches: Its columns `round`, `client` and, where there is one, `status`.
        rows: About how many rows it has, seldom fewer.
    """

    path: Path
    kind: str
    batches: "pl.LazyFrame"
    rows: int


def open_source(path: str | os.PathLike[str]) -> Source:
    """A log by its file's ending, or one line that says why it is none."""
    target, size = _existing(path)
    ending = next((end for end in ENDINGS if target.name.lower().endswith(end)), None)
    if ending is None:
        raise InvalidInput(f"{target} must end in one of {', '.join(ENDINGS)} to be read as a log")
    kind, bytes_per_row = ENDINGS[ending]
    with _told_plainly(target, kind):
        scan = {"csv": _scan_csv, "json": _scan_json, "parquet": _scan_parquet}[kind]
        batches, rows = scan(target)
    return Source(target, kind, batches, int(size / bytes_per_row) if rows is None else rows)


def stream(source: Source, receive: Callable[["pl.DataFrame"], None]) -> None:
    """Hand over the log batch by batch, in order.

    Guarantees:
        A log of text is refused if a line of it did not become a row, or if a line of JSON says two
        things. What was handed over by then must not be used.
    """
    check = _CHECKS[source.kind](source)
    tally = Tally()

    def count(batch: "pl.DataFrame") -> None:
        tally.rows += len(batch)
        tally.nulls.update({name: batch[name].null_count() for name in batch.columns})
        receive(batch)

    with _told_plainly(source.path, source.kind):
        # Not `collect_batches`: it ends early, without an error, where polars panics on a damaged
        # file.
        source.batches.sink_batches(count, chunk_size=ROWS_PER_BATCH)
    check(tally)


@dataclass
class Tally:
    """What was handed over: rows, and how many of them have no value in each column."""

    rows: int = 0
    nulls: Counter[str] = field(default_factory=Counter[str])


def _csv_check(source: Source) -> Callable[[Tally], None]:
    with _told_plainly(source.path, source.kind):
        lines = count_csv_lines(source.path)

    def check(tally: Tally) -> None:
        if tally.rows < lines:
            _refuse_lost_lines(source, lines, tally.rows)

    return check


def _json_check(source: Source) -> Callable[[Tally], None]:
    with _told_plainly(source.path, source.kind):
        counts = count_json(source.path, COLUMNS)

    def check(tally: Tally) -> None:
        if counts.exclude_ambiguity(tally.rows, tally.nulls):
            return
        lines = check_json_lines(source.path, COLUMNS)
        if tally.rows < lines:
            _refuse_lost_lines(source, lines, tally.rows)

    return check


def _no_check(_: Source) -> Callable[[Tally], None]:
    """Parquet says itself how many rows it has."""
    return lambda _: None


_CHECKS = {"csv": _csv_check, "json": _json_check, "parquet": _no_check}


def _refuse_lost_lines(source: Source, lines: int, rows: int) -> None:
    """A row with a line break in one of its fields swallowed the lines after it: name it."""
    import polars as pl

    where = ""
    if source.kind == "csv":
        frame = pl.scan_csv(source.path, infer_schema=False, glob=False)
        has_break = pl.any_horizontal(pl.all().str.contains("\n", literal=True))
        first = frame.select(has_break.arg_true().first()).collect().item()
        where = "" if first is None else f", and row {first + 1:,} has a field with a line break"
    raise InvalidInput(
        f"{source.path} has {lines:,} lines of data and {rows:,} rows{where}; a stray quote joins "
        "lines: remove it, and write each row on one line"
    )


def _existing(path: str | os.PathLike[str]) -> tuple[Path, int]:
    target = Path(path).absolute()
    try:
        found = target.stat()
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(found.st_mode):
        raise InvalidInput(f"{path} is a folder; name the log itself")
    if not stat.S_ISREG(found.st_mode):
        raise InvalidInput(f"{path} is not a file; a log is read from a file, not from a pipe")
    if found.st_size == 0:
        raise InvalidInput(f"{path} is empty (0 bytes); a log has columns round and client")
    return target, found.st_size


def _scan_csv(path: Path) -> tuple["pl.LazyFrame", None]:
    import polars as pl

    frame = pl.scan_csv(path, infer_schema=False, glob=False)
    return frame.select(_present(path, frame.collect_schema().names())), None


def _scan_parquet(path: Path) -> tuple["pl.LazyFrame", int]:
    import polars as pl

    frame = pl.scan_parquet(path, glob=False, hive_partitioning=False)
    chosen = frame.select(_present(path, frame.collect_schema().names()))
    return chosen, int(frame.select(pl.len()).collect().item())


def _scan_json(path: Path) -> tuple["pl.LazyFrame", None]:
    """Everything is read as text, since one column may hold both 7 and "7"."""
    import polars as pl

    first = next(_json_lines(path), None)
    if first is not None:
        _present(path, list(_json_object(path, *first)))
    # There is no `glob=False` here, and a name with brackets would quietly match no file at all.
    pattern = glob.escape(str(path))
    return pl.scan_ndjson(pattern, schema=dict.fromkeys(COLUMNS, pl.String)), None


def _present(path: Path, names: list[str]) -> list[str]:
    for needed in NEEDED:
        if needed not in names:
            there = ", ".join(repr(name[:40]) for name in names[:12]) or "none"
            raise InvalidInput(f"{path} has no column {needed!r}; its columns are {there}")
    for name in COLUMNS:
        if f"{name}_duplicated_0" in names:
            raise InvalidInput(f"{path} has two columns {name!r}; leave one of them out")
    return [name for name in COLUMNS if name in names]


def _json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank."""
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        text = line.strip()[:60].decode(errors="replace")
        raise InvalidInput(
            f"{path}: line {number:,} is not one JSON object a line, got {text!r}"
        ) from None


@contextmanager
def _told_plainly(path: Path, kind: str) -> Generator[None]:
    """Turn what polars or the system says of a bad file into one line."""
    import polars as pl

    polars_says = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
    try:
        yield
    except (*polars_says, OSError, EOFError, zlib.error) as error:
        if kind == "json" and isinstance(error, polars_says):
            # Polars does not say which line; a second look finds it.
            for number, line in _json_lines(path):
                _json_object(path, number, line)
        name = {"csv": "CSV", "json": "JSON lines", "parquet": "Parquet"}[kind]
        raise InvalidInput(f"{path} cannot be read as {name}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
    return text[:200] or type(error).__name__
