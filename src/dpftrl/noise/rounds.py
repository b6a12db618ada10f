"""One round of noise: which rows of Z it takes, what is mixed with them, and where that goes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.compiled import TILE
from dpftrl._internal.threads import parallel_map
from dpftrl.errors import TooLarge
from dpftrl.mechanisms import Mechanism, StreamState, ToeplitzMechanism
from dpftrl.noise.kernels import (
    add_normals,
    add_rounded,
    add_scaled,
    blt_step,
    blt_step_onto,
    mix_buffers,
)
from dpftrl.noise.key import BLOCK_BYTES, Keystream, NoiseKey
from dpftrl.noise.normals import TILE_BLOCKS
from dpftrl.noise.state import Buffer


@final
class DecoderRows:
    """Gives row t of D for t = 0, 1, ...; going back starts from the beginning."""

    def __init__(self, mechanism: Mechanism):
        self._mechanism = mechanism
        self._state = mechanism.init(1)

    def row(self, round_: int) -> Vector:
        """Weights of the rows of Z in the noise of this round."""
        if isinstance(self._mechanism, ToeplitzMechanism):
            return self._mechanism.inverse_coefficients(round_ + 1)[::-1].copy()
        if self._state.round > round_:
            self._state = self._mechanism.init(1)
        noise = np.zeros(0)
        while self._state.round <= round_:
            noise = self._next()
        return noise

    def _next(self) -> Vector:
        """One reference step on unit vectors, of which there are as many as rows of Z so far."""
        state = self._state
        width = state.next_row + 128
        buffers = np.zeros((len(state.buffers), width))
        if state.round:
            buffers[:, : state.buffers.shape[1]] = state.buffers

        def unit(index: int) -> Vector:
            row = np.zeros(width)
            row[index] = 1.0
            return row

        start = StreamState(
            state.round, state.next_row, buffers if state.round else np.zeros((0, width))
        )
        noise, after = self._mechanism.step(start, unit)
        used = after.next_row
        self._state = StreamState(after.round, used, after.buffers[:, :used])
        return noise[:used]


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


Buffers = Sequence[Buffer]

# Coordinates whose keystream and noise are in cache together.
CHUNK_TILES: Final = 32
CHUNK: Final = CHUNK_TILES * TILE
CHUNK_BLOCKS: Final = CHUNK_TILES * TILE_BLOCKS
# Chunks that are not worth another thread.
SMALL_SHARE: Final = 4
# Shares a thread: one that is interrupted leaves the rest to the others.
SHARES: Final = 4
ZEROS: Final = bytes(CHUNK_BLOCKS * BLOCK_BYTES)


@final
class Scratch:
    """Room for the keystream and the noise of some tiles; as secret as they are."""

    def __init__(self, sums: int, tiles: int):
        size = tiles * TILE_BLOCKS * BLOCK_BYTES
        self.zeros = memoryview(ZEROS)[:size]
        # The cipher wants room for a block more than it writes.
        self.raw = bytearray(size + BLOCK_BYTES)
        self.words = np.frombuffer(self.raw, np.uint64, size // 8)
        self.tile = np.empty(TILE)
        self.coordinates = tiles * TILE
        self._sums = sums

    @cached_property
    def made(self) -> Matrix:
        """What is made of all the tiles: only some rounds want that much room."""
        return np.empty((self._sums, self.coordinates))

    def __repr__(self) -> str:
        return "Scratch(secret)"


@final
class Target:
    """Where noise goes: the arrays of an update, and how large a unit of noise is in them."""

    def __init__(self, parts: Sequence[NDArray[Any]], scale: float):
        self._scale = scale
        ends = list(accumulate(part.size for part in parts))
        self._parts = list(zip(parts, [0, *ends][: len(parts)], ends, strict=True))
        self._ends = ends

    def around(self, start: int, count: int) -> tuple[float, bool, NDArray[Any]] | None:
        """The unit, whether it is one of a grid, and the coordinates, if one array has them all."""
        place = bisect_right(self._ends, start)
        if place == len(self._ends) or self._ends[place] < min(start + count, self._ends[-1]):
            return None
        part, first, _ = self._parts[place]
        return self._scale, part.dtype == np.int64, part[start - first : start - first + count]

    def add(self, start: int, scratch: Scratch) -> None:
        """Add the noise of the coordinates from `start` on."""
        stop = start + scratch.coordinates
        for part, first, end in self._parts[bisect_right(self._ends, start) :]:
            if first >= stop:
                break
            a, b = max(first, start), min(end, stop)
            add = add_rounded if part.dtype == np.int64 else add_scaled
            add(scratch.made[0, a - start : b - start], self._scale, part[a - first : b - first])


class Round(Protocol):
    """What a round does, chunk by chunk.

    Attributes:
        rows: The keys of the rows of Z that it takes.
        sums: How many vectors it makes: the noise, and new buffers that are not made in place.
    """

    rows: Sequence[NoiseKey]
    sums: int

    def add(
        self, streams: Sequence[Keystream], start: int, scratch: Scratch, target: Target
    ) -> None:
        """Make the noise of the chunk that begins at `start`, and add it to the target."""
        ...


@final
class BltRound:
    """A round of a BLT, whose buffers change in place."""

    def __init__(self, row: NoiseKey, theta: Matrix, omega: Matrix, buffers: Buffers, size: int):
        self.rows: Sequence[NoiseKey] = (row,)
        self.sums = 1
        self._decays = (theta, omega)
        self._place = (addresses(buffers), size)
        self._like = buffers[0].array[:0]

    def add(
        self, streams: Sequence[Keystream], start: int, scratch: Scratch, target: Target
    ) -> None:
        """The paper's Algorithm 3."""
        streams[0].fill(scratch.zeros, scratch.raw)
        # No local name for words or noise: a traceback may show what those hold.
        here = (*self._decays, *self._place, start, self._like)
        where = target.around(start, scratch.coordinates)
        if where is None:
            blt_step(scratch.words, *here, scratch.made[0])
            target.add(start, scratch)
        else:
            blt_step_onto(scratch.words, *here, scratch.tile, *where)


