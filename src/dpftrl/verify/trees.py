"""The exact sensitivity of tree strategies, whose rows add up nested blocks of rounds.

The squared norm of a pattern is the sum, over all blocks, of the square of the number of its rounds
inside the block. The part of a pattern inside a block affects the rest of the pattern by three
numbers only: how many rounds it has, how far the first is from the start of the block, and how far
the last is from its end. Dynamic programming computes tables over these three numbers, from the
leaves to the root.
"""

from functools import reduce
from typing import Final, NamedTuple

import numpy as np

from dpftrl._internal.arrays import Matrix
from dpftrl.errors import TooLarge
from dpftrl.verify.patterns import Limits

# tables[j][x, y]: the largest squared norm of j rounds in a block, of which the first is x rounds
# after the start and the last is y rounds before the end (0: the last round of the block). Both are
# cut at min-sep - 1, because a neighbour cannot be affected by more.
Tables = dict[int, Matrix]

MOST_WORK: Final = 1e9  # table entries that may be computed: a few seconds
CALL_COST: Final = 20_000  # the time of one numpy call, in table entries


class Block(NamedTuple):
    """A range of consecutive rounds that rows of the strategy add up.

    Attributes:
        size: The number of rounds.
        times: The number of rows that add up exactly these rounds.
        inside: The blocks that this block consists of.
    """

    size: int
    times: int
    inside: "tuple[Block, ...]"


LEAF: Final = Block(1, 0, ())


def nested_sensitivity(strategy: Matrix, limits: Limits) -> float | None:
    """Return the exact sensitivity, or None if the rows are not nested or it takes too long."""
    root = blocks_of(strategy)
    if root is None:
        return None
    try:
        tables = _BlockTables(limits).tables(root)
    except TooLarge:
        return None
    return max(float(table.max()) for table in tables.values()) ** 0.5


def blocks_of(strategy: Matrix) -> Block | None:
    """Return the tree of blocks that the rows add up, or None if the rows are not nested blocks."""
    if not np.isin(strategy, (0.0, 1.0)).all():
        return None
    rows = strategy[strategy.any(axis=1)]
    starts, sizes = rows.argmax(axis=1), rows.sum(axis=1).astype(np.int64)
    ends = strategy.shape[1] - rows[:, ::-1].argmax(axis=1)
    if not np.array_equal(ends - starts, sizes):
        return None
    spans = sorted(zip(starts.tolist(), ends.tolist(), strict=True), key=lambda s: (s[0], -s[1]))
    spans.append((strategy.shape[1], strategy.shape[1] + 1))
    return _BlockBuilder(spans).block(0, strategy.shape[1], 0)


class _BlockBuilder:
    """Builds a tree of blocks from spans, which are sorted by start and then longest first."""

    def __init__(self, spans: list[tuple[int, int]]):
        self._spans = spans
        self._next = 0

    def block(self, start: int, end: int, times: int) -> Block | None:
        """Build the block of the rounds from `start` to `end`, or return None if spans cross."""
        inside: list[Block] = []
        position = start
        while position < end:
            first, last = self._spans[self._next]
            if first > position:
                inside.append(LEAF)
                position += 1
                continue
            if last > end:
                return None
            child = self._child(first, last)
            if child is None:
                return None
            inside.append(child)
            position = last
        return Block(end - start, times, tuple(inside))

    def _child(self, first: int, last: int) -> Block | None:
        times = 0
        while self._spans[self._next] == (first, last):
            self._next += 1
            times += 1
        return LEAF._replace(times=times) if last == first + 1 else self.block(first, last, times)


class _BlockTables:
    """Computes the tables of blocks for given limits; equal blocks are computed once."""

    def __init__(self, limits: Limits):
        self._b = limits.min_sep
        self._most = limits.max_participations
        self._cache: dict[Block, Tables] = {}
        self._work = 0

    def tables(self, block: Block) -> Tables:
        """Return the tables of a block.

        Raises:
            TooLarge: They take too long to compute.
        """
        if block not in self._cache:
            parts = [(part.size, self.tables(part)) for part in block.inside]
            _, whole = reduce(self._join, parts) if parts else (1, self._leaf())
            self._cache[block] = {j: table + j * j * block.times for j, table in whole.items()}
        return self._cache[block]

    def _leaf(self) -> Tables:
        one_round = np.full((self._b, self._b), -np.inf)
        one_round[0, 0] = 0.0  # the round is both the first and the last of the block
        return {0: np.zeros((1, 1)), 1: one_round}

    def _join(self, left: tuple[int, Tables], right: tuple[int, Tables]) -> tuple[int, Tables]:
        """Return the size and the tables of two neighbouring blocks together."""
        joined: Tables = {}
        for i, left_table in left[1].items():
            for j, right_table in right[1].items():
                if i + j > self._most:
                    continue
                self._spend(CALL_COST)
                if not i or not j:
                    table = self._join_empty(
                        left_table if i else right_table, right[0] if i else left[0], i
                    )
                else:
                    table = self._join_apart(left_table, right_table)
                if i + j in joined:
                    table = np.maximum(joined[i + j], table)
                if np.isfinite(table).any():
                    joined[i + j] = table
        return left[0] + right[0], joined

    def _join_empty(self, table: Matrix, size: int, on_the_left: int) -> Matrix:
        """Join a block with an empty neighbour, which moves its end (or its start) away.

        Args:
            table: The table of the block.
            size: The number of rounds of the empty neighbour.
            on_the_left: Not 0 if the block is on the left of the empty neighbour.
        """
        if table.shape == (1, 1) and self._b > 1:
            return table  # both are empty
        distances = np.minimum(np.arange(self._b) + size, self._b - 1)
        moved = np.full_like(table, -np.inf)
        if on_the_left:
            np.maximum.at(moved.T, distances, table.T)
        else:
            np.maximum.at(moved, distances, table)
        return moved

    def _join_apart(self, left: Matrix, right: Matrix) -> Matrix:
        """Join two blocks such that the last round of the left is b before the first of the right.

        The distance may also be larger.
        """
        b = self._b
        firsts = np.flatnonzero(np.isfinite(right).any(axis=1))
        self._spend(len(firsts) * b * b)
        at_least = np.maximum.accumulate(left[:, ::-1], axis=1)[:, ::-1]
        best = np.full((b, b), -np.inf)
        for first in firsts:  # the distance is y + 1 + `first`, which must be at least b
            np.maximum(best, at_least[:, b - 1 - first, None] + right[None, first], out=best)
        return best

    def _spend(self, entries: int) -> None:
        self._work += entries
        if self._work > MOST_WORK:
            raise TooLarge("the nested blocks of this strategy take too long to search")
