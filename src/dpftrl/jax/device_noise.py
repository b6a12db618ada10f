"""Correlated noise on the device, sharded like the parameters.

Keystream, normals and buffers are computed by operations of JAX on the device, in one compiled
function; see `dpftrl.noise.device`. The buffers are arrays like the parameters, and have their
sharding. Each device computes the noise of the coordinates that it holds.

The key of a row of noise is computed on the host, from a digest of the whole sum. For it, the host
reads each device's part of the sum; see `dpftrl.noise.sharding`. The digests of all parts are
combined, so the noise does not depend on how the parameters are sharded.
"""

# JAX's types are only partly known to a type checker; what enters from it is annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import hmac
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple, NoReturn, cast, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from dpftrl.clipping import norm_of
from dpftrl.errors import InvalidInput, RoundsExceeded, UnsafeState
from dpftrl.jax.gradients import LOW_BITS, ExactGradientSum
from dpftrl.noise import NoiseKey, Shard
from dpftrl.noise.device import (
    HIGH_HALF,
    NORMALS_PER_BLOCK,
    Split,
    chacha20,
    check_block_counter,
    decaying_buffers,
    split_blt_step,
    split_normals,
    split_rounded,
    surplus_bits,
)
from dpftrl.noise.key import DIGEST_BYTES, KEY_BYTES, Secret, row_key
from dpftrl.noise.sharding import ShardDigest
from dpftrl.noise.stream import MOST_DRAWS, NORM_SLACK, NoisePlan, stream_identity
from dpftrl.plan.device import noise_multiplier_on_device

DIGEST_WORDS: Final = DIGEST_BYTES // 4
KEY_WORDS: Final = KEY_BYTES // 4
# The largest standard deviation of Z in steps of the grid: the noise fits into two words.
MOST_STEPS: Final = 2.0**36
# Blocks of keystream that are computed at once, to limit the memory in between.
BLOCKS_AT_ONCE: Final = 2**14


class DeviceNoiseState(NamedTuple):
    """State of noise on the device between two steps.

    The state is secret. Store it like the noise key, and never publish it with a model.

    Attributes:
        step: Number of steps completed so far.
        digests: One row for each planned step: a keyed digest of all sums up to that step.
        tag: Proves that key, plan, step and digests belong together. It does not cover the buffers.
        buffers: For each buffer of the mechanism, its high and its low parts, like the parameters.
    """

    step: jax.Array
    digests: jax.Array
    tag: jax.Array
    buffers: tuple[tuple[Any, Any], ...]

    def __repr__(self) -> str:
        return "DeviceNoiseState(secret)"


@final
class JaxOps:
    """The operations of `dpftrl.noise.device.Ops`, by JAX.

    Args:
        never: The number 0, as an array whose value the compiler does not know.
    """

    def __init__(self, never: Any):
        self._never = never

    def words(self, value: int, like: Any) -> Any:
        """An array like another one, filled with one word."""
        return jnp.full(like.shape, value, jnp.uint32)

    def shift_right(self, words: Any, count: int) -> Any:
        """Words shifted right, filled with zeros."""
        return words >> count

    def low_bits(self, words: Any, count: int) -> Any:
        """The lowest bits of words."""
        return words & np.uint32(2**count - 1)

    def to_float(self, words: Any) -> Any:
        """Words below 2^24 as float32, exactly."""
        return words.astype(jnp.float32)

    def high_half(self, values: Any) -> Any:
        """Float32 numbers with the lowest 12 bits set to zero."""
        bits = jax.lax.bitcast_convert_type(values, jnp.uint32) & np.uint32(HIGH_HALF)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def power_of_two(self, exponents: Any) -> Any:
        """Two to the power of whole numbers."""
        bits = (exponents.astype(jnp.int32) + 127) << 23
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def exponent(self, values: Any) -> Any:
        """The exponents of positive float32 numbers."""
        bits = jax.lax.bitcast_convert_type(values, jnp.int32) >> 23
        return (bits - 127).astype(jnp.float32)

    def where(self, condition: Any, left: Any, right: Any) -> Any:
        """Left where the condition is true, right elsewhere."""
        return jnp.where(condition, jnp.float32(left), jnp.float32(right))

    def sqrt(self, values: Any) -> Any:
        """Square roots."""
        return jnp.sqrt(values)

    def round(self, values: Any) -> Any:
        """The nearest whole numbers."""
        return jnp.round(values)

    def stack(self, arrays: list[Any]) -> Any:
        """Arrays of one shape as one array, with a new first dimension."""
        return self._computed(jnp.stack(arrays))

    def concatenate(self, first: Any, second: Any) -> Any:
        """Two arrays joined along their first dimension."""
        return self._computed(jnp.concatenate([first, second]))

    def barrier(self, numbers: Split) -> Split:
        """The same numbers, computed before what uses them."""
        return self._computed(numbers)

    def _computed(self, arrays: Any) -> Any:
        """The same arrays, after a loop that XLA cannot see through.

        XLA drops `optimization_barrier` on CPUs before it fuses operations, and then compiles for
        minutes. It keeps a loop whose number of iterations it does not know.
        """
        return jax.lax.fori_loop(
            0, self._never, lambda _, now: jax.tree.map(lambda one: one + one, now), arrays
        )

    def repeat(self, times: int, function: Any, state: list[Any]) -> list[Any]:
        """Apply a function to a list of arrays several times."""
        return jax.lax.fori_loop(0, times, lambda _, now: function(now), state)


