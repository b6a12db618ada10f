"""Comparison of the ledger with the journal: every contact must be in the ledger exactly once."""

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.journal import Abandoned, Attempt, Committed

HEADER: Final = b"round,client,status\n"


@final
@dataclass(frozen=True, eq=False)
class Ledger:
    """What the ledger says in addition to the journal.

    Attributes:
        counted: For each attempt that has ended, a mask of the clients that were counted.
        trailing_bytes: The number of bytes after the last row that the journal covers.
    """

    counted: tuple[NDArray[np.bool_], ...]
    trailing_bytes: int


def read_ledger(path: Path, attempts: Sequence[Attempt]) -> Ledger:
    """Read the ledger attempt by attempt, and compare it with the journal.

    Raises:
        UnsafeState: The ledger cannot be read, was changed, or contradicts the journal.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path.stat().st_size, attempts)
    except OSError as error:
        raise UnsafeState(f"ledger.csv cannot be read: {error.strerror}") from None


def _read(file: BinaryIO, size: int, attempts: Sequence[Attempt]) -> Ledger:
    hasher, position = hashlib.sha256(), len(HEADER)
    if (header := file.read(position)) != HEADER:
        raise UnsafeState("the first line of ledger.csv must be round,client,status")
    hasher.update(header)
    counted: list[NDArray[np.bool_]] = []
    for attempt in attempts:
        if (end := attempt.end) is None:
            continue
        label = f"attempt {end.attempt} (round {end.row})"
        if end.ledger_bytes > size:
            raise UnsafeState(f"ledger.csv ends too early: rows are missing from {label} on")
        rows = file.read(end.ledger_bytes - position)
        hasher.update(rows)
        if hasher.hexdigest() != end.ledger_sha256:
            raise UnsafeState(f"rows up to {label} were changed after they were written")
        try:
            counted.append(_counted_mask(attempt, end, rows))
        except InvalidInput as error:
            raise UnsafeState(f"the rows of {label} contradict the journal: {error}") from None
        position = end.ledger_bytes
    return Ledger(tuple(counted), size - position)


def _counted_mask(
    attempt: Attempt, end: Committed | Abandoned, csv_bytes: bytes
) -> NDArray[np.bool_]:
    """Return a mask of the clients of an attempt that were counted.

    Args:
        attempt: The attempt, from the journal.
        end: The journal record that ended it.
        csv_bytes: The rows of the attempt in the ledger.

    Raises:
        InvalidInput: The rows contradict the journal.
    """
    names = attempt.cohort.names or [f"c{client:016x}" for client in attempt.clients.tolist()]
    try:
        rows = list(csv.reader(io.StringIO(csv_bytes.decode(), newline=""), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidInput(f"they are not valid CSV ({error})") from None
    if any(len(row) != 3 or row[0] != str(end.row) for row in rows):
        raise InvalidInput("a row belongs to another round, or does not have three fields")
    status_of = {client: status for _, client, status in rows}
    if len(rows) != len(names) or set(status_of) != set(names):
        raise InvalidInput(
            f"expected one row for each of the {len(names)} clients, got {len(rows)} rows or rows "
            "of other clients"
        )
    allowed = {"abandoned"} if isinstance(end, Abandoned) else {"counted", "contacted"}
    if not set(status_of.values()) <= allowed:
        raise InvalidInput(f"a row has a status other than {' or '.join(sorted(allowed))}")
    counted = np.array([status_of[name] == "counted" for name in names], dtype=np.bool_)
    if isinstance(end, Committed) and counted.sum() != end.reports:
        raise InvalidInput(
            f"{counted.sum()} rows are counted, but the journal has {end.reports} reports"
        )
    return counted
