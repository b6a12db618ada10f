"""Sensitivity of tree strategies: an exact dynamic program over nested blocks of rounds.

Each row of a tree strategy sums one block of consecutive rounds, and any two blocks are nested or
disjoint. The norm of a pattern is the square root of the sum, over blocks, of the squared number of
participations inside the block. `Tables` describe what the patterns inside one block can attain.
They are built from single rounds with `leaf`, `concat` and `count`.

Take j participations inside a block, with a sum of squares v from the block and the blocks inside
it. Everything outside depends on them only through the *push*: the function that maps the first
offset allowed in this block to the first offset allowed in the next block. To place one block after
another is to compose these functions. A pattern is dominated if another one with the same j has at
least the same v and never pushes further; dominated patterns are dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import TooLarge
from dpftrl.mechanisms._sensitivity import MOST_PATTERNS, Sensitivity
from dpftrl.participation import FixedEpochs, Participation, Pattern

# Largest number of table entries of the exact program, which take under a minute on slow machines.
# Above this number a bound is used.
MOST_WORK = 1_000_000_000
# Longest pattern and largest min-sep for which tables are built. A push then takes 40 MB.
MOST_ROUNDS = 10_000_000
# Cost of one numpy call, in units of table entries.
CALL_COST = 3_000


@final
@dataclass(frozen=True)
class Choices:
    """The sums of squares that j participations in a block can attain, and their pushes.

    Attributes:
        values: Sums of squares, decreasing.
        pushes: pushes[i, a] is the first offset allowed in the next block if offset a is the first
            one allowed in this block. The last index means "not possible" and maps to itself.
    """

    values: NDArray[np.int64]
    pushes: NDArray[np.int32]


# The choices for each number of participations in a block.
Tables = dict[int, Choices]


@final
class NestedBlocks:
    """Builder of the tables of blocks, for one min-sep and one limit on participations."""

    def __init__(self, min_sep: int, max_participations: int):
        self._gap = min_sep
        self._most = max_participations
        self._work = 0

    def leaf(self) -> Tables:
        """Tables of a single round that no row of the strategy covers yet."""
        offsets = np.arange(self._gap + 1, dtype=np.int32)
        absent = np.maximum(offsets - 1, 0)
        absent[self._gap] = self._gap
        present = np.full(self._gap + 1, self._gap, dtype=np.int32)
        present[0] = self._gap - 1
        no_squares = np.zeros(1, dtype=np.int64)
        return {0: Choices(no_squares, absent[None]), 1: Choices(no_squares, present[None])}

    def count(self, block: Tables) -> Tables:
        """Tables of the block after one more row covers it: j participations add j squared."""
        return {j: Choices(table.values + j * j, table.pushes) for j, table in block.items()}

    def concat(self, first: Tables, second: Tables) -> Tables:
        """Tables of two neighboring blocks, taken as one block."""
        choices_by_count: dict[int, list[Choices]] = {}
        for i, left in first.items():
            for j, right in second.items():
                if i + j <= self._most:
                    self._spend(left, right)
                    values = left.values[:, None] + right.values[None, :]
                    pushes = right.pushes[:, left.pushes].swapaxes(0, 1)
                    flat = pushes.reshape(-1, self._gap + 1)
                    choices = Choices(values.ravel(), flat)
                    choices_by_count.setdefault(i + j, []).append(choices)
        merged = {j: _without_dominated(choices) for j, choices in choices_by_count.items()}
        return {j: table for j, table in merged.items() if len(table.values)}

    def best(self, block: Tables) -> int:
        """Largest sum of squares over all patterns in the block."""
        return max(int(table.values[0]) for table in block.values())

    def _spend(self, left: Choices, right: Choices) -> None:
        """Count the work of combining two tables, and raise `TooLarge` if it becomes too much."""
        entries = len(left.values) * len(right.values) * (self._gap + 1)
        self._work += entries + CALL_COST
        if self._work > MOST_WORK:
            raise TooLarge("the exact program over these blocks would take over a minute")


def _without_dominated(choices: Sequence[Choices]) -> Choices:
    """Keep, for each value, the least push among choices of at least that value.

    A value is dropped if a larger value has the same least push.
    """
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
        build: Builds the tables of the whole strategy.
        pattern_norm: Returns the norm of one pattern.
        block_sizes: For each level of disjoint blocks, the number of blocks of each size.

    Guarantees:
        A strategy of zeros and ones attains the sum of squares with updates that all point in the
        same direction, so the program is exact. If it would take over a minute, each level is
        bounded on its own: a block of m rounds contains at most ceil(m / min_sep) participations.
    """
    few = isinstance(participation, FixedEpochs) and participation.pattern_count() <= MOST_PATTERNS
    if few:
        worst = max(participation.patterns(), key=pattern_norm)
        return Sensitivity.exact(pattern_norm(worst), worst)
    most = participation.max_participations
    earliest = participation.earliest() if most <= MOST_ROUNDS else None
    # The leaves alone contribute the square root of the number of participations.
    attained = most**0.5 if earliest is None else pattern_norm(earliest)
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
    if isinstance(participation, FixedEpochs):
        # The program allows all gaps of at least min-sep, so that its result is only a bound here.
        return Sensitivity.between(attained, best, earliest)
    return Sensitivity.exact(best)


def _level_bound(sizes: dict[int, int], participation: Participation) -> int:
    """Bound on the sum of squares of one level: fill its disjoint blocks, the largest first."""
    left, total = participation.max_participations, 0
    for size in sorted(sizes, reverse=True):
        room = min(left, -(-size // participation.min_sep))
        full = min(sizes[size], left // room) if room else 0
        total += full * room * room
        left -= full * room
        if full < sizes[size]:  # the remaining participations fit into one more block of this size
            return total + left * left
    return total
