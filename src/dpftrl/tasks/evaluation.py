"""Accuracy and perplexity of a model on sentences of held-out users."""

# JAX leaves much of its API untyped: return values are annotated where it matters.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.tasks.language_model import Model, block, real_first, words_alone
from dpftrl.tasks.vocabulary import PAD, UNKNOWN

# Sentences per batch of the evaluation.
BATCH = 64
# The exponential of a larger number overflows a float64.
MAX_EXPONENT = 709


@final
@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        accuracy: Share of words for which the model's first guess is correct. Out-of-vocabulary and
            end-of-sentence targets are not counted, as in the paper's StackOverflow benchmark.
        cross_entropy: Mean cross entropy of the same words, in nats.
        words: Number of these words.
    """

    accuracy: float
    cross_entropy: float
    words: int

    @property
    def perplexity(self) -> float:
        """Exponential of the cross entropy; infinite if a float cannot hold it."""
        # A cross entropy of NaN gives NaN, because the comparison is then false.
        return math.inf if self.cross_entropy > MAX_EXPONENT else math.exp(self.cross_entropy)


def evaluate(
    model: Model,
    parameters: Mapping[str, NDArray[np.float32]],
    sentences: NDArray[np.int32],
    most_sentences: int | None = None,
) -> Evaluation:
    """Evaluate a model on sentences of held-out users.

    Args:
        model: Model to evaluate.
        parameters: Arrays of the model, by name.
        sentences: [sentences, length + 1], as in `Users.sentences`.
        most_sentences: Largest number of sentences to use. They are spread evenly over all
            sentences, so that all users are represented.

    Raises:
        InvalidInput: The sentences have no word of the vocabulary to predict.
    """
    chosen = _spread(sentences, most_sentences)
    padded = np.pad(chosen, ((0, -len(chosen) % BATCH), (0, 0)), constant_values=PAD)
    on_device = {name: jnp.asarray(array) for name, array in parameters.items()}
    loss, hits = 0.0, 0
    for first in range(0, len(padded), BATCH):
        batch_loss, batch_hits = _scores(model, on_device, padded[first : first + BATCH])
        loss, hits = loss + float(batch_loss), hits + int(batch_hits)
    words = _count(chosen)
    return Evaluation(hits / words, loss / words, words)


def words_to_predict(sentences: NDArray[np.int32], most_sentences: int | None = None) -> int:
    """Return the number of words that `evaluate` would count; refuse sentences without any."""
    return _count(_spread(sentences, most_sentences))


def unigram_accuracy(known: NDArray[np.int32], heldout: NDArray[np.int32]) -> float:
    """Return the accuracy of always predicting the most frequent word of `known`: a baseline."""
    _count(known)
    words = known[:, 1:][known[:, 1:] > UNKNOWN]
    return float(np.sum(heldout[:, 1:] == np.bincount(words).argmax()) / _count(heldout))


@partial(jax.jit, static_argnums=0)
def _scores(
    model: Model, parameters: Mapping[str, Any], sentences: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the cross entropy summed over the targets, and the number of correct first guesses."""
    states = model.states(parameters, sentences[:, :-1])
    rows, targets, blocks, _ = real_first(states, words_alone(sentences[:, 1:]))

    def add_block(number: jax.Array, sums: tuple[jax.Array, jax.Array]) -> Any:
        loss, hits = sums
        target = block(targets, number)
        scores = block(rows, number) @ parameters["output.weight"].T + parameters["output.bias"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), target[:, None], axis=1)[:, 0]
        hit = (jnp.argmax(scores, axis=1) == target) & (target != PAD)
        return loss - jnp.sum(chosen, where=target != PAD), hits + jnp.sum(hit)

    return jax.lax.fori_loop(0, blocks, add_block, (jnp.zeros(()), jnp.zeros((), jnp.int32)))


def _spread(sentences: NDArray[np.int32], most: int | None) -> NDArray[np.int32]:
    """Return at most `most` sentences, spread evenly over all of them."""
    if most is None or len(sentences) <= whole_number("most_sentences", most):
        return sentences
    return sentences[np.arange(most) * len(sentences) // most]


def _count(sentences: NDArray[np.int32]) -> int:
    """Return the number of target words that are in the vocabulary."""
    words = int(np.sum(sentences[:, 1:] > UNKNOWN))
    if not words:
        raise InvalidInput(
            f"the {len(sentences):,} sentences to evaluate on have no known word to predict; hold "
            "out more users, or use a larger vocabulary"
        )
    return words
