"""The noise that every training loop calls: correlated, keyed, added in place."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NoReturn, Protocol, Self, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpftrl._internal.arrays import Arrays, segments
from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.deprecation import renamed_argument
from dpftrl.clipping import ExactSum, Grid, norm_of
from dpftrl.errors import InvalidInput, RoundsExceeded
from dpftrl.mechanisms import BLT, FullTree, Mechanism, SquareRoot
from dpftrl.noise.key import NoiseKey, Secret, row_key
from dpftrl.noise.rounds import (
    BltRound,
    DecoderRows,
    LinearRound,
    Round,
    Target,
    run_round,
    transition,
)
from dpftrl.noise.state import (
    DIGEST_BYTES,
    Buffer,
    Header,
    NoiseState,
    digest_of_update,
    mechanism_sha256,
    read_state,
    write_state,
)
from dpftrl.participation import Participation

Parts = Sequence[NDArray[Any]]
Mode = Literal["auto", "buffered", "regenerating"]

# Above this, `auto` makes earlier noise again instead of keeping it.
MOST_BUFFER_BYTES = 4 * 2**30
# Steps of a grid in one standard deviation of Z: beyond, noise might not fit into 64 bits.
MOST_STEPS = 2**48
# Rounds at which the memory of a mechanism without end is judged.
MANY_ROUNDS = 1_000_000
# Coordinates times rounds that a guarantee covers: `dpftrl.accounting` has the same number.
MOST_DRAWS = 2**40
# How far rounding may take a sum above the number of its updates times the clip norm.
NORM_SLACK = 1e-6


class NoisePlan(Protocol):
    """What a stream needs of a plan; `dpftrl.plan.Plan` has it."""

    @property
    def mechanism(self) -> Mechanism:
        """What correlates the noise."""
        ...

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier."""
        ...

    @property
    def participation(self) -> Participation:
        """How many rounds there are, and who may take part in them."""
        ...


