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
    grouped = rows.group_by("client").agg("visit")
    if not len(grouped):
        nothing = np.zeros(0, dtype=np.int64)
        return Visits(grouped["client"], nothing, nothing, nothing)
    lengths = grouped["visit"].list.len().to_numpy()
    owner = np.repeat(np.arange(len(grouped)), lengths)
    visit = _sort_within(owner, grouped["visit"].explode().to_numpy())
    rounds = visit >> 1
    new = (np.diff(owner, prepend=-1) != 0) | (np.diff(rounds, prepend=-1) != 0)
    first = np.flatnonzero(new)
    counted_rows = np.add.reduceat(visit & 1, first)
    return Visits(grouped["client"], owner[first], rounds[first], counted_rows)


def _sort_within(owner: Integers, values: Integers) -> Integers:
    """Sort the values of each owner; the owners are sorted already."""
    span = int(values.max()) + 1
    if (int(owner[-1]) + 1) * span > NO_GAP:
        return values[np.lexsort((values, owner))]
    # One number for both, since sorting plain numbers is several times as fast.
    both = owner * span + values
    both.sort()
    return both - owner * span
