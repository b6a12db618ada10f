"""The smooth binary mechanism (Andersson and Pagh 2023).

A binary tree whose rounds sit only at balanced leaves: those whose number has as many ones as zeros
among its `height` binary digits. Adding up everything before a leaf takes one left sibling for each
digit 1 of its number, so that every prefix sum carries the same amount of noise.
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
    """Round t (from 0) adds to balanced leaf t; the prefix after it is all before leaf t + 1.

    Only left siblings that come before a balanced leaf are ever used. Some hold no round at all;
    their noise is added all the same, which keeps every prefix at the same variance.

    Attributes:
        height: Binary digits of a leaf's number, an even number.
    """

    family = "smooth-tree"

    height: int

    def __post_init__(self) -> None:
        height = whole_number("height", self.height, at_least=2)
        if height % 2 or height > 128:
            raise InvalidInput(f"height must be an even number up to 128, got {height}")
        object.__setattr__(self, "height", height)

    @classmethod
    def for_rounds(cls, rounds: int) -> Self:
        """The lowest tree with enough balanced leaves.

        >>> SmoothTree.for_rounds(2052)
        SmoothTree(height=14)
        """
        rounds, height = whole_number("rounds", rounds), 2
        while math.comb(height, height // 2) <= rounds:
            height += 2
        return cls(height)

    @property
    def rounds(self) -> int:
        """One less than there are balanced leaves."""
        return math.comb(self.height, self.height // 2) - 1

    def _leaf(self, rank: int) -> int:
        """The number of a balanced leaf, from its rank among them."""
        number, ones = 0, self.height // 2
        for digit in reversed(range(self.height)):
            with_zero = math.comb(digit, ones)
            if rank >= with_zero:
                number |= 1 << digit
                rank, ones = rank - with_zero, ones - 1
        return number

    def _new_nodes(self, count: int) -> Iterator[tuple[int, int]]:
        """The blocks (start, stop) of rounds first used by prefix `count`, largest digit first.

        Going from a leaf to the next moves the top of its lowest run of ones up and the others down
        to the end; those digits have new left siblings, the rest keep theirs.
        """
        run = _lowest_run(self._leaf(count - 1))
        leaf, ones_below = self._leaf(count), run
        for digit in reversed(range(leaf.bit_length())):
            if leaf >> digit & 1 and (leaf & ((1 << digit) - 1)).bit_count() < run:
                ones_below -= 1
                yield count - math.comb(digit, ones_below + 1), count

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """See `dpftrl.mechanisms._tree_sensitivity.nested_sensitivity`."""
        rounds = self.check_rounds(participation.rounds)
        half = self.height // 2
        return nested_sensitivity(
            participation,
            lambda blocks: _tables(blocks, {}, self.height, half, rounds),
            pattern_norm=lambda pattern: self._pattern_norm(pattern, rounds),
            block_sizes=self._block_sizes(rounds),
        )

    def _block_sizes(self, rounds: int) -> list[dict[int, int]]:
        levels = [Counter[int]() for _ in range(self.height)]
        _add_sizes(levels, self.height, self.height // 2, rounds, 1)
        return [dict(level) for level in levels]

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """The participations in each block that was used, squared and added."""
        inside: Counter[tuple[int, int]] = Counter()
        for taken in pattern:
            first, ones = 0, self.height // 2  # descend towards the leaf of this round
            for digit in reversed(range(self.height)):
                stop = first + math.comb(digit, ones)
                if taken >= stop:
                    first, ones = stop, ones - 1
                elif ones and stop <= self.check_rounds(rounds):
                    inside[digit, first] += 1
        return sum(count * count for count in inside.values()) ** 0.5

    def error_curve(self, rounds: int) -> Vector:
        """The same for every prefix: as many nodes as there are ones."""
        return np.full(self.check_curve(rounds), (self.height / 2) ** 0.5)

    def max_error(self, rounds: int) -> float:
        """The same for every prefix."""
        self.check_rounds(rounds)
        return (self.height / 2) ** 0.5

    def rms_error(self, rounds: int) -> float:
        """The same for every prefix."""
        return self.max_error(rounds)

    def memory(self, rounds: int) -> int:
        """The nodes of one prefix."""
        return self.height // 2 if self.check_rounds(rounds) > 1 else 0

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """Buffers hold the noise of the nodes of the prefix so far, the largest digit first."""
        run = _lowest_run(self._leaf(state.round))
        kept, replaced = np.split(state.buffers, [max(0, len(state.buffers) - run)])
        fresh = np.stack([rows(state.next_row + i) for i in range(run)])
        noise = fresh.sum(axis=0) - replaced.sum(axis=0)
        buffers = np.concatenate([kept, fresh])
        return noise, StreamState(state.round + 1, state.next_row + run, buffers)

    def strategy(self, rounds: int) -> Matrix:
        """One row a node, with ones where it sums; rows of zeros for nodes without rounds."""
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
        """Differences of the prefixes, each a sum of nodes."""
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
        """The height."""
        return {"height": self.height}


def _lowest_run(leaf: int) -> int:
    """The length of the lowest run of ones."""
    shifted = leaf >> ((leaf & -leaf).bit_length() - 1)
    return ((shifted + 1) & -(shifted + 1)).bit_length() - 1


def _tables(
    blocks: NestedBlocks, known: dict[tuple[int, int], Tables], digits: int, ones: int, limit: int
) -> Tables:
    """Tables of the first `limit` balanced leaves below a node with so many digits to go."""
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
    """Count the blocks in use by level and size, among the first `limit` leaves."""
    queue: Counter[tuple[int, int, int]] = Counter({(digits, ones, limit): times})
    for level in reversed(range(digits)):
        below: Counter[tuple[int, int, int]] = Counter()
        for (_, ones_here, first), copies in queue.items():
            lower = math.comb(level, ones_here)
            if lower:
                below[level, ones_here, min(first, lower)] += copies
            if ones_here and lower <= first:
                if lower:
                    levels[level][lower] += copies
                if first > lower:
                    below[level, ones_here - 1, first - lower] += copies
        queue = below
