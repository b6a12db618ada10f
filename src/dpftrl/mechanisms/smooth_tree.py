"""The smooth binary mechanism (Andersson and Pagh 2023).

The mechanism is a binary tree that uses only its balanced leaves: those whose number has as many
ones as zeros among its `height` binary digits. The sum over everything before a leaf needs one node
(a left sibling on the path to the leaf) for each digit 1 of the leaf's number. All balanced leaves
have equally many ones, so that every prefix sum has the same noise variance.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.mechanisms._tree_sensitivity import NestedBlocks, Tables, nested_sensitivity
from dpftrl.mechanisms.base import Matrix, Mechanism, Rows, StreamState, Vector
from dpftrl.participation import Participation, Pattern


@final
@dataclass(frozen=True)
class SmoothTree(Mechanism):
    """A binary tree in which round t belongs to balanced leaf t, both counted from 0.

    The prefix sum after round t ends before balanced leaf t + 1. Only nodes that are left siblings
    on the path to a balanced leaf are used. Some of them contain no round. Their noise is added all
    the same, so that every prefix has the same variance.

    Attributes:
        height: Number of binary digits of a leaf's number; it must be even.
    """

    family = "smooth-tree"
    sensitivity_cost = "medium"

    height: int

    def __post_init__(self) -> None:
        height = whole_number("height", self.height, at_least=2)
        if height % 2 or height > 128:  # 128 digits already allow more than 10^37 rounds
            raise InvalidInput(f"height must be an even number up to 128, got {height}")
        object.__setattr__(self, "height", height)

    @classmethod
    def for_rounds(cls, rounds: int) -> Self:
        """Build the lowest tree with enough balanced leaves.

        >>> SmoothTree.for_rounds(2052)
        SmoothTree(height=14)
        """
        rounds, height = whole_number("rounds", rounds), 2
        while math.comb(height, height // 2) <= rounds:
            height += 2
        return cls(height)

    @property
    def rounds(self) -> int:
        """Largest number of rounds, one less than the number of balanced leaves."""
        return math.comb(self.height, self.height // 2) - 1

    def _leaf(self, rank: int) -> int:
        """Number of the balanced leaf with this rank (from 0) among all balanced leaves."""
        number, ones = 0, self.height // 2
        for digit in reversed(range(self.height)):
            with_zero = math.comb(digit, ones)
            if rank >= with_zero:
                number |= 1 << digit
                rank, ones = rank - with_zero, ones - 1
        return number

    def _new_nodes(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield the nodes that the prefix of `count` rounds is the first to use.

        Each node is a block (start, stop) of rounds; the node of the largest digit comes first.
        From one balanced leaf to the next, the highest digit of the lowest run of ones moves up by
        one place, and the other ones of that run move down to the end. Those digits have new left
        siblings. The other digits keep theirs.
        """
        run = _lowest_run(self._leaf(count - 1))
        leaf, ones_below = self._leaf(count), run
        for digit in reversed(range(leaf.bit_length())):
            if leaf >> digit & 1 and (leaf & ((1 << digit) - 1)).bit_count() < run:
                ones_below -= 1
                yield count - math.comb(digit, ones_below + 1), count

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Sensitivity of the tree; see `_tree_sensitivity.nested_sensitivity`."""
        rounds = self.check_rounds(participation.rounds)
        half = self.height // 2
        return nested_sensitivity(
            participation,
            lambda blocks: _tables(blocks, {}, self.height, half, rounds),
            pattern_norm=lambda pattern: self._pattern_norm(pattern, rounds),
            block_sizes=self._block_sizes(rounds),
        )

    def _block_sizes(self, rounds: int) -> list[dict[int, int]]:
        """For each level of the tree, how many nodes in use contain each number of rounds."""
        levels = [Counter[int]() for _ in range(self.height)]
        _add_sizes(levels, self.height, self.height // 2, rounds, 1)
        return [dict(level) for level in levels]

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """Root of the sum, over nodes in use, of the squared number of participations in each."""
        inside: Counter[tuple[int, int]] = Counter()
        for participation in pattern:
            first, ones = 0, self.height // 2  # descend toward the leaf of this round
            for digit in reversed(range(self.height)):
                stop = first + math.comb(digit, ones)
                if participation >= stop:
                    first, ones = stop, ones - 1
                elif ones and stop <= self.check_rounds(rounds):
                    inside[digit, first] += 1
        return sum(count * count for count in inside.values()) ** 0.5

    def error_curve(self, rounds: int) -> Vector:
        """The same value for every prefix, which consists of `height` / 2 nodes."""
        return np.full(self.check_curve(rounds), (self.height / 2) ** 0.5)

    def max_error(self, rounds: int) -> float:
        """Error of any prefix: all are equal."""
        self.check_rounds(rounds)
        return (self.height / 2) ** 0.5

    def rms_error(self, rounds: int) -> float:
        """Error of any prefix: all are equal."""
        return self.max_error(rounds)

    def memory(self, rounds: int) -> int:
        """One vector for each node of a prefix."""
        return self.height // 2 if self.check_rounds(rounds) > 1 else 0

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """The buffers are the noise of the nodes of the prefix so far, the largest digit first."""
        run = _lowest_run(self._leaf(state.round))
        kept, replaced = np.split(state.buffers, [max(0, len(state.buffers) - run)])
        fresh = np.stack([rows(state.next_row + i) for i in range(run)])
        noise = fresh.sum(axis=0) - replaced.sum(axis=0)
        buffers = np.concatenate([kept, fresh])
        return noise, StreamState(state.round + 1, state.next_row + run, buffers)

    def strategy(self, rounds: int) -> Matrix:
        """One row per node, with ones in its rounds; nodes without rounds have rows of zeros."""
        blocks = [
            block
            for count in range(1, self.check_dense(rounds) + 1)
            for block in self._new_nodes(count)
        ]
        dense = np.zeros((len(blocks), rounds))
        for row, (start, stop) in enumerate(blocks):
            dense[row, start:stop] = 1.0
        return dense

    def decoder(self, rounds: int) -> Matrix:
        """Differences of neighboring prefixes, each a sum of nodes."""
        current: list[int] = []  # rows of the nodes of the prefix, largest digit first
        used: list[list[int]] = [[]]
        total = 0
        for count in range(1, self.check_dense(rounds) + 1):
            fresh = len(list(self._new_nodes(count)))
            current = current[: max(0, len(current) - fresh)] + list(range(total, total + fresh))
            total += fresh
            used.append(list(current))
        prefixes = np.zeros((rounds + 1, total))
        for count, rows_used in enumerate(used):
            prefixes[count, rows_used] = 1.0
        return np.diff(prefixes, axis=0)

    def parameters(self) -> dict[str, Any]:
        """The height of the tree."""
        return {"height": self.height}


def _lowest_run(leaf: int) -> int:
    """Length of the lowest run of ones in the binary digits of a leaf's number."""
    shifted = leaf >> ((leaf & -leaf).bit_length() - 1)
    return ((shifted + 1) & -(shifted + 1)).bit_length() - 1


