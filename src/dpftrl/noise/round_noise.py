"""One round of noise: the rows of Z that it uses, how it mixes them with buffers, and its output.

`NoiseState` is what a stream keeps between rounds: digests of the sums so far, and buffers.
`run_round` divides the coordinates into chunks and computes them in several threads. A `RoundWork`
says what to compute for one chunk: `BltRound` for buffers that decay, and `LinearRound` for any
other mechanism, with the weights that `transition` or `DecoderRows` derives from the mechanism's
own `step`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Final, NoReturn, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Array, Matrix, Vector
from dpftrl._internal.compiled import TILE
from dpftrl._internal.threads import parallel_map
from dpftrl.errors import TooLarge
from dpftrl.mechanisms import Mechanism, StreamState, ToeplitzMechanism
from dpftrl.noise._shard_kernels import add_to_shard, blt_step_of_shard, mix_buffers_of_shard
from dpftrl.noise.kernels import (
    add_normals,
    add_rounded,
    add_scaled,
    blt_step,
    blt_step_onto,
    mix_buffers,
)
from dpftrl.noise.key import BLOCK_BYTES, Keystream, NoiseKey, Secret
from dpftrl.noise.normals import TILE_BLOCKS

# Largest number of rows of Z that a mechanism uses in one round: trees use one per level, and have
# at most 128 levels.
MOST_FRESH: Final = 128
# Size of a chunk: its keystream and noise fit into the cache together.
CHUNK_TILES: Final = 32
CHUNK: Final = CHUNK_TILES * TILE
CHUNK_BLOCKS: Final = CHUNK_TILES * TILE_BLOCKS
# A share is the work that a thread takes at once. This is the smallest number of chunks in a share:
# fewer are not worth another thread.
SMALL_SHARE: Final = 4
# Number of shares per thread. There are several, so that other threads can take over from a slow
# one.
SHARES: Final = 4
ZEROS: Final = bytes(CHUNK_BLOCKS * BLOCK_BYTES)
# The digest before the first round.
NO_DIGEST: Final = Secret(b"")


@final
class Buffer:
    """A model-sized vector that is as secret as the noise, and so never printed."""

    __slots__ = ("array",)

    def __init__(self, array: Array):
        self.array = array

    def __repr__(self) -> str:
        return "Buffer(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Buffer cannot be pickled or copied")


@final
class NoiseState:
    """State of a noise stream between two rounds.

    Attributes:
        round: Number of rounds completed.
        digests: For each row of Z used so far, the digest of the sums that it covers.
        buffers: The mechanism's buffers, in the order of `StreamState.buffers`.
        next_row: Number of rows of Z used so far.
        last_digest: Digest of the last round; empty before the first.
    """

    __slots__ = ("buffers", "digests", "last_digest", "next_row", "round")

    def __init__(self, round_: int, digests: tuple[Secret, ...], buffers: list[Buffer]):
        self.round = round_
        self.digests = digests
        self.buffers = buffers
        self.next_row = len(digests)
        self.last_digest = digests[-1] if digests else NO_DIGEST

    def __repr__(self) -> str:
        return f"NoiseState(round={self.round}, secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NoiseState cannot be pickled or copied")

    @classmethod
    def start(cls) -> "NoiseState":
        """The state before the first round."""
        return cls(0, (), [])

    def after(self, digest: Secret, fresh: int, buffers: list[Buffer]) -> "NoiseState":
        """The state after one more round.

        Args:
            digest: Digest of the round.
            fresh: Number of new rows of Z that the round used.
            buffers: The buffers after the round.
        """
        return NoiseState(self.round + 1, self.digests + (digest,) * fresh, buffers)

    def tensors(self) -> dict[str, Array]:
        """The arrays of the state file.

        Never keep the result in a local variable: tracebacks may show local variables.
        """
        return {
            "digests": np.frombuffer(b"".join(d.secret_bytes() for d in self.digests), np.uint8),
            **{f"buffer-{i}": buffer.array for i, buffer in enumerate(self.buffers)},
        }


Buffers = Sequence[Buffer]


@final
class DecoderRows:
    """Computes rows of D in the order t = 0, 1, ...; for an earlier row it starts again at 0."""

    def __init__(self, mechanism: Mechanism):
        self._mechanism = mechanism
        self._state = mechanism.init(1)

    def row(self, round_: int) -> Vector:
        """Row `round_` of D: the weights of the rows of Z in the noise of that round."""
        if isinstance(self._mechanism, ToeplitzMechanism):
            return self._mechanism.inverse_coefficients(round_ + 1)[::-1].copy()
        if self._state.round > round_:
            self._state = self._mechanism.init(1)
        noise = np.zeros(0)
        while self._state.round <= round_:
            noise = self._next()
        return noise

    def _next(self) -> Vector:
        """Do one reference step with unit vectors as rows of Z, so that the noise is a row of D."""
        state = self._state
        width = state.next_row + MOST_FRESH
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


@final
@dataclass(frozen=True)
class Transition:
    """The linear map that one round applies to the buffers and the new rows of Z.

    Attributes:
        weights: Row 0 gives the noise, the other rows the buffers that must be computed. Columns
            are the old buffers, then the new rows of Z.
        buffers: For each new buffer, where it comes from: the index of the old buffer that it is
            equal to (0 and up), or -1 for the first computed buffer, -2 for the second, and so on.
        fresh: Number of new rows of Z.
    """

    weights: Matrix
    buffers: tuple[int, ...]
    fresh: int


def transition(mechanism: Mechanism, round_: int, next_row: int, kept: int) -> Transition:
    """The linear map of one round, found by a reference step on unit vectors.

    Args:
        mechanism: The mechanism.
        round_: The round.
        next_row: Number of rows of Z used before the round.
        kept: Number of buffers before the round.
    """
    units = np.eye(kept + MOST_FRESH)

    def rows(index: int) -> NDArray[np.float64]:
        if not 0 <= index - next_row < MOST_FRESH:
            raise TooLarge(
                f"{mechanism.name} needs row {index} of Z in round {round_}; a round can use only "
                f"{MOST_FRESH} rows, from {next_row} on"
            )
        return units[kept + index - next_row]

    noise, state = mechanism.step(StreamState(round_, next_row, units[:kept]), rows)
    fresh = state.next_row - next_row
    used = slice(0, kept + fresh)
    unchanged = [_same_as(row[:kept], row[kept:]) for row in state.buffers]
    computed = [row[used] for row, old in zip(state.buffers, unchanged, strict=True) if old is None]
    computed_index = iter(range(-1, -len(computed) - 1, -1))
    return Transition(
        np.array([noise[used], *computed]),
        tuple(next(computed_index) if old is None else old for old in unchanged),
        fresh,
    )


def _same_as(from_buffers: Matrix, from_rows: Matrix) -> int | None:
    """Index of the old buffer that a new buffer is equal to; None if it is a combination."""
    (used,) = np.nonzero(from_buffers)
    if from_rows.any() or len(used) != 1 or from_buffers[used[0]] != 1:
        return None
    return int(used[0])


@final
class Scratch:
    """Memory for the keystream and the noise of some tiles. It is as secret as they are."""

    def __init__(self, sums: int, tiles: int):
        # The cipher needs one block more than it writes.
        self.raw = np.empty(tiles * TILE_BLOCKS * BLOCK_BYTES + BLOCK_BYTES, np.uint8)
        self.tile = np.empty(TILE)
        self._sums = sums
        self.shorten(tiles)

    def shorten(self, tiles: int) -> None:
        """Use the memory for this many tiles, which are not more than before."""
        size = tiles * TILE_BLOCKS * BLOCK_BYTES
        self.zeros = memoryview(ZEROS)[:size]
        self.words = self.raw[:size].view(np.uint64)
        self.coordinates = tiles * TILE
        self.__dict__.pop("vectors", None)

    @cached_property
    def vectors(self) -> Matrix:
        """Memory for the noise and new buffers of all tiles; only some rounds need it."""
        return np.empty((self._sums, self.coordinates))

    def __repr__(self) -> str:
        return "Scratch(secret)"


@final
class Target:
    """The arrays that the noise is added to, and the factor that scales the noise for them."""

    def __init__(self, parts: Sequence[memoryview], scale: float):
        self._scale = scale
        ends = list(accumulate(len(part) for part in parts))
        self._parts = list(zip(parts, [0, *ends][: len(parts)], ends, strict=True))
        self._ends = ends

    def around(self, start: int, count: int) -> tuple[float, bool, memoryview] | None:
        """Find the `count` coordinates from `start` on in one array.

        Returns:
            The scale, whether the array counts grid steps, and its slice with the coordinates.
            None if they are in more than one array, or in none.
        """
        index = bisect_right(self._ends, start)
        if index == len(self._ends) or self._ends[index] < min(start + count, self._ends[-1]):
            return None
        part, first, _ = self._parts[index]
        piece = part[start - first : start - first + count]
        return self._scale, np.asarray(part).dtype == np.int64, piece

    def add(self, start: int, scratch: Scratch) -> None:
        """Add the noise in `scratch` to the coordinates from `start` on."""
        stop = start + scratch.coordinates
        for part, first, end in self._parts[bisect_right(self._ends, start) :]:
            if first >= stop:
                break
            a, b = max(first, start), min(end, stop)
            add = add_rounded if np.asarray(part).dtype == np.int64 else add_scaled
            add(
                scratch.vectors[0, a - start : b - start],
                self._scale,
                np.asarray(part[a - first : b - first]),
            )


class RoundWork(Protocol):
    """The work of one round, chunk by chunk.

    Attributes:
        rows: The keys of the rows of Z that the round uses.
        sums: Number of vectors that the round computes: the noise, and new buffers that are not
            updated in place.
    """

    rows: Sequence[NoiseKey]
    sums: int

    def add(
        self, streams: Sequence[Keystream], start: int, scratch: Scratch, target: Target
    ) -> None:
        """Compute the noise of the chunk that begins at `start`, and add it to the target.

        Args:
            streams: A keystream for each row of Z, positioned at the chunk.
            start: First coordinate of the chunk.
            scratch: Memory to work in.
            target: Where the noise goes.
        """
        ...

    def add_to_shard(
        self,
        streams: Sequence[Keystream],
        cuts: NDArray[np.int64],
        scratch: Scratch,
        scale: float,
        rounded: bool,
        update: Array,
    ) -> None:
        """Compute the noise of some tiles, for the coordinates of a shard alone.

        Args:
            streams: A keystream for each row of Z, positioned at the first tile.
            cuts: Which coordinates of the tiles belong to the shard; see `Shard.cuts`.
            scratch: Memory to work in, of as many tiles.
            scale: Factor by which the noise is multiplied.
            rounded: Whether `update` counts grid steps, so that the noise is rounded to integers.
            update: The coordinates of the shard that the noise is added to; empty for none.
        """
        ...


@final
class BltRound:
    """A round of a BLT, which updates its buffers in place."""

    def __init__(self, row: NoiseKey, theta: Matrix, omega: Matrix, buffers: Buffers, size: int):
        self.rows: Sequence[NoiseKey] = (row,)
        self.sums = 1
        self._parameters = (theta, omega)
        self._memory = (addresses(buffers), size)
        self._like = buffers[0].array[:0]  # tells the kernel the type of the buffers

    def add(
        self, streams: Sequence[Keystream], start: int, scratch: Scratch, target: Target
    ) -> None:
        """Algorithm 3 of the paper, for one chunk."""
        streams[0].fill(scratch.zeros, scratch.raw)
        # No local variable for words or noise: a traceback may show its content.
        arguments = (*self._parameters, *self._memory, start, self._like)
        destination = target.around(start, scratch.coordinates)
        if destination is None:
            blt_step(scratch.words, *arguments, scratch.vectors[0])
            target.add(start, scratch)
        else:
            scale, rounded, piece = destination
            blt_step_onto(
                scratch.words, *arguments, scratch.tile, scale, rounded, np.asarray(piece)
            )

    def add_to_shard(
        self,
        streams: Sequence[Keystream],
        cuts: NDArray[np.int64],
        scratch: Scratch,
        scale: float,
        rounded: bool,
        update: Array,
    ) -> None:
        """Algorithm 3 of the paper, for the coordinates of a shard in some tiles."""
        streams[0].fill(scratch.zeros, scratch.raw)
        where = (int(cuts[0, 0]), cuts, *self._parameters, self._memory[0], self._like)
        blt_step_of_shard(scratch.words, *where, scratch.tile, scale, rounded, update)


@final
class LinearRound:
    """A round of any mechanism: a matrix times the old buffers and the rows of Z.

    Args:
        rows: Keys of the rows of Z.
        weights: Row 0 gives the noise, the other rows the outputs. Columns are the inputs, then the
            rows of Z.
        inputs: The old buffers.
        outputs: The buffers to write.
        size: Number of coordinates.
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
        self._row_weights = [np.ascontiguousarray(column) for column in weights.T[len(inputs) :]]
        self._mix = (np.ascontiguousarray(weights), addresses(inputs), addresses(outputs), size)
        both = [*inputs, *outputs]
        self._like = both[0].array[:0] if both else None  # tells the kernel the type of the buffers

    def add(
        self, streams: Sequence[Keystream], start: int, scratch: Scratch, target: Target
    ) -> None:
        """Add up the rows of Z, then the buffers, for one chunk."""
        scratch.vectors[:] = 0.0
        for stream, weights in zip(streams, self._row_weights, strict=True):
            stream.fill(scratch.zeros, scratch.raw)
            add_normals(scratch.words, weights, scratch.vectors)
        if self._like is not None:
            mix_buffers(*self._mix, start, self._like, scratch.vectors)
        target.add(start, scratch)

    def add_to_shard(
        self,
        streams: Sequence[Keystream],
        cuts: NDArray[np.int64],
        scratch: Scratch,
        scale: float,
        rounded: bool,
        update: Array,
    ) -> None:
        """Add up the rows of Z, then the buffers, for the coordinates of a shard in some tiles."""
        first = int(cuts[0, 0])
        scratch.vectors[:] = 0.0
        for stream, weights in zip(streams, self._row_weights, strict=True):
            stream.fill(scratch.zeros, scratch.raw)
            add_normals(scratch.words, weights, scratch.vectors)
        if self._like is not None:
            mix_buffers_of_shard(first, cuts, *self._mix[:3], self._like, scratch.vectors)
        if len(update):
            add_to_shard(first, cuts, scratch.vectors[0], scale, rounded, update)


