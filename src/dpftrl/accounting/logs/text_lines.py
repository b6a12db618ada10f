"""The raw lines of a text log: counts and checks of what polars does not report.

Polars reads a log into rows. It does not say that a stray quote joined two lines, that a JSON
object repeats a key, or that a number was rounded. The functions here look at the bytes of the
file: `count_csv_lines`, `count_json` and `check_json_lines`. They also refuse NUL bytes.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

import msgspec

from dpftrl._internal.client_ids import EXACT_FLOATS
from dpftrl.errors import InvalidInput

BYTES_PER_PIECE: Final = 2**23  # 8 MB of text at a time
# A compressed log may decompress to this many times its size; text of logs compresses less.
MOST_RATIO: Final = 200
# A log of this many bytes is never too large.
SMALL_LOG: Final = 2**26
# The first bytes of gzip, zlib and Zstandard files, all of which polars decompresses.
COMPRESSED: Final = (b"\x1f\x8b", b"\x78\x01", b"\x78\x9c", b"\x78\xda", b"\x28\xb5\x2f\xfd")
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
# After a key: ids that different programs read differently, such as 7.0 and 1e20, and values that
# are no ids.
_UNUSUAL_VALUE: Final = rb'\s*:\s*(?:[^\s"0-9-]|-?[0-9]+[.eE])'
# JSON keys can contain escapes, such as \u0063lient. Lower-case letters are \u0061 to \u007a.
_ESCAPED_LETTER: Final = rb"\\u00[67]"


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
        keys: How often the key of each column occurs in quotes.
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
            nulls: For each column, the number of rows without a value.
        """
        return (
            not self.escapes
            and self.lines == self.text_ids == rows
            and all(count == rows - nulls[column] for column, count in self.keys.items())
        )


def count_json(path: Path, columns: Mapping[str, str]) -> JsonCounts:
    """Count the lines, the keys of the columns and the text ids in a file of JSON lines.

    Args:
        path: The file.
        columns: The key in the file of the column `client` and of the other columns.
    """
    lines, text_ids, escapes = 0, 0, False
    key_counts = Counter[str]()
    quoted = {column: _quoted(key) for column, key in columns.items()}
    # The two usual ways to write an id as text. If every line has one, no id is unusual.
    compact_id, spaced_id = (quoted["client"] + colon for colon in (b':"', b': "'))
    for first_line, piece_lines, content in _pieces(path):
        lines = first_line + piece_lines - 1
        key_counts.update({column: content.count(key) for column, key in quoted.items()})
        compact = content.count(compact_id)
        spaced = 0 if compact == piece_lines else content.count(spaced_id)
        text_ids += compact + spaced
        escapes |= b"\\" in content
    return JsonCounts(lines, key_counts, text_ids, escapes)


def check_json_lines(path: Path, columns: Mapping[str, str]) -> int:
    """Check every line that may be ambiguous, and return the number of lines that are not blank.

    Args:
        path: The file.
        columns: The key in the file of the column `client` and of the other columns.

    Raises:
        InvalidInput: A line has one of the keys twice, or an id that is neither text nor a number
            that all programs read in the same way.
    """
    quoted = {column: re.escape(_quoted(key)) for column, key in columns.items()}
    repeated_key = b"|".join(b"%b[^\\n]*%b" % (key, key) for key in quoted.values())
    has_plain_keys = all(re.fullmatch("[a-z]+", key) for key in columns.values())
    escape = _ESCAPED_LETTER if has_plain_keys else rb"\\"
    patterns = (repeated_key, quoted["client"] + _UNUSUAL_VALUE, escape)
    suspicious = [re.compile(pattern) for pattern in patterns]
    not_blank = 0
    for first_line, _, content in _pieces(path):
        lines = content.split(b"\n")
        not_blank += sum(bool(line.strip()) for line in lines)
        if any(pattern.search(content) for pattern in suspicious):
            for position, line in enumerate(lines):
                _refuse_ambiguous(path, first_line + position, line, columns)
    return not_blank


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    with _open_bytes(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The JSON object in a line."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        text = line.strip()[:60].decode(errors="replace")
        raise InvalidInput(
            f"{path}: line {number:,} is not one JSON object, got {text!r}"
        ) from None


def _quoted(key: str) -> bytes:
    """A key as it stands in a file, unless it is written with escapes that it does not need."""
    return json.dumps(key, ensure_ascii=False).encode()


def _refuse_ambiguous(path: Path, number: int, line: bytes, columns: Mapping[str, str]) -> None:
    """Refuse a line with a repeated key, or with an id that two programs may read differently."""
    try:
        pairs: Any = json.loads(line, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return  # polars reports what is wrong with the line
    if not isinstance(pairs, _Pairs):
        return
    given_keys = [key for key, _ in pairs]
    for key in columns.values():
        if given_keys.count(key) > 1:
            values = " and ".join(f"{value!a:.40}" for name, value in pairs if name == key)
            raise InvalidInput(
                f"{path}: line {number:,} has the key {key!r} {given_keys.count(key)} times, with "
                f"{values:.120}; keep one of them"
            )
    client = dict(pairs).get(columns["client"])
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


def refuse_bomb(path: Path) -> None:
    """Refuse a compressed log that would fill the memory, and one that does not say it is one.

    Polars decompresses a whole file in memory, and recognizes compression by the content.

    Raises:
        InvalidInput: The file decompresses to far more than logs do, or its name does not end in
            .gz although it is compressed.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if path.suffix.lower() != ".gz":
        if start.startswith(COMPRESSED):
            raise InvalidInput(f"{path} is compressed; decompress it, or name it .gz if it is gzip")
        return
    most = max(SMALL_LOG, MOST_RATIO * path.stat().st_size)
    size = 0
    with _open_bytes(path) as file:
        while block := file.read(BYTES_PER_PIECE):
            size += len(block)
            if size > most:
                raise InvalidInput(
                    f"{path} decompresses to more than {most:,} bytes, {MOST_RATIO} times its "
                    "size, which no log does; decompress it yourself if you trust it"
                )


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
