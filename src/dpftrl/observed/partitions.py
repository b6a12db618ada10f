"""Rows of a log, sorted into partitions by client so that one at a time fits in memory."""

import io
import tempfile
from array import array
from typing import IO, TYPE_CHECKING

from dpftrl.errors import TooLarge

if TYPE_CHECKING:
    import polars as pl

# With more, each batch would fall into crumbs; beyond some billion rows partitions grow instead.
MOST_PARTITIONS = 1000


class Partitions:
    """All rows of a client are in the same partition: in memory if there is one, else on disk.

    So are all ids with the same canonical form, which are refused when the partition is read.

    The file on disk has no name: the system removes it however the program ends.
    """

    def __init__(self, number: int):
        self._number = min(number, MOST_PARTITIONS)
        self._frames: list[pl.DataFrame] = []
        self._file: IO[bytes] | None = None
        if self._number > 1:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does)
        self._end = 0
        # For each partition, where its pieces start and how long they are, in turn.
        self._pieces = [array("q") for _ in range(self._number)]

    def __len__(self) -> int:
        return self._number

    def add(self, rows: "pl.DataFrame", forms: "pl.Series") -> None:
        """Put rows where they belong.

        Args:
            rows: Columns `client` and `visit`.
            forms: The canonical form of each row's client.
        """
        if self._file is None:
            self._frames.append(rows)
            return
        # A hash only chooses the partition; who is who is decided by the ids themselves.
        chosen = (forms.hash() % self._number).alias("partition")
        split = rows.with_columns(chosen).partition_by("partition", as_dict=True, include_key=False)
        for (partition,), part in split.items():
            self._write(self._file, partition, part)

    def _write(self, file: IO[bytes], partition: int, part: "pl.DataFrame") -> None:
        packed = io.BytesIO()
        part.rechunk().write_ipc_stream(packed)
        try:
            file.write(packed.getbuffer())
            file.flush()
        except OSError as error:
            raise TooLarge(
                f"the log is sorted on disk in {tempfile.gettempdir()}, which failed "
                f"({error.strerror}); point TMPDIR to a folder with room for twice the log"
            ) from None
        self._pieces[partition].extend((self._end, packed.tell()))
        self._end += packed.tell()

    def rows(self, partition: int) -> "pl.DataFrame":
        """All rows of one partition, in no particular order."""
        import polars as pl

        if self._file is None:
            parts = self._frames
        else:
            parts: list[pl.DataFrame] = []
            pieces = self._pieces[partition]
            for start, length in zip(pieces[::2], pieces[1::2], strict=True):
                self._file.seek(start)
                parts.append(pl.read_ipc_stream(io.BytesIO(self._file.read(length))))
        empty = pl.DataFrame(schema={"client": pl.String, "visit": pl.Int64})
        return pl.concat([empty, *parts], rechunk=True)

    def close(self) -> None:
        """Forget all rows."""
        self._frames.clear()
        if self._file is not None:
            self._file.close()
