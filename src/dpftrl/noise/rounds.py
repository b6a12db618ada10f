"""One round of noise: which rows of Z it takes, what is mixed with them, and where that goes."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.noise.kernels import add_normals, add_rounded, add_scaled, blt_step, mix_buffers
from dpftrl.noise.key import NoiseKey
from dpftrl.noise.keystream import BLOCK_BYTES, Keystream
from dpftrl.noise.normals import TILE, TILE_BLOCKS

Matrix = NDArray[np.float64]
Buffers = Sequence[NDArray[Any]]

# Coordinates whose keystream and noise are in cache together.
CHUNK: Final = 8 * TILE
CHUNK_BLOCKS: Final = CHUNK // TILE * TILE_BLOCKS
CHUNK_BYTES: Final = CHUNK_BLOCKS * BLOCK_BYTES
ZEROS: Final = bytes(CHUNK_BYTES)


@final
class Scratch:
    """Room for the keystream and the noise of one chunk; as secret as they are."""

    def __init__(self, sums: int):
        # The cipher wants room for a block more than it writes.
        self.raw = bytearray(CHUNK_BYTES + BLOCK_BYTES)
        self.words = np.frombuffer(self.raw, np.uint32, CHUNK_BYTES // 4)
        self.made = np.empty((sums, CHUNK))

    def __repr__(self) -> str:
        return "Scratch(secret)"


class Round(Protocol):
    """What a round does, chunk by chunk."""

    @property
    def rows(self) -> Sequence[NoiseKey]:
        """The keys of the rows of Z that it takes."""
        ...

    @property
    def sums(self) -> int:
        """How many vectors it makes: the noise, and new buffers that are not made in place."""
        ...

    def make(self, streams: Sequence[Keystream], start: int, scratch: Scratch) -> None:
        """Leave the noise of the chunk that begins at `start` in the first row of the scratch."""
        ...


@final
@dataclass(frozen=True, repr=False)
class BltRound:
    """A round of a BLT, whose buffers change in place."""

    row: NoiseKey
    theta: Matrix
    omega: Matrix
    buffers: Buffers
    size: int

    @property
    def rows(self) -> Sequence[NoiseKey]:
        """One row a round."""
        return (self.row,)

    @property
    def sums(self) -> int:
        """The noise alone."""
        return 1

    def make(self, streams: Sequence[Keystream], start: int, scratch: Scratch) -> None:
        """The paper's Algorithm 3."""
        streams[0].fill(ZEROS, scratch.raw)
        blt_step(
            scratch.words,
            self.theta,
            self.omega,
            addresses(self.buffers),
            self.size,
            start,
            self.buffers[0][:0],
            scratch.made[0],
        )


@final
@dataclass(frozen=True, repr=False)
class LinearRound:
    """A round of any mechanism: a matrix times old buffers and rows of Z.

    Attributes:
        rows: Keys of the rows.
        weights: Row 0 gives the noise, the others the outputs; columns are inputs, then rows of Z.
        inputs: The old buffers.
        outputs: Where new buffers go.
        size: Coordinates.
    """

    rows: Sequence[NoiseKey]
    weights: Matrix
    inputs: Buffers
    outputs: Buffers
    size: int

    @property
    def sums(self) -> int:
        """One for each row of the matrix."""
        return len(self.weights)

    def make(self, streams: Sequence[Keystream], start: int, scratch: Scratch) -> None:
        """Rows of Z first, then the buffers."""
        scratch.made[:] = 0.0
        kept = len(self.inputs)
        for k, stream in enumerate(streams):
            stream.fill(ZEROS, scratch.raw)
            add_normals(scratch.words, self.weights[:, kept + k], scratch.made)
        if self.inputs or self.outputs:
            mix_buffers(
                self.weights,
                addresses(self.inputs),
                addresses(self.outputs),
                self.size,
                start,
                (*self.inputs, *self.outputs)[0][:0],
                scratch.made,
            )


@dataclass(frozen=True, repr=False)
class Target:
    """Where noise goes: the arrays of an update, and how large a unit of noise is in them."""

    parts: Sequence[NDArray[Any]]
    scale: float
    ends: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", np.cumsum([part.size for part in self.parts]))

    def add(self, start: int, noise: Matrix) -> None:
        """Add the noise of the coordinates from `start` on."""
        stop = min(start + len(noise), int(self.ends[-1]))
        at = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            part, end = self.parts[at], int(self.ends[at])
            upto = min(stop, end)
            piece = part[part.size - (end - start) : part.size - (end - upto)]
            add = add_rounded if part.dtype == np.int64 else add_scaled
            add(noise[: upto - start], self.scale, piece)
            noise, start, at = noise[upto - start :], upto, at + 1


def run_round(made: Round, target: Target, size: int, shares: int, pool: Executor) -> None:
    """Do all chunks, in so many shares side by side; the result does not depend on how many."""
    chunks = -(-size // CHUNK)
    share = -(-chunks // shares)
    ranges = [range(first, min(first + share, chunks)) for first in range(0, chunks, share)]
    for done in [pool.submit(_run_chunks, made, target, each) for each in ranges]:
        done.result()


def _run_chunks(made: Round, target: Target, chunks: range) -> None:
    streams = [Keystream(row, chunks.start * CHUNK_BLOCKS) for row in made.rows]
    scratch = Scratch(made.sums)
    for chunk in chunks:
        made.make(streams, chunk * CHUNK, scratch)
        target.add(chunk * CHUNK, scratch.made[0])


def addresses(buffers: Buffers) -> NDArray[np.uint64]:
    """Where each of them lies."""
    return np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uint64)
