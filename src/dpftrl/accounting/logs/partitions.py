"""The partitions of a log, and the participation patterns of the clients in each of them.

`Partitions` collects the checked rows so that all rows of a client are together. `merge_contacts`
turns the rows of one partition into `Contacts`, and these into `Patterns`: one per client.
"""

import io
import tempfile
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import TooLarge
from dpftrl.participation import Pattern

if TYPE_CHECKING:
    import polars as pl

Integers = NDArray[np.int64]

# Stands for the smallest gap of a client that took part only once: larger than any real gap.
NO_GAP = np.iinfo(np.int64).max
# With more partitions, each batch would be cut into very small pieces. Logs of more than some
# billion rows have larger partitions instead.
MOST_PARTITIONS: Final = 1000


class Clock(NamedTuple):
    """Where rounds begin and how long they are, for a log with times. All in microseconds.

    Attributes:
        start: When the first round began, or the first time in the log.
        length: Length of the longest round.
        resolution: 1 if any time was rounded, and 0 if none was.
        starts_exactly: Whether `start` was stated. If not, a round can begin anywhere.
    """

    start: int
    length: int
    resolution: int
    starts_exactly: bool

    def rounds(self, times: Integers) -> Integers:
        """The round of each time since the start, if a round began at the start."""
        return times // self.length

    def whole_rounds(self, durations: Integers) -> Integers:
        """How many rounds, at least, two contacts are apart.

        Guarantees:
            Rounds are half-open intervals, one after the other, none longer than `length`. If two
            contacts are in the rounds i and j, the duration between them is less than
            (j - i + 1) * length. So j - i is at least floor(duration / length), wherever the rounds
            begin. A duration between two rounded times is less than 1 microsecond too long, which
            the larger divisor covers: k * (length + 1) - 1 is at least k * length for k of 1 or
            more.
        """
        return durations // (self.length + self.resolution)


class Partitions:
    """The rows of a log, split so that all rows of a client are in the same partition.

    All ids with the same canonical form are in the same partition too. A single partition is held
    in memory, several are held in one temporary file. The file has no name in its folder, so the
    system removes it however the program ends.
    """

    def __init__(self, number: int):
        self._number = min(number, MOST_PARTITIONS)
        self._frames: list[pl.DataFrame] = []
        self._file: IO[bytes] | None = None
        if self._number > 1:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._end = 0
        # For each partition, the start and the length of each of its pieces, alternating.
        self._pieces = [array("q") for _ in range(self._number)]

    def __len__(self) -> int:
        return self._number

    def add(self, rows: "pl.DataFrame", forms: "pl.Series") -> None:
        """Add rows to their partitions.

        Args:
            rows: The columns `client` and `contact`.
            forms: The canonical form of each row's client id.
        """
        if self._file is None:
            self._frames.append(rows)
            return
        # The hash only chooses the partition. Clients are distinguished by their ids.
        partitions = (forms.hash() % self._number).alias("partition")
        labelled = rows.with_columns(partitions)
        parts = labelled.partition_by("partition", as_dict=True, include_key=False)
        for (partition,), part in parts.items():
            self._write(self._file, partition, part)

    def _write(self, file: IO[bytes], partition: int, part: "pl.DataFrame") -> None:
        """Append rows of one partition to the temporary file."""
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
        empty = pl.DataFrame(schema={"client": pl.String, "contact": pl.Int64})
        return pl.concat([empty, *parts], rechunk=True)

    def close(self) -> None:
        """Release the memory and the temporary file."""
        self._frames.clear()
        if self._file is not None:
            self._file.close()


