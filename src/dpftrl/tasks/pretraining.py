"""Pre-training on public text, without privacy, for a better model to start from."""

# JAX leaves much of its API untyped: return values are annotated where it matters.
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

# Adam's beta_1, beta_2 and epsilon, as Kingma and Ba (2015) recommend.
MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.999, 1e-8


class AdamState(NamedTuple):
    """State of Adam: parameters, and running means of the gradients and of their squares."""

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
        None for the authors of these sentences: the sentences must be public.

    Args:
        model: Model to train.
        sentences: [sentences, length + 1], as in `Task.public`.
        seed: Seed of the first parameters and of the batches. The same seed gives the same bits.
        steps: Number of batches.
        batch_size: Sentences per batch.
        learning_rate: Learning rate of Adam.
        report: Progress callback, called after each step with its number, from 1, and its loss.

    Raises:
        InvalidInput: There are no sentences, or a number is not positive.
    """
    whole_number("steps", steps)
    whole_number("batch_size", batch_size)
    positive_number("learning_rate", learning_rate)
    if not len(sentences):
        raise InvalidInput("there are no public sentences to train on; start from a fresh model")
    state = _initial_state(model.init(seed))
    draws = np.random.default_rng(seed)
    for number in range(1, steps + 1):
        batch = sentences[draws.integers(len(sentences), size=batch_size)]
        state, batch_loss = _step(model, learning_rate, state, batch)
        if report is not None:
            report(number, float(batch_loss))
    return {name: np.asarray(array) for name, array in state.parameters.items()}


def _initial_state(parameters: Parameters) -> AdamState:
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return AdamState(jax.tree.map(jnp.asarray, parameters), zeros, zeros, jnp.zeros(()))


@partial(jax.jit, static_argnums=(0, 1))
def _step(
    model: Model, learning_rate: float, state: AdamState, batch: jax.Array
) -> tuple[AdamState, jax.Array]:
    """Take one step of Adam; return the new state and the loss of the batch."""
    batch_loss, gradients = jax.value_and_grad(partial(loss, model))(state.parameters, batch)
    steps = state.steps + 1
    mean = jax.tree.map(partial(_running_mean, MEAN_DECAY), state.mean, gradients)
    squares = jax.tree.map(jnp.square, gradients)
    square = jax.tree.map(partial(_running_mean, SQUARE_DECAY), state.square, squares)
    # Adam's bias correction: both means start at zero.
    rate = learning_rate * jnp.sqrt(1 - SQUARE_DECAY**steps) / (1 - MEAN_DECAY**steps)

    def stepped(array: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return array - rate * m / (jnp.sqrt(s) + EPSILON)

    parameters = jax.tree.map(stepped, state.parameters, mean, square)
    return AdamState(parameters, mean, square, steps), batch_loss


def _running_mean(decay: float, mean: jax.Array, new: jax.Array) -> jax.Array:
    return decay * mean + (1 - decay) * new
