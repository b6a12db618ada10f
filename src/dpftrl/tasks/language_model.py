"""Models that predict the next word (`Lstm`, `Window`), their loss, training and evaluation.

A model is an immutable value that holds only its sizes. Its parameters are a separate dictionary of
float32 arrays, which the server keeps and exports. `pretrain` trains a model on public text,
without privacy, for a better model to start from. `evaluate` measures accuracy and perplexity on
sentences of held-out users.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.deprecation import renamed_argument
from dpftrl.errors import InvalidInput
from dpftrl.tasks.vocabulary import PAD, UNKNOWN

# JAX leaves much of its API untyped: return values are annotated where it matters.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


# Rows per step of the last layer: the scores of one block fit into the cache.
BLOCK = 64

# The state of the loop over blocks: the loss and its gradients, summed up to the current block.
Sums = Any
Parameters = dict[str, NDArray[np.float32]]


class Model(Protocol):
    """The interface that training needs. A model is hashable, and equal to a model of equal sizes.

    Its last layer is linear: `output.weight` [vocabulary, size] and `output.bias` [vocabulary].
    """

    def init(self, seed: int) -> Parameters:
        """Return new parameters in the order of sorted names; equal seeds give equal parameters."""
        ...

    def states(self, parameters: Mapping[str, Any], inputs: jax.Array) -> jax.Array:
        """Return the inputs of the last layer after each step of `inputs` [sentences, steps]."""
        ...


@dataclass(frozen=True)
class Layered(ABC):
    """A model whose layers come from Equinox. Its fields are sizes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            whole_number(field.name, getattr(self, field.name))

    @abstractmethod
    def layers(self, key: jax.Array) -> Any:
        """Return the layers as an Equinox module."""

    def init(self, seed: int) -> Parameters:
        """Return new parameters in the order of sorted names."""
        return _initial_parameters(_skeleton(self.layers), seed)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters by name, without making any."""
        leaves = jax.tree_util.tree_leaves_with_path(_skeleton(self.layers))
        return {_name(path): tuple(leaf.shape) for path, leaf in leaves}

    def states(self, parameters: Mapping[str, Any], inputs: jax.Array) -> jax.Array:
        """Return the inputs of the last layer after each step."""
        return self.network(parameters).states(inputs)

    def network(self, parameters: Mapping[str, Any]) -> Any:
        """Return the layers with these parameters, as an Equinox module."""
        return _filled(_skeleton(self.layers), parameters)


@final
@dataclass(frozen=True)
class Lstm(Layered):
    """One LSTM layer between an embedding and a projection.

    Sizes that are not given are those of the paper's StackOverflow model.

    >>> sum(array.size for array in Lstm(vocabulary=10_004).init(seed=0).values())
    4050748
    """

    vocabulary: int
    embedding: int = 96
    hidden: int = 670
    projection: int = 96

    def layers(self, key: jax.Array) -> "LstmNetwork":
        """Return the layers as an Equinox module."""
        keys = jax.random.split(key, 4)
        return LstmNetwork(
            embedding=eqx.nn.Embedding(self.vocabulary, self.embedding, key=keys[0]),
            lstm=eqx.nn.LSTMCell(self.embedding, self.hidden, key=keys[1]),
            projection=eqx.nn.Linear(self.hidden, self.projection, key=keys[2]),
            output=eqx.nn.Linear(self.projection, self.vocabulary, key=keys[3]),
        )


@final
@dataclass(frozen=True)
class Window(Layered):
    """One hidden layer over the last few words: faster than an LSTM.

    Attributes:
        vocabulary: Number of words, with the special tokens.
        embedding: Size of the embedding.
        words: Number of last words that the model reads.
        hidden: Size of the hidden layer.
    """

    vocabulary: int
    embedding: int = 32
    words: int = 3
    hidden: int = 32

    def layers(self, key: jax.Array) -> "WindowNetwork":
        """Return the layers as an Equinox module."""
        keys = jax.random.split(key, 3)
        return WindowNetwork(
            embedding=eqx.nn.Embedding(self.vocabulary, self.embedding, key=keys[0]),
            hidden=eqx.nn.Linear(self.words * self.embedding, self.hidden, key=keys[1]),
            output=eqx.nn.Linear(self.hidden, self.vocabulary, key=keys[2]),
            words=self.words,
        )


class LstmNetwork(eqx.Module):
    """The layers of an `Lstm`."""

    embedding: eqx.nn.Embedding
    lstm: eqx.nn.LSTMCell
    projection: eqx.nn.Linear
    output: eqx.nn.Linear

    def states(self, inputs: jax.Array) -> jax.Array:
        """Return the projected LSTM state after each step."""
        # The part of the gates that depends on the words needs no recurrence: one matrix product
        # computes it for all steps.
        embedded = self.embedding.weight[inputs.T]
        from_words = embedded @ self.lstm.weight_ih.T + cast("jax.Array", self.lstm.bias)
        start = jnp.zeros((inputs.shape[0], self.lstm.hidden_size))

        def step(state: tuple[jax.Array, jax.Array], from_word: jax.Array) -> Any:
            hidden, cell = state
            gates = from_word + hidden @ self.lstm.weight_hh.T
            input_gate, forget_gate, new, output_gate = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(forget_gate) * cell + jax.nn.sigmoid(input_gate) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(output_gate) * jnp.tanh(cell)
            return (hidden, cell), hidden

        _, hidden = jax.lax.scan(step, (start, start), from_words)
        return _linear(self.projection, hidden).swapaxes(0, 1)


class WindowNetwork(eqx.Module):
    """The layers of a `Window`."""

    embedding: eqx.nn.Embedding
    hidden: eqx.nn.Linear
    output: eqx.nn.Linear
    words: int = eqx.field(static=True)

    def states(self, inputs: jax.Array) -> jax.Array:
        """Return the hidden layer after each step; PAD fills the window before the first word."""
        steps = inputs.shape[1]
        padded = jnp.pad(inputs, ((0, 0), (self.words - 1, 0)), constant_values=PAD)
        embedded = [self.embedding.weight[padded[:, i : i + steps]] for i in range(self.words)]
        return jnp.tanh(_linear(self.hidden, jnp.concatenate(embedded, axis=-1)))


MODELS: dict[str, type[Lstm] | type[Window]] = {"lstm": Lstm, "window": Window}


def language_model(name: str, vocabulary: int, **sizes: int) -> Lstm | Window:
    """Return the model of this name. A size that is not given has its default.

    >>> language_model("window", 1000, hidden=16)
    Window(vocabulary=1000, embedding=32, words=3, hidden=16)
    """
    if name not in MODELS:
        raise InvalidInput(f"model must be one of {', '.join(MODELS)}, got {name!r:.60}")
    known = [field.name for field in fields(MODELS[name]) if field.name != "vocabulary"]
    for size in sizes:
        if size not in known:
            raise InvalidInput(f"{name} has the sizes {', '.join(known)}, got {size!r:.60}")
    return MODELS[name](vocabulary, **sizes)


def architecture(model: Lstm | Window) -> dict[str, Any]:
    """Return the name of a model and its sizes, from which `language_model` makes an equal one."""
    (name,) = (name for name, kind in MODELS.items() if type(model) is kind)
    return {"name": name, **{field.name: getattr(model, field.name) for field in fields(model)}}


def logits(model: Model, parameters: Mapping[str, Any], inputs: jax.Array) -> jax.Array:
    """Return the scores of the next word after each step: [sentences, steps, vocabulary]."""
    states = model.states(parameters, inputs)
    return states @ parameters["output.weight"].T + parameters["output.bias"]


def loss(model: Model, parameters: Mapping[str, Any], sentences: jax.Array) -> jax.Array:
    """Return the mean cross entropy of the next word, in nats, over all targets in the vocabulary.

    The unknown word and the end of a sentence are not targets, because a keyboard would not suggest
    them. Sentences that consist of PAD only may fill up a batch.
    """
    states, targets = model.states(parameters, sentences[:, :-1]), words_alone(sentences[:, 1:])
    total = output_loss(parameters["output.weight"], parameters["output.bias"], states, targets)
    return total / jnp.maximum(jnp.sum(targets != PAD), 1)


def words_alone(targets: jax.Array) -> jax.Array:
    """Return the targets, with PAD in place of every target that is not a vocabulary word."""
    return jnp.where(targets > UNKNOWN, targets, PAD)


def real_first(
    states: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Move targets that are PAD, and their rows, to the end; pad to a whole number of blocks.

    Returns:
        The rows, the targets, the number of blocks with a target that is not PAD, and the order of
        the original rows.
    """
    words = targets.reshape(-1)
    rows = states.reshape(len(words), -1)
    order = jnp.argsort(words == PAD, stable=True)
    fill = -len(words) % BLOCK
    blocks = (jnp.sum(words != PAD) + BLOCK - 1) // BLOCK
    rows = jnp.pad(rows[order], ((0, fill), (0, 0)))
    return rows, jnp.pad(words[order], (0, fill), constant_values=PAD), blocks, order


