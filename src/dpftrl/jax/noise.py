"""Correlated noise as an optax transformation.

The noise is computed by `dpftrl.noise.NoiseStream` on the host, which a compiled JAX function calls
through `jax.pure_callback`. So it is the same noise, to the last bit, as without JAX.

The call is a pure function of the state and the sums. The state holds one keyed digest per step,
from which the noise of every earlier step can be computed again. The model-sized noise buffers are
not part of the state: they are a cache on the host. So a state is small, a checkpoint of it is too,
and no buffer is copied between host and device.
"""

import hmac
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, NoReturn, cast, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.clipping import Grid
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.jax.gradients import ExactGradientSum
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.noise.key import DIGEST_BYTES, Secret
from dpftrl.noise.stream import Mode, NoisePlan, stream_identity
from dpftrl.plan import DatasetPlan

# JAX's types are only partly known to a type checker; what enters from it is annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

DIGEST_WORDS = DIGEST_BYTES // 4  # a digest as numbers of 32 bits, which JAX has by default


class CorrelatedNoiseState(NamedTuple):
    """State of `correlated_noise` between two steps: arrays that any checkpoint library can save.

    The state is secret. Store it like the noise key, and never publish it with a model.

    Attributes:
        step: Number of steps completed so far.
        digests: One row for each planned step: a keyed digest of all sums up to that step.
        tag: Proves that key, plan, step and digests belong together.
    """

    step: jax.Array
    digests: jax.Array
    tag: jax.Array

    def __repr__(self) -> str:
        return "CorrelatedNoiseState(secret)"


