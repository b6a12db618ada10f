"""Tree aggregation: noise on the sums of dyadic blocks of rounds.

Nodes are the complete dyadic blocks inside the rounds made so far, and rows of Z belong to nodes in
the order in which they are completed: a round's own leaf first, then every block that it closes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.mechanisms._tree_sensitivity import NestedBlocks, Tables, nested_sensitivity
from dpftrl.mechanisms.base import (
    DENSE_LIMIT,
    ROUNDING_MARGIN,
    Matrix,
    Mechanism,
    Rows,
    StreamState,
    Vector,
)
from dpftrl.mechanisms.toeplitz import forward_substitution, invert_lower
from dpftrl.participation import FixedEpochs, MinSep, Participation, Pattern


@final
@dataclass(frozen=True)
class BinaryTree(Mechanism):
    """TreeAgg: a prefix sum is put together from at most log2(n) noisy blocks.

    Attributes:
        refine: Improve each block's sum by those of the blocks inside it, as far as they are known
            when it is completed (Honaker's partial variance reduction, the way TreeAgg is used in
            practice). False is the vanilla decoding.
    """

    family = "tree"

    refine: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.refine, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(f"refine must be true or false, got {self.refine!r}")

    @property
    def name(self) -> str:
        """`tree`, or `tree-vanilla`."""
        return "tree" if self.refine else "tree-vanilla"

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """See `dpftrl.mechanisms._tree_sensitivity.nested_sensitivity`."""
        return tree_sensitivity(participation)

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """The participations in each node, squared and added."""
        return tree_pattern_norm(pattern, self.check_rounds(rounds))

    def _own_weight(self, level: int) -> float:
        """The share of a node's own noise in its estimate, and the variance of that estimate.

        The estimate from below has twice the variance of a child's; weighing both by precision
        gives 2^l / (2^(l+1) - 1).
        """
        return 1 / (2 - 0.5**level) if self.refine else 1.0

    def error_curve(self, rounds: int) -> Vector:
        """The blocks of prefix t are the binary digits of t."""
        count = np.arange(1, self.check_curve(rounds) + 1)
        variance = np.zeros(rounds)
        for level in range(rounds.bit_length()):
            variance += self._own_weight(level) * (count >> level & 1)
        return np.sqrt(variance)

    def max_error(self, rounds: int) -> float:
        """The worst count up to n agrees with n down to some digit 1, and has only ones below."""
        worst, above = 0.0, 0.0
        for level in reversed(range(self.check_rounds(rounds).bit_length())):
            if rounds >> level & 1:
                worst = max(worst, above + sum(map(self._own_weight, range(level))))
                above += self._own_weight(level)
        return max(worst, above) ** 0.5

    def rms_error(self, rounds: int) -> float:
        """Each digit is 1 in a number of counts that is easy to tell."""
        total = 0.0
        for level in range(self.check_rounds(rounds).bit_length()):
            cycles, rest = divmod(rounds + 1, 2 << level)
            ones = (cycles << level) + max(0, rest - (1 << level))
            total += ones * self._own_weight(level)
        return (total / rounds) ** 0.5

    def rounding_gain(self, rounds: int) -> float:
        """From the estimates of larger and larger blocks.

        The estimate of a block of 2^l rounds is a sum of 2l + 1 products, each rounded, and so is
        the noise of the round that completes it. The noise is the estimate minus those of the
        blocks that it takes up, so that the errors of these add up in it; the row of Z of the block
        itself makes up for them. Vanilla estimates are rows of Z, which storing does not round.
        """
        self.check_rounds(rounds)
        if not self.refine:
            return 0.0
        sizes, errors, squares = [1.0], [0.0], 0.0
        for level in range(1, rounds.bit_length()):
            own = self._own_weight(level)
            size = own + (1 - own) * 2 * sizes[-1]
            merged = sum(errors)
            # At most one round in 2^l completes a block of that size and nothing larger.
            squares += rounds / (1 << level) * (merged / own) ** 2
            errors.append(merged + (2 * level + 1) * (2 * size + sum(sizes)))
            sizes.append(size)
        return squares**0.5 * ROUNDING_MARGIN

    def memory(self, rounds: int) -> int:
        """One vector for each block that a prefix can be made of: ceil(log2 n)."""
        return (self.check_rounds(rounds) - 1).bit_length()

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """Buffers hold the estimates of the blocks of the prefix so far, the largest first."""
        closed = trailing_zeros(state.round + 1)
        kept, merged = np.split(state.buffers, [len(state.buffers) - closed])
        estimate = rows(state.next_row)
        for level, sibling in enumerate(merged[::-1], start=1):
            own = self._own_weight(level)
            estimate = own * rows(state.next_row + level) + (1 - own) * (sibling + estimate)
        noise = estimate - merged.sum(axis=0)
        buffers = np.concatenate([kept, estimate[None]])
        return noise, StreamState(state.round + 1, state.next_row + closed + 1, buffers)

    def strategy(self, rounds: int) -> Matrix:
        """One row a node, with ones where it sums."""
        return tree_strategy(self.check_dense(rounds))

    def decoder(self, rounds: int) -> Matrix:
        """Differences of the prefix estimates, written in terms of nodes."""
        index = {node: row for row, node in enumerate(nodes(self.check_dense(rounds)))}
        estimates: dict[tuple[int, int], Vector] = {}
        for (start, stop), row in index.items():
            own = self._own_weight((stop - start).bit_length() - 1)
            estimate = own * np.eye(1, len(index), row)[0]
            if own < 1:
                middle = (start + stop) // 2
                below = estimates[start, middle] + estimates[middle, stop]
                estimate += (1 - own) * below
            estimates[start, stop] = estimate
        prefixes = np.zeros((rounds + 1, len(index)))
        for count in range(1, rounds + 1):
            size = 1 << trailing_zeros(count)
            prefixes[count] = prefixes[count - size] + estimates[count - size, count]
        return np.diff(prefixes, axis=0)

    def parameters(self) -> dict[str, Any]:
        """How it decodes."""
        return {"refine": self.refine}


@final
@dataclass(frozen=True)
class FullTree(Mechanism):
    """TreeAgg-Full: Honaker's full variance reduction, the best decoder of the same tree.

    The best decoder is the pseudoinverse of the tree's strategy T, which looks at nodes not yet
    complete. The square lower-triangular L with L^T L = T^T T has the same sensitivity and its
    inverse the same noise covariance (T^T T)^-1, and is causal: that is the C of this mechanism.
    """

    family = "tree-full"

    n: int

    def __init__(self, rounds: int):
        object.__setattr__(self, "n", whole_number("rounds", rounds))

    @property
    def rounds(self) -> int:
        """The whole tree must be known from the start."""
        return self.n

    @cached_property
    def _factor(self) -> Matrix:
        """L, from the Cholesky factor of T^T T turned around."""
        if self.n > DENSE_LIMIT:
            raise TooLarge(
                f"tree-full streams through an n x n matrix, kept to {DENSE_LIMIT} rounds, "
                f"got {self.n}; use tree, or blt"
            )
        factor = np.zeros((self.n, self.n))
        for start, stop in largest_blocks(self.n):
            tree = tree_strategy(stop - start)
            gram = (tree.T @ tree)[::-1, ::-1]
            factor[start:stop, start:stop] = np.linalg.cholesky(gram)[::-1, ::-1].T
        factor.flags.writeable = False
        return factor

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """That of the tree; a bound if fewer rounds are made than it was built for."""
        made = self.check_rounds(participation.rounds)
        kind = FixedEpochs if isinstance(participation, FixedEpochs) else MinSep
        whole = kind(self.n, participation.min_sep, participation.max_participations)
        found = tree_sensitivity(whole)
        if made == self.n:
            return found
        earliest = participation.earliest()
        attained = np.linalg.norm(self._factor[:made, :made][:, earliest].sum(axis=1))
        return Sensitivity.between(float(attained), found.value, earliest)

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """That of the tree (a bound if fewer rounds are made than it was built for)."""
        self.check_rounds(rounds)
        return tree_pattern_norm(pattern, self.n)

    def error_curve(self, rounds: int) -> Vector:
        """Prefix variances 1_t^T (T^T T)^-1 1_t, by halves.

        A complete tree of 2m leaves has the Gram matrix diag(G, G) + 1 1^T, and G 1 is constant:
        4m - 1 for the whole. The Sherman-Morrison formula then gives the variances of the whole
        from those of a half.
        """
        self.check_curve(self.n)
        curve, before = [np.zeros(0)], 0.0
        for start, stop in largest_blocks(self.n):
            variance = np.array([1.0])
            while (half := len(variance)) < stop - start:
                share = np.arange(1, 2 * half + 1) / (2 * half - 1)
                blocks = np.concatenate([variance, variance[-1] + variance])
                variance = blocks - share**2 * (2 * half - 1) / (4 * half - 1)
            curve.append(before + variance)
            before += variance[-1]
        return np.sqrt(np.concatenate(curve)[: self.check_rounds(rounds)])

    def memory(self, rounds: int) -> int:
        """Every earlier round, unless they are made again."""
        return self.check_rounds(rounds) - 1

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        row_of_c = self._factor[state.round, state.round :: -1]
        return forward_substitution(state, rows, row_of_c, keep=state.round + 1)

    def strategy(self, rounds: int) -> Matrix:
        """L, or the leading part of it."""
        return self._factor[: self.check_dense(rounds), :rounds].copy()

    def decoder(self, rounds: int) -> Matrix:
        """L^-1."""
        return invert_lower(self.strategy(rounds))

    def parameters(self) -> dict[str, Any]:
        """The rounds it was built for."""
        return {"rounds": self.n}


def trailing_zeros(count: int) -> int:
    """How often 2 divides a positive number."""
    return (count & -count).bit_length() - 1


def nodes(rounds: int) -> Iterator[tuple[int, int]]:
    """The complete dyadic blocks as (start, stop), in the order of their rows of Z."""
    for count in range(1, rounds + 1):
        for level in range(trailing_zeros(count) + 1):
            yield count - (1 << level), count


def largest_blocks(rounds: int) -> Iterator[tuple[int, int]]:
    """The trees of the forest: one for each binary digit 1 of the number of rounds."""
    start = 0
    for level in reversed(range(rounds.bit_length())):
        if rounds >> level & 1:
            yield start, start + (1 << level)
            start += 1 << level


def tree_strategy(rounds: int) -> Matrix:
    """T: one row a node, with ones where it sums."""
    blocks = list(nodes(rounds))
    dense = np.zeros((len(blocks), rounds))
    for row, (start, stop) in enumerate(blocks):
        dense[row, start:stop] = 1.0
    return dense


@lru_cache(maxsize=64)
def tree_sensitivity(participation: Participation) -> Sensitivity:
    """Sensitivity of the complete dyadic blocks within the rounds."""
    rounds = participation.rounds

    def build(blocks: NestedBlocks) -> Tables:
        trees = [blocks.count(blocks.leaf())]
        while len(trees) < rounds.bit_length():
            trees.append(blocks.count(blocks.concat(trees[-1], trees[-1])))
        forest = None
        for start, stop in largest_blocks(rounds):
            tree = trees[trailing_zeros(stop - start)]
            forest = tree if forest is None else blocks.concat(forest, tree)
        assert forest is not None  # there is at least one round
        return forest

    levels = range(rounds.bit_length())
    return nested_sensitivity(
        participation,
        build,
        pattern_norm=lambda pattern: tree_pattern_norm(pattern, rounds),
        block_sizes=[{1 << level: rounds >> level} for level in levels],
    )


def tree_pattern_norm(pattern: Sequence[int], rounds: int) -> float:
    """The participations in each complete dyadic block, squared and added."""
    taken, total = np.asarray(pattern, dtype=np.int64), 0
    for level in range(rounds.bit_length()):
        block = taken >> level
        complete = block[block < rounds >> level]
        total += int((np.unique(complete, return_counts=True)[1] ** 2).sum())
    return total**0.5
