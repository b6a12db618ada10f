"""Sensitivity of tree strategies: the square root of a whole number.

Every row of the strategy sums one block of rounds. The squared norm of a pattern is the sum, over
all blocks, of the square of the number of its rounds in the block.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import Final

import numpy as np
from flint import arb

from dpftrl.errors import TooLarge
from dpftrl.participation import FixedEpochs, Participation
from dpftrl.verify.rigorous.toeplitz import spend
from dpftrl.verify.sensitivity import Limits, block_tree, largest_nested_square

Span = tuple[int, int]  # the first round of a block, and the round after its last

MOST_BLOCKS: Final = 300_000  # so many blocks take a few seconds
MOST_PAIRS: Final = 1e9  # pairs of rounds, times levels: a few seconds


def binary_tree_levels(rounds: int) -> list[list[Span]]:
    """Return the complete blocks of 2^l rounds, for every level l."""
    if 2 * rounds > MOST_BLOCKS:
        raise TooLarge(f"the tree has about {2 * rounds:,} blocks")
    return [
        [(start, start + (1 << level)) for start in range(0, rounds - (1 << level) + 1, 1 << level)]
        for level in range(rounds.bit_length())
    ]


def smooth_tree_levels(height: int, rounds: int) -> list[list[Span]]:
    """Return the blocks in use of a smooth tree, by the position of their last binary digit.

    Round t belongs to the leaf with number t among those with `height` / 2 ones. The prefix of t
    rounds uses a block for every digit 1 of leaf t: the leaves that agree with it in all higher
    digits and have a 0 in its place.
    """
    if rounds * height > MOST_BLOCKS:
        raise TooLarge(f"the tree has about {rounds * height:,} blocks")
    leaves = [(1 << height // 2) - 1]
    for _ in range(rounds):  # the next larger number with the same number of ones
        lowest = leaves[-1] & -leaves[-1]
        carried = leaves[-1] + lowest
        leaves.append(carried | ((leaves[-1] ^ carried) >> 2) // lowest)
    levels = list[list[Span]]()
    for digit in range(height):
        used = [(leaf >> digit) ^ 1 for leaf in leaves[1:] if leaf >> digit & 1]
        prefixes = [leaf >> digit for leaf in leaves]
        spans = [
            (bisect_left(prefixes, prefix), bisect_left(prefixes, prefix + 1))
            for prefix, _ in groupby(used)
        ]
        levels.append([(start, stop) for start, stop in spans if start < stop])
    return levels


def tree_sensitivity(levels: Sequence[Sequence[Span]], participation: Participation) -> arb:
    """Return the sensitivity of the strategy with these blocks.

    Args:
        levels: The blocks. Those of one level are disjoint.
        participation: The rounds that one client may take part in.

    Raises:
        TooLarge: The search over all patterns takes too long.
    """
    return arb(_largest_square(levels, participation)).sqrt()


def _largest_square(levels: Sequence[Sequence[Span]], participation: Participation) -> int:
    if isinstance(participation, FixedEpochs):
        patterns = participation.pattern_count()
        spend(patterns * participation.max_participations * len(levels))
        return max(_square(levels, pattern) for pattern in participation.patterns())
    attained = _square(levels, participation.earliest())
    limits = Limits(participation.rounds, participation.min_sep, participation.max_participations)
    bound = sum(_level_bound(level, limits) for level in levels)
    if attained == bound:
        return bound
    if limits.max_participations <= 2:
        return _largest_pair(levels, limits)
    root = block_tree([span for level in levels for span in level], participation.rounds)
    square = None if root is None else largest_nested_square(root, limits)
    if square is None:
        raise TooLarge("the search over all patterns of the tree takes too long")
    return square


def _largest_pair(levels: Sequence[Sequence[Span]], limits: Limits) -> int:
    """Return the largest sum of squares of two rounds, or of one, by trying all of them."""
    rounds = limits.rounds
    gap = limits.min_sep if limits.max_participations > 1 else rounds
    block_of = np.full((len(levels), rounds), -1)  # the block of each round in each level, or -1
    for blocks, level in zip(block_of, levels, strict=True):
        for number, (start, stop) in enumerate(level):
            blocks[start:stop] = number
    is_inside = block_of >= 0
    alone = is_inside.sum(axis=0)
    largest = int(alone.max())
    if (rounds - gap) ** 2 * len(levels) > MOST_PAIRS:
        raise TooLarge("the search over all pairs of rounds of the tree takes too long")
    for first in range(rounds - gap):
        later = slice(first + gap, rounds)
        same = is_inside[:, later] & (block_of[:, later] == block_of[:, [first]])
        squares = alone[first] + alone[later] + 2 * same.sum(axis=0)
        largest = max(largest, int(squares.max()))
    return largest


def _square(levels: Sequence[Sequence[Span]], pattern: Sequence[int]) -> int:
    """Return the sum of squares of one pattern, which is sorted."""
    return sum(
        (bisect_left(pattern, stop) - bisect_left(pattern, start)) ** 2
        for level in levels
        for start, stop in level
    )


def _level_bound(level: Sequence[Span], limits: Limits) -> int:
    """Bound the sum of squares over disjoint blocks.

    A block of m rounds has at most m / min-sep of them, rounded up, and all blocks together have at
    most as many as one client. Squares are convex, so the bound fills the largest blocks first.
    """
    left, total = limits.max_participations, 0
    for size in sorted((stop - start for start, stop in level), reverse=True):
        inside = min(left, -(-size // limits.min_sep))
        left -= inside
        total += inside * inside
    return total