def noise_on_device(
    plan: NoisePlan, key: NoiseKey, clip_norm: float, batch_size: float, sharding: Any = None
) -> optax.GradientTransformation:
    """Create an optax transformation that computes correlated noise on the device.

    Use `dpftrl.jax.correlated_noise(..., on_device=True)`, which calls this function.

    Args:
        plan: Mechanism, noise multiplier and number of steps.
        key: The noise key.
        clip_norm: Norm to which each gradient was clipped.
        batch_size: The number to divide by.
        sharding: A pytree of `NamedSharding`, one for each parameter; None for one device.
    """
    noise_multiplier_on_device(plan, 1)  # checks mechanism and plan now, not in the first step

    @cache
    def noise_for(shapes: tuple[tuple[int, ...], ...]) -> _Noise:
        return _Noise(plan, key, clip_norm, batch_size, _Layout.of(shapes, sharding))

    def init(params: optax.Params) -> DeviceNoiseState:
        leaves, structure = jax.tree.flatten(params)
        noise = noise_for(tuple(np.shape(leaf) for leaf in leaves))
        buffers = tuple(
            (noise.zeros(structure), noise.zeros(structure))
            for _ in decaying_buffers(plan.mechanism).decays
        )
        return DeviceNoiseState(
            step=jnp.zeros((), jnp.int32),
            digests=jnp.zeros((plan.participation.rounds, DIGEST_WORDS), jnp.uint32),
            tag=jnp.asarray(_words(noise.tag(b""))),
            buffers=buffers,
        )

    def update(
        updates: Any, state: Any, params: optax.Params | None = None
    ) -> tuple[Any, DeviceNoiseState]:
        del params
        if not isinstance(updates, ExactGradientSum):
            raise InvalidInput(
                "noise on the device needs the exact sum of dpftrl.jax.clipped_sum, got "
                f"{type(updates).__name__}"
            )
        if updates.grid.clip_norm != clip_norm:
            raise InvalidInput(
                f"the gradients were clipped to {updates.grid.clip_norm!r}, the noise is for "
                f"{clip_norm!r}; give both the same clip_norm"
            )
        shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(updates.high))
        return noise_for(shapes).update(updates, cast("DeviceNoiseState", state))

    return optax.GradientTransformation(init, update)


