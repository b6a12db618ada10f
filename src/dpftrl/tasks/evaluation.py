"""How well a model predicts the next word of people it was not trained on."""

# JAX leaves much of its interface untyped: what comes back is annotated where it matters.
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

BATCH = 64


@final
@dataclass(frozen=True)
class Evaluation:
    """What was measured, and on how much.

    Attributes:
        accuracy: The share of words that came first of the whole vocabulary. Out-of-vocabulary and
            end-of-sentence targets are not counted, as in the paper's StackOverflow benchmark.
        cross_entropy: Mean over the same words, in nats.
        words: How many they are.
    """

    accuracy: float
    cross_entropy: float
    words: int

    @property
    def perplexity(self) -> float:
        """As if so many words were equally likely."""
        # Beyond this a float would overflow; NaN stays NaN.
        return math.inf if self.cross_entropy > 709 else math.exp(self.cross_entropy)


def evaluate(
    model: Model,
    parameters: Mapping[str, NDArray[np.float32]],
    sentences: NDArray[np.int32],
    most_sentences: int | None = None,
) -> Evaluation:
    """Accuracy and perplexity on sentences of held-out users.

    Args:
        model: What to evaluate.
        parameters: Its arrays by name.
        sentences: [sentences, length + 1], as in `Users.sentences`.
        most_sentences: At most this many, evenly spread over all, so that every user has a part.
    """
    chosen = _spread(sentences, most_sentences)
    filled = np.pad(chosen, ((0, -len(chosen) % BATCH), (0, 0)), constant_values=PAD)
    on_device = {name: jnp.asarray(array) for name, array in parameters.items()}
    loss, hits = 0.0, 0
    for first in range(0, len(filled), BATCH):
        part_loss, part_hits = _scores(model, on_device, filled[first : first + BATCH])
        loss, hits = loss + float(part_loss), hits + int(part_hits)
    words = _count(chosen)
    return Evaluation(hits / words, loss / words, words)


def words_to_predict(sentences: NDArray[np.int32], most_sentences: int | None = None) -> int:
    """How many words `evaluate` would count; sentences without any are refused."""
    return _count(_spread(sentences, most_sentences))


def unigram_accuracy(known: NDArray[np.int32], heldout: NDArray[np.int32]) -> float:
    """The accuracy of always saying the commonest word of `known`: what any model has to beat."""
    _count(known)
    words = known[:, 1:][known[:, 1:] > UNKNOWN]
    return float(np.sum(heldout[:, 1:] == np.bincount(words).argmax()) / _count(heldout))


@partial(jax.jit, static_argnums=0)
def _scores(
    model: Model, parameters: Mapping[str, Any], sentences: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy added up over the targets, and how many words came first."""
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
    if most is None or len(sentences) <= whole_number("most_sentences", most):
        return sentences
    return sentences[np.arange(most) * len(sentences) // most]


def _count(sentences: NDArray[np.int32]) -> int:
    """Words of the sentences, neither special nor unknown."""
    words = int(np.sum(sentences[:, 1:] > UNKNOWN))
    if not words:
        raise InvalidInput(
            f"the model is measured on {len(sentences):,} sentences, which have no known word to "
            "predict; hold out more people, or take more words into the vocabulary"
        )
    return words
