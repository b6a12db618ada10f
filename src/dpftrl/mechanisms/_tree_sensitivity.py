"""Sensitivity of tree strategies: an exact dynamic programme over nested blocks of rounds.

Each row of a tree strategy sums one block of consecutive rounds, and any two blocks are nested or
disjoint. A pattern then moves the release by the square root of the sum, over blocks, of the
squared number of participations inside. `Tables` describe one block by what patterns inside it can
reach; blocks are built from single rounds with `leaf`, `concat` and `count`.

For j participations worth v inside a block, the rest needs to know only how they push later ones
away: a function from the first offset allowed in this block to the first allowed in the next.
Placing one block behind another composes these functions, and a pattern is dominated by one of the
same count that is worth as much and never pushes further.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import TooLarge
from dpftrl.mechanisms._sensitivity import MOST_PATTERNS, Sensitivity
from dpftrl.participation import FixedEpochs, Participation, Pattern

# Table entries after which the programme gives way to a bound: under a minute on slow machines.
MOST_WORK = 1_000_000_000
# The longest pattern, and the largest separation, for which there is a table.
MOST_ROUNDS = 10_000_000
# What one numpy call costs, in table entries.
CALL_COST = 3_000


@final
@dataclass(frozen=True)
class Choices:
    """What j participations in a block can be worth, and how each pushes later ones away.

    Attributes:
        values: Sums of squares, decreasing.
        pushes: pushes[i, a] is the first offset allowed behind the block when offset a is the first
            allowed in it. The last index stands for "not possible", and leads to itself.
    """

    values: NDArray[np.int64]
    pushes: NDArray[np.int32]


Tables = dict[int, Choices]


@final
class NestedBlocks:
    """Builds the tables of blocks for one min-sep and one cap on participations."""

    def __init__(self, min_sep: int, max_participations: int):
        self._gap = min_sep
        self._most = max_participations
        self._work = 0

    def leaf(self) -> Tables:
        """A single round, which no strategy row covers yet."""
        offsets = np.arange(self._gap + 1, dtype=np.int32)
        idle = np.maximum(offsets - 1, 0)
        idle[self._gap] = self._gap
        taken = np.full(self._gap + 1, self._gap, dtype=np.int32)
        taken[0] = self._gap - 1
        zero, one = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        return {0: Choices(zero, idle[None]), 1: Choices(one, taken[None])}

    def count(self, block: Tables) -> Tables:
        """The same block, now summed by one more row: j participations are worth j squared more."""
        return {j: Choices(table.values + j * j, table.pushes) for j, table in block.items()}

    def concat(self, first: Tables, second: Tables) -> Tables:
        """Two neighbouring blocks as one."""
        found: dict[int, list[Choices]] = {}
        for i, left in first.items():
            for j, right in second.items():
                if i + j <= self._most:
                    self._spend(left, right)
                    values = left.values[:, None] + right.values[None, :]
                    pushes = right.pushes[:, left.pushes].swapaxes(0, 1)
                    flat = pushes.reshape(-1, self._gap + 1)
                    found.setdefault(i + j, []).append(Choices(values.ravel(), flat))
        merged = {j: _without_dominated(choices) for j, choices in found.items()}
        return {j: table for j, table in merged.items() if len(table.values)}

    def best(self, block: Tables) -> int:
        """The largest sum of squares over all patterns in the block."""
        return max(int(table.values[0]) for table in block.values())

    def _spend(self, left: Choices, right: Choices) -> None:
        entries = len(left.values) * len(right.values) * (self._gap + 1)
        self._work += entries + CALL_COST
        if self._work > MOST_WORK:
            raise TooLarge("the exact programme over these blocks would take over a minute")


def _without_dominated(choices: Sequence[Choices]) -> Choices:
    """For each value the least push of all worth as much, where that is an advance."""
    values = np.concatenate([choice.values for choice in choices])
    pushes = np.concatenate([choice.pushes for choice in choices])
    order = np.argsort(-values, kind="stable")
    values, least = values[order], np.minimum.accumulate(pushes[order], axis=0)
    last_of_value = np.append(np.diff(values) != 0, True)
    values, least = values[last_of_value], least[last_of_value]
    impossible = least.shape[1] - 1
    advance = np.any(np.diff(least, axis=0, prepend=impossible) < 0, axis=1)
    return Choices(values[advance], least[advance])


def nested_sensitivity(
    participation: Participation,
    build: Callable[[NestedBlocks], Tables],
    pattern_norm: Callable[[Pattern], float],
    block_sizes: Sequence[dict[int, int]],
) -> Sensitivity:
    """Sensitivity of a strategy of nested blocks.

    Args:
        participation: Which rounds one client may take part in.
        build: Makes the tables of the whole strategy.
        pattern_norm: What one pattern contributes.
        block_sizes: For each level of disjoint blocks, how many there are of each size.

    Guarantees:
        Strategies of zeros and ones attain the sum of squares with updates that all point one way,
        so the programme is exact. Where it would take over a minute, each level's share is bounded
        on its own: a block of m rounds holds at most ceil(m / min_sep) of the participations.
    """
    few = isinstance(participation, FixedEpochs) and participation.pattern_count() <= MOST_PATTERNS
    if few:
        worst = max(participation.patterns(), key=pattern_norm)
        return Sensitivity.exact(pattern_norm(worst), worst)
    most = participation.max_participations
    earliest = participation.earliest() if most <= MOST_ROUNDS else None
    attained = (
        most**0.5 if earliest is None else pattern_norm(earliest)
    )  # leaves alone count so much
    bound = sum(_level_bound(sizes, participation) for sizes in block_sizes) ** 0.5
    quick = Sensitivity.between(attained, bound, earliest)
    if quick.kind == "exact" or min(participation.min_sep, participation.rounds) > MOST_ROUNDS:
        return quick
    blocks = NestedBlocks(
        min(participation.min_sep, participation.rounds), participation.max_participations
    )
    try:
        best = blocks.best(build(blocks)) ** 0.5
    except TooLarge:
        return quick
    if isinstance(participation, FixedEpochs):  # exact for any gaps of at least so many rounds
        return Sensitivity.between(attained, best, earliest)
    return Sensitivity.exact(best)


def _level_bound(sizes: dict[int, int], participation: Participation) -> int:
    """Spread the participations over disjoint blocks, the fullest first."""
    left, total = participation.max_participations, 0
    for size in sorted(sizes, reverse=True):
        room = min(left, -(-size // participation.min_sep))
        full = min(sizes[size], left // room) if room else 0
        total += full * room * room
        left -= full * room
        if full < sizes[size]:  # what is left fits into one more block of this size
            return total + left * left
    return total
