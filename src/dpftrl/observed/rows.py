"""One batch of a log, checked: text and numbers in, `client` and `visit` out.

A visit is 2 r + 1 for a client counted in round r, and 2 r for one that was only contacted or
whose round was abandoned, so that sorting visits sorts rounds. Rounds count from 0 from here on.
"""

from typing import TYPE_CHECKING

from dpftrl.errors import InvalidInput
from dpftrl.participation import MOST_ROUNDS

if TYPE_CHECKING:
    import polars as pl

COUNTED = "counted"
STATUSES = (COUNTED, "contacted", "abandoned")

# Above this, floating point has no room for every whole number.
EXACT_FLOATS = 2.0**53


def clean(
    batch: "pl.DataFrame", first_round: int, rounds: int | None, rows_before: int
) -> "pl.DataFrame":
    """The batch as columns `client` and `visit`, or one line about its first bad row."""
    import polars as pl

    last = first_round + (rounds or MOST_ROUNDS) - 1
    number = _whole(batch["round"])
    _refuse_rounds(batch["round"], number, first_round, last, rows_before)
    client = _text(batch["client"])
    _refuse_clients(client, rows_before)
    visit = (number - first_round) * 2
    if "status" in batch.columns:
        status = _text(batch["status"]).fill_null("")
        _refuse_statuses(status, rows_before)
        visit += status.is_in(["", COUNTED]).cast(pl.Int64)
    else:
        visit += 1
    return pl.DataFrame({"client": client, "visit": visit})


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
    """Any column as text; equal text is the same client."""
    import polars as pl

    if column.dtype == pl.Binary:
        return column.bin.encode("hex")  # bytes need not be text
    if column.dtype.is_float():
        column = column.fill_nan(None)
    return column.cast(pl.String)


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


def _refuse_clients(client: "pl.Series", rows_before: int) -> None:
    bad = (client.is_null() | (client == "")).arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,} has no client; every row needs an id, "
            "since without it nobody knows how often one client took part"
        )


def _refuse_statuses(status: "pl.Series", rows_before: int) -> None:
    bad = (~status.is_in(["", *STATUSES])).arg_true()
    if len(bad):
        raise InvalidInput(
            f"row {rows_before + bad[0] + 1:,}: a status is {', '.join(STATUSES)} or empty, "
            f"got {status[bad[0]]!r:.60}"
        )