def run_round(work: RoundWork, target: Target, size: int, threads: int) -> None:
    """Compute a round in several threads. The result does not depend on their number.

    Args:
        work: The round.
        target: Where its noise goes.
        size: Number of coordinates.
        threads: Number of threads.
    """
    chunks = -(-size // CHUNK)
    share = chunks if threads == 1 else max(-(-chunks // (SHARES * threads)), SMALL_SHARE)
    shares = [range(first, min(first + share, chunks)) for first in range(0, chunks, share)]
    parallel_map(partial(_run_chunks, work, target, -(-size // TILE)), shares, threads)


def _run_chunks(work: RoundWork, target: Target, tiles: int, chunks: range) -> None:
    """Compute some chunks of a round, one after another; the last chunk may have fewer tiles."""
    streams = [Keystream(row, chunks.start * CHUNK_BLOCKS) for row in work.rows]
    scratch = Scratch(work.sums, min(CHUNK_TILES, tiles - chunks.start * CHUNK_TILES))
    for chunk in chunks:
        remaining = tiles - chunk * CHUNK_TILES
        if remaining < CHUNK_TILES:
            scratch.shorten(remaining)
        work.add(streams, chunk * CHUNK, scratch, target)


def addresses(buffers: Buffers) -> NDArray[np.uint64]:
    """Memory address of each buffer."""
    return np.array([buffer.array.ctypes.data for buffer in buffers], dtype=np.uint64)
