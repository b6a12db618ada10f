"""The noise stream that training loops call: it adds correlated, keyed noise to sums in place."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Literal, NoReturn, Protocol, Self, final

import numpy as np
from msgspec import UNSET
from numpy.typing import DTypeLike

from dpftrl._internal.arrays import Arrays, segments
from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.deprecation import renamed_argument
from dpftrl.clipping import ExactSum, Grid, norm_of
from dpftrl.errors import InvalidInput, RoundsExceeded
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms.base import DecayingBuffers
from dpftrl.noise.key import DIGEST_BYTES, NoiseKey, Secret, digest_of_update, row_key
from dpftrl.noise.round_noise import (
    BltRound,
    Buffer,
    DecoderRows,
    LinearRound,
    NoiseState,
    RoundWork,
    Target,
    run_round,
    transition,
)
from dpftrl.noise.sharding import (
    Exchange,
    Shard,
    ShardDigest,
    ShardTarget,
    read_shards,
    run_shard,
)
from dpftrl.noise.state_file import Header, mechanism_sha256, write_state
from dpftrl.participation import Participation

PathLike = str | os.PathLike[str]
# The arrays of a sum. No traceback shows the content of a memoryview.
Parts = Sequence[memoryview]
Mode = Literal["auto", "buffered", "regenerating"]

# With larger buffers than this, the mode `auto` recomputes earlier noise instead of keeping it.
MOST_BUFFER_BYTES = 4 * 2**30
# Largest number of grid steps in one standard deviation of Z. With more steps, the noise might not
# fit into 64 bits.
MOST_STEPS = 2**48
# Number of rounds at which the mode `auto` measures the memory of a mechanism without a limit.
MANY_ROUNDS = 1_000_000
# Largest product of coordinates and rounds that a guarantee covers; `dpftrl.accounting` has the
# same number.
MOST_DRAWS = 2**40
# Relative amount by which rounding may raise the norm of a sum above updates times clip norm.
NORM_SLACK = 1e-6


class NoisePlan(Protocol):
    """The part of a plan that a stream needs; `dpftrl.plan.Plan` implements it."""

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that correlates the noise."""
        ...

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of Z divided by the clip norm."""
        ...

    @property
    def participation(self) -> Participation:
        """The number of rounds, and which of them one client may take part in."""
        ...

    @property
    def buffers(self) -> Literal["float32", "float64"]:
        """The number type of the noise buffers that the guarantee covers."""
        ...


@final
class NoiseStream:
    """A stream of correlated noise for a model of `size` coordinates.

    The noise of round t is row t of D Z, times `noise_multiplier` times `clip_norm`; see
    `dpftrl.mechanisms`.

    Guarantees:
        Row i of Z is a function of the key, of the definition of the stream (mechanism, size, noise
        multiplier, clip norm and dtype), of i, and of a keyed digest of all sums that it covers,
        including those of earlier rounds. The same sums get the same noise, to the last bit, on
        any machine and with any number of threads; anything else gets fresh noise. A stream that
        was interrupted within a round refuses to continue.

    Args:
        plan: Mechanism, noise multiplier, number of rounds and number type of the buffers. A round
            after the last is refused.
        size: Number of coordinates of the model. Size times rounds is at most 2^40, which is what
            a guarantee covers.
        key: The noise key.
        clip_norm: Norm to which each update was clipped.
        mode: `buffered` keeps the buffers of the mechanism between rounds. `regenerating` keeps no
            buffers, and computes all earlier rows of Z again in every round. `auto` is `buffered`
            unless the buffers take more than 4 GiB or grow by one vector per round.
        threads: Number of threads; by default one per core.
        shard: The coordinates that this process holds, if it does not hold all of them. Sums are
            then those of the shard, and so are the buffers; `size` stays that of the whole model.
            All shards together have the noise of one stream, to the last bit.
    """

    def __init__(
        self,
        plan: NoisePlan,
        size: int,
        *,
        key: NoiseKey,
        clip_norm: float,
        mode: Mode = "auto",
        threads: int | None = None,
        shard: Shard | None = None,
    ):
        self._setup(
            plan.mechanism,
            size,
            plan.noise_multiplier,
            key,
            clip_norm,
            plan.buffers,
            mode,
            threads,
            shard,
        )
        self._limit_to(plan)

    @classmethod
    @renamed_argument("sigma", "noise_multiplier")
    def unchecked(
        cls,
        mechanism: Mechanism,
        size: int,
        *,
        noise_multiplier: float,
        key: NoiseKey,
        clip_norm: float,
        dtype: DTypeLike = np.float64,
        mode: Mode = "auto",
        threads: int | None = None,
        shard: Shard | None = None,
    ) -> Self:
        """Create a stream without a plan: nothing checks that a guarantee covers its use.

        The stream accepts as many rounds as the mechanism supports, and sums of any norm.

        Args:
            mechanism: The mechanism that correlates the noise.
            size: Number of coordinates of the model.
            noise_multiplier: Standard deviation of Z divided by the clip norm.
            key: The noise key.
            clip_norm: Norm to which each update was clipped.
            dtype: Type of the buffers. Guarantees cover the rounding of float64 only; version 0.1
                used float32.
            mode: As for a stream with a plan.
            threads: Number of threads; by default one per core.
            shard: As for a stream with a plan.
        """
        stream = cls.__new__(cls)
        stream._setup(
            mechanism, size, noise_multiplier, key, clip_norm, dtype, mode, threads, shard
        )
        return stream

    def _setup(
        self,
        mechanism: Mechanism,
        size: int,
        noise_multiplier: float,
        key: NoiseKey,
        clip_norm: float,
        dtype: DTypeLike,
        mode: Mode,
        threads: int | None,
        shard: Shard | None,
    ) -> None:
        if not isinstance(key, NoiseKey):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(key).__name__
            del key  # it may be secret bytes, which no traceback should show
            raise InvalidInput(
                f"key must be a NoiseKey, got {kind}; NoiseKey.generate() creates one"
            )
        self._mechanism = mechanism
        self._size = whole_number("size", size)
        self._noise_multiplier = positive_number("noise_multiplier", noise_multiplier)
        self._clip_norm = positive_number("clip_norm", clip_norm)
        self._dtype: Literal["float32", "float64"] = _dtype_name(dtype)
        self._mode: Literal["buffered", "regenerating"] = _resolved_mode(
            mode, mechanism, self._size * np.dtype(self._dtype).itemsize
        )
        self._threads = _core_count() if threads is None else whole_number("threads", threads)
        self._key = key
        self._row_keys = key.derive(
            b"stream",
            stream_identity(
                mechanism, self._size, self._noise_multiplier, self._clip_norm, self._dtype
            ),
        )
        if shard is not None and shard.size != self._size:
            raise InvalidInput(
                f"the shard is of {shard.size:,} coordinates, the stream has {self._size:,}"
            )
        self._shard = shard
        self._shard_digest = None if shard is None else ShardDigest(self._row_keys, shard)
        self._rounds: int | None = None
        self._most_rounds = mechanism.rounds
        self._decaying = mechanism.decaying_buffers
        self._decoder_rows = DecoderRows(mechanism)
        self._lock = Lock()
        self._interrupted = False
        self._state = NoiseState.start()

    def _limit_to(self, plan: NoisePlan) -> None:
        """Limit the stream to the rounds of the plan."""
        rounds = self._mechanism.check_rounds(plan.participation.rounds)
        if self._size * rounds > MOST_DRAWS:
            raise InvalidInput(
                f"{self._size:,} coordinates over {rounds:,} rounds are more than the 2^40 numbers "
                f"that a guarantee covers; plan at most {MOST_DRAWS // self._size:,} rounds"
            )
        self._rounds = rounds

    def __repr__(self) -> str:
        if not hasattr(self, "_state"):
            return "NoiseStream(refused)"
        return (
            f"NoiseStream({self._mechanism.name}, size={self._size:,}, "
            f"noise_multiplier={self._noise_multiplier:g}, round={self.round}, {self._mode}, "
            f"key {self._key.fingerprint()})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a noise stream cannot be pickled; save() writes its state")

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that correlates the noise."""
        return self._mechanism

    @property
    def shard(self) -> Shard | None:
        """The coordinates that this process holds; None for all."""
        return self._shard

    @property
    def round(self) -> int:
        """Number of rounds completed so far."""
        return self._state.round

    @property
    def mode(self) -> str:
        """`buffered` or `regenerating`."""
        return self._mode

    @property
    def memory_bytes(self) -> int:
        """Size of the buffers at present."""
        return sum(buffer.array.nbytes for buffer in self._state.buffers)

    @property
    def rounds(self) -> int | None:
        """Number of rounds that the plan allows; None for a stream without a plan."""
        return self._rounds

    def add_to(
        self,
        total: ExactSum | Arrays,
        grid: Grid | None = None,
        *,
        updates: int | None = None,
        on_digest: Callable[[Secret], None] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Add the noise of the next round to a sum of clipped updates, in place.

        No other thread may change the sum during this call. With a shard, the sum is one flat array
        of its coordinates, and all ranks must call this method for the same round.

        Args:
            total: An `ExactSum`, which has clipped its updates itself; or an array, or lists and
                dicts of arrays. Arrays have the type float32 or float64, or int64 with a grid.
            grid: The grid of a sum of int64. The noise is then rounded to the grid, so that the
                release is exactly a rounding of the ideal sum plus noise.
            updates: Number of updates in a sum of arrays. A sum with a larger norm than that
                number times the clip norm was not clipped, and is refused. A stream without a
                plan does not require the number.
            on_digest: Called before any noise is added, with the digest that `last_digest` returns
                after this call. If it raises, the round is not completed.
            exchange: With a shard: a function that gives 16 bytes of this rank to all others, and
                returns those of all ranks. They are as secret as the noise.
        """
        covered = b""
        if isinstance(total, ExactSum):
            if grid is not None or updates is not None:
                raise InvalidInput(
                    "an ExactSum has its own grid and number of updates; leave out grid and updates"
                )
            parts, grid, covered = [total.steps.data], total.grid, total.covered
            self._check(parts, grid)
        else:
            parts = [part.data for part in segments(total)]
            self._check(parts, grid)
            self._check_norm(parts, grid, updates)
        scale = self._noise_multiplier * self._clip_norm / (1.0 if grid is None else grid.step)
        if not 0 < scale < math.inf:
            raise InvalidInput(f"noise multiplier times clip norm is {scale:g} steps of the sum")
        with self._lock:
            self._add(parts, scale, covered, on_digest, exchange)

    def last_digest(self) -> Secret:
        """The digest with which `replay` can repeat the last round; as secret as the noise."""
        return self._state.last_digest

    def replay(self, digest: Secret) -> None:
        """Repeat a round that was completed before, without its sum.

        The state changes as it did in that round, and the noise is added to nothing.

        Args:
            digest: The result of `last_digest` after that round.
        """
        if len(digest.secret_bytes()) != DIGEST_BYTES:
            raise InvalidInput(f"the digest of a round must have {DIGEST_BYTES} bytes")
        with self._lock:
            self._check_can_continue()
            if self._mode == "regenerating":  # the state consists of digests only
                _, self._state = self._next_round(digest)
            else:
                self._run(digest, [], 1.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file that only its owner can read.

        The file is replaced atomically: after a crash, it holds the old state or the new state.
        """
        with self._lock:
            if self._interrupted:
                raise InvalidInput(
                    "this stream was interrupted within a round; there is no valid state to save"
                )
            write_state(Path(path), self._header(), self._state, self._key)

    @classmethod
    def load(
        cls,
        path: PathLike | Sequence[PathLike],
        plan: NoisePlan,
        *,
        key: NoiseKey,
        at_least: int,
        threads: int | None = None,
        shard: Shard | None = None,
    ) -> Self:
        """Resume a stream from a saved state.

        Args:
            path: The file that `save` wrote. For a stream that was saved in shards, all their
                files; these need not be the shards that are resumed.
            plan: The plan of the saved stream; another mechanism or noise multiplier is refused.
            key: The key of the saved stream; another key is refused.
            at_least: Number of rounds that were released already. An older state is refused,
                because it would release rounds twice.
            threads: Number of threads; by default one per core.
            shard: The coordinates that this process is to hold; by default all.
        """
        stream = cls.load_unchecked(
            path, plan.mechanism, key=key, at_least=at_least, threads=threads, shard=shard
        )
        if stream._noise_multiplier != plan.noise_multiplier:
            raise InvalidInput(
                f"{path} was saved with noise multiplier {stream._noise_multiplier!r}, the plan "
                f"has {plan.noise_multiplier!r}"
            )
        if stream._dtype != plan.buffers:
            raise InvalidInput(
                f"{path} was saved with buffers in {stream._dtype}, and the guarantee of the plan "
                f"is for buffers in {plan.buffers}; use the plan that the stream was made with"
            )
        stream._limit_to(plan)
        return stream

    @classmethod
    def load_unchecked(
        cls,
        path: PathLike | Sequence[PathLike],
        mechanism: Mechanism,
        *,
        key: NoiseKey,
        at_least: int,
        threads: int | None = None,
        shard: Shard | None = None,
    ) -> Self:
        """Resume a stream from a saved state without a plan; see `unchecked`."""
        paths = [path] if isinstance(path, str | os.PathLike) else path
        least = whole_number("at_least", at_least, 0)
        header, state = read_shards([Path(one) for one in paths], mechanism, key, least, shard)
        stream = cls.unchecked(
            mechanism,
            header.size,
            noise_multiplier=header.noise_multiplier,
            key=key,
            clip_norm=header.clip_norm,
            dtype=header.dtype,
            mode=header.mode,
            threads=threads,
            shard=shard,
        )
        stream._state = state
        return stream

    def _header(self) -> Header:
        return Header(
            mechanism=self._mechanism.name,
            mechanism_sha256=mechanism_sha256(self._mechanism),
            round=self._state.round,
            next_row=self._state.next_row,
            size=self._size,
            noise_multiplier=self._noise_multiplier,
            clip_norm=self._clip_norm,
            dtype=self._dtype,
            mode=self._mode,
            buffers=len(self._state.buffers),
            key_fingerprint=self._key.fingerprint(),
            spans=UNSET if self._shard is None else self._shard.spans,
        )

    def _add(
        self,
        parts: Parts,
        scale: float,
        covered: bytes,
        on_digest: Callable[[Secret], None] | None,
        exchange: Exchange | None,
    ) -> None:
        """Digest the sum, and add the noise of the next round to it."""
        self._check_can_continue()
        digest = self._digest(parts, scale, covered, exchange)
        if on_digest is not None:
            on_digest(digest)
        self._run(digest, parts, scale)

    def _digest(
        self, parts: Parts, scale: float, covered: bytes, exchange: Exchange | None
    ) -> Secret:
        """The digest of the whole sum, of which this process may hold a part."""
        previous = self._state.last_digest
        if self._shard_digest is None:
            return digest_of_update(self._row_keys, parts, scale, previous, self._threads, covered)
        if exchange is None or len(parts) != 1:
            raise InvalidInput(
                "a stream of a shard needs `exchange`, and a sum that is one array: its digest "
                "covers the coordinates of all ranks"
            )
        (part,) = parts
        own = self._shard_digest.partial(part, scale, previous, self._threads, covered)
        all_parts = exchange(own)
        return self._shard_digest.combine(all_parts, part, scale, previous, covered)

    def _run(self, digest: Secret, parts: Parts, scale: float) -> None:
        """Compute the next round, add its noise to the arrays and advance the state."""
        next_round, state_after = self._next_round(digest)
        self._interrupted = True
        if self._shard is None:
            run_round(next_round, Target(parts, scale), self._size, self._threads)
        else:
            part = parts[0] if parts else np.empty(0).data
            run_shard(next_round, ShardTarget(part, scale), self._shard, self._threads)
        self._state = state_after
        self._interrupted = False

    def _check_can_continue(self) -> None:
        """Raise if the stream was interrupted, or if all its rounds are done."""
        if self._interrupted:
            raise InvalidInput(
                "this stream was interrupted within a round, and its buffers are inconsistent; "
                "load the last saved state"
            )
        if self._rounds is not None and self.round >= self._rounds:
            raise RoundsExceeded(
                f"all {self._rounds:,} rounds of the plan are done, and a further round has no "
                "guarantee; plan for more rounds before training"
            )
        if self._most_rounds is not None and self.round >= self._most_rounds:
            raise RoundsExceeded(
                f"{self._mechanism.name} was built for {self._most_rounds} rounds, and all of them "
                "are done; build one for more rounds, or use a mechanism without a limit, such as "
                "blt"
            )

    def _check(self, parts: Parts, grid: Grid | None) -> None:
        """Raise if the sum has another size, type or grid than the stream needs."""
        size = sum(map(len, parts))
        if size != self._held:
            raise InvalidInput(f"the update has {size:,} coordinates, the stream {self._held:,}")
        whole = [np.asarray(part).dtype == np.int64 for part in parts]
        if any(whole) != (grid is not None) or all(whole) != (grid is not None):
            raise InvalidInput("a sum of int64 needs a grid, and a floating-point sum has none")
        if grid is not None and self._noise_multiplier * self._clip_norm / grid.step > MOST_STEPS:
            raise InvalidInput(
                f"a grid with steps of {grid.step:g} is too fine for this noise: its standard "
                "deviation is limited to 2^48 steps"
            )
        if grid is not None and grid.clip_norm != self._clip_norm:
            raise InvalidInput(
                f"the grid clips to {grid.clip_norm!r}, the stream to {self._clip_norm!r}"
            )

    def _check_norm(self, parts: Parts, grid: Grid | None, updates: int | None) -> None:
        """Raise if the norm of the sum is too large for this number of clipped updates."""
        if self._rounds is None and updates is None:
            return
        if updates is None:
            raise InvalidInput(
                "pass the number of clipped updates in the sum as updates=, or pass an ExactSum"
            )
        most = whole_number("updates", updates, 0) * self._clip_norm * (1 + NORM_SLACK)
        norm = norm_of(list(map(np.asarray, parts))) * (1.0 if grid is None else grid.step)
        if math.isnan(norm) or (math.isinf(norm) and grid is None):
            raise InvalidInput("the update has a NaN or an infinity; nothing was changed")
        if not norm <= most:
            raise InvalidInput(
                f"the sum has norm {norm:.6g}, but {updates:,} updates clipped to "
                f"{self._clip_norm:g} have at most {most:.6g}: clip each update before summing"
            )

    def _next_round(self, digest: Secret) -> tuple[RoundWork, NoiseState]:
        """The work of the next round, and the state after it. The present state does not change."""
        if self._mode == "regenerating":
            return self._regenerated(digest)
        if self._decaying is not None:
            return self._next_of_decaying(self._decaying, digest)
        return self._next_of_any(digest)

    def _next_of_decaying(
        self, parameters: DecayingBuffers, digest: Secret
    ) -> tuple[RoundWork, NoiseState]:
        """The next round with the fused kernel for buffers that decay."""
        state = self._state
        buffers = state.buffers or [self._new_buffer() for _ in parameters.decays]
        row = row_key(self._row_keys, state.next_row, digest)
        decays, scales = np.array(parameters.decays), np.array(parameters.scales)
        return BltRound(row, decays, scales, buffers, self._size), state.after(digest, 1, buffers)

    def _next_of_any(self, digest: Secret) -> tuple[RoundWork, NoiseState]:
        """The next round by the mechanism's own step; buffers that are not kept are overwritten."""
        state = self._state
        step = transition(self._mechanism, state.round, state.next_row, len(state.buffers))
        unused = [b for i, b in enumerate(state.buffers) if i not in step.buffers]
        needed = len(step.weights) - 1
        outputs = [*unused, *(self._new_buffer() for _ in range(needed - len(unused)))][:needed]
        rows = [row_key(self._row_keys, state.next_row + i, digest) for i in range(step.fresh)]
        next_round = LinearRound(rows, step.weights, state.buffers, outputs, self._size)
        buffers = [state.buffers[i] if i >= 0 else outputs[-1 - i] for i in step.buffers]
        return next_round, state.after(digest, step.fresh, buffers)

    def _regenerated(self, digest: Secret) -> tuple[RoundWork, NoiseState]:
        """The next round from all rows of Z so far, without buffers."""
        state = self._state
        weights = self._decoder_rows.row(state.round)
        after = state.after(digest, len(weights) - state.next_row, [])
        (used,) = np.nonzero(weights)
        rows = [row_key(self._row_keys, row, after.digests[row]) for row in used.tolist()]
        return LinearRound(rows, weights[None, used], [], [], self._size), after

    def _new_buffer(self) -> Buffer:
        return Buffer(np.zeros(self._held, self._dtype))

    @property
    def _held(self) -> int:
        """Number of coordinates that this process holds."""
        return self._size if self._shard is None else self._shard.count


def stream_identity(
    mechanism: Mechanism, size: int, noise_multiplier: float, clip_norm: float, dtype: str
) -> bytes:
    """Bytes that identify a stream; its row keys are derived from them and from the noise key.

    Two streams with different noise must not share a row of Z, even for the same sum: the
    difference of their releases would reveal the row. The format of these bytes must not change,
    because that would change the noise of every run in progress.
    """
    shape = (mechanism_sha256(mechanism), size, noise_multiplier, clip_norm, dtype)
    return repr(shape).encode()


def _dtype_name(dtype: DTypeLike) -> Literal["float32", "float64"]:
    """Name of a supported dtype; raises for any other."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    for supported in ("float32", "float64"):
        if name == supported:
            return supported
    raise InvalidInput(f"dtype must be float32 or float64, got {name:.60}")


def _resolved_mode(
    mode: Mode, mechanism: Mechanism, vector_bytes: int
) -> Literal["buffered", "regenerating"]:
    """The given mode, with `auto` replaced by one of the other two."""
    if mode != "auto":
        if mode not in ("buffered", "regenerating"):
            raise InvalidInput(f"mode must be auto, buffered or regenerating, got {mode!r}")
        return mode
    if mechanism.memory_grows:
        return "regenerating"
    memory = mechanism.memory(mechanism.rounds or MANY_ROUNDS)
    return "regenerating" if memory * vector_bytes > MOST_BUFFER_BYTES else "buffered"


def _core_count() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
