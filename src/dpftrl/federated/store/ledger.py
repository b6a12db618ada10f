"""The ledger: a file that records who took part in which round, for `dpftrl observe`.

Rows are only appended, one attempt at a time. The journal stores the length and the digest of the
file. Rows after that length belong to an attempt whose end was not journalled; they are removed
when the run is resumed.
"""

import csv
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from dpftrl._internal.storage import append_durably, cut_durably, open_own, replace_file
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.store.journal import Status

HEADER: Final = "round,client,status\n"
# Length and digest of a ledger without rows.
EMPTY: Final = (len(HEADER), hashlib.sha256(HEADER.encode()).hexdigest())
PIECE: Final = 2**20


@final
class Ledger:
    """The ledger file of a run. Rows are only appended.

    Args:
        path: The CSV file.
        hashed: Whether the file contains pseudonyms instead of the names of clients.

    Attributes:
        bytes: Number of bytes that `resume` has checked or that were appended since.
        sha256: SHA-256 of these bytes.
    """

    def __init__(self, path: Path, hashed: bool):
        self._path = path
        self._hashed = hashed
        self._hasher = hashlib.sha256()
        self.bytes = 0
        self.sha256 = self._hasher.hexdigest()

    def __repr__(self) -> str:
        return f"Ledger({self._path}, {self.bytes:,} bytes)"

    def begin(self) -> None:
        """Write the header."""
        replace_file(self._path, HEADER.encode(), private=True)
        self._hasher.update(HEADER.encode())
        self.bytes, self.sha256 = EMPTY

    def append(self, row: int, clients: Sequence[tuple[str, Status]]) -> None:
        """Write the rows of an attempt to the disk: the name and the status of each client."""
        text = io.StringIO()
        # Names may contain any characters. Quotes keep readers from stripping or splitting them.
        quoting = csv.QUOTE_MINIMAL if self._hashed else csv.QUOTE_NONNUMERIC
        writer = csv.writer(text, lineterminator="\n", quoting=quoting)
        writer.writerows((row, *client) for client in clients)
        content = text.getvalue().encode()
        append_durably(self._path, content, self.bytes)
        self._hasher.update(content)
        self.bytes += len(content)
        self.sha256 = self._hasher.hexdigest()

    def resume(self, length: int, sha256: str) -> None:
        """Check that the first `length` bytes are unchanged; later rows are appended after them."""
        try:
            with os.fdopen(open_own(self._path), "rb") as file:
                while self.bytes < length and (piece := file.read(min(PIECE, length - self.bytes))):
                    self._hasher.update(piece)
                    self.bytes += len(piece)
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