def block(array: jax.Array, number: jax.Array | int) -> jax.Array:
    """Return the rows of one block."""
    return jax.lax.dynamic_slice_in_dim(array, number * BLOCK, BLOCK)


@jax.custom_vjp
def output_loss(
    weight: jax.Array, bias: jax.Array, states: jax.Array, targets: jax.Array
) -> jax.Array:
    """Return the cross entropy in nats, summed over the targets that are not PAD.

    Args:
        weight: Weight of the last layer, [vocabulary, size].
        bias: Bias of the last layer, [vocabulary].
        states: Inputs of the last layer, [..., size].
        targets: Words to predict, [...].
    """
    return _loss_and_gradients(weight, bias, states, targets)[0]


def _loss_and_gradients(
    weight: jax.Array, bias: jax.Array, states: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Compute the loss and its gradients together, so that each block of scores exists once."""
    rows, words, blocks, order = real_first(states, targets)

    def add_block(number: jax.Array, sums: Sums) -> Sums:
        loss, of_weight, of_bias, of_rows = sums  # the loss, and its gradients
        row, word = block(rows, number), block(words, number)
        scores = row @ weight.T + bias
        log_probability = jax.nn.log_softmax(scores)
        hit = word[:, None] == jnp.arange(len(bias))
        # PAD does not count, neither in the loss nor in its gradient.
        error = jnp.where((word != PAD)[:, None], jnp.exp(log_probability) - hit, 0)
        chosen = jnp.take_along_axis(log_probability, word[:, None], axis=1)[:, 0]
        return (
            loss - jnp.sum(chosen, where=word != PAD),
            of_weight + error.T @ row,
            of_bias + jnp.sum(error, axis=0),
            jax.lax.dynamic_update_slice_in_dim(of_rows, error @ weight, number * BLOCK, 0),
        )

    start = (jnp.zeros(()), jnp.zeros_like(weight), jnp.zeros_like(bias), jnp.zeros_like(rows))
    loss, of_weight, of_bias, of_rows = jax.lax.fori_loop(0, blocks, add_block, start)
    of_states = jnp.zeros_like(rows[: len(order)]).at[order].set(of_rows[: len(order)])
    return loss, (of_weight, of_bias, of_states.reshape(states.shape))


def _scaled(gradients: tuple[jax.Array, ...], scale: jax.Array) -> tuple[Any, ...]:
    return (*(scale * gradient for gradient in gradients), None)


output_loss.defvjp(_loss_and_gradients, _scaled)


def _linear(layer: eqx.nn.Linear, inputs: jax.Array) -> jax.Array:
    return inputs @ layer.weight.T + cast("jax.Array", layer.bias)


def _skeleton(layers: Callable[[jax.Array], eqx.Module]) -> Any:
    """Return the layers with shapes in place of arrays."""
    return eqx.filter_eval_shape(layers, jax.random.key(0))


def _initial_parameters(skeleton: Any, seed: int) -> Parameters:
    """Return new parameters: zero biases, and uniform weights up to 1 / sqrt(inputs)."""
    leaves = jax.tree_util.tree_leaves_with_path(skeleton)
    shapes = {_name(path): leaf.shape for path, leaf in leaves}
    generator = np.random.default_rng(seed)
    parameters = Parameters()
    for name in sorted(shapes):
        limit = 0 if name.endswith("bias") else shapes[name][-1] ** -0.5
        parameters[name] = generator.uniform(-limit, limit, shapes[name]).astype(np.float32)
    return parameters


def _filled(skeleton: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the layers of a skeleton with these parameters."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(skeleton)
    return jax.tree_util.tree_unflatten(structure, [parameters[_name(path)] for path, _ in leaves])


def _name(path: Any) -> str:
    """Return the name of a parameter, such as `lstm.weight_hh`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


# Adam's beta_1, beta_2 and epsilon, as Kingma and Ba (2015) recommend.
MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.999, 1e-8


class AdamState(NamedTuple):
    """State of Adam: parameters, and running means of the gradients and of their squares."""

    parameters: Any
    mean: Any
    square: Any
    steps: Any


@renamed_argument("report", "on_step")
def pretrain(
    model: Model,
    sentences: NDArray[np.int32],
    seed: int,
    *,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    cooldown: bool = False,
    on_step: Callable[[int, float], None] | None = None,
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
        cooldown: Whether the learning rate falls to zero, in equal steps, over the second half.
        on_step: Progress callback, called after each step with its number, from 1, and its loss.

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
        left = min(1.0, 2 * (1 - (number - 1) / steps)) if cooldown else 1.0
        state, batch_loss = _step(model, learning_rate * left, state, batch)
        if on_step is not None:
            on_step(number, float(batch_loss))
    return {name: np.asarray(array) for name, array in state.parameters.items()}


def _initial_state(parameters: Parameters) -> AdamState:
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return AdamState(jax.tree.map(jnp.asarray, parameters), zeros, zeros, jnp.zeros(()))


@partial(jax.jit, static_argnums=0)
def _step(
    model: Model, learning_rate: float | jax.Array, state: AdamState, batch: jax.Array
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


# Sentences per batch of the evaluation.
EVALUATION_BATCH = 64
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
        unknown_words: Number of words in the same sentences that are not in the vocabulary.
    """

    accuracy: float
    cross_entropy: float
    words: int
    unknown_words: int = 0

    @property
    def accuracy_of_all_words(self) -> float:
        """The accuracy if an out-of-vocabulary word counts as a wrong guess."""
        return self.accuracy * self.words / (self.words + self.unknown_words)

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
    padded = np.pad(chosen, ((0, -len(chosen) % EVALUATION_BATCH), (0, 0)), constant_values=PAD)
    on_device = {name: jnp.asarray(array) for name, array in parameters.items()}
    loss, hits = 0.0, 0
    for first in range(0, len(padded), EVALUATION_BATCH):
        batch_loss, batch_hits = _scores(model, on_device, padded[first : first + EVALUATION_BATCH])
        loss, hits = loss + float(batch_loss), hits + int(batch_hits)
    words = _count(chosen)
    return Evaluation(hits / words, loss / words, words, int(np.sum(chosen[:, 1:] == UNKNOWN)))


def sentence_losses(
    model: Model, parameters: Mapping[str, NDArray[np.float32]], sentences: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Return the cross entropy of each sentence in nats, summed over its words of the vocabulary.

    Args:
        model: The model.
        parameters: Arrays of the model, by name.
        sentences: [sentences, length + 1], as in `Users.sentences`.
    """
    padded = np.pad(sentences, ((0, -len(sentences) % EVALUATION_BATCH), (0, 0)))
    on_device = {name: jnp.asarray(array) for name, array in parameters.items()}
    losses = [
        np.asarray(_losses(model, on_device, padded[first : first + EVALUATION_BATCH]), np.float64)
        for first in range(0, len(padded), EVALUATION_BATCH)
    ]
    return np.concatenate([np.empty(0), *losses])[: len(sentences)]


@partial(jax.jit, static_argnums=0)
def _losses(model: Model, parameters: Mapping[str, Any], sentences: jax.Array) -> jax.Array:
    """Return the cross entropy of each sentence, summed over its words of the vocabulary."""
    targets = words_alone(sentences[:, 1:])
    log_probabilities = jax.nn.log_softmax(logits(model, parameters, sentences[:, :-1]))
    chosen = jnp.take_along_axis(log_probabilities, targets[:, :, None], axis=2)[:, :, 0]
    return -jnp.sum(chosen, axis=1, where=targets != PAD)


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
