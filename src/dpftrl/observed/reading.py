"""A participation log as a stream of batches, whatever its format.

Polars is imported where it is needed, since it takes a while.
"""

import glob
import gzip
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dpftrl.errors import InvalidInput
from dpftrl.observed.raw_lines import check_json_lines, count_csv_lines, count_json

if TYPE_CHECKING:
    import polars as pl

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