@final
@dataclass(frozen=True)
class Patterns:
    """The patterns of several clients, stored one after the other.

    Attributes:
        clients: The clients that have a pattern, as increasing indices into the partition's ids.
        starts: Where in `rounds` each pattern starts. The last entry is where the last one stops.
        rounds: The rounds of all patterns; increasing within each pattern.
        stated_gaps: For a log with times: for each entry of `rounds`, how many rounds, at least,
            the client's previous contact was before it. The first of each pattern is not used.
    """

    clients: Integers
    starts: Integers
    rounds: Integers
    stated_gaps: Integers | None = None

    @classmethod
    def of(
        cls, owner: Integers, rounds: Integers, stated_gaps: Integers | None = None
    ) -> "Patterns":
        """Build patterns from (client, round) pairs that are sorted and occur once each."""
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        return cls(owner[first], np.append(first, len(owner)), rounds, stated_gaps)

    def __len__(self) -> int:
        return len(self.clients)

    @cached_property
    def counts(self) -> Integers:
        """The number of rounds in each client's pattern."""
        return np.diff(self.starts)

    @cached_property
    def _gap_before(self) -> Integers:
        """For each entry of `rounds`, the gap to the client's previous round, or NO_GAP."""
        if self.stated_gaps is None:
            gaps = np.diff(self.rounds, prepend=0)
        else:
            gaps = self.stated_gaps.copy()
        gaps[self.starts[:-1]] = NO_GAP
        return gaps

    @property
    def gaps(self) -> Integers:
        """Every difference between two consecutive rounds of the same client."""
        return self._gap_before[self._gap_before != NO_GAP]

    @cached_property
    def min_gaps(self) -> Integers:
        """The smallest gap of each client; NO_GAP if the client took part once."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.minimum.reduceat(self._gap_before, self.starts[:-1])

    def pattern(self, position: int) -> Pattern:
        """The pattern of the client at this position."""
        return tuple(self.rounds[self.starts[position] : self.starts[position + 1]].tolist())

    def closest(self, position: int) -> tuple[int, int]:
        """The first two rounds of one client that are its smallest gap apart."""
        start, stop = self.starts[position : position + 2]
        later = int(start + np.argmin(self._gap_before[start:stop]))
        earlier_round = int(self.rounds[later - 1])
        return earlier_round, earlier_round + int(self._gap_before[later])

    def matrix(self, positions: Integers, count: int) -> Integers:
        """The patterns at these positions as a matrix with one row per pattern.

        Args:
            positions: Patterns that all have the same length.
            count: That length.
        """
        return self.rounds[self.starts[positions][:, None] + np.arange(count)]


class ClientIds(Protocol):
    """Client ids by position: a polars Series, or `ledgers.Ids`."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> Any: ...
    def gather(self, indices: Any, /) -> Any:
        """The ids at these positions."""
        ...


class Contacts(NamedTuple):
    """Which client of a partition was contacted when; each (client, round or time) once.

    Attributes:
        ids: The ids of the partition's clients.
        owner: The client of each contact, as an index into `ids`; sorted.
        rounds: The round of each contact; increasing within a client.
        counted_rows: How many rows of the log say that the client was counted in that round. In a
            log with times, a row that can be in the same round as the counted row before it adds 1.
        times: For a log with times: microseconds from the start to each contact.
        clock: For a log with times: how times become rounds.
    """

    ids: ClientIds
    owner: Integers
    rounds: Integers
    counted_rows: Integers
    times: Integers | None = None
    clock: Clock | None = None

    def contacted(self) -> Patterns:
        """The rounds in which each client was contacted, whatever its status."""
        if self.clock is None:
            return Patterns.of(self.owner, self.rounds)
        # A contact and the report that followed it are one contact. Counted rows stay apart.
        is_counted = self.counted_rows > 0
        new_round = np.diff(self.owner, prepend=-1) != 0
        new_round |= np.diff(self.rounds, prepend=-1) != 0
        group = np.cumsum(new_round) - 1
        has_counted = np.zeros(len(self.owner), dtype=bool)
        has_counted[group[is_counted]] = True
        return self._patterns(is_counted | (new_round & ~has_counted[group]))

    def counted(self) -> Patterns:
        """The rounds in which each client's update is in the released sum."""
        return self._patterns(self.counted_rows > 0)

    def _patterns(self, kept: NDArray[np.bool_]) -> Patterns:
        """The patterns of these contacts alone."""
        owner, rounds = self.owner[kept], self.rounds[kept]
        if self.clock is None or self.times is None:
            return Patterns.of(owner, rounds)
        # Contacts at two times are two participations, even if they seem to be in one round: they
        # can be in two rounds next to each other.
        gaps = self.clock.whole_rounds(np.diff(self.times[kept], prepend=0))
        return Patterns.of(owner, rounds, np.maximum(gaps, 1))


