"""The sensitivity of a strategy C, recomputed: bounds for every matrix, exact values for trees.

A pattern is the list of rounds that one client takes part in. Let G = C^T C. A client with a given
pattern can move C X by at most the square root of the sum of |G| over all pairs of its rounds. It
attains this bound if these entries of G are not negative. `bound_sensitivity` has three bounds on
the largest such sum over all patterns. They hold for every matrix, and for most mechanisms one of
them is attained.

`nested_sensitivity` is for tree strategies, whose rows add up nested blocks of rounds. The squared
norm of a pattern is the sum, over all blocks, of the square of the number of its rounds inside the
block. The part of a pattern inside a block affects the rest of the pattern by three numbers only:
how many rounds it has, how far the first is from the start of the block, and how far the last is
from its end. Dynamic programming computes tables over these three numbers, from the leaves to the
root.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Final, NamedTuple, final

import numpy as np

from dpftrl._internal.arrays import Matrix
from dpftrl.errors import TooLarge

Pattern = list[int]

MOST_CHAIN_WORK: Final = 5e8  # matrix entries that the search over chains may read: a few seconds
ROUNDING: Final = 1e-9  # relative difference allowed between two ways to add up the same terms


@final
@dataclass(frozen=True)
class Limits:
    """The rounds that one client may take part in.

    Attributes:
        rounds: The number of rounds.
        min_sep: The smallest distance of two rounds of one client.
        cap: The largest number of rounds of one client.
    """

    rounds: int
    min_sep: int
    cap: int

    @property
    def max_participations(self) -> int:
        """The largest number of rounds of one client that fits into the run."""
        return min(self.cap, -(-self.rounds // self.min_sep))

    def earliest_pattern(self) -> Pattern:
        """Return the pattern that is as early and as often as possible: 0, b, 2b, ..."""
        return list(range(0, self.max_participations * self.min_sep, self.min_sep))


class SensitivityBounds(NamedTuple):
    """A lower and an upper bound on the sensitivity: how far one client can move C X.

    Attributes:
        attained: Some client attains this norm.
        bound: No client exceeds this norm.
    """

    attained: float
    bound: float

    @property
    def is_exact(self) -> bool:
        """Whether the two bounds agree up to rounding."""
        return self.bound <= self.attained * (1 + ROUNDING)

    def combined_with(self, other: "SensitivityBounds") -> "SensitivityBounds":
        """Return the tighter lower and the tighter upper bound of the two."""
        return SensitivityBounds(max(self.attained, other.attained), min(self.bound, other.bound))


def pattern_norm(gram: Matrix, pattern: Pattern) -> float:
    """Return the norm of the sum of the columns of C in a pattern."""
    return float(max(gram[np.ix_(pattern, pattern)].sum(), 0.0)) ** 0.5


def bound_sensitivity(gram: Matrix, limits: Limits) -> SensitivityBounds:
    """Return the tightest bounds; the expensive search runs only if the cheap bounds are loose."""
    bounds = _by_start_and_gap(gram, limits).combined_with(_by_all_rounds(gram, limits))
    if bounds.is_exact or limits.max_participations * limits.rounds**2 > MOST_CHAIN_WORK:
        return bounds
    return bounds.combined_with(_by_chain(gram, limits))


def _by_all_rounds(gram: Matrix, limits: Limits) -> SensitivityBounds:
    """Bound every pattern by the pattern of all rounds."""
    attained = pattern_norm(gram, limits.earliest_pattern())
    return SensitivityBounds(attained, float(np.abs(gram).sum()) ** 0.5)


def _by_start_and_gap(gram: Matrix, limits: Limits) -> SensitivityBounds:
    """Bound |G| by a matrix for which the earliest pattern is the worst one.

    That matrix is the smallest one above |G| whose entries never increase with the start of a pair
    of rounds, nor with its gap. In any pattern, round number s (from 0) is at least s b, and its
    gap to round number r is at least (r - s) b. So every pair of the pattern 0, b, 2b, ... has an
    entry at least as large as that of the same pair in any other pattern.
    """
    rounds = limits.rounds
    by_gap = np.zeros((rounds, rounds))
    for start in range(rounds):
        by_gap[start, : rounds - start] = np.abs(gram[start, start:])
    reversed_view = by_gap[::-1, ::-1]  # accumulates from the end; writes into `by_gap`
    np.maximum.accumulate(reversed_view, axis=0, out=reversed_view)
    np.maximum.accumulate(reversed_view, axis=1, out=reversed_view)
    b, most = limits.min_sep, limits.max_participations
    total = sum(
        by_gap[s * b, 0] + 2 * by_gap[s * b, b : (most - s - 1) * b + 1 : b].sum()
        for s in range(most)
    )
    return SensitivityBounds(pattern_norm(gram, limits.earliest_pattern()), float(total) ** 0.5)


def _by_chain(gram: Matrix, limits: Limits) -> SensitivityBounds:
    """Bound all patterns by dynamic programming over their last round.

    Pairs of consecutive rounds of a pattern count exactly; all other pairs are bounded. The entry
    `best[t, j]` bounds the sum of |G| over all pairs, for patterns of j + 1 rounds that end with
    round t. The second-nearest, third-nearest, ... earlier rounds are at least 2b, 3b, ... rounds
    before t. `far[j]` bounds what their pairs with t add, each by the largest entry at that
    distance or further. The bound is exact for matrices of at most 2b bands.
    """
    size, rounds, b = np.abs(gram), limits.rounds, limits.min_sep
    most = limits.max_participations
    best = np.full((rounds, most), -np.inf)
    previous_round = np.zeros((rounds, most), dtype=np.int64)
    best[:, 0] = np.diag(size)
    for t in range(b, rounds):
        pairs = 2 * size[: t - b + 1, t]
        far = _far_pairs_bound(pairs, b, most)
        chains = best[: t - b + 1, : most - 1] + pairs[:, None]
        previous_round[t, 1:] = chains.argmax(axis=0)
        best[t, 1:] = chains.max(axis=0) + size[t, t] + far[1:]
    last, count = np.unravel_index(best.argmax(), best.shape)
    pattern = [int(last)]
    for j in range(int(count), 0, -1):
        pattern.append(int(previous_round[pattern[-1], j]))
    return SensitivityBounds(pattern_norm(gram, pattern[::-1]), float(best.max()) ** 0.5)


def _far_pairs_bound(pairs: Matrix, b: int, most: int) -> Matrix:
    """Bound what a round's pairs with j earlier rounds add, except the pair with the nearest.

    Args:
        pairs: The contribution of each earlier round. The last entry is b rounds earlier.
        b: The min-sep.
        most: The number of entries of the result: j = 0, 1, ..., most - 1.
    """
    largest_up_to = np.maximum.accumulate(pairs)
    far = np.zeros(most)
    distant = largest_up_to[::-1][b::b][: max(most - 2, 0)]  # at least 2b, 3b, ... rounds earlier
    far[2 : 2 + len(distant)] = np.cumsum(distant)
    far[2 + len(distant) :] = far[1 + len(distant)] if len(distant) else 0.0
    return far


# tables[j][x, y]: the largest squared norm of j rounds in a block, of which the first is x rounds
# after the start and the last is y rounds before the end (0: the last round of the block). Both are
# cut at min-sep - 1, because a neighbour cannot be affected by more.
Tables = dict[int, Matrix]

MOST_TABLE_WORK: Final = 1e9  # table entries that may be computed: a few seconds
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
    square = None if root is None else largest_nested_square(root, limits)
    return None if square is None else square**0.5


def largest_nested_square(root: Block, limits: Limits) -> int | None:
    """Return the square of the sensitivity, a whole number, or None if it takes too long."""
    try:
        tables = _BlockTables(limits).tables(root)
    except TooLarge:
        return None
    return int(max(float(table.max()) for table in tables.values()))


def blocks_of(strategy: Matrix) -> Block | None:
    """Return the tree of blocks that the rows add up, or None if the rows are not nested blocks."""
    if not np.isin(strategy, (0.0, 1.0)).all():
        return None
    rows = strategy[strategy.any(axis=1)]
    starts, sizes = rows.argmax(axis=1), rows.sum(axis=1).astype(np.int64)
    ends = strategy.shape[1] - rows[:, ::-1].argmax(axis=1)
    if not np.array_equal(ends - starts, sizes):
        return None
    return block_tree(list(zip(starts.tolist(), ends.tolist(), strict=True)), strategy.shape[1])


def block_tree(spans: list[tuple[int, int]], rounds: int) -> Block | None:
    """Return the tree of blocks with these spans, or None if spans cross.

    Args:
        spans: The first round of each block, and the round after its last, in any order.
        rounds: The number of rounds.
    """
    longest_first = sorted(spans, key=lambda span: (span[0], -span[1]))
    return _BlockBuilder([*longest_first, (rounds, rounds + 1)]).block(0, rounds, 0)


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
        if self._work > MOST_TABLE_WORK:
            raise TooLarge("the nested blocks of this strategy take too long to search")
