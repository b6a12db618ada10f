"""What a text log holds line by line, which a parser would hide.

A parser of CSV takes a stray quote as the start of a field that may go on for many lines, and the
rows in it are gone. A parser of JSON takes one of two values for the same key. Either would make
clients take part less often than they did.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from dpftrl.client_ids import EXACT_FLOATS
from dpftrl.errors import InvalidInput

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