@final
class _Layout:
    """Shapes of all arrays of a model, and how they are sharded over the devices of a mesh."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], specs: Sequence[Any], mesh: Any):
        self.shapes, self.specs, self.mesh = tuple(shapes), tuple(specs), mesh
        self.size = sum(math.prod(shape) for shape in shapes)
        for leaf, shape in enumerate(self.shapes):
            check_block_counter(math.prod(shape[:-1]) * _blocks_per_row(shape))
            for length, names in zip(shape, self.names(leaf), strict=True):
                parts = math.prod(self.axes[name] for name in names)
                if length % parts:
                    raise InvalidInput(
                        f"a parameter of shape {shape} cannot be divided as {self.specs[leaf]}: "
                        f"{length:,} is not a multiple of {parts:,}"
                    )

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], sharding: Any) -> "_Layout":
        if sharding is None:
            return cls(shapes, [PartitionSpec()] * len(shapes), None)
        given = jax.tree.leaves(sharding, is_leaf=lambda one: isinstance(one, NamedSharding))
        if len(given) != len(shapes) or not all(isinstance(one, NamedSharding) for one in given):
            raise InvalidInput(
                "sharding must have one jax.sharding.NamedSharding for each parameter, such as "
                "jax.tree.map(lambda x: x.sharding, params)"
            )
        if len({one.mesh for one in given}) != 1:
            raise InvalidInput("all parameters must be sharded over the same mesh")
        return cls(shapes, [one.spec for one in given], given[0].mesh)

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh, and how many devices each has."""
        return {} if self.mesh is None else dict(self.mesh.shape)

    def names(self, leaf: int) -> list[tuple[str, ...]]:
        """For each dimension of an array, the axes of the mesh over which it is divided."""
        spec = [*self.specs[leaf], *[None] * len(self.shapes[leaf])][: len(self.shapes[leaf])]
        return [
            () if one is None else (one,) if isinstance(one, str) else tuple(one) for one in spec
        ]

    def local_shape(self, leaf: int) -> tuple[int, ...]:
        """The shape of the part of an array on one device."""
        return tuple(
            length // math.prod(self.axes[name] for name in names)
            for length, names in zip(self.shapes[leaf], self.names(leaf), strict=True)
        )

    def offsets(self, leaf: int, place: dict[str, Any]) -> list[Any]:
        """The index of the first element that a device holds, in each dimension.

        Args:
            leaf: The number of the array.
            place: The place of the device on each axis of the mesh.
        """
        offsets = list[Any]()
        for length, names in zip(self.local_shape(leaf), self.names(leaf), strict=True):
            index: Any = 0
            for name in names:
                index = index * self.axes[name] + place[name]
            offsets.append(index * length)
        return offsets

    def spans(self, place: dict[str, int]) -> list[tuple[int, int]]:
        """The coordinates of the whole model whose digest a device computes.

        An array that several devices hold is left to the first of them.
        """
        spans, start = list[tuple[int, int]](), 0
        for leaf, shape in enumerate(self.shapes):
            used = {name for names in self.names(leaf) for name in names}
            if all(place[name] == 0 for name in self.axes if name not in used):
                spans += _spans_of(shape, self.local_shape(leaf), self.offsets(leaf, place), start)
            start += math.prod(shape)
        return spans


def _spans_of(
    shape: tuple[int, ...], local: tuple[int, ...], offsets: Sequence[int], start: int
) -> list[tuple[int, int]]:
    """The places of a part of an array in its raveled form, in order."""
    cut = max((d for d in range(len(shape)) if local[d] != shape[d]), default=-1)
    inner = math.prod(shape[cut + 1 :])
    if cut < 0:
        return [(start, start + inner)]
    run = local[cut] * inner  # elements that follow one another
    strides = [math.prod(shape[d + 1 :]) for d in range(cut + 1)]
    base = start + sum(o * s for o, s in zip(offsets, strides, strict=False))
    outer = np.zeros(1, np.int64)
    for d in range(cut):
        outer = (outer[:, None] + np.arange(local[d]) * strides[d]).reshape(-1)
    return [(base + int(one), base + int(one) + run) for one in outer]