@final
class NoiseStream:
    """A stream of correlated noise for a model of `size` coordinates.

    The noise of round t is row t of D Z, times `noise_multiplier` times `clip_norm`; see
    `dpftrl.mechanisms`.

    Guarantees:
        Row i of Z is a function of the key, of what shapes the stream (mechanism, size, sigma, clip
        norm and dtype), of i, and of a keyed digest of all sums that it covers, those of earlier
        rounds included. The same sums get the same noise, to the last bit, on any machine and with
        any number of threads; anything else gets fresh noise. A stream that was interrupted within
        a round refuses to go on.

    Args:
        plan: Mechanism, noise multiplier and number of rounds; a round after the last is refused.
        size: Coordinates of the model. Times the rounds, at most 2^40: that is what a guarantee
            covers.
        key: The noise key.
        clip_norm: Norm to which each update was clipped.
        dtype: What the buffers are kept in. Guarantees cover the rounding of float64 alone; float32
            is there to go on with runs of version 0.1.
        mode: `buffered` keeps what the mechanism needs between rounds; `regenerating` keeps
            nothing, and makes all earlier rows again in every round; `auto` is buffered unless
            that takes more than 4 GiB, or one vector per round.
        threads: How many to use; by default one per processor.
    """

    def __init__(
        self,
        plan: NoisePlan,
        size: int,
        *,
        key: NoiseKey,
        clip_norm: float,
        dtype: DTypeLike = np.float64,
        mode: Mode = "auto",
        threads: int | None = None,
    ):
        self._setup(
            plan.mechanism, size, plan.noise_multiplier, key, clip_norm, dtype, mode, threads
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
    ) -> Self:
        """A stream without a plan: nothing checks that a guarantee covers what is made with it.

        It goes on for as many rounds as the mechanism supports, and takes sums of any norm.

        Args:
            mechanism: What correlates the noise.
            size: Coordinates of the model.
            noise_multiplier: Standard deviation of Z in units of the clip norm.
            key: The noise key.
            clip_norm: Norm to which each update was clipped.
            dtype: What the buffers are kept in, float64 or float32.
            mode: As for a stream with a plan.
            threads: How many to use; by default one per processor.
        """
        stream = cls.__new__(cls)
        stream._setup(mechanism, size, noise_multiplier, key, clip_norm, dtype, mode, threads)
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
    ) -> None:
        if not isinstance(key, NoiseKey):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(key).__name__
            del key  # it may be a secret all the same, which no traceback should show
            raise InvalidInput(f"key must be a NoiseKey, got {kind}; NoiseKey.generate() makes one")
        self._mechanism = mechanism
        self._size = whole_number("size", size)
        self._noise_multiplier = positive_number("noise_multiplier", noise_multiplier)
        self._clip_norm = positive_number("clip_norm", clip_norm)
        self._dtype: Literal["float32", "float64"] = _kind(dtype)
        self._mode: Literal["buffered", "regenerating"] = _mode(
            mode, mechanism, self._size * np.dtype(self._dtype).itemsize
        )
        self._threads = _processors() if threads is None else whole_number("threads", threads)
        self._key = key
        self._row_keys = key.derive(
            b"stream",
            stream_identity(
                mechanism, self._size, self._noise_multiplier, self._clip_norm, self._dtype
            ),
        )
        self._rounds: int | None = None
        self._decoder_rows = DecoderRows(mechanism)
        self._turn = Lock()
        self._interrupted = False
        self._state = NoiseState.start()

    def _limit_to(self, plan: NoisePlan) -> None:
        rounds = self._mechanism.check_rounds(plan.participation.rounds)
        if self._size * rounds > MOST_DRAWS:
            raise InvalidInput(
                f"{self._size:,} coordinates over {rounds:,} rounds are more than the 2^40 numbers "
                f"that a guarantee covers; plan for at most {MOST_DRAWS // self._size:,} rounds"
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
        raise TypeError("a noise stream is not for pickling; save() writes its state")

    @property
    def mechanism(self) -> Mechanism:
        """What correlates the noise."""
        return self._mechanism

    @property
    def round(self) -> int:
        """Rounds made so far."""
        return self._state.round

    @property
    def mode(self) -> str:
        """Whether it keeps buffers or regenerates."""
        return self._mode

    @property
    def memory_bytes(self) -> int:
        """What its buffers take now."""
        return sum(buffer.array.nbytes for buffer in self._state.buffers)

    @property
    def rounds(self) -> int | None:
        """The last round that the plan allows; None for an unchecked stream."""
        return self._rounds

    def add_to(
        self, total: ExactSum | Arrays, grid: Grid | None = None, *, updates: int | None = None
    ) -> None:
        """Add the noise of the next round to a sum of clipped updates, in place.

        No other thread may change the sum meanwhile.

        Args:
            total: An `ExactSum`, which has clipped its updates itself; or an array, or lists and
                dicts of arrays, of float32 or float64; or, with a grid, of int64.
            grid: The grid that a sum of int64 was made on: the noise is then rounded to it, so that
                what is released is exactly a rounding of the ideal sum plus noise.
            updates: How many updates are in a sum of arrays. A sum whose norm is above that many
                clip norms was not clipped, and is refused. A stream without a plan does not ask.
        """
        if isinstance(total, ExactSum):
            if grid is not None or updates is not None:
                raise InvalidInput("an ExactSum has its own grid and number of updates")
            parts, grid = segments(total.steps), total.grid
            self._check(parts, grid)
        else:
            parts = segments(total)
            self._check(parts, grid)
            self._check_norm(parts, grid, updates)
        step = 1.0 if grid is None else grid.step
        scale = positive_number(
            "sigma times clip norm", self._noise_multiplier * self._clip_norm / step
        )
        with self._turn:
            self._add(parts, scale)

    def last_digest(self) -> Secret:
        """What `replay` needs to go through the last round again; as secret as the noise."""
        return self._state.last_digest()

    def replay(self, digest: Secret) -> None:
        """Go through a round that was made before, without its sum: its noise is added to nothing.

        Args:
            digest: What `last_digest` was after that round.
        """
        if len(digest.secret_bytes()) != DIGEST_BYTES:
            raise InvalidInput(
                f"the digest of a round has {DIGEST_BYTES} bytes; this has another size"
            )
        with self._turn:
            self._check_can_go_on()
            if self._mode == "regenerating":  # nothing is kept but digests
                _, self._state = self._next_round(digest)
            else:
                self._make(digest, Target([], 1.0))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, for the owner's eyes only, so that a crash leaves the old or the new."""
        with self._turn:
            if self._interrupted:
                raise InvalidInput("this stream was interrupted within a round; nothing to save")
            write_state(Path(path), self._header(), self._state, self._key)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        plan: NoisePlan,
        *,
        key: NoiseKey,
        at_least: int,
        threads: int | None = None,
    ) -> Self:
        """Go on from a saved state.

        Args:
            path: What `save` wrote.
            plan: The one it was saved with; another mechanism or noise multiplier is refused.
            key: The key it was saved with; another is refused.
            at_least: Rounds that have been released already: a state from before is refused.
            threads: How many to use; by default one per processor.
        """
        stream = cls.load_unchecked(
            path, plan.mechanism, key=key, at_least=at_least, threads=threads
        )
        if stream._noise_multiplier != plan.noise_multiplier:
            raise InvalidInput(
                f"{path} was saved with noise multiplier {stream._noise_multiplier!r}, the plan "
                f"has {plan.noise_multiplier!r}"
            )
        stream._limit_to(plan)
        return stream

    @classmethod
    def load_unchecked(
        cls,
        path: str | os.PathLike[str],
        mechanism: Mechanism,
        *,
        key: NoiseKey,
        at_least: int,
        threads: int | None = None,
    ) -> Self:
        """Go on from a saved state without a plan; see `unchecked`."""
        header, state = read_state(
            Path(path), mechanism, key, whole_number("at_least", at_least, 0)
        )
        stream = cls.unchecked(
            mechanism,
            header.size,
            noise_multiplier=header.noise_multiplier,
            key=key,
            clip_norm=header.clip_norm,
            dtype=header.dtype,
            mode=header.mode,
            threads=threads,
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
        )

    def _add(self, parts: Parts, scale: float) -> None:
        self._check_can_go_on()
        before = self._state.last_digest()
        digest = digest_of_update(self._row_keys, parts, scale, before, self._threads)
        self._make(digest, Target(parts, scale))

    def _make(self, digest: Secret, target: Target) -> None:
        made, after = self._next_round(digest)
        self._interrupted = True
        run_round(made, target, self._size, self._threads)
        self._state = after
        self._interrupted = False

    def _check_can_go_on(self) -> None:
        if self._interrupted:
            raise InvalidInput(
                "this stream was interrupted within a round, and its buffers are half changed; "
                "load the last saved state"
            )
        if self._rounds is not None and self.round >= self._rounds:
            raise RoundsExceeded(
                f"all {self._rounds:,} rounds of the plan are done, and a further one has no "
                "guarantee; plan for more rounds before training"
            )
        if self._mechanism.rounds is not None and self.round >= self._mechanism.rounds:
            raise RoundsExceeded(
                f"{self._mechanism.name} was built for {self._mechanism.rounds} rounds and has "
                "made them all; build one for more rounds, or use one that runs on, such as blt"
            )

    def _check(self, parts: Parts, grid: Grid | None) -> None:
        size = sum(part.size for part in parts)
        if size != self._size:
            raise InvalidInput(f"the update has {size:,} coordinates, the stream {self._size:,}")
        whole = [part.dtype == np.int64 for part in parts]
        if any(whole) != (grid is not None) or all(whole) != (grid is not None):
            raise InvalidInput("sums of int64 go with a grid, and floating-point ones without")
        if grid is not None and self._noise_multiplier * self._clip_norm / grid.step > MOST_STEPS:
            raise InvalidInput(f"a grid with steps of {grid.step:g} is too fine for this noise")
        if grid is not None and grid.clip_norm != self._clip_norm:
            raise InvalidInput(
                f"the grid clips to {grid.clip_norm!r}, the stream to {self._clip_norm!r}"
            )

    def _check_norm(self, parts: Parts, grid: Grid | None, updates: int | None) -> None:
        if self._rounds is None and updates is None:
            return
        if updates is None:
            raise InvalidInput(
                "say how many clipped updates the sum holds, as updates=, or pass an ExactSum"
            )
        most = whole_number("updates", updates, 0) * self._clip_norm * (1 + NORM_SLACK)
        norm = norm_of(parts) * (1.0 if grid is None else grid.step)
        if math.isnan(norm) or (math.isinf(norm) and grid is None):
            raise InvalidInput("the update has a NaN or an infinity; nothing was changed")
        if not norm <= most:
            raise InvalidInput(
                f"the sum has norm {norm:.6g}, and {updates:,} updates clipped to "
                f"{self._clip_norm:g} have at most {most:.6g}: clip each update before summing"
            )

    def _next_round(self, digest: Secret) -> tuple[Round, NoiseState]:
        """What to do, and the state after it."""
        if self._mode == "regenerating":
            return self._regenerated(digest)
        if isinstance(self._mechanism, BLT):
            return self._next_of_blt(self._mechanism, digest)
        return self._next_of_any(digest)

    def _next_of_blt(self, blt: BLT, digest: Secret) -> tuple[Round, NoiseState]:
        state = self._state
        buffers = state.buffers or [self._room() for _ in blt.theta]
        row = row_key(self._row_keys, state.next_row, digest)
        made = BltRound(row, np.array(blt.theta), np.array(blt.omega), buffers, self._size)
        return made, state.after(digest, 1, buffers)

    def _next_of_any(self, digest: Secret) -> tuple[Round, NoiseState]:
        state = self._state
        step = transition(self._mechanism, state.round, state.next_row, len(state.buffers))
        unused = [b for i, b in enumerate(state.buffers) if i not in step.buffers]
        wanted = len(step.weights) - 1
        outputs = [*unused, *(self._room() for _ in range(wanted - len(unused)))][:wanted]
        rows = [row_key(self._row_keys, state.next_row + i, digest) for i in range(step.fresh)]
        made = LinearRound(rows, step.weights, state.buffers, outputs, self._size)
        after = [state.buffers[i] if i >= 0 else outputs[-1 - i] for i in step.buffers]
        return made, state.after(digest, step.fresh, after)

    def _regenerated(self, digest: Secret) -> tuple[Round, NoiseState]:
        state = self._state
        weights = self._decoder_rows.row(state.round)
        after = state.after(digest, len(weights) - state.next_row, [])
        (used,) = np.nonzero(weights)
        rows = [row_key(self._row_keys, row, after.digest(row)) for row in used.tolist()]
        return LinearRound(rows, weights[None, used], [], [], self._size), after

    def _room(self) -> Buffer:
        return Buffer(np.zeros(self._size, self._dtype))