def correlated_noise(
    plan: NoisePlan,
    key: NoiseKey,
    clip_norm: float,
    batch_size: float | None = None,
    *,
    max_batch_size: int | None = None,
    mode: Mode = "auto",
    threads: int | None = None,
    on_device: bool = False,
    sharding: Any = None,
) -> optax.GradientTransformation:
    """Create an optax transformation that adds the correlated noise of the next step.

    It takes the sum of clipped gradients and returns a noisy mean: the sum plus noise, divided by
    `batch_size`. Use it as the first part of a chain. It works in `jax.jit` and `jax.lax.scan`.

    The sum is an `ExactGradientSum` from `clipped_sum`, or a pytree of float32 arrays. With float32
    arrays, rounding can change a sum by a little more than the clip norm if one example is removed.
    An `ExactGradientSum` has no such error, and its noise is rounded to its grid.

    The state is secret, and so is the key: whoever has both can remove the noise from released
    models. Never publish a state.

    Continuing from a saved state, or from an earlier one, computes the noise buffers again. That
    takes as long as the noise of all steps before it.

    Guarantees:
        The noise of a step is the noise of `dpftrl.noise.NoiseStream` for the same plan, key and
        sums, to the last bit. The guarantee of the plan holds if every sum changes by at most
        `clip_norm` in L2 norm when one example or user is left out. If training goes back to an
        earlier state and continues with other gradients, it gets fresh noise. But the plan then
        covers the released steps of one branch only, so do not release both.

    Args:
        plan: Mechanism, noise multiplier and number of steps. A step after the last is an error.
        key: The noise key. It does not appear in the transformation's repr or in a jaxpr.
        clip_norm: Norm to which each gradient was clipped.
        batch_size: The number to divide by. It must not depend on the data: it is the planned
            batch size, not the size of the batch. The default is that of a `DatasetPlan`.
        max_batch_size: Largest number of examples in a batch. A pytree of floats whose norm is
            larger than that many clip norms is refused. The default is that of a `DatasetPlan`.
        mode: As for `NoiseStream`.
        threads: Number of threads for the noise; by default one per core.
        on_device: Compute the noise on the device, by operations of JAX, and keep its buffers
            there. It needs a sum of `clipped_sum`, a BLT or independent noise, and a guarantee that
            is not for sampled batches. The noise has other bits than on the host. There is a little
            more of it, which covers the larger errors of the arithmetic, so that the guarantee of
            the plan holds. See docs/large_models.md.
        sharding: With `on_device`, a pytree of `NamedSharding`, one for each parameter. The state
            is sharded like the parameters, and no device holds a whole buffer.

    Raises:
        InvalidInput: An argument is invalid. Errors of a step, such as a NaN or a step after the
            last, come from compiled code: JAX reports them as `jax.errors.JaxRuntimeError` or
            `ValueError`, with the original message at the end.
    """
    if isinstance(plan, DatasetPlan):
        batch_size = plan.dataset.batch_size if batch_size is None else batch_size
        largest = plan.dataset.max_batch_size or plan.dataset.size
        max_batch_size = largest if max_batch_size is None else max_batch_size
    if batch_size is None or max_batch_size is None:
        raise InvalidInput(
            "batch_size and max_batch_size are needed, since the plan is not for a data set"
        )
    if sharding is not None and not on_device:
        raise InvalidInput("sharding is for noise on the device; give on_device=True too")
    if on_device:
        from dpftrl.jax.device_noise import noise_on_device

        limit, divisor = (
            positive_number("clip_norm", clip_norm),
            positive_number("batch_size", batch_size),
        )
        return noise_on_device(plan, key, limit, divisor, sharding)
    settings = _Settings(
        plan,
        positive_number("clip_norm", clip_norm),
        positive_number("batch_size", batch_size),
        whole_number("max_batch_size", max_batch_size),
        mode,
        threads,
    )
    _Noise(settings, key, size=1)  # checks the arguments now, not in the first step

    @cache
    def noise_for(size: int) -> _Noise:
        return _Noise(settings, key, size)

    def init(params: optax.Params) -> CorrelatedNoiseState:
        leaves: list[Any] = jax.tree.leaves(params)
        size = sum(int(np.size(leaf)) for leaf in leaves)
        return CorrelatedNoiseState(
            step=jnp.zeros((), jnp.int32),
            digests=jnp.zeros((plan.participation.rounds, DIGEST_WORDS), jnp.uint32),
            tag=jnp.asarray(_words(noise_for(size).first_tag())),
        )

    def update(
        updates: Any, state: Any, params: optax.Params | None = None
    ) -> tuple[Any, CorrelatedNoiseState]:
        del params
        given = cast("CorrelatedNoiseState", state)
        sums: Any = updates.high if isinstance(updates, ExactGradientSum) else updates
        leaves: list[Any] = jax.tree.leaves(sums)
        noise = noise_for(sum(int(np.size(leaf)) for leaf in leaves))
        words = jax.ShapeDtypeStruct((DIGEST_WORDS,), jnp.uint32)
        if isinstance(updates, ExactGradientSum):
            if updates.grid.clip_norm != settings.clip_norm:
                raise InvalidInput(
                    f"the gradients were clipped to {updates.grid.clip_norm!r}, the noise is for "
                    f"{settings.clip_norm!r}; give both the same clip_norm"
                )
            results = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), sums)
            noisy, digest, tag = jax.pure_callback(
                noise.add_to_exact_sum, (results, words, words), given, updates,
                vmap_method="sequential",
            )  # fmt: skip
        else:
            results = jax.tree.map(_float_result, sums)
            noisy, digest, tag = jax.pure_callback(
                noise.add_to_floats, (results, words, words), given, sums, vmap_method="sequential"
            )
        digests = given.digests.at[given.step].set(digest)
        return noisy, CorrelatedNoiseState(given.step + 1, digests, tag)

    return optax.GradientTransformation(init, update)


