"""What rounding in the noise buffers adds to mu, from the mechanism's own steps.

The stream keeps float64 buffers between rounds. A buffer that is not a row of noise or of Z itself
is rounded when it is stored, and the rounding depends on the noise. `docs/guarantees.md` shows that
this costs no more than moving Z by a further vector, and how long that vector can be. Here its
length is found by following every single rounding through all later rounds.
"""

import math
from typing import Final

import numpy as np

from dpftrl._internal.arrays import Matrix
from dpftrl.mechanisms import Mechanism, StreamState

# Float64's relative rounding, the largest normal that the sampler makes, and coordinates x rounds.
# The radius has 76 random bits, and half of the last one more: its smallest uniform is 2^-77.
UNIT_ROUNDOFF: Final = 2.0**-53
LARGEST_NORMAL: Final = math.sqrt(2 * 77 * math.log(2))
MOST_DRAWS: Final = 2.0**40
# No mechanism takes more rows of Z in one round.
MOST_FRESH: Final = 128
PROBES: Final = 4


def rounding_of(shift: float, rounds: int, mu: float) -> float:
    """What is added to an ideal mu where rounding can shift Z by so much in one coordinate."""
    share = 2 * UNIT_ROUNDOFF * math.sqrt(MOST_DRAWS / rounds) * shift
    return (mu + share * LARGEST_NORMAL) / (1 - share) - mu


def worst_shift(mechanism: Mechanism, rounds: int) -> float:
    """The norm over rounds by which rounding can shift Z, in units of one rounding of a normal."""
    if _stores_exactly(mechanism, rounds):
        return 0.0
    content = np.zeros((0, 0))  # buffers (down) by rows of Z (across)
    errors, sizes = np.zeros((0, 0)), np.zeros(0)  # buffers by roundings, and how large those are
    next_row, squares, once = 0, 0.0, mechanism.rounds_buffers_once
    for round_ in range(rounds):
        noise, after, fresh = _weights(mechanism, round_, next_row, len(content))
        kept = len(content)
        pivot = kept + int(np.argmax(np.abs(noise[kept:])))
        # A change of one fresh row of Z makes up for what the errors do to the noise.
        change = -(noise[:kept] @ errors) / noise[pivot]
        squares += float(np.abs(change) @ sizes) ** 2
        errors = after[:, :kept] @ errors + np.outer(after[:, pivot], change)
        limits = np.append(np.abs(content).sum(axis=1), np.ones(fresh))
        content = np.hstack([after[:, :kept] @ content, after[:, kept:]])
        new = [
            (j, float(np.abs(content[j]).sum()) if once else _rounding(after[j], limits))
            for j in range(len(after))
            if not _is_exact(after[j], noise)
        ]
        added = np.zeros((len(after), len(new)))
        for column, (buffer, _) in enumerate(new):
            added[buffer, column] = 1.0
        errors = np.hstack([errors, added])
        sizes = np.append(sizes, [size for _, size in new])
        next_row += fresh
    return math.sqrt(squares)


def _rounding(row: Matrix, limits: Matrix) -> float:
    """How many roundings of a normal a buffer takes that is rounded after each of its products."""
    return float(np.count_nonzero(row) * (np.abs(row) @ limits))


def _is_exact(row: Matrix, noise: Matrix) -> bool:
    """Whether a buffer is the noise, or a number that was there before."""
    return bool(np.array_equal(row, noise)) or (row.max() == 1 and np.count_nonzero(row) == 1)


def _weights(
    mechanism: Mechanism, round_: int, next_row: int, kept: int
) -> tuple[Matrix, Matrix, int]:
    """Noise and new buffers as weights of old buffers and fresh rows, and how many those are."""
    units = np.eye(kept + MOST_FRESH)
    state = StreamState(round_, next_row, units[:kept])
    noise, after = mechanism.step(state, lambda row: units[kept + row - next_row])
    fresh = after.next_row - next_row
    return noise[: kept + fresh], after.buffers[:, : kept + fresh], fresh


def _stores_exactly(mechanism: Mechanism, rounds: int) -> bool:
    """Whether every buffer is a row of noise or of Z, seen by sending random numbers through."""
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((MOST_FRESH, PROBES))
    state = mechanism.init(PROBES)
    for _ in range(rounds):
        fresh = {state.next_row + i: row for i, row in enumerate(rows)}
        known = {row.tobytes() for row in (*state.buffers, *rows)}
        noise, state = mechanism.step(state, fresh.__getitem__)
        if any(
            row.tobytes() not in known and row.tobytes() != noise.tobytes() for row in state.buffers
        ):
            return False
        rows = generator.standard_normal((MOST_FRESH, PROBES))
    return True
