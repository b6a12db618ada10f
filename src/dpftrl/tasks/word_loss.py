"""The last layer and its cross entropy, for the targets that count and no others.

Half of a batch of chat messages is PAD, and the last layer is nearly all of the work. So the real
targets are moved to the front and taken block by block, as many blocks as they fill. A block's
scores stay in the cache, and its gradients are computed where its scores are.
"""

# JAX leaves much of its interface untyped: what comes back is annotated where it matters.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any

import jax
import jax.numpy as jnp

from dpftrl.tasks.vocabulary import PAD

BLOCK = 64

# A block of the last layer's inputs and its targets, added to the sums so far.
Sums = Any


def real_first(
    states: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows of states and their targets, PAD last, to a whole number of blocks.

    Returns:
        The rows, the targets, how many blocks hold a real one, and the order that was used.
    """
    words = targets.reshape(-1)
    rows = states.reshape(len(words), -1)
    order = jnp.argsort(words == PAD, stable=True)
    fill = -len(words) % BLOCK
    blocks = (jnp.sum(words != PAD) + BLOCK - 1) // BLOCK
    rows = jnp.pad(rows[order], ((0, fill), (0, 0)))
    return rows, jnp.pad(words[order], (0, fill), constant_values=PAD), blocks, order


def block(array: jax.Array, number: jax.Array | int) -> jax.Array:
    """The rows of one block."""
    return jax.lax.dynamic_slice_in_dim(array, number * BLOCK, BLOCK)


@jax.custom_vjp
def output_loss(
    weight: jax.Array, bias: jax.Array, states: jax.Array, targets: jax.Array
) -> jax.Array:
    """Cross entropy in nats, added up over the targets that are not PAD.

    Args:
        weight: Of the last layer, [vocabulary, size].
        bias: Of the last layer, [vocabulary].
        states: What it reads, [..., size].
        targets: The words to predict, [...].
    """
    return _loss_and_gradients(weight, bias, states, targets)[0]


def _loss_and_gradients(
    weight: jax.Array, bias: jax.Array, states: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    rows, words, blocks, order = real_first(states, targets)

    def add_block(number: jax.Array, sums: Sums) -> Sums:
        loss, of_weight, of_bias, of_rows = sums
        row, word = block(rows, number), block(words, number)
        scores = row @ weight.T + bias
        log_likely = jax.nn.log_softmax(scores)
        hit = word[:, None] == jnp.arange(len(bias))
        # PAD has no part in the sum, nor in its gradient.
        error = jnp.where((word != PAD)[:, None], jnp.exp(log_likely) - hit, 0)
        chosen = jnp.take_along_axis(log_likely, word[:, None], axis=1)[:, 0]
        return (
            loss - jnp.sum(chosen, where=word != PAD),
            of_weight + error.T @ row,
            of_bias + jnp.sum(error, axis=0),
            jax.lax.dynamic_update_slice_in_dim(of_rows, error @ weight, number * BLOCK, 0),
        )

    start = (jnp.zeros(()), jnp.zeros_like(weight), jnp.zeros_like(bias), jnp.zeros_like(rows))
    loss, of_weight, of_bias, of_rows = jax.lax.fori_loop(0, blocks, add_block, start)
    back = jnp.zeros_like(rows[: len(order)]).at[order].set(of_rows[: len(order)])
    return loss, (of_weight, of_bias, back.reshape(states.shape))


def _scaled(gradients: tuple[jax.Array, ...], scale: jax.Array) -> tuple[Any, ...]:
    return (*(scale * gradient for gradient in gradients), None)


output_loss.defvjp(_loss_and_gradients, _scaled)
