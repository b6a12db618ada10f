"""One batch of a log, checked: text and numbers in, `client` and `visit` out.

A visit is 2 r + 1 for a client counted in round r, and 2 r for one that was only contacted or
whose round was abandoned, so that sorting visits sorts rounds. Rounds count from 0 from here on.
"""

import re
from typing import TYPE_CHECKING, NamedTuple

from dpftrl.client_ids import CanonicalIds, canonical_ids, first_unfit, shown
from dpftrl.errors import InvalidInput
from dpftrl.participation import MOST_ROUNDS

if TYPE_CHECKING:
    import polars as pl

COUNTED = "counted"
STATUSES = (COUNTED, "contacted", "abandoned")

# Above this, floating point has no room for every whole number.
EXACT_FLOATS = 2.0**53

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
