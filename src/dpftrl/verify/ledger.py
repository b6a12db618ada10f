"""The ledger against the journal: every contact once, and what became of it."""

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
    """What the ledger adds to the journal.

    Attributes:
        counted: For each attempt that has ended, which of its clients are in the sum.
        bytes_after: Bytes after the last row that the journal knows of.
    """

    counted: tuple[NDArray[np.bool_], ...]
    bytes_after: int


def read_ledger(path: Path, attempts: Sequence[Attempt]) -> Ledger:
    """Read the rows of one attempt after the other, and refuse what the journal does not say."""
    try:
        with path.open("rb") as file:
            return _read(file, path.stat().st_size, attempts)
    except OSError as error:
        raise UnsafeState(f"ledger.csv cannot be read: {error.strerror}") from None


def _read(file: BinaryIO, size: int, attempts: Sequence[Attempt]) -> Ledger:
    hasher, at = hashlib.sha256(), len(HEADER)
    if (header := file.read(at)) != HEADER:
        raise UnsafeState("its first line is not round,client,status")
    hasher.update(header)
    counted: list[NDArray[np.bool_]] = []
    for attempt in attempts:
        if (end := attempt.end) is None:
            continue
        where = f"attempt {end.attempt} (round {end.row})"
        if end.ledger_bytes > size:
            raise UnsafeState(f"rows are missing from {where} on")
        piece = file.read(end.ledger_bytes - at)
        hasher.update(piece)
        if hasher.hexdigest() != end.ledger_sha256:
            raise UnsafeState(f"the rows up to {where} are not what they were: some were changed")
        try:
            counted.append(_counted(attempt, end, piece))
        except InvalidInput as error:
            raise UnsafeState(f"the rows of {where} contradict the journal: {error}") from None
        at = end.ledger_bytes
    return Ledger(tuple(counted), size - at)


def _counted(attempt: Attempt, end: Committed | Abandoned, piece: bytes) -> NDArray[np.bool_]:
    """Which clients of an attempt were counted, from its rows of the ledger."""
    names = attempt.cohort.names or [f"c{client:016x}" for client in attempt.clients.tolist()]
    try:
        rows = list(csv.reader(io.StringIO(piece.decode(), newline=""), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidInput(f"they are no CSV ({error})") from None
    if any(len(row) != 3 or row[0] != str(end.row) for row in rows):
        raise InvalidInput("one is of another round")
    status = {client: said for _, client, said in rows}
    if len(rows) != len(names) or set(status) != set(names):
        raise InvalidInput(f"{len(rows)} rows, which are not the {len(names)} clients, each once")
    allowed = {"abandoned"} if isinstance(end, Abandoned) else {"counted", "contacted"}
    if not set(status.values()) <= allowed:
        raise InvalidInput(f"a status other than {' or '.join(sorted(allowed))}")
    counted = np.array([status[name] == "counted" for name in names], dtype=np.bool_)
    if isinstance(end, Committed) and counted.sum() != end.reports:
        raise InvalidInput(f"{counted.sum()} counted, and {end.reports} reports")
    return counted