@final
class LinearRound:
    """A round of any mechanism: a matrix times old buffers and rows of Z.

    Args:
        rows: Keys of the rows.
        weights: Row 0 gives the noise, the others the outputs; columns are inputs, then rows of Z.
        inputs: The old buffers.
        outputs: Where new buffers go.
        size: Coordinates.
    """

    def __init__(
        self,
        rows: Sequence[NoiseKey],
        weights: Matrix,
        inputs: Buffers,
        outputs: Buffers,
        size: int,
    ):
        self.rows = rows
        self.sums = len(weights)
        self._of_rows = [np.ascontiguousarray(column) for column in weights.T[len(inputs) :]]
        self._mix = (np.ascontiguousarray(weights), addresses(inputs), addresses(outputs), size)
        both = [*inputs, *outputs]
        self._like = both[0].array[:0] if both else None

    def add(
        self, streams: Sequence[Keystream], start: int, scratch: Scratch, target: Target
    ) -> None:
        """Rows of Z first, then the buffers."""
        scratch.made[:] = 0.0
        for stream, weights in zip(streams, self._of_rows, strict=True):
            stream.fill(scratch.zeros, scratch.raw)
            add_normals(scratch.words, weights, scratch.made)
        if self._like is not None:
            mix_buffers(*self._mix, start, self._like, scratch.made)
        target.add(start, scratch)


def run_round(made: Round, target: Target, size: int, threads: int) -> None:
    """Do all chunks, some at a time; the result does not depend on how many threads there are."""
    chunks = -(-size // CHUNK)
    share = max(-(-chunks // (SHARES * threads)), SMALL_SHARE)
    shares = [range(first, min(first + share, chunks)) for first in range(0, chunks, share)]
    parallel_map(partial(_run_chunks, made, target, -(-size // TILE)), shares, threads)


def _run_chunks(made: Round, target: Target, tiles: int, chunks: range) -> None:
    streams = [Keystream(row, chunks.start * CHUNK_BLOCKS) for row in made.rows]
    scratch = Scratch(made.sums, CHUNK_TILES)
    for chunk in chunks:
        left = tiles - chunk * CHUNK_TILES
        if left < CHUNK_TILES:
            scratch = Scratch(made.sums, left)
        made.add(streams, chunk * CHUNK, scratch, target)


def addresses(buffers: Buffers) -> NDArray[np.uint64]:
    """Where each of them lies."""
    return np.array([buffer.array.ctypes.data for buffer in buffers], dtype=np.uint64)