def stream_identity(
    mechanism: Mechanism, size: int, noise_multiplier: float, clip_norm: float, dtype: str
) -> bytes:
    """What the row keys of a stream are derived from, besides the noise key.

    Two streams that differ in anything that shapes the noise must not share a row of Z, even for
    the same sum: their difference would show the row. These bytes are frozen: another form of them
    would change the noise of every run that is under way.
    """
    shape = (mechanism_sha256(mechanism), size, noise_multiplier, clip_norm, dtype)
    return repr(shape).encode()


def _kind(dtype: DTypeLike) -> Literal["float32", "float64"]:
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    for kind in ("float32", "float64"):
        if name == kind:
            return kind
    raise InvalidInput(f"dtype must be float32 or float64, got {name:.60}")


def _mode(
    mode: Mode, mechanism: Mechanism, vector_bytes: int
) -> Literal["buffered", "regenerating"]:
    if mode != "auto":
        if mode not in ("buffered", "regenerating"):
            raise InvalidInput(f"mode must be auto, buffered or regenerating, got {mode!r}")
        return mode
    grows = isinstance(mechanism, FullTree) or mechanism == SquareRoot()
    memory = 0 if grows else mechanism.memory(mechanism.rounds or MANY_ROUNDS)
    return "regenerating" if grows or memory * vector_bytes > MOST_BUFFER_BYTES else "buffered"


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
