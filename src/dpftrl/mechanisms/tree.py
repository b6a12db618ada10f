"""Tree aggregation: noise on the sums of dyadic blocks of rounds.

A node is a complete dyadic block: 2^l consecutive rounds that start at a multiple of 2^l. Each node
has one row of Z. Rows are assigned in the order in which nodes are completed: in each round first
the leaf of the round, then every block that ends with this round, from small to large.
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
    """TreeAgg: a prefix sum is the sum of at most log2(n) noisy blocks.

    Attributes:
        refine: Whether to combine the noisy sum of a block with the noisy sums of the blocks
            inside it (Honaker's partial variance reduction, the way TreeAgg is used in practice).
            False uses the noisy sum of the block alone.
    """

    family = "tree"
    sensitivity_cost = "medium"
    has_jagged_error = True

    refine: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.refine, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(f"refine must be true or false, got {self.refine!r}")

    @property
    def name(self) -> str:
        """`tree`, or `tree-vanilla`."""
        return "tree" if self.refine else "tree-vanilla"

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Sensitivity of the tree; see `_tree_sensitivity.nested_sensitivity`."""
        return tree_sensitivity(participation)

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """Root of the sum, over nodes, of the squared number of participations in each."""
        return tree_pattern_norm(pattern, self.check_rounds(rounds))

    def _own_weight(self, level: int) -> float:
        """Weight of a node's own noisy sum in its estimate; also the variance of that estimate.

        The other part of the estimate is the sum of the children's estimates, which has twice the
        variance of one child. Weighting both by inverse variance gives 2^l / (2^(l+1) - 1).
        """
        return 1 / (2 - 0.5**level) if self.refine else 1.0

    def error_curve(self, rounds: int) -> Vector:
        """Sum the variances of the blocks of each prefix: one per binary digit 1 of its length."""
        count = np.arange(1, self.check_curve(rounds) + 1)
        variance = np.zeros(rounds)
        for level in range(rounds.bit_length()):
            variance += self._own_weight(level) * (count >> level & 1)
        return np.sqrt(variance)

    def max_error(self, rounds: int) -> float:
        """Error of the worst prefix.

        Its length is n itself, or it agrees with n in all binary digits above some digit 1 of n,
        has a 0 in place of that digit, and has only ones below it.
        """
        worst, above = 0.0, 0.0
        for level in reversed(range(self.check_rounds(rounds).bit_length())):
            if rounds >> level & 1:
                worst = max(worst, above + sum(map(self._own_weight, range(level))))
                above += self._own_weight(level)
        return max(worst, above) ** 0.5

    def rms_error(self, rounds: int) -> float:
        """Root mean square error, by counting how often each digit of the prefix length is 1."""
        total = 0.0
        for level in range(self.check_rounds(rounds).bit_length()):
            cycles, rest = divmod(rounds + 1, 2 << level)
            ones = (cycles << level) + max(0, rest - (1 << level))
            total += ones * self._own_weight(level)
        return (total / rounds) ** 0.5

    def rounding_gain(self, rounds: int) -> float:
        """Bound from the estimates of blocks, from small to large.

        The estimate of a block of 2^l rounds is a sum of 2l + 1 products, each rounded. So is the
        noise of the round that completes it. That noise is the estimate minus the estimates of the
        merged blocks, so that their errors add up in it. A shift of the block's own row of Z has
        the same effect. Without refinement, estimates are rows of Z, which storing does not round.
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
        """One vector for each block that a prefix can consist of: ceil(log2 n)."""
        return (self.check_rounds(rounds) - 1).bit_length()

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """The buffers are the estimates of the blocks of the prefix so far, the largest first."""
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
        """One row per node, with ones in the rounds of its block."""
        return tree_strategy(self.check_dense(rounds))

    def decoder(self, rounds: int) -> Matrix:
        """Differences of neighboring prefix estimates, as combinations of nodes."""
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
        """Whether estimates are refined."""
        return {"refine": self.refine}


@final
@dataclass(frozen=True)
class FullTree(Mechanism):
    """TreeAgg-Full: Honaker's full variance reduction, the best decoder of the same tree.

    The best decoder is the pseudoinverse of the tree's strategy T, but it uses nodes that are not
    complete yet. The lower-triangular matrix L with L^T L = T^T T has the same sensitivity, and its
    inverse gives the same noise covariance (T^T T)^-1. L^-1 is causal, so this mechanism uses
    C = L.
    """

    family = "tree-full"
    sensitivity_cost = "high"
    has_jagged_error = True

    n: int

    def __init__(self, rounds: int):
        object.__setattr__(self, "n", whole_number("rounds", rounds))

    @property
    def rounds(self) -> int:
        """Number of rounds that the tree was built for."""
        return self.n

    @cached_property
    def _factor(self) -> Matrix:
        """L, from the Cholesky factor of T^T T with rows and columns in reverse order."""
        if self.n > DENSE_LIMIT:
            raise TooLarge(
                f"a stream of tree-full needs an n x n matrix, which is limited to {DENSE_LIMIT} "
                f"rounds, got {self.n}; use tree or blt"
            )
        factor = np.zeros((self.n, self.n))
        for start, stop in largest_blocks(self.n):
            tree = tree_strategy(stop - start)
            gram = (tree.T @ tree)[::-1, ::-1]
            factor[start:stop, start:stop] = np.linalg.cholesky(gram)[::-1, ::-1].T
        factor.flags.writeable = False
        return factor

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Sensitivity of the tree; an upper bound for fewer rounds than it was built for."""
        rounds = self.check_rounds(participation.rounds)
        kind = FixedEpochs if isinstance(participation, FixedEpochs) else MinSep
        all_rounds = kind(self.n, participation.min_sep, participation.max_participations)
        sensitivity = tree_sensitivity(all_rounds)
        if rounds == self.n:
            return sensitivity
        earliest = participation.earliest()
        attained = np.linalg.norm(self._factor[:rounds, :rounds][:, earliest].sum(axis=1))
        return Sensitivity.between(float(attained), sensitivity.value, earliest)

    def _pattern_norm(self, pattern: Pattern, rounds: int) -> float:
        """Norm of the pattern in the tree; a bound for fewer rounds than it was built for."""
        self.check_rounds(rounds)
        return tree_pattern_norm(pattern, self.n)

    def error_curve(self, rounds: int) -> Vector:
        """Square roots of the prefix variances 1_t^T (T^T T)^-1 1_t, from half trees to trees.

        A complete tree of 2m leaves has the Gram matrix diag(G, G) + 1 1^T, where G is the Gram
        matrix of a half. All row sums of a Gram matrix are equal: 4m - 1 for 2m leaves. The
        Sherman-Morrison formula then gives the variances of the tree from those of a half.
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
        """One vector for every earlier round."""
        return self.check_rounds(rounds) - 1

    @property
    def memory_grows(self) -> bool:
        """True: every round needs the noise of all earlier rounds."""
        return True

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        row_of_c = self._factor[state.round, state.round :: -1]
        return forward_substitution(state, rows, row_of_c, keep=state.round + 1)

    def strategy(self, rounds: int) -> Matrix:
        """The first `rounds` rows and columns of L."""
        return self._factor[: self.check_dense(rounds), :rounds].copy()

    def decoder(self, rounds: int) -> Matrix:
        """The first `rounds` rows and columns of L^-1."""
        return invert_lower(self.strategy(rounds))

    def parameters(self) -> dict[str, Any]:
        """The number of rounds that the tree was built for."""
        return {"rounds": self.n}


def trailing_zeros(count: int) -> int:
    """Number of zeros at the end of a positive number in binary."""
    return (count & -count).bit_length() - 1


def nodes(rounds: int) -> Iterator[tuple[int, int]]:
    """Yield the complete dyadic blocks as (start, stop), in the order of their rows of Z."""
    for count in range(1, rounds + 1):
        for level in range(trailing_zeros(count) + 1):
            yield count - (1 << level), count


def largest_blocks(rounds: int) -> Iterator[tuple[int, int]]:
    """Yield the largest complete blocks, one for each binary digit 1 of the number of rounds."""
    start = 0
    for level in reversed(range(rounds.bit_length())):
        if rounds >> level & 1:
            yield start, start + (1 << level)
            start += 1 << level


def tree_strategy(rounds: int) -> Matrix:
    """The matrix T: one row per node, with ones in the rounds of its block."""
    blocks = list(nodes(rounds))
    dense = np.zeros((len(blocks), rounds))
    for row, (start, stop) in enumerate(blocks):
        dense[row, start:stop] = 1.0
    return dense


@lru_cache(maxsize=64)
def tree_sensitivity(participation: Participation) -> Sensitivity:
    """Sensitivity of the strategy T over the rounds of the participation."""
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
    """Root of the sum, over complete blocks, of the squared number of participations in each."""
    participations, total = np.asarray(pattern, dtype=np.int64), 0
    for level in range(rounds.bit_length()):
        block = participations >> level
        complete = block[block < rounds >> level]
        total += int((np.unique(complete, return_counts=True)[1] ** 2).sum())
    return total**0.5
