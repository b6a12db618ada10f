"""The ledger: who took part in which round, as a CSV file for `dpftrl observe` and others.

A ledger is derived from the journal when somebody asks for it (`write_ledger`). Runs whose journal
has version 1 keep a ledger file beside it: rows are only appended, one attempt at a time, and the
journal stores the length and the digest of the file. Rows after that length belong to an attempt
whose end was not journalled; they are removed when the run is resumed.
"""

import csv
import hashlib
import io
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, final

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from dpftrl._internal.storage import append_durably, cut_durably, open_own, replace_with
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.pseudonyms import PREFIX
from dpftrl.federated.store.journal import (
    Abandoned,
    AnyRecord,
    Cohort,
    Committed,
    Created,
    RunState,
    unpacked_mask,
)
from dpftrl.federated.store.run_folder import HEADER, RunFolder
from dpftrl.journal import Journal

# Length and digest of a ledger without rows.
EMPTY: Final = (len(HEADER), hashlib.sha256(HEADER.encode()).hexdigest())
PIECE: Final = 2**20  # bytes of a ledger that are read at a time
DIGITS: Final = 16  # hexadecimal digits of one pseudonym


def rows_of(cohort: Cohort, counted: NDArray[np.bool_] | None) -> bytes:
    """The rows of an attempt that has ended.

    Args:
        cohort: The record of its cohort.
        counted: Whose updates are in the sum; None if the attempt was abandoned.
    """
    status: Iterable[str]
    if counted is None:
        status = ["abandoned"] * len(cohort.keys())
    else:
        status = np.where(counted, "counted", "contacted").tolist()
    names: Iterable[str]
    if (names := cohort.names or ()) == ():
        digits = cohort.keys().astype(">u8").tobytes().hex()
        names = (PREFIX + digits[i : i + DIGITS] for i in range(0, len(digits), DIGITS))
    text = io.StringIO()
    # Names may contain any characters. Quotes keep readers from stripping or splitting them.
    quoting = csv.QUOTE_MINIMAL if cohort.names is None else csv.QUOTE_NONNUMERIC
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerows((cohort.row, *client) for client in zip(names, status, strict=True))
    return text.getvalue().encode()


def write_ledger(run: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write who took part in which round of a run to a CSV file, for its owner only.

    The rows are derived from the journal, whose digests are checked. A round in flight has no rows.
    The witness is not looked at: `dpftrl verify` tells whether the folder is an older copy.

    Args:
        run: The folder of the run. A server may be working on it.
        path: The file to write.

    Raises:
        UnsafeState: The journal was changed.
        InvalidInput: A file cannot be read or written.
    """
    folder = RunFolder(Path(run))
    if not folder.exists:
        raise InvalidInput(f"{folder.root} holds no run; there is no {folder.journal.name} in it")
    pieces = _pieces(folder)
    replace_with(Path(path), lambda file: file.writelines(pieces), private=True)


@contextmanager
def ledger_file(run: Path) -> Generator[Path]:
    """The ledger of a run, as a file that only this user can read, and that is removed at the end.

    Args:
        run: The folder of the run.
    """
    with TemporaryDirectory(prefix="dpftrl-") as folder:
        path = Path(folder) / "ledger.csv"
        write_ledger(run, path)
        yield path


def _pieces(folder: RunFolder) -> Iterator[bytes]:
    """The content of a ledger, piece by piece."""
    journal: Journal[AnyRecord] = Journal(folder.journal, folder.read_key(), AnyRecord)
    state = RunState()
    for record, _ in journal.read():
        assert record is not None  # no line was skipped
        pending = state.pending
        state.follow(record)
        if state.created is None or state.created.version == 1:
            continue
        if isinstance(record, Created):
            yield HEADER.encode()
        elif isinstance(record, Committed) and pending is not None and record.counted is not UNSET:
            yield rows_of(pending, unpacked_mask(record.counted, len(pending.keys())))
        elif isinstance(record, Abandoned) and pending is not None:
            yield rows_of(pending, None)
    if state.created is None:
        raise UnsafeState(f"{folder.journal} has no first line that belongs to this noise key")
    if state.created.version == 1:
        yield from Ledger(folder.ledger).pieces(*(state.ledger or EMPTY))


@final
class Ledger:
    """The ledger file of a run whose journal has version 1. Rows are only appended.

    Args:
        path: The CSV file.

    Attributes:
        bytes: Number of bytes that `resume` has checked or that were appended since.
        sha256: SHA-256 of these bytes.
    """

    def __init__(self, path: Path):
        self._path = path
        self._hasher = hashlib.sha256()
        self.bytes = 0
        self.sha256 = self._hasher.hexdigest()

    def __repr__(self) -> str:
        return f"Ledger({self._path}, {self.bytes:,} bytes)"

    def append(self, rows: bytes) -> None:
        """Write the rows of an attempt to the disk."""
        append_durably(self._path, rows, self.bytes)
        self._hasher.update(rows)
        self.bytes += len(rows)
        self.sha256 = self._hasher.hexdigest()

    def resume(self, length: int, sha256: str) -> None:
        """Check that the first `length` bytes are unchanged; later rows are appended after them."""
        for _ in self.pieces(length, sha256):
            pass

    def pieces(self, length: int, sha256: str) -> Iterator[bytes]:
        """Yield the first `length` bytes; at the end, refuse them if they were changed."""
        try:
            with os.fdopen(open_own(self._path), "rb") as file:
                while self.bytes < length and (piece := file.read(min(PIECE, length - self.bytes))):
                    self._hasher.update(piece)
                    self.bytes += len(piece)
                    yield piece
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be read: {error.strerror}") from None
        self.sha256 = self._hasher.hexdigest()
        if self.bytes != length or self.sha256 != sha256:
            raise UnsafeState(
                f"{self._path} is not what the journal says: its first {length:,} bytes were "
                "changed, or some are missing"
            )

    def cut(self) -> None:
        """Remove everything after the first `bytes` bytes of the file."""
        cut_durably(self._path, self.bytes)