@final
class _Noise:
    """The noise of a model whose arrays have these shapes and this sharding."""

    def __init__(
        self, plan: NoisePlan, key: NoiseKey, clip_norm: float, batch_size: float, layout: _Layout
    ):
        self._plan, self._clip_norm, self._batch_size = plan, clip_norm, batch_size
        self.layout = layout
        self._buffers = decaying_buffers(plan.mechanism)
        rounds = plan.mechanism.check_rounds(plan.participation.rounds)
        if layout.size * rounds > MOST_DRAWS:
            raise InvalidInput(
                f"{layout.size:,} coordinates over {rounds:,} steps are more than the 2^40 numbers "
                "that a guarantee covers"
            )
        self._noise_multiplier = noise_multiplier_on_device(plan, layout.size, "split")
        # Which normal a coordinate gets depends on the shapes, so they are a part of the identity.
        kind = f"split float32 {layout.shapes!r}"
        identity = stream_identity(
            plan.mechanism, layout.size, self._noise_multiplier, clip_norm, kind
        )
        self._row_keys = key.derive(b"stream on a device", identity)
        self._tag_key = key.derive(b"state on a device", identity)
        self._digest_of = cache(self._make_digest)

    def __repr__(self) -> str:
        return f"Noise({self._plan.mechanism.name}, size={self.layout.size:,}, secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("correlated noise cannot be pickled; save the state of the transformation")

    def zeros(self, structure: Any) -> Any:
        """Arrays of zeros like the parameters. No device ever holds more than its part."""
        layout = self.layout

        def make() -> Any:
            arrays = [jnp.zeros(shape, jnp.float32) for shape in layout.shapes]
            return jax.tree.unflatten(structure, arrays)

        if layout.mesh is None:
            return make()
        where = [NamedSharding(layout.mesh, spec) for spec in layout.specs]
        return jax.jit(make, out_shardings=jax.tree.unflatten(structure, where))()

    def update(self, total: ExactGradientSum, state: DeviceNoiseState) -> tuple[Any, Any]:
        """The noisy mean, and the state after the step."""
        scale = self._noise_multiplier * self._clip_norm / total.grid.step
        if not scale <= MOST_STEPS:
            raise InvalidInput(
                f"the noise has {scale:g} steps of the grid per standard deviation, and at most "
                "2^36 fit on the device"
            )
        high, structure = jax.tree.flatten(total.high)
        low = jax.tree.leaves(total.low)
        flat = tuple((jax.tree.leaves(a), jax.tree.leaves(b)) for a, b in state.buffers)
        secret = (state.step, state.digests, state.tag)
        arguments = (high, low, total.count, flat, secret)
        step, axes = total.grid.step, tuple(self.layout.axes)

        def on_device(high: Any, low: Any, count: Any, buffers: Any, secret: Any) -> Any:
            place = {name: jax.lax.axis_index(name) for name in axes}
            words = jax.ShapeDtypeStruct((DIGEST_WORDS,), jnp.uint32)
            where = jnp.array([*place.values()], jnp.int32)
            own = jax.pure_callback(
                self._own_digest, words, where, high, low, count, secret, _bits_of(scale)
            )
            parts = jax.lax.all_gather(own, axes) if axes else own[None]
            results = (jax.ShapeDtypeStruct((KEY_WORDS,), jnp.uint32), words, words)
            row, digest, tag = jax.pure_callback(
                self._row, results, parts.reshape(-1, DIGEST_WORDS), secret, _bits_of(scale)
            )
            ops = JaxOps((secret[0] < 0).astype(jnp.int32))  # no step is negative
            means, after = self._add(ops, high, low, buffers, row, place, scale, step)
            return means, after, digest, tag

        if self.layout.mesh is not None:
            like_params = list(self.layout.specs)
            both = tuple((like_params, like_params) for _ in flat)
            everywhere = PartitionSpec()
            on_device = jax.shard_map(
                on_device,
                mesh=self.layout.mesh,
                in_specs=(like_params, like_params, everywhere, both, (everywhere,) * 3),
                out_specs=(like_params, both, everywhere, everywhere),
                check_vma=False,
            )
        means, after, digest, tag = on_device(*arguments)
        pairs = tuple(
            (jax.tree.unflatten(structure, a), jax.tree.unflatten(structure, b)) for a, b in after
        )
        digests = state.digests.at[state.step].set(digest)
        return (
            jax.tree.unflatten(structure, means),
            DeviceNoiseState(state.step + 1, digests, tag, pairs),
        )

    # ------------------------------------------------------------------ on the device

    def _add(
        self,
        ops: JaxOps,
        high: list[Any],
        low: list[Any],
        buffers: Any,
        row: Any,
        place: dict[str, Any],
        scale: float,
        step: float,
    ) -> tuple[list[Any], Any]:
        """The noisy means of the coordinates of this device, and its buffers after the step.

        All arrays are joined, so that XLA compiles the noise once.
        """
        z = self._normals(ops, row, place)
        old = [Split(_joined(one[0]), _joined(one[1])) for one in buffers]
        noise, new = split_blt_step(ops, self._buffers, old, z)
        noise_high, noise_low = split_rounded(ops, noise, scale)
        sum_low = _joined(low) + noise_low.astype(jnp.int32)
        sum_high = _joined(high) + noise_high.astype(jnp.int32) + (sum_low >> LOW_BITS)
        sum_high, sum_low = _rounded(surplus_bits(scale), sum_high, sum_low & (2**LOW_BITS - 1))
        rest = sum_low.astype(jnp.float32)
        unit = step / self._batch_size
        mean = sum_high.astype(jnp.float32) * np.float32(unit * 2**LOW_BITS)
        mean = mean + rest * np.float32(unit)
        after = tuple((self._apart(one.high), self._apart(one.low)) for one in new)
        return self._apart(mean), after

    def _apart(self, joined: Any) -> list[Any]:
        """The arrays of this device that `_joined` has joined."""
        shapes = [self.layout.local_shape(leaf) for leaf in range(len(self.layout.shapes))]
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()
        parts = jnp.split(joined, ends)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _normals(self, ops: JaxOps, row: Any, place: dict[str, Any]) -> Split:
        """The normals of the coordinates of all arrays that this device holds, joined."""
        blocks = [self._blocks(leaf, place) for leaf in range(len(self.layout.shapes))]
        counter = _joined([one.counter for one in blocks])
        leaves = _joined(
            [jnp.full(one.counter.shape, leaf, jnp.uint32) for leaf, one in enumerate(blocks)]
        )
        at_once = min(counter.size, BLOCKS_AT_ONCE)
        padding = -counter.size % at_once
        both = [jnp.pad(one, (0, padding)).reshape(-1, at_once) for one in (counter, leaves)]
        key, zero = [row[i] for i in range(KEY_WORDS)], jnp.zeros((), jnp.uint32)

        def some(numbers: Any) -> Split:
            words = chacha20(ops, key, numbers[0], [numbers[1], zero, zero])
            return Split(*(part.T for part in split_normals(ops, words)))

        drawn = jax.lax.map(some, tuple(both))
        parts = list[Split]()
        start = 0
        for one in blocks:
            stop = start + one.counter.size
            flat = (part.reshape(-1, NORMALS_PER_BLOCK)[start:stop] for part in drawn)
            parts.append(Split(*(one.own(part).reshape(-1) for part in flat)))
            start = stop
        return Split(_joined([one.high for one in parts]), _joined([one.low for one in parts]))

    def _blocks(self, leaf: int, place: dict[str, Any]) -> "_Blocks":
        """The blocks of keystream for the coordinates of an array that this device holds.

        They go along the last dimension. So a device that holds a part of it computes at most one
        block per row more than it needs.
        """
        shape, local = self.layout.shapes[leaf] or (1,), self.layout.local_shape(leaf) or (1,)
        offsets = self.layout.offsets(leaf, place) or [0]
        first = offsets[-1] // NORMALS_PER_BLOCK
        width = local[-1]
        blocks = -(-width // NORMALS_PER_BLOCK) + (0 if width == shape[-1] else 1)
        per_row = _blocks_per_row(shape)
        index = jnp.zeros((), jnp.uint32)
        for d, length in enumerate(local[:-1]):
            along = jnp.arange(length, dtype=jnp.uint32) + jnp.asarray(offsets[d], jnp.uint32)
            index = index[..., None] + along * np.uint32(math.prod(shape[d + 1 : -1]))
        counter = index[..., None] * np.uint32(per_row) + (
            jnp.arange(blocks, dtype=jnp.uint32) + jnp.asarray(first, jnp.uint32)
        )
        skip = jnp.asarray(offsets[-1] - first * NORMALS_PER_BLOCK, jnp.int32)
        return _Blocks(counter.reshape(-1), blocks * NORMALS_PER_BLOCK, skip, width)

    # ------------------------------------------------------------------ on the host

    def _make_digest(self, place: tuple[int, ...]) -> ShardDigest:
        spans = self.layout.spans(dict(zip(self.layout.axes, place, strict=True)))
        return ShardDigest(self._row_keys, Shard(self.layout.size, tuple(spans)))

    def _own_digest(
        self, place: Any, high: Any, low: Any, count: Any, secret: Any, scale: Any
    ) -> NDArray[np.uint32]:
        """What a device contributes to the digest of the sum."""
        where = tuple(np.asarray(place).tolist())
        axes = dict(zip(self.layout.axes, where, strict=True))
        own = list[NDArray[np.int64]]()
        for leaf, (top, rest) in enumerate(zip(high, low, strict=True)):
            used = {name for names in self.layout.names(leaf) for name in names}
            if all(axes[name] == 0 for name in axes if name not in used):
                steps = (np.asarray(top, np.int64) << LOW_BITS) + np.asarray(rest, np.int64)
                own.append(steps.reshape(-1))
        part = np.concatenate([*own, np.empty(0, np.int64)])
        unit = self._noise_multiplier / _float_of(scale)  # a step, in clip norms
        if not norm_of([part]) * unit <= int(count) * (1 + NORM_SLACK):
            raise InvalidInput(
                f"the sum is too large for {int(count):,} gradients that were clipped: clip each "
                "of them with dpftrl.jax.clipped_sum"
            )
        _, previous = self._checked(secret)
        digest = self._digest_of(where).partial(part.data, _float_of(scale), previous, 1, b"")
        return _words(digest)

    def _row(self, parts: Any, secret: Any, scale: Any) -> Any:
        """The key of the row of noise, the digest of the step, and the tag after it."""
        past, previous = self._checked(secret)
        given = [Secret(memoryview(np.asarray(one).tobytes())) for one in np.asarray(parts)]
        empty = np.empty(0, np.int64).data
        first = self._digest_of((0,) * len(self.layout.axes))
        digest = first.combine(given, empty, _float_of(scale), previous, b"")
        step = len(past) // DIGEST_BYTES
        if step >= self._plan.participation.rounds:
            raise RoundsExceeded(f"all {step:,} steps of the plan are done")
        row = np.frombuffer(row_key(self._row_keys, step, digest).secret_bytes(), np.uint32)
        return row, _words(digest), _words(self.tag(past + digest.secret_bytes()))

    def _checked(self, secret: Any) -> tuple[bytes, Secret]:
        """The digests of the steps so far, and the last one; raises if the state is not valid."""
        step, digests, tag = secret
        past = np.asarray(digests)[: max(int(step), 0)].tobytes()
        known = np.asarray(tag).tobytes()
        if not 0 <= int(step) <= len(digests) or not hmac.compare_digest(
            known, self.tag(past).secret_bytes()
        ):
            raise UnsafeState(
                "this state of the noise was made with another key, plan, clip norm or model, or "
                "it was changed; continue with the key and plan of the run"
            )
        return past, Secret(past[-DIGEST_BYTES:])

    def tag(self, digests: bytes) -> Secret:
        """The tag of a state with these digests."""
        tag = self._tag_key.derive(b"tag", secret=Secret(digests)).secret_bytes()
        return Secret(tag[:DIGEST_BYTES])


class _Blocks(NamedTuple):
    """The blocks of keystream for a part of an array.

    Attributes:
        counter: The number of each block.
        row: Number of normals of all blocks of a row.
        skip: How many of them come before the first that is needed.
        width: How many of them are needed.
    """

    counter: Any
    row: int
    skip: Any
    width: int

    def own(self, normals: Any) -> Any:
        """Those of the normals of all blocks that are needed."""
        rows = normals.reshape(-1, self.row)
        return jax.lax.dynamic_slice_in_dim(rows, self.skip, self.width, axis=1)


def _rounded(bits: int, high: Any, low: Any) -> tuple[Any, Any]:
    """High * 2^16 + low, rounded to a multiple of a power of two. Low is from 0 to 2^16."""
    if bits == 0:
        return high, low
    if bits <= LOW_BITS:
        return high, ((low + 2 ** (bits - 1)) >> bits) << bits
    above = bits - LOW_BITS
    return ((high + 2 ** (above - 1)) >> above) << above, low * 0


def _blocks_per_row(shape: tuple[int, ...]) -> int:
    """Blocks of keystream for the last dimension of an array."""
    return -(-(shape[-1] if shape else 1) // NORMALS_PER_BLOCK)


def _joined(arrays: Sequence[Any]) -> Any:
    return jnp.concatenate([one.reshape(-1) for one in arrays])


def _words(secret: Secret) -> NDArray[np.uint32]:
    return np.frombuffer(secret.secret_bytes(), np.uint32)


def _bits_of(value: float) -> NDArray[np.uint32]:
    """A float64 as two words, which JAX passes on unchanged."""
    return np.frombuffer(np.float64(value).tobytes(), np.uint32)


def _float_of(words: Any) -> float:
    return float(np.frombuffer(np.asarray(words, np.uint32).tobytes(), np.float64)[0])
