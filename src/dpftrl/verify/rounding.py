"""The cost of rounding in the noise buffers: what it adds to mu.

The noise stream keeps float64 buffers between rounds. A buffer is rounded when it is stored, unless
it is a row of the noise or of Z itself. The rounding depends on the noise. `docs/guarantees.md`
shows that it costs no more than a shift of Z by a further vector, and bounds the norm of that
vector. This module computes the norm in another way than the library: it follows every single
rounding error through all later rounds.
"""

import math
from typing import Final

import numpy as np

from dpftrl._internal.arrays import Matrix
from dpftrl.mechanisms import Mechanism, StreamState

UNIT_ROUNDOFF: Final = 2.0**-53  # the relative rounding error of float64
# The largest normal that the sampler returns: the radius has 76 random bits, and the sampler adds
# half of the last bit, so that the smallest uniform is 2^-77.
LARGEST_NORMAL: Final = math.sqrt(2 * 77 * math.log(2))
MOST_DRAWS: Final = 2.0**40  # the largest number of normals in a run (coordinates times rounds)
MOST_FRESH: Final = 128  # no mechanism reads more new rows of Z in one round
PROBES: Final = 4  # random coordinates that are sent through the stream


def rounding_cost(shift: float, rounds: int, mu: float) -> float:
    """Return what rounding adds to mu.

    Args:
        shift: The norm by which rounding can shift one coordinate of Z; see `worst_shift`.
        rounds: The number of rounds.
        mu: The mu without rounding.
    """
    share = 2 * UNIT_ROUNDOFF * math.sqrt(MOST_DRAWS / rounds) * shift
    return (mu + share * LARGEST_NORMAL) / (1 - share) - mu


def worst_shift(mechanism: Mechanism, rounds: int) -> float:
    """Return the norm, over all rounds, by which rounding can shift one coordinate of Z.

    The unit is the rounding error of one normal.
    """
    if _stores_exactly(mechanism, rounds):
        return 0.0
    content = np.zeros((0, 0))  # weights: one row per buffer, one column per row of Z
    errors = np.zeros((0, 0))  # weights: one row per buffer, one column per rounding error
    sizes = np.zeros(0)  # the size of each rounding error
    next_row, squares, rounds_once = 0, 0.0, mechanism.rounds_buffers_once
    for round_ in range(rounds):
        noise, after, fresh = _step_weights(mechanism, round_, next_row, len(content))
        kept = len(content)
        pivot = kept + int(np.argmax(np.abs(noise[kept:])))
        # A change of one new row of Z compensates for the effect of the errors on the noise.
        change = -(noise[:kept] @ errors) / noise[pivot]
        squares += float(np.abs(change) @ sizes) ** 2
        errors = after[:, :kept] @ errors + np.outer(after[:, pivot], change)
        largest_inputs = np.append(np.abs(content).sum(axis=1), np.ones(fresh))
        content = np.hstack([after[:, :kept] @ content, after[:, kept:]])
        new_errors = [
            (
                j,
                float(np.abs(content[j]).sum())
                if rounds_once
                else _error_size(after[j], largest_inputs),
            )
            for j in range(len(after))
            if not _is_exact(after[j], noise)
        ]
        new_weights = np.zeros((len(after), len(new_errors)))
        for column, (buffer, _) in enumerate(new_errors):
            new_weights[buffer, column] = 1.0
        errors = np.hstack([errors, new_weights])
        sizes = np.append(sizes, [size for _, size in new_errors])
        next_row += fresh
    return math.sqrt(squares)


def _error_size(weights: Matrix, largest_inputs: Matrix) -> float:
    """Return the error of a buffer that is rounded after each of its products.

    The unit is the rounding error of one normal.
    """
    return float(np.count_nonzero(weights) * (np.abs(weights) @ largest_inputs))


def _is_exact(weights: Matrix, noise: Matrix) -> bool:
    """Return whether a buffer is stored exactly: it is the noise, or a copy of one input."""
    return bool(np.array_equal(weights, noise)) or (
        weights.max() == 1 and np.count_nonzero(weights) == 1
    )


def _step_weights(
    mechanism: Mechanism, round_: int, next_row: int, kept: int
) -> tuple[Matrix, Matrix, int]:
    """Return one step of the stream as weights of its inputs.

    The inputs are the old buffers and the new rows of Z.

    Returns:
        The weights of the noise, those of the new buffers (one row per buffer), and the number of
        new rows of Z that the step reads.
    """
    units = np.eye(kept + MOST_FRESH)
    state = StreamState(round_, next_row, units[:kept])
    noise, after = mechanism.step(state, lambda row: units[kept + row - next_row])
    fresh = after.next_row - next_row
    return noise[: kept + fresh], after.buffers[:, : kept + fresh], fresh


def _stores_exactly(mechanism: Mechanism, rounds: int) -> bool:
    """Return whether every buffer is a row of the noise or of Z.

    This is tested by sending random numbers through the stream.
    """
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((MOST_FRESH, PROBES))
    state = mechanism.init(PROBES)
    for _ in range(rounds):
        fresh = {state.next_row + i: row for i, row in enumerate(rows)}
        exact_rows = {row.tobytes() for row in (*state.buffers, *rows)}
        noise, state = mechanism.step(state, fresh.__getitem__)
        if any(
            row.tobytes() not in exact_rows and row.tobytes() != noise.tobytes()
            for row in state.buffers
        ):
            return False
        rows = generator.standard_normal((MOST_FRESH, PROBES))
    return True
