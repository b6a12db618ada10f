"""The patterns of one partition's clients: in which rounds each of them took part."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.participation import Pattern

if TYPE_CHECKING:
    import polars as pl

Integers = NDArray[np.int64]

# The gap of a client that took part once: larger than any real one.
NO_GAP = np.iinfo(np.int64).max


@final
@dataclass(frozen=True)
class Patterns:
    """Patterns one after the other.

    Attributes:
        clients: Indices of the clients into the partition's ids, increasing; each has a pattern.
        starts: Where in `rounds` each pattern starts, and where the last one stops.
        rounds: Increasing within each pattern.
    """

    clients: Integers
    starts: Integers
    rounds: Integers

    @classmethod
    def of(cls, owner: Integers, rounds: Integers) -> "Patterns":
        """From (client, round) pairs, sorted and each once."""
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        return cls(owner[first], np.append(first, len(owner)), rounds)

    def __len__(self) -> int:
        return len(self.clients)

    @cached_property
    def counts(self) -> Integers:
        """How often each client took part."""
        return np.diff(self.starts)

    @cached_property
    def _gap_before(self) -> Integers:
        gaps = np.diff(self.rounds, prepend=0)
        gaps[self.starts[:-1]] = NO_GAP
        return gaps

    @property
    def gaps(self) -> Integers:
        """Every difference between two neighbouring rounds of one client."""
        return self._gap_before[self._gap_before != NO_GAP]

    @cached_property
    def min_gaps(self) -> Integers:
        """The smallest gap of each client."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.minimum.reduceat(self._gap_before, self.starts[:-1])

    def pattern(self, position: int) -> Pattern:
        """One pattern."""
        return tuple(self.rounds[self.starts[position] : self.starts[position + 1]].tolist())

    def closest(self, position: int) -> tuple[int, int]:
        """The first two rounds of one client that are its smallest gap apart."""
        start, stop = self.starts[position : position + 2]
        later = int(start + np.argmin(self._gap_before[start:stop]))
        return int(self.rounds[later - 1]), int(self.rounds[later])

    def matrix(self, positions: Integers, count: int) -> Integers:
        """The patterns at these positions, all of this length, one a row."""
        return self.rounds[self.starts[positions][:, None] + np.arange(count)]


class Visits(NamedTuple):
    """Who was asked in which round, in one partition; each (client, round) once.

    Attributes:
        ids: Of the partition's clients.
        owner: The client of each visit, as an index into `ids`; sorted.
        rounds: The round of each visit; increasing within a client.
        counted_rows: How many rows say that the visit was counted; 0 if it was not.
    """

    ids: "pl.Series"
    owner: Integers
    rounds: Integers
    counted_rows: Integers

    def contacted(self) -> Patterns:
        """Everyone who was asked, whatever became of it."""
        return Patterns.of(self.owner, self.rounds)

    def counted(self) -> Patterns:
        """Those whose update is in a released sum."""
        keep = self.counted_rows > 0
        return Patterns.of(self.owner[keep], self.rounds[keep])


def visits(rows: "pl.DataFrame") -> Visits:
    """Sort the rows of a partition by client and round, and make one of those that agree."""
    order, new_client = _clients_together(rows["client"])
    owner = np.cumsum(new_client) - 1
    visit = _sort_within(owner, rows["visit"].to_numpy()[order])
    rounds = visit >> 1
    first = np.flatnonzero(new_client | (np.diff(rounds, prepend=-1) != 0))
    counted_rows = np.add.reduceat(visit & 1, first) if len(first) else first
    ids = rows["client"].gather(order[new_client])
    return Visits(ids, owner[first], rounds[first], counted_rows)


def _clients_together(ids: "pl.Series") -> tuple[Integers, NDArray[np.bool_]]:
    """An order with equal ids next to each other, and where in it another id begins.

    By hash, which is several times as fast as by id; unless two ids share one.
    """
    hashes = ids.hash().to_numpy()
    order = np.argsort(hashes)
    new_hash = np.diff(hashes[order], prepend=0) != 0
    new_hash[:1] = True
    new = _is_new(ids.gather(order))
    if np.array_equal(new, new_hash):
        return order, new
    order = ids.arg_sort().to_numpy().astype(np.int64)
    return order, _is_new(ids.gather(order))


def _is_new(ids: "pl.Series") -> NDArray[np.bool_]:
    new = (ids != ids.shift(1)).fill_null(True)
    return new.to_numpy()


def _sort_within(owner: Integers, values: Integers) -> Integers:
    """Sort the values of each owner; the owners are sorted already."""
    if not len(values):
        return values
    span = int(values.max()) + 1
    if (int(owner[-1]) + 1) * span > NO_GAP:
        return values[np.lexsort((values, owner))]
    # One number for both, since sorting plain numbers is several times as fast.
    both = owner * span + values
    both.sort()
    return both - owner * span
