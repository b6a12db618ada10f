"""What one round of a mechanism does to its buffers, as a matrix.

Every mechanism's stream is linear: noise and new buffers are weighted sums of old buffers and fresh
rows of Z, the same for every coordinate. Running the mechanism's own reference step on unit vectors
shows the weights, so that the fast stream holds no second description of any mechanism.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import TooLarge
from dpftrl.mechanisms import Mechanism, StreamState

Matrix = NDArray[np.float64]

# No mechanism takes more rows of Z in one round: trees take one a level.
MOST_FRESH = 128


@final
@dataclass(frozen=True)
class Transition:
    """One round.

    Attributes:
        weights: Row 0 gives the noise, the others the buffers that are computed anew. Columns are
            the old buffers, then the fresh rows of Z.
        buffers: The new buffers in order: for each, the old one that it is (0 and up), or which
            computed one (-1 for the first, -2 for the second, ...).
        fresh: How many rows of Z are taken.
    """

    weights: Matrix
    buffers: tuple[int, ...]
    fresh: int


def transition(mechanism: Mechanism, round_: int, next_row: int, kept: int) -> Transition:
    """What the given round does to `kept` buffers."""
    units = np.eye(kept + MOST_FRESH)

    def rows(index: int) -> NDArray[np.float64]:
        if not 0 <= index - next_row < MOST_FRESH:
            raise TooLarge(f"{mechanism.name} wants row {index} in round {round_}")
        return units[kept + index - next_row]

    noise, state = mechanism.step(StreamState(round_, next_row, units[:kept]), rows)
    fresh = state.next_row - next_row
    used = slice(0, kept + fresh)
    moved = [_same_as(row[:kept], row[kept:]) for row in state.buffers]
    computed = [row[used] for row, old in zip(state.buffers, moved, strict=True) if old is None]
    places = iter(range(-1, -len(computed) - 1, -1))
    return Transition(
        np.array([noise[used], *computed]),
        tuple(next(places) if old is None else old for old in moved),
        fresh,
    )


def _same_as(from_buffers: Matrix, from_rows: Matrix) -> int | None:
    """Which old buffer this is, unchanged; None if it is something else."""
    (used,) = np.nonzero(from_buffers)
    if from_rows.any() or len(used) != 1 or from_buffers[used[0]] != 1:
        return None
    return int(used[0])