def _tables(
    blocks: NestedBlocks, known: dict[tuple[int, int], Tables], digits: int, ones: int, limit: int
) -> Tables:
    """Sensitivity tables for the first `limit` balanced leaves below a node.

    Args:
        blocks: Builder of the tables.
        known: Tables of complete nodes so far, by (digits, ones); new ones are added.
        digits: Number of binary digits below the node.
        ones: How many of these digits are 1 in a balanced leaf.
        limit: Number of leaves.
    """
    size = math.comb(digits, ones)
    if digits == 0:
        return blocks.leaf()
    if limit >= size and (digits, ones) in known:
        return known[digits, ones]
    lower, upper = math.comb(digits - 1, ones), math.comb(digits - 1, ones - 1) if ones else 0
    if lower == 0:
        tables = _tables(blocks, known, digits - 1, ones - 1, limit)
    else:
        tables = _tables(blocks, known, digits - 1, ones, min(limit, lower))
        if upper and limit >= lower:
            tables = blocks.count(tables)
        if upper and limit > lower:
            rest = _tables(blocks, known, digits - 1, ones - 1, limit - lower)
            tables = blocks.concat(tables, rest)
    if limit >= size:
        known[digits, ones] = tables
    return tables


def _add_sizes(levels: list[Counter[int]], digits: int, ones: int, limit: int, times: int) -> None:
    """Count the nodes in use, by level and by number of rounds, among the first `limit` leaves."""
    queue: Counter[tuple[int, int, int]] = Counter({(digits, ones, limit): times})
    for level in reversed(range(digits)):
        below: Counter[tuple[int, int, int]] = Counter()
        for (_, ones_left, leaves), copies in queue.items():
            lower = math.comb(level, ones_left)
            if lower:
                below[level, ones_left, min(leaves, lower)] += copies
            if ones_left and lower <= leaves:
                if lower:
                    levels[level][lower] += copies
                if leaves > lower:
                    below[level, ones_left - 1, leaves - lower] += copies
        queue = below
