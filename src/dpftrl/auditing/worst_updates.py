"""The updates of one client that a release shows best: what an attack on a mechanism looks for.

The release X + D Z has covariance D D^T, times the variance of Z. A client whose updates are u, one
number per round, moves it by sqrt(u^T F u) standard deviations with F = (D D^T)^-1. For a square C,
F is C^T C, and this is the norm of C u that the sensitivity bounds. Trees have more rows of Z than
rounds, so that a release shows less than C X + Z: no client attains their sensitivity.
"""

from collections.abc import Iterable, Sequence
from itertools import islice, product
from typing import Final, NamedTuple, final

import numpy as np

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms._sensitivity import brute_force_is_cheap
from dpftrl.participation import FixedEpochs, Participation, Pattern

# Patterns whose signs are searched, and the most passes over the signs and places of one of them.
MOST_SEARCHED: Final = 64
MOST_PASSES: Final = 50
# Every choice of signs is tried for patterns of at most so many rounds.
MOST_ALL_SIGNS: Final = 8
# The most patterns that are tried where they are too many to try all.
MOST_TRIED: Final = 4096
# A change counts as better if it is better by more than rounding.
BETTER: Final = 1 + 1e-12


@final
class WorstUpdates(NamedTuple):
    """The updates of norm 1 of one client that a release shows best, of those that were found.

    Attributes:
        updates: One number per round: 1, -1, or 0 where the client takes no part.
        norm: By how many standard deviations they move the release, at noise multiplier 1. It is at
            most the sensitivity, and equal to it where the sensitivity is attained.
    """

    updates: Vector
    norm: float

    @property
    def pattern(self) -> Pattern:
        """The rounds in which the client takes part."""
        return tuple(np.flatnonzero(self.updates).tolist())


def information(mechanism: Mechanism, rounds: int) -> Matrix:
    """F = (D D^T)^-1: what a release with unit Z shows about the updates."""
    strategy = mechanism.strategy(rounds)
    if len(strategy) == rounds:
        return strategy.T @ strategy
    decoder = mechanism.decoder(rounds)
    return np.asarray(np.linalg.inv(decoder @ decoder.T), dtype=np.float64)


def worst_updates(
    mechanism: Mechanism, participation: Participation, shown: Matrix | None = None
) -> WorstUpdates:
    """Search for the updates of one client that the release shows best.

    Every allowed pattern is tried if there are few. Otherwise the pattern of the sensitivity, those
    that are exactly min-sep apart, and their neighbors are tried. Any result is a valid attack; a
    better one gives a larger lower bound.

    Args:
        mechanism: The mechanism.
        participation: In which rounds one client may take part.
        shown: The result of `information`, if it is known.
    """
    rounds = participation.rounds
    matrix = information(mechanism, rounds) if shown is None else shown
    candidates = list(_candidates(mechanism, participation))
    bounds = _sums(np.abs(matrix), candidates)
    plain = _sums(matrix, candidates)
    chosen = {*np.argsort(bounds)[-MOST_SEARCHED:].tolist(), int(plain.argmax())}
    found = [_with_best_signs(matrix, candidates[one]) for one in chosen]
    best = max(found, key=lambda one: one.norm)
    if brute_force_is_cheap(participation) or isinstance(participation, FixedEpochs):
        return best
    return _with_best_places(matrix, best, participation)


def _candidates(mechanism: Mechanism, participation: Participation) -> Iterable[Pattern]:
    yield participation.earliest()
    if (known := mechanism.sensitivity(participation).pattern) is not None:
        yield known
    if brute_force_is_cheap(participation):
        yield from participation.patterns()
        return
    epochs = FixedEpochs(
        participation.rounds, participation.min_sep, participation.max_participations
    )
    yield from islice(epochs.patterns(), MOST_TRIED)


def _sums(matrix: Matrix, patterns: Sequence[Pattern]) -> Vector:
    """The sum of the entries of the matrix in the rows and columns of each pattern."""
    sums = np.zeros(len(patterns))
    by_length = dict[int, list[int]]()
    for position, pattern in enumerate(patterns):
        by_length.setdefault(len(pattern), []).append(position)
    for positions in by_length.values():
        rounds = np.array([patterns[position] for position in positions])
        sums[positions] = matrix[rounds[:, :, None], rounds[:, None, :]].sum(axis=(1, 2))
    return sums


def _of(matrix: Matrix, updates: Vector) -> WorstUpdates:
    return WorstUpdates(updates, float(max(0.0, updates @ matrix @ updates)) ** 0.5)


def _with_best_signs(matrix: Matrix, pattern: Sequence[int]) -> WorstUpdates:
    """Try all signs of a short pattern; otherwise flip one at a time as long as the norm grows."""
    updates = np.zeros(len(matrix))
    updates[list(pattern)] = 1.0
    if len(pattern) <= MOST_ALL_SIGNS:
        signs = np.array(list(product([1.0, -1.0], repeat=len(pattern))))
        block = matrix[np.ix_(pattern, pattern)]
        squares = np.einsum("ij,jk,ik->i", signs, block, signs)
        updates[list(pattern)] = signs[int(squares.argmax())]
        return _of(matrix, updates)
    for _ in range(MOST_PASSES):
        pulls = matrix @ updates
        # Flipping sign i changes the squared norm by -4 u_i (F u)_i + 4 F_ii.
        gains = [4 * (matrix[i, i] - updates[i] * pulls[i]) for i in pattern]
        best = int(np.argmax(gains))
        if not gains[best] > (BETTER - 1) * abs(float(pulls @ updates)):
            break
        updates[pattern[best]] *= -1
    return _of(matrix, updates)


def _with_best_places(
    matrix: Matrix, start: WorstUpdates, participation: Participation
) -> WorstUpdates:
    """Move one participation at a time as long as the norm grows, and never against min-sep."""
    best, gap = start, participation.min_sep
    for _ in range(MOST_PASSES):
        before = best.norm
        for index in range(len(best.pattern)):
            pattern = best.pattern
            low = pattern[index - 1] + gap if index else 0
            high = (
                pattern[index + 1] - gap if index + 1 < len(pattern) else participation.rounds - 1
            )
            updates = best.updates.copy()
            sign, updates[pattern[index]] = updates[pattern[index]], 0.0
            places = np.arange(low, high + 1)
            gains = 2 * sign * (matrix[places] @ updates) + matrix[places, places]
            updates[places[int(gains.argmax())]] = sign
            if (moved := _of(matrix, updates)).norm > best.norm * BETTER:
                best = moved
        if not best.norm > before:
            break
    return best
