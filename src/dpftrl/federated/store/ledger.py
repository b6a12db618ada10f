"""The ledger: who took part in which round, as the file that `dpftrl observe` reads.

Rows are only ever appended, one round at a time. The journal keeps the length and the digest of the
file. What comes after that length belongs to a round that was not committed, and is cut off.
"""

import csv
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from dpftrl._internal.storage import append_durably
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.store.journal import Status

HEADER: Final = "round,client,status\n"
# Length and digest of a ledger with nobody in it.
EMPTY: Final = (len(HEADER), hashlib.sha256(HEADER.encode()).hexdigest())
PIECE: Final = 2**20


@final
class Ledger:
    """The ledger file of a run, which is appended to.

    Args:
        path: The CSV file.
        hashed: Whether clients appear under their pseudonyms.

    Attributes:
        bytes: The length of the committed part of the file.
        sha256: SHA-256 of that part.
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
        self._append(HEADER.encode())

    def append(self, row: int, clients: Sequence[tuple[str, Status]]) -> None:
        """Add the rows of a round, with the name and the status of each client, durably."""
        text = io.StringIO()
        # Names may hold anything; quotes keep what a reader might strip or split at.
        quoting = csv.QUOTE_MINIMAL if self._hashed else csv.QUOTE_NONNUMERIC
        writer = csv.writer(text, lineterminator="\n", quoting=quoting)
        writer.writerows((row, *client) for client in clients)
        self._append(text.getvalue().encode())

    def resume(self, length: int, sha256: str) -> None:
        """Check that the first `length` bytes are unchanged, and append after them from now on."""
        try:
            with self._path.open("rb") as file:
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
        """Cut off what was written after the committed part."""
        append_durably(self._path, b"", self.bytes)

    def _append(self, content: bytes) -> None:
        append_durably(self._path, content, self.bytes)
        self._hasher.update(content)
        self.bytes += len(content)
        self.sha256 = self._hasher.hexdigest()
