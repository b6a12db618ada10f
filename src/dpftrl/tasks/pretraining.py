"""A model to start from: plain training on public text, which needs no privacy."""

# JAX leaves much of its interface untyped: what comes back is annotated where it matters.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.tasks.language_model import Model, Parameters, loss

# Kingma and Ba's own values.
MEAN_DECAY, SQUARE_DECAY, TINY = 0.9, 0.999, 1e-8


class AdamState(NamedTuple):
    """Parameters, and the running means of their gradients and of the squares."""

    parameters: Any
    mean: Any
    square: Any
    steps: Any


def pretrain(
    model: Model,
    sentences: NDArray[np.int32],
    seed: int,
    *,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    report: Callable[[int, float], None] | None = None,
) -> Parameters:
    """Train a fresh model with Adam on batches drawn at random from public sentences.

    Guarantees:
        None at all for whoever wrote these sentences: they must be public.

    Args:
        model: What to train.
        sentences: [sentences, length + 1], as in `Task.public`.
        seed: For the first parameters and the batches; the same seed gives the same bits.
        steps: How many batches.
        batch_size: Sentences in one.
        learning_rate: Of Adam.
        report: Called after each step with its number, from 1, and its loss.
    """
    whole_number("steps", steps)
    whole_number("batch_size", batch_size)
    positive_number("learning_rate", learning_rate)
    if not len(sentences):
        raise InvalidInput("there are no public sentences to train on; start from a fresh model")
    state = _fresh(model.init(seed))
    draws = np.random.default_rng(seed)
    for number in range(1, steps + 1):
        batch = sentences[draws.integers(len(sentences), size=batch_size)]
        state, value = _step(model, learning_rate, state, batch)
        if report is not None:
            report(number, float(value))
    return {name: np.asarray(array) for name, array in state.parameters.items()}


def _fresh(parameters: Parameters) -> AdamState:
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return AdamState(jax.tree.map(jnp.asarray, parameters), zeros, zeros, jnp.zeros(()))


@partial(jax.jit, static_argnums=(0, 1))
def _step(
    model: Model, learning_rate: float, state: AdamState, batch: jax.Array
) -> tuple[AdamState, jax.Array]:
    value, gradients = jax.value_and_grad(partial(loss, model))(state.parameters, batch)
    steps = state.steps + 1
    mean = jax.tree.map(partial(_moved, MEAN_DECAY), state.mean, gradients)
    square = jax.tree.map(partial(_moved, SQUARE_DECAY), state.square, _squares(gradients))
    # Both means start at zero; dividing takes that out again.
    rate = learning_rate * jnp.sqrt(1 - SQUARE_DECAY**steps) / (1 - MEAN_DECAY**steps)

    def stepped(array: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return array - rate * m / (jnp.sqrt(s) + TINY)

    parameters = jax.tree.map(stepped, state.parameters, mean, square)
    return AdamState(parameters, mean, square, steps), value


def _moved(decay: float, mean: jax.Array, new: jax.Array) -> jax.Array:
    return decay * mean + (1 - decay) * new


def _squares(gradients: Any) -> Any:
    return jax.tree.map(jnp.square, gradients)
