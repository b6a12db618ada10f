"""Noise for some of the coordinates of a model, so that each of several processes holds a part.

A `Shard` says which coordinates a process (a rank) holds. `NoiseStream(..., shard=shard)` keeps the
buffers of these coordinates alone, and adds noise to them alone. The shards of all ranks, put
together, are the noise of one stream, to the last bit, whatever the number of ranks.

A row of noise is keyed by a digest of the whole sum, of which a rank has only its part. The digest
is GMAC, which is linear: for contents A and B of one length, tag(A xor B) is tag(A) xor tag(B) xor
tag(zeros). So each rank digests its own coordinates with zeros in place of all others, the ranks
exchange the results, 16 bytes each, and each of them computes the digest that one stream would
compute for the whole sum.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Array
from dpftrl._internal.checks import whole_number
from dpftrl._internal.compiled import TILE, all_finite
from dpftrl._internal.threads import parallel_map
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.noise.key import DIGEST_BYTES, PIECE, Digest, Keystream, NoiseKey, Secret
from dpftrl.noise.normals import TILE_BLOCKS
from dpftrl.noise.round_noise import (
    CHUNK_TILES,
    SHARES,
    SMALL_SHARE,
    Buffer,
    NoiseState,
    RoundWork,
    Scratch,
)
from dpftrl.noise.state_file import Header, read_state

# Gives the 16 bytes of this rank to all others, and returns those of all ranks, in any order.
Exchange = Callable[[Secret], Sequence[Secret]]
# Which coordinates of a block belong to a shard; the columns are described in `Shard.cuts`.
Cuts = NDArray[np.int64]

NO_CONTENT: Final = bytes(DIGEST_BYTES)


@final
@dataclass(frozen=True)
class Shard:
    """Some of the coordinates of a model: intervals that may begin and end anywhere.

    The arrays of a shard hold its coordinates in their order in the model.

    Attributes:
        size: Number of coordinates of the whole model.
        spans: The intervals, each as its first coordinate and the one after its last, in order.

    >>> Shard.even(10, rank=1, ranks=4)
    Shard(size=10, spans=((2, 5),))
    """

    size: int
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", whole_number("size", self.size))
        spans = tuple((int(start), int(stop)) for start, stop in self.spans if stop > start)
        object.__setattr__(self, "spans", spans)
        ends = [0, *(end for span in spans for end in span), self.size]
        if any(a > b for a, b in pairwise(ends)):
            raise InvalidInput(
                f"the spans of a shard must be in order, not overlap, and lie within "
                f"{self.size:,} coordinates"
            )

    @classmethod
    def whole(cls, size: int) -> Self:
        """The shard of a single rank."""
        return cls(size, ((0, size),))

    @classmethod
    def even(cls, size: int, rank: int, ranks: int) -> Self:
        """The part of one rank, if all ranks get parts of about the same size."""
        whole_number("ranks", ranks)
        if not 0 <= rank < ranks:
            raise InvalidInput(f"rank must be from 0 to {ranks - 1}, got {rank}")
        return cls(size, ((size * rank // ranks, size * (rank + 1) // ranks),))

    @cached_property
    def count(self) -> int:
        """Number of coordinates of the shard."""
        return sum(stop - start for start, stop in self.spans)

    def cuts(self, width: int) -> Cuts:
        """Which coordinates of the shard lie in which block of `width` coordinates of the model.

        Returns:
            One row for each block and span that meet, with the number of the block, the first
            coordinate in the block, their number, and the place of the first one in the arrays of
            the shard.
        """
        rows: list[Cuts] = [np.empty((0, 4), np.int64)]
        local = 0
        for start, stop in self.spans:
            blocks = np.arange(start // width, -(-stop // width))
            first = np.maximum(blocks * width, start)
            length = np.minimum(blocks * width + width, stop) - first
            rows.append(
                np.stack([blocks, first - blocks * width, length, first - start + local], 1)
            )
            local += stop - start
        return np.concatenate(rows)

    @cached_property
    def tile_cuts(self) -> Cuts:
        """The cuts by tiles of normals."""
        return self.cuts(TILE)


# --- Digests --------------------------------------------------------------------------------------


@final
class ShardDigest:
    """The digest of a whole sum, of which this process holds a shard.

    Guarantees:
        The digest is that of `dpftrl.noise.key.digest_of_update` for the whole sum as one array. It
        is the same on all ranks and for every number of ranks.

    Args:
        key: The stream's key.
        shard: The coordinates of this rank.
    """

    def __init__(self, key: NoiseKey, shard: Shard):
        self._key, self._shard = key, shard
        self._piece_key = key.derive(b"piece")
        self._pieces = -(-shard.size // PIECE)
        cuts = shard.cuts(PIECE)
        self._groups = np.split(cuts, np.flatnonzero(np.diff(cuts[:, 0])) + 1) if len(cuts) else []
        # Tags of zeros, for pieces of the usual length and for the last piece.
        lengths = {min(PIECE, shard.size), shard.size - (self._pieces - 1) * PIECE}
        self._zeros = {n: _digest(self._piece_key, bytes(8 * n)) for n in lengths}
        self._float32_zeros = {n: _digest(self._piece_key, bytes(4 * n)) for n in lengths}

    def __repr__(self) -> str:
        return "ShardDigest(secret)"

    def partial(
        self, part: memoryview, scale: float, previous: Secret, threads: int, covered: bytes
    ) -> Secret:
        """The 16 bytes that this rank gives to all others. The arguments are those of `combine`."""
        if np.asarray(part).dtype != np.int64 and not all_finite(np.asarray(part)):
            raise InvalidInput("the update has a NaN or an infinity; nothing was changed")
        whole = self._key.derive(b"update", covered, previous)
        blank = bytes(len(self._header(part, scale)))
        tags = bytearray(DIGEST_BYTES * self._pieces)
        change = partial(self._change_of_piece, part)
        for group, tag in zip(
            self._groups, parallel_map(change, self._groups, threads), strict=True
        ):
            place = DIGEST_BYTES * int(group[0, 0])
            tags[place : place + DIGEST_BYTES] = tag.secret_bytes()
        zeros = _digest(whole, blank, bytes(len(tags)))
        return _xor([_digest(whole, blank, memoryview(tags)), zeros])

    def combine(
        self,
        parts: Iterable[Secret],
        part: memoryview,
        scale: float,
        previous: Secret,
        covered: bytes,
    ) -> Secret:
        """The digest of the whole sum, from what all ranks gave.

        Args:
            parts: The 16 bytes of every rank, in any order.
            part: The sum of the coordinates of this rank; only its type counts here.
            scale: Standard deviation of Z in the unit of the sum.
            previous: Digest of the previous round; empty before the first.
            covered: Further bytes that the digest covers.
        """
        whole = self._key.derive(b"update", covered, previous)
        zeros = [self._zeros_of(piece, part).secret_bytes() for piece in range(self._pieces)]
        base = _digest(whole, self._header(part, scale), memoryview(b"".join(zeros)))
        return _xor([base, *parts])

    def _header(self, part: memoryview, scale: float) -> bytes:
        return repr((scale, [(np.asarray(part).dtype.name, self._shard.size)])).encode()

    def _length_of(self, piece: int) -> int:
        return min(PIECE, self._shard.size - piece * PIECE)

    def _zeros_of(self, piece: int, part: memoryview) -> Secret:
        known = self._float32_zeros if part.itemsize == 4 else self._zeros
        return known[self._length_of(piece)]

    def _change_of_piece(self, part: memoryview, group: Cuts) -> Secret:
        """The tag of a piece with zeros for coordinates of other ranks, xor that of all zeros."""
        piece = int(group[0, 0])
        length = self._length_of(piece)
        if len(group) == 1 and group[0, 2] == length:
            start = int(group[0, 3])
            tag = _digest(self._piece_key, part[start : start + length].cast("B"))
        else:
            tag = _digest(self._piece_key, _spread(part, group, length))
        return _xor([tag, self._zeros_of(piece, part)])


def _spread(part: memoryview, group: Cuts, length: int) -> memoryview:
    """A piece with the coordinates of this rank in their places, and zeros elsewhere."""
    values = np.zeros(length, np.asarray(part).dtype)
    for _, offset, count, start in group.tolist():
        values[offset : offset + count] = part[start : start + count]
    return values.view(np.uint8).data


def _digest(key: NoiseKey, *contents: Any) -> Secret:
    digest = Digest(key)
    for content in contents:
        digest.add(content)
    return digest.finish()


def _xor(secrets: Sequence[Secret]) -> Secret:
    total = 0
    for secret in secrets:
        if len(secret.secret_bytes()) != DIGEST_BYTES:
            raise InvalidInput(f"each rank must give {DIGEST_BYTES} bytes for the digest of a sum")
        total ^= int.from_bytes(secret.secret_bytes(), "big")
    return Secret(memoryview(total.to_bytes(DIGEST_BYTES, "big")))


# --- One round ------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, repr=False)
class ShardTarget:
    """The coordinates of a shard that noise is added to; an empty array if to nothing."""

    part: memoryview
    scale: float

    @property
    def arguments(self) -> tuple[float, bool, Array]:
        """The scale, whether the array counts grid steps, and the array."""
        array = np.asarray(self.part)
        return self.scale, array.dtype == np.int64, array


def run_shard(work: RoundWork, target: ShardTarget, shard: Shard, threads: int) -> None:
    """Compute a round for the coordinates of a shard, in several threads."""
    chunks = _chunks(shard.tile_cuts)
    share = max(-(-len(chunks) // (SHARES * threads)), SMALL_SHARE)
    shares = [chunks[first : first + share] for first in range(0, len(chunks), share)]
    parallel_map(partial(_run_chunks, work, target), shares, threads)


def _chunks(cuts: Cuts) -> list[Cuts]:
    """The cuts in groups: the tiles of each follow one another, and are few enough for a chunk."""
    if not len(cuts):
        return []
    tiles = cuts[:, 0]
    gaps = np.flatnonzero(np.diff(tiles) > 1) + 1
    chunks = list[Cuts]()
    for run in np.split(cuts, gaps):
        steps = (run[:, 0] - run[0, 0]) // CHUNK_TILES
        chunks += np.split(run, np.flatnonzero(np.diff(steps)) + 1)
    return chunks


def _run_chunks(work: RoundWork, target: ShardTarget, chunks: Sequence[Cuts]) -> None:
    scratch, streams, following = Scratch(work.sums, CHUNK_TILES), list[Keystream](), -1
    for cuts in chunks:
        first, last = int(cuts[0, 0]), int(cuts[-1, 0])
        tiles = last + 1 - first
        if first != following:
            streams = [Keystream(row, first * TILE_BLOCKS) for row in work.rows]
        following = last + 1
        if scratch.coordinates != tiles * TILE:
            scratch = Scratch(work.sums, tiles)
        work.add_to_shard(streams, cuts, scratch, *target.arguments)


# --- Files ----------------------------------------------------------------------------------------


def read_shards(
    paths: Sequence[Path],
    mechanism: Mechanism,
    key: NoiseKey,
    at_least: int,
    shard: Shard | None,
) -> tuple[Header, NoiseState]:
    """Read the state of a shard from files that other shards of the same stream were saved to.

    Each file is read once, and one after another: besides the buffers of the shard, there are those
    of one file in memory.

    Args:
        paths: The files. Together they must hold all coordinates of the shard.
        mechanism: The mechanism that the state must belong to.
        key: The key that the state must belong to.
        at_least: Number of rounds that were released already.
        shard: The coordinates to read; None for all.

    Raises:
        InvalidInput: A file cannot be used, the files do not belong together, or some coordinates
            are in none of them.
    """
    if len(paths) == 1:
        header, state = read_state(paths[0], mechanism, key, at_least)
        wanted = ((0, header.size),) if shard is None else shard.spans
        if header.shard_spans == wanted:
            return header, state
    first: Header | None = None
    digests: tuple[Secret, ...] = ()
    arrays = list[Array]()
    missing = 0
    for path in paths:
        header, state = read_state(path, mechanism, key, at_least)
        common = _without_spans(header)
        shard = shard or Shard.whole(header.size)
        if first is None:
            first, digests, missing = common, state.digests, shard.count
            arrays = [np.zeros(shard.count, header.dtype) for _ in range(header.buffers)]
        elif first != common or digests != state.digests:
            raise InvalidInput(f"{path} is not of the same state as {paths[0]}")
        if header.size != shard.size:
            raise InvalidInput(f"{path} is of a stream for {header.size:,} coordinates")
        for theirs, ours, count in _overlaps(header.shard_spans, shard.spans):
            for array, buffer in zip(arrays, state.buffers, strict=True):
                array[ours : ours + count] = buffer.array[theirs : theirs + count]
            missing -= count
    if first is None or missing:
        raise InvalidInput(
            f"the shards in {len(paths)} files do not hold each coordinate once: {missing:,} are "
            "missing (fewer than 0: held twice)"
        )
    return first, NoiseState(first.round, digests, [Buffer(array) for array in arrays])


def _without_spans(header: Header) -> Header:
    import msgspec

    return msgspec.structs.replace(header, spans=msgspec.UNSET)


def _overlaps(
    theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]
) -> Iterable[tuple[int, int, int]]:
    """For each common interval: its place in their arrays, its place in ours, and its length."""
    their_place = 0
    for a, b in theirs:
        our_place = 0
        for start, stop in ours:
            first, last = max(a, start), min(b, stop)
            if first < last:
                yield their_place + first - a, our_place + first - start, last - first
            our_place += stop - start
        their_place += b - a