def merge_contacts(rows: "pl.DataFrame", clock: Clock | None = None) -> Contacts:
    """Sort a partition by client and round, and merge the rows of the same client and round.

    Args:
        rows: The columns `client` and `contact` of `reading.clean`.
        clock: For a log with times: how times become rounds. Then only rows of the same client and
            the same time are merged.
    """
    order, new_client = _group_by_client(rows["client"])
    owner = np.cumsum(new_client) - 1
    values = rows["contact"].to_numpy()[order]
    contact = _sort_within(owner, values if clock is None else values - 2 * clock.start)
    moments = contact >> 1
    first = np.flatnonzero(new_client | (np.diff(moments, prepend=-1) != 0))
    counted_rows = np.add.reduceat(contact & 1, first) if len(first) else first
    ids, owner, moments = rows["client"].gather(order[new_client]), owner[first], moments[first]
    if clock is None:
        return Contacts(ids, owner, moments, counted_rows)
    rounds = clock.rounds(moments)
    counted_rows = _with_close_rows(owner, moments, rounds, counted_rows, clock)
    return Contacts(ids, owner, rounds, counted_rows, moments, clock)


def _with_close_rows(
    owner: Integers, times: Integers, rounds: Integers, counted_rows: Integers, clock: Clock
) -> Integers:
    """Add 1 to each counted contact that can be in the same round as the counted one before it.

    Two updates of one client in the same round have twice the sensitivity, so what cannot be told
    from that is reported as a repeated row.
    """
    counted = np.flatnonzero(counted_rows > 0)
    earlier, later = counted[:-1], counted[1:]
    is_close = clock.whole_rounds(times[later] - times[earlier]) == 0
    is_close &= owner[later] == owner[earlier]
    if clock.starts_exactly:
        is_close &= rounds[later] == rounds[earlier]
    raised = counted_rows.copy()
    raised[later[is_close]] += 1
    return raised


def _group_by_client(ids: "pl.Series") -> tuple[Integers, NDArray[np.bool_]]:
    """Return an order that puts equal ids next to each other, and where new ids start.

    The ids are sorted by hash, which is several times faster than sorting by id. If two ids share a
    hash, all ids are sorted by id instead.
    """
    hashes = ids.hash().to_numpy()
    order = np.argsort(hashes)
    new_hash = np.diff(hashes[order], prepend=0) != 0
    new_hash[:1] = True
    new_id = _differs_from_previous(ids.gather(order))
    if np.array_equal(new_id, new_hash):
        return order, new_id
    order = ids.arg_sort().to_numpy().astype(np.int64)
    return order, _differs_from_previous(ids.gather(order))


def _differs_from_previous(ids: "pl.Series") -> NDArray[np.bool_]:
    differs = (ids != ids.shift(1)).fill_null(True)
    return differs.to_numpy()


def _sort_within(owner: Integers, values: Integers) -> Integers:
    """Sort the values of each owner; the owners are sorted already."""
    if not len(values):
        return values
    span = int(values.max()) + 1
    if (int(owner[-1]) + 1) * span > NO_GAP:  # owner * span would overflow int64
        return values[np.lexsort((values, owner))]
    # Owner and value in one number: sorting plain integers is several times faster.
    combined = owner * span + values
    combined.sort()
    return combined - owner * span
