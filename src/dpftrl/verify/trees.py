"""The worst pattern of a strategy whose rows add up nested blocks of rounds, as trees do.

A pattern is worth the sum, over blocks, of the square of its rounds inside. What happens in a block
matters to the rest only by the number of its rounds, by how far the first is from its start and by
how far the last is from its end: a table for each number, from the leaves up.
"""

from functools import reduce
from typing import Final, NamedTuple

import numpy as np

from dpftrl._internal.arrays import Matrix
from dpftrl.errors import TooLarge
from dpftrl.verify.patterns import Limits

# tables[j][x, y]: the most for j rounds of which the first has offset x and the last ends y before
# the end of the block, both cut at what a neighbour can still notice.
Tables = dict[int, Matrix]

# Table entries that may be looked at, some seconds, and what one call of numpy costs in them.
MOST_WORK: Final = 1e9
CALL_COST: Final = 20_000


class Block(NamedTuple):
    """Rounds that one or several rows of the strategy add up, and the blocks inside."""

    size: int
    times: int
    inside: "tuple[Block, ...]"


LEAF: Final = Block(1, 0, ())


def worst_nested(strategy: Matrix, limits: Limits) -> float | None:
    """The sensitivity, exactly; None if the rows are not nested blocks, or it takes too long."""
    root = blocks_of(strategy)
    if root is None:
        return None
    try:
        tables = _Nested(limits).tables(root)
    except TooLarge:
        return None
    return max(float(table.max()) for table in tables.values()) ** 0.5


def blocks_of(strategy: Matrix) -> Block | None:
    """The blocks that the rows add up, nested; None if they do anything else."""
    if not np.isin(strategy, (0.0, 1.0)).all():
        return None
    rows = strategy[strategy.any(axis=1)]
    starts, sizes = rows.argmax(axis=1), rows.sum(axis=1).astype(np.int64)
    ends = strategy.shape[1] - rows[:, ::-1].argmax(axis=1)
    if not np.array_equal(ends - starts, sizes):
        return None
    spans = sorted(zip(starts.tolist(), ends.tolist(), strict=True), key=lambda s: (s[0], -s[1]))
    spans.append((strategy.shape[1], strategy.shape[1] + 1))
    return _Nesting(spans).block(0, strategy.shape[1], 0)


class _Nesting:
    """Puts spans, sorted by start and the longest first, into each other."""

    def __init__(self, spans: list[tuple[int, int]]):
        self._spans = spans
        self._next = 0

    def block(self, start: int, end: int, times: int) -> Block | None:
        inside: list[Block] = []
        at = start
        while at < end:
            first, last = self._spans[self._next]
            if first > at:
                inside.append(LEAF)
                at += 1
                continue
            if last > end:
                return None
            child = self._child(first, last)
            if child is None:
                return None
            inside.append(child)
            at = last
        return Block(end - start, times, tuple(inside))

    def _child(self, first: int, last: int) -> Block | None:
        times = 0
        while self._spans[self._next] == (first, last):
            self._next += 1
            times += 1
        return LEAF._replace(times=times) if last == first + 1 else self.block(first, last, times)


class _Nested:
    """Tables of blocks for one min-sep; blocks that are alike have theirs made once."""

    def __init__(self, limits: Limits):
        self._b = limits.min_sep
        self._most = limits.most
        self._known: dict[Block, Tables] = {}
        self._work = 0

    def tables(self, block: Block) -> Tables:
        if block not in self._known:
            parts = [(part.size, self.tables(part)) for part in block.inside]
            _, whole = reduce(self._joined, parts) if parts else (1, self._leaf())
            self._known[block] = {j: table + j * j * block.times for j, table in whole.items()}
        return self._known[block]

    def _leaf(self) -> Tables:
        one = np.full((self._b, self._b), -np.inf)
        one[0, 0] = 0.0  # the last round ends 1 before the end: y counts from there
        return {0: np.zeros((1, 1)), 1: one}

    def _joined(self, left: tuple[int, Tables], right: tuple[int, Tables]) -> tuple[int, Tables]:
        """Two neighbours as one block."""
        joined: Tables = {}
        for i, one in left[1].items():
            for j, other in right[1].items():
                if i + j > self._most:
                    continue
                self._spend(CALL_COST)
                if not i or not j:
                    table = self._beside_nobody(one if i else other, right[0] if i else left[0], i)
                else:
                    table = self._apart(one, other)
                if i + j in joined:
                    table = np.maximum(joined[i + j], table)
                if np.isfinite(table).any():
                    joined[i + j] = table
        return left[0] + right[0], joined

    def _beside_nobody(self, table: Matrix, size: int, on_the_left: int) -> Matrix:
        """One neighbour is empty, and pushes the end (or the start) away by its size."""
        if table.shape == (1, 1) and self._b > 1:
            return table  # nobody in either
        far = np.minimum(np.arange(self._b) + size, self._b - 1)
        moved = np.full_like(table, -np.inf)
        if on_the_left:
            np.maximum.at(moved.T, far, table.T)
        else:
            np.maximum.at(moved, far, table)
        return moved

    def _apart(self, one: Matrix, other: Matrix) -> Matrix:
        """The last of the one and the first of the other are b rounds apart, or more."""
        b = self._b
        firsts = np.flatnonzero(np.isfinite(other).any(axis=1))
        self._spend(len(firsts) * b * b)
        at_least = np.maximum.accumulate(one[:, ::-1], axis=1)[:, ::-1]
        best = np.full((b, b), -np.inf)
        for first in firsts:  # y + 1 rounds from the last to the end, and `first` more
            np.maximum(best, at_least[:, b - 1 - first, None] + other[None, first], out=best)
        return best

    def _spend(self, entries: int) -> None:
        self._work += entries
        if self._work > MOST_WORK:
            raise TooLarge("so many nested blocks take too long")
