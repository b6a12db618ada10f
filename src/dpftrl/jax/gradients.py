"""Sums of clipped per-example gradients, exact in any order.

In floating point, a sum of clipped gradients can change by more than the clip norm when one example
is left out, because all roundings change with it. Here every clipped gradient is cut off toward
zero to a grid, and the sum is a sum of whole numbers. That is exact, in any order and with any
micro-batch size. See `dpftrl.clipping`, which does the same with NumPy arrays.

JAX has no 64-bit integers by default. A sum is therefore kept in two words of 32 bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.clipping import Grid, JointClip
from dpftrl.errors import InvalidInput, TooLarge

# JAX's types are only partly known to a type checker; what enters from it is annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

# A tree of arrays, as JAX defines it.
PyTree = Any
# The mean loss of a batch: called with the parameters and a batch of one example.
LossFunction = Callable[[PyTree, PyTree], jax.Array]
# Which rows of a batch count.
Mask = jax.Array | NDArray[np.bool_]
# What is clipped and protected: one example, or all examples of one user.
Unit = Literal["example", "user"]

# The smallest and largest clip norm: no product of the computation leaves the range of float32.
SMALLEST_CLIP_NORM: Final = 2.0**-60
LARGEST_CLIP_NORM: Final = 2.0**60
# Steps of the grid per clip norm, as a power of two: as many bits as a float32 has. A coordinate of
# a clipped gradient is below 2^(STEP_BITS + 1) steps, since a clip norm is below 2^25 steps.
STEP_BITS: Final = 24
# So many coordinates below 2^25 steps always fit into the 32 bits of one sum.
MOST_IN_WORD: Final = 64
# The low word of a sum has so many bits; the high word has the others.
LOW_BITS: Final = 16
LOW_MASK: Final = 2**LOW_BITS - 1
# Most rows of a batch. The high words of their sum are below 2^21 * 2^(25 - 16) = 2^30.
MOST_ROWS: Final = 2**21
# Squares are added up in blocks of this length: so few additions in a row bound the rounding error.
BLOCK: Final = 256
ROUNDING: Final = 2.0**-24  # relative error of one operation in float32
# Operations other than additions between a gradient and its clipped value: a square, a root, a
# product with the margin, a division and a product. Twice as many leave room for an accelerator's
# less exact roots and divisions.
OTHER_OPERATIONS: Final = 16
# Bytes of the gradients of a micro-batch: what stays in the cache of a CPU core, and what fits into
# any memory.
CACHED_BYTES: Final = 2**23
MOST_BYTES: Final = 2**28
# Fewer examples at once than this leave a CPU idle, even if their gradients stay in its cache.
SMALL_BATCH: Final = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("high", "low", "count"),
    meta_fields=("grid",),
)
@final
@dataclass(frozen=True)
class ExactGradientSum:
    """The exact sum of clipped gradients, as a pytree. A value is (high * 2^16 + low) * step.

    The sums of several devices can be added with `jax.lax.psum`, which adds high words, low words
    and counts, as long as there are at most 2^21 rows and 2^15 devices.

    Attributes:
        high: The high words, in the structure of the parameters; arrays of int32.
        low: The low words, likewise; from 0 to 2^16 - 1.
        count: Number of gradients in the sum.
        grid: The grid: its step, and the norm to which gradients were clipped.
    """

    high: PyTree
    low: PyTree
    count: jax.Array
    grid: Grid

    def steps(self) -> PyTree:
        """The sum in steps of the grid, as NumPy arrays of int64. It does not work in `jax.jit`."""

        def whole(high: Any, low: Any) -> Any:
            return (np.asarray(high, np.int64) << LOW_BITS) + np.asarray(low, np.int64)

        return jax.tree.map(whole, self.high, self.low)

    def to_float32(self) -> PyTree:
        """The sum as arrays of float32, which rounds it."""

        def value(high: jax.Array, low: jax.Array) -> jax.Array:
            high_value = high.astype(jnp.float32) * np.float32(self.grid.step * 2**LOW_BITS)
            return high_value + low.astype(jnp.float32) * np.float32(self.grid.step)

        return jax.tree.map(value, self.high, self.low)


class ClippingInfo(NamedTuple):
    """What was measured while clipping. It is private: it has no noise, so do not publish it.

    Attributes:
        losses: The loss of every row of the batch; 0 where the mask is False.
        norms: The norm of every gradient before clipping; 0 where the mask is False.
        non_finite: Number of rows that were left out because their loss, or the norm of their
            gradient, is not finite.
    """

    losses: jax.Array
    norms: jax.Array
    non_finite: jax.Array


class ClippedSum(Protocol):
    """A function that adds up clipped gradients; see `clipped_sum`."""

    def __call__(
        self, params: PyTree, batch: PyTree, mask: Mask | None = None
    ) -> tuple[ExactGradientSum, ClippingInfo]:
        """Return the sum of the clipped gradients of a batch, and what was measured."""
        ...


def clipped_sum(
    loss_fn: LossFunction,
    clip_norm: float,
    *,
    unit: Unit = "example",
    micro_batch: int | None = None,
) -> ClippedSum:
    """Create a function that clips the gradient of every example or user, and adds them up.

    The result is a function of the parameters, a batch and a mask. It works in `jax.jit`, which
    makes it much faster. Every array of the batch has one row per example, or for `unit="user"`
    the shape [users, examples, ...]. The mask has the shape [examples] or [users, examples]; rows
    where it is False do not count. Pad batches to the same size with `pad_batch`: a new size
    compiles the function again.

    Guarantees:
        Masking one row changes the sum by at most `clip_norm` in L2 norm, and replacing one by at
        most twice that. This includes all rounding after the gradient, and rests on four facts.
        The norm of a float32 gradient is an upper bound: squares are added in blocks of 256, and
        the bound holds for any order within a block. The gradient is scaled below the clip norm by
        this bound. Cutting off toward zero makes no coordinate larger. Whole numbers are added
        without overflow, so that their order does not matter.
        The gradient of a row must depend on this row only, as it does for a function without side
        effects. With `micro_batch=1` this is exact. Otherwise a matrix product may round a row in
        another way at another place of the batch; a masked row keeps the place of all others.

    Args:
        loss_fn: The mean loss of a batch. It is called with the parameters and with a batch of one
            example: arrays with a first dimension of 1. For random numbers such as dropout, make a
            key for every example part of the batch.
        clip_norm: The largest L2 norm of the gradient of an example, or of the gradient of a user's
            mean loss.
        unit: Whether a row of the batch is an example or a user.
        micro_batch: Number of rows whose gradients are computed at once. It changes time and
            memory, but never the sum of given gradients. The default fits the size of the model.

    >>> grad_sum = clipped_sum(lambda w, x: jnp.mean(x @ w), clip_norm=1.0)
    >>> total, info = jax.jit(grad_sum)(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.5, 0.0]]))
    >>> info.norms.tolist(), np.asarray(total.to_float32()).round(4)
    ([5.0, 0.5], array([1.1, 0.8], dtype=float32))
    """
    limit = positive_number("clip_norm", clip_norm)
    if not SMALLEST_CLIP_NORM <= limit <= LARGEST_CLIP_NORM:
        raise InvalidInput(f"clip_norm must be between 2^-60 and 2^60, got {clip_norm!r}")
    if unit not in get_args(Unit):
        raise InvalidInput(f"unit must be example or user, got {unit!r}")
    size = None if micro_batch is None else whole_number("micro_batch", micro_batch)
    clip = _Clip(Grid(2.0 ** (math.floor(math.log2(limit)) - STEP_BITS), limit))
    return _sum_of_batch(loss_fn, clip, unit, size)


class JointSum(Protocol):
    """A function that adds up gradients of adaptive clipping; see `joint_sum`."""

    def __call__(
        self, params: PyTree, batch: PyTree, mask: Mask | None, scale: Any
    ) -> tuple[ExactGradientSum, ClippingInfo]:
        """Return the sum of the clipped gradients of a batch, and what was measured."""
        ...


def joint_sum(
    loss_fn: LossFunction, beta: float, *, unit: Unit = "example", micro_batch: int | None = None
) -> JointSum:
    """Create a function that adds up gradients for adaptive clipping.

    It is like `clipped_sum`, with a clip norm that may change from call to call, as `scale_of`
    gives it. The gradients are divided by the clip norm and multiplied by sqrt(1 - beta^2).

    Guarantees:
        Masking one row changes the sum by at most sqrt(1 - beta^2) in L2 norm, for the same reasons
        as with `clipped_sum`.

    Args:
        loss_fn: See `clipped_sum`.
        beta: The size of the bit that is added beside the gradients; see `joint_bits`.
        unit: Whether a row of the batch is an example or a user.
        micro_batch: Number of rows whose gradients are computed at once.
    """
    return _sum_of_batch(loss_fn, _Clip(Grid(2.0**-STEP_BITS, 1.0), beta), unit, micro_batch)


def scale_of(clip_norm: float) -> NDArray[np.float32]:
    """A clip norm for `joint_sum`: a number from 1 to 2, and the inverse of its power of two."""
    if not SMALLEST_CLIP_NORM <= clip_norm <= LARGEST_CLIP_NORM:
        raise InvalidInput(f"clip_norm must be between 2^-60 and 2^60, got {clip_norm!r}")
    mantissa, exponent = math.frexp(clip_norm)
    return np.array([2 * mantissa, 2.0 ** (1 - exponent)], np.float32)


def joint_bits(info: ClippingInfo, rows: int, joint: JointClip) -> int:
    """The sum of the bits of the first rows of a batch, in steps of the grid of `joint_sum`.

    A row that was left out, because its loss or gradient is not finite, adds nothing.
    """
    norm, inverse = scale_of(joint.clip_norm)
    norms = np.asarray(info.norms, np.float32)[:rows] * inverse  # exact: a power of two
    losses = np.asarray(info.losses)[:rows]
    counted = np.isfinite(norms) & np.isfinite(losses)
    within = int(np.sum(counted & (norms <= norm)))
    size = joint.bit(0.0, 2.0**-STEP_BITS)
    return size * (2 * within - int(np.sum(counted)))


def _sum_of_batch(loss_fn: LossFunction, clip: "_Clip", unit: Unit, size: int | None) -> Any:
    """The function that `clipped_sum` and `joint_sum` create."""
    row_loss = partial(_user_loss if unit == "user" else _example_loss, loss_fn)
    gradients = jax.vmap(jax.value_and_grad(row_loss), in_axes=(None, 0, 0))

    def sum_of_batch(
        params: PyTree, batch: PyTree, mask: Mask | None = None, scale: Any = None
    ) -> tuple[ExactGradientSum, ClippingInfo]:
        rows, mask = _checked_mask(batch, mask, 1 if unit == "example" else 2)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(np.shape(leaf), jnp.int32), params)
        if mask.size == 0:  # no examples at all
            nothing, none = jnp.zeros(rows, jnp.float32), jnp.zeros((), jnp.int32)
            total = ExactGradientSum(zeros, zeros, none, clip.grid)
            return total, ClippingInfo(nothing, nothing, none)
        at_once = min(rows, _automatic_size(params) if size is None else size)
        batches = _split((batch, mask), rows, at_once)

        def add(total: _Words, rows_and_mask: tuple[PyTree, jax.Array]) -> tuple[_Words, PyTree]:
            some, present = rows_and_mask
            losses, grads = gradients(params, some, present)
            used = jnp.any(present.reshape(at_once, -1), axis=1)
            sums, norms, counted = clip.sum(grads, used & jnp.isfinite(losses), scale)
            for one in sums:
                total = _with(total, one)
            losses = jnp.where(used, losses.astype(jnp.float32), 0.0)
            norms = jnp.where(used, norms, 0.0)
            return total, (losses, norms, counted, used & ~counted)

        (high, low), measured = jax.lax.scan(add, _Words(zeros, zeros), batches)
        losses, norms, counted, left_out = (one.reshape(-1)[:rows] for one in measured)
        total = ExactGradientSum(high, low, jnp.sum(counted, dtype=jnp.int32), clip.grid)
        return total, ClippingInfo(losses, norms, jnp.sum(left_out, dtype=jnp.int32))

    return sum_of_batch


def pad_batch(batch: PyTree, multiple_of: int) -> tuple[PyTree, NDArray[np.bool_]]:
    """Pad a batch with rows of zeros, so that batches of random size have few different shapes.

    A compiled function is compiled again for every new shape.

    Args:
        batch: A pytree of NumPy arrays with one row per example.
        multiple_of: The number of rows becomes a multiple of this, and at least this.

    Returns:
        The batch, and the mask for `clipped_sum`, which is False for the new rows.

    >>> pad_batch(np.array([5, 6, 7]), 4)
    (array([5, 6, 7, 0]), array([ True,  True,  True, False]))
    """
    rows, _ = _checked_mask(batch, None, 1)
    step = whole_number("multiple_of", multiple_of)
    size = max(1, -(-rows // step)) * step

    def padded(leaf: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([leaf, np.zeros((size - rows, *leaf.shape[1:]), leaf.dtype)])

    return jax.tree.map(padded, batch), np.arange(size) < rows


class _Words(NamedTuple):
    """High and low words of a sum."""

    high: PyTree
    low: PyTree


def _with(total: _Words, sums: PyTree) -> _Words:
    """The total with sums of 32 bits added. The low words stay below 2^16."""
    low = jax.tree.map(lambda low, new: low + (new & LOW_MASK), total.low, sums)
    high = jax.tree.map(
        lambda high, new, low: high + (new >> LOW_BITS) + (low >> LOW_BITS), total.high, sums, low
    )
    return _Words(high, jax.tree.map(lambda low: low & LOW_MASK, low))


def _example_loss(
    loss_fn: LossFunction, params: PyTree, example: PyTree, mask: jax.Array
) -> jax.Array:
    """The loss of one example."""
    del mask  # the caller leaves out the gradient
    return loss_fn(params, jax.tree.map(lambda leaf: leaf[None], example))


def _user_loss(
    loss_fn: LossFunction, params: PyTree, examples: PyTree, mask: jax.Array
) -> jax.Array:
    """The mean loss of the examples of one user."""
    # Padding is replaced by an example of the user. Its weight is 0, but the gradient of a loss
    # that is not finite would be NaN even with weight 0.
    places = jnp.where(mask, jnp.arange(len(mask)), jnp.argmax(mask))
    present = jax.tree.map(lambda leaf: leaf[places], examples)
    losses = jax.vmap(partial(_example_loss, loss_fn), in_axes=(None, 0, 0))(params, present, mask)
    return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


@final
@dataclass(frozen=True)
class _Clip:
    """Clips gradients to a grid.

    Attributes:
        grid: The grid.
        beta: For adaptive clipping, the size of the bit; the clip norm of the grid is then 1.
    """

    grid: Grid
    beta: float | None = None

    def sum(
        self, grads: PyTree, used: jax.Array, scale: Any = None
    ) -> tuple[list[PyTree], jax.Array, jax.Array]:
        """Clip gradients and add them up in steps.

        Args:
            grads: A pytree of arrays with one row per gradient.
            used: Which gradients to add. It must depend on data.
            scale: For adaptive clipping, the clip norm, as `scale_of` gives it.

        Returns:
            Sums of at most 64 gradients each, in int32; the norm of every gradient; and which of
            them were added: those that are used and finite.
        """
        floats = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
        rows = used.shape[0]

        def no_sum(
            grads: PyTree, used: jax.Array, _: Any
        ) -> tuple[list[PyTree], jax.Array, jax.Array]:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], jnp.int32), grads)
            groups = -(-rows // MOST_IN_WORD)
            return [zeros] * groups, jnp.full(rows, jnp.nan, jnp.float32), used

        # The branch of a condition reads its arguments from memory. This matters: otherwise XLA may
        # compute a gradient once for its norm and again for its sum, with other roundings. The
        # condition depends on data, so that XLA cannot remove it.
        return jax.lax.cond(jnp.any(used), self._sum, no_sum, floats, used, scale)

    def _sum(
        self, grads: PyTree, used: jax.Array, scale: Any
    ) -> tuple[list[PyTree], jax.Array, jax.Array]:
        unit: Any = self.grid.step * 2**STEP_BITS  # a power of two; the clip norm is 1 to 2 units
        inverse: Any = np.float32(1 / unit)
        if self.beta is not None:
            inverse = scale[1]
            unit = 1 / inverse
        squares, additions = _sum_of_squares(grads, inverse)
        norms = jnp.sqrt(squares)  # in units
        added = used & (norms < jnp.inf)  # also False for NaN
        # A sum of numbers >= 0 in float32 has a relative error of at most `additions` roundings,
        # and its root of half as many. Squares that vanish are too small to matter.
        margin = 1.01 * (additions / 2 + OTHER_OPERATIONS) * ROUNDING
        largest = norms * np.float32(1 + margin)
        if self.beta is None:
            limit = np.nextafter(np.float32(self.grid.clip_norm / unit), np.float32(0))
            # A product with 1 and powers of two is exact.
            factors = jnp.where(largest <= limit, 1.0, limit / largest)
        else:
            limit = np.nextafter(np.float32(math.sqrt(1 - self.beta**2)), np.float32(0))
            factors = limit / jnp.maximum(largest, scale[0]) * inverse
        factors = factors * np.float32(1 / self.grid.step)

        def rounded(leaf: jax.Array) -> jax.Array:
            column = (-1, *(1,) * (leaf.ndim - 1))
            scaled = leaf * factors.reshape(column)
            # `where`, because 0 times NaN is NaN. The conversion cuts off toward zero.
            return jnp.where(added.reshape(column), scaled, 0.0).astype(jnp.int32)

        steps = jax.tree.map(rounded, grads)
        starts = range(0, used.shape[0], MOST_IN_WORD)
        sums = [
            jax.tree.map(
                lambda leaf, start=start: jnp.sum(
                    leaf[start : start + MOST_IN_WORD], axis=0, dtype=jnp.int32
                ),
                steps,
            )
            for start in starts
        ]
        return sums, norms * (np.float32(unit) if self.beta is None else unit), added


def _sum_of_squares(grads: PyTree, scale: Any) -> tuple[jax.Array, int]:
    """The sum of squares of every gradient times `scale`, and a bound on its rounding error.

    Returns:
        The sums, and the largest number of additions that a square passes through.
    """
    sums, most = list[jax.Array](), 0
    for leaf in jax.tree.leaves(grads):
        scaled = (leaf * scale).reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
        one, additions = _sum_in_blocks(scaled * scaled)
        sums.append(one)
        most = max(most, additions)
    total, additions = _sum_in_blocks(jnp.stack(sums, axis=1))
    return total, most + additions


def _sum_in_blocks(values: jax.Array) -> tuple[jax.Array, int]:
    """The sum of every row, and the largest number of additions that a value passes through."""
    rows, additions = values.shape[0], 0
    while (length := values.shape[1]) > BLOCK:
        whole = length // BLOCK * BLOCK
        parts = [jnp.sum(values[:, :whole].reshape(rows, -1, BLOCK), axis=2)]
        if whole < length:
            parts.append(jnp.sum(values[:, whole:], axis=1, keepdims=True))
        # The barrier keeps XLA from merging this sum with the next one.
        values = jax.lax.optimization_barrier(jnp.concatenate(parts, axis=1))
        additions += BLOCK
    return jnp.sum(values, axis=1), additions + values.shape[1]


def _checked_mask(batch: PyTree, mask: Mask | None, dimensions: int) -> tuple[int, jax.Array]:
    """The number of rows and a mask of bools; raises if the arrays of the batch do not fit."""
    shapes = {np.shape(leaf)[:dimensions] for leaf in jax.tree.leaves(batch)}
    rows = "[examples, ...]" if dimensions == 1 else "[users, examples, ...]"
    if len(shapes) != 1 or len(min(shapes)) != dimensions:
        raise InvalidInput(
            f"all arrays of a batch must have the shape {rows} with the same numbers, got "
            f"{sorted(shapes)}"
        )
    (shape,) = shapes
    if shape[0] > MOST_ROWS:
        raise TooLarge(f"a batch has at most {MOST_ROWS:,} rows, got {shape[0]:,}")
    if mask is None:
        return shape[0], jnp.ones(shape, bool)
    if mask.shape != shape or mask.dtype != jnp.bool_:
        raise InvalidInput(
            f"mask must be an array of bool of shape {shape}, got {mask.dtype} of {mask.shape}"
        )
    return shape[0], jnp.asarray(mask)


def _split(batch: tuple[PyTree, jax.Array], rows: int, at_once: int) -> tuple[PyTree, jax.Array]:
    """The batch and its mask as micro-batches of equal size; masked rows pad the last one."""
    count = -(-rows // at_once)
    padding = count * at_once - rows
    if padding:
        data, mask = batch
        places = np.minimum(np.arange(rows + padding), rows - 1)
        absent = jnp.zeros((padding, *mask.shape[1:]), bool)
        batch = jax.tree.map(lambda leaf: leaf[places], data), jnp.concatenate([mask, absent])
    return jax.tree.map(lambda leaf: leaf.reshape(count, at_once, *leaf.shape[1:]), batch)


def _automatic_size(params: PyTree) -> int:
    """A number of gradients to compute at once that suits the model and the device."""
    bytes_each = 4 * max(1, sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params)))
    most = max(1, MOST_BYTES // bytes_each)
    if jax.default_backend() != "cpu":
        return most
    return min(most, MOST_IN_WORD, max(SMALL_BATCH, CACHED_BYTES // bytes_each))