def _float_result(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of a noisy leaf."""
    if leaf.dtype not in (jnp.float32, jnp.float64):
        raise InvalidInput(
            f"sums of clipped gradients must be float32, got {leaf.dtype}; add up the gradients in "
            "float32, or use dpftrl.jax.clipped_sum"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


class _Settings(NamedTuple):
    """The arguments of `correlated_noise`, except the key."""

    plan: NoisePlan
    clip_norm: float
    batch_size: float
    max_batch_size: int
    mode: Mode
    threads: int | None


@final
class _Noise:
    """The noise of a model of `size` coordinates, as a pure function of state and sums.

    It keeps the stream of the last call. If the next call continues where that call ended, it needs
    no other work. Otherwise the stream is computed again from the digests in the state.
    """

    def __init__(self, settings: _Settings, key: NoiseKey, size: int):
        self._settings = settings
        self._key = key
        self._size = size
        self._stream = self._new_stream()
        self._digests = bytearray()  # of the steps that the stream has completed
        self._lock = Lock()
        plan = settings.plan
        identity = stream_identity(
            plan.mechanism, size, plan.noise_multiplier, settings.clip_norm, plan.buffers
        )
        self._tag_key = key.derive(b"state of an optax transformation", identity)

    def __repr__(self) -> str:
        return f"CorrelatedNoise({self._settings.plan.mechanism.name}, size={self._size:,}, secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("correlated noise cannot be pickled; save the state of the transformation")

    def first_tag(self) -> Secret:
        """The tag of the state before the first step."""
        return self._tag(b"")

    def add_to_floats(self, state: CorrelatedNoiseState, sums: Any) -> Any:
        """The noisy mean of floating-point sums, the digest of the step, and the next tag."""
        leaves, structure = jax.tree.flatten(sums)
        # One copy: the arrays of a callback are read-only. No traceback shows a memoryview.
        parts = [np.array(leaf, order="C").reshape(-1).data for leaf in leaves]
        secrets = self._add(state, parts, None, self._settings.max_batch_size)
        for part in parts:
            np.divide(part, self._settings.batch_size, out=np.asarray(part))
        return _like(parts, leaves, structure), *map(_words, secrets)

    def add_to_exact_sum(self, state: CorrelatedNoiseState, total: ExactGradientSum) -> Any:
        """The noisy mean of an exact sum, the digest of the step, and the next tag."""
        leaves, structure = jax.tree.flatten(total.steps())
        parts = [leaf.reshape(-1).data for leaf in leaves]
        secrets = self._add(state, parts, total.grid, int(total.count))
        divisor = self._settings.batch_size
        means = [
            total.grid.values(np.asarray(part), divisor).astype(np.float32).data for part in parts
        ]
        return _like(means, leaves, structure), *map(_words, secrets)

    def _add(
        self,
        state: CorrelatedNoiseState,
        parts: list[memoryview],
        grid: Grid | None,
        updates: int,
    ) -> tuple[Secret, Secret]:
        """Add the noise of the next step in place; return the digest of the step and the tag."""
        arrays = [np.asarray(part) for part in parts]
        with self._lock:
            past = self._checked(state)
            try:
                self._catch_up(past)
                self._stream.add_to(arrays, grid, updates=updates)
            except BaseException:
                self._stream, self._digests = self._new_stream(), bytearray()
                raise
            digest = self._stream.last_digest()
            self._digests += digest.secret_bytes()
            return digest, self._tag(bytes(self._digests))

    def _checked(self, state: CorrelatedNoiseState) -> bytes:
        """The digests of the steps so far; raises UnsafeState if the state is not valid."""
        step, rounds = int(state.step), len(state.digests)
        past = np.asarray(state.digests)[: max(step, 0)].tobytes()
        tag = np.asarray(state.tag).tobytes()
        if not 0 <= step <= rounds or not hmac.compare_digest(tag, self._tag(past).secret_bytes()):
            raise UnsafeState(
                "this state of the noise was made with another key, plan, clip norm or model size, "
                "or it was changed; continue with the key and plan of the run"
            )
        return past

    def _catch_up(self, past: bytes) -> None:
        """Bring the stream to the step after these digests."""
        if not past.startswith(self._digests):
            self._stream, self._digests = self._new_stream(), bytearray()
        for start in range(len(self._digests), len(past), DIGEST_BYTES):
            digest = memoryview(past)[start : start + DIGEST_BYTES]
            self._stream.replay(Secret(digest))
            self._digests += digest

    def _tag(self, digests: bytes) -> Secret:
        tag = self._tag_key.derive(b"tag", secret=Secret(digests)).secret_bytes()
        return Secret(tag[:DIGEST_BYTES])

    def _new_stream(self) -> NoiseStream:
        settings = self._settings
        mechanism, mode = settings.plan.mechanism, settings.mode
        if mode == "auto" and mechanism.memory(settings.plan.participation.rounds) == 0:
            mode = "regenerating"  # without buffers, there is nothing to compute again
        return NoiseStream(
            settings.plan,
            self._size,
            key=self._key,
            clip_norm=settings.clip_norm,
            mode=mode,
            threads=settings.threads,
        )


def _words(secret: Secret) -> NDArray[np.uint32]:
    """The bytes of a digest or tag as numbers of 32 bits."""
    return np.frombuffer(secret.secret_bytes(), np.uint32)


def _like(parts: list[memoryview], leaves: list[Any], structure: Any) -> Any:
    """The flat parts in the shapes and the structure of the sums."""
    shaped = [
        np.asarray(part).reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)
