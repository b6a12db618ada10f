"""The models against layers applied one by one, and the loss against its definition."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.tasks.language_model import BLOCK, Lstm, Window, language_model, logits, loss
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, UNKNOWN

LSTM = Lstm(vocabulary=23, embedding=5, hidden=7, projection=6)
WINDOW = Window(vocabulary=23, embedding=5, words=3, hidden=6)
MODELS = [LSTM, WINDOW]
SCORES = jax.jit(logits, static_argnums=0)


def ragged(sentences: int, steps: int, vocabulary: int = 23, seed: int = 0):
    draws = np.random.default_rng(seed)
    rows = np.full((sentences, steps + 1), PAD, np.int32)
    rows[:, 0] = BEGIN
    for row, length in zip(rows, draws.integers(1, steps + 1, sentences), strict=True):
        row[1 : length + 1] = draws.integers(4, vocabulary, length)
        row[length + 1 : length + 2] = END
    return rows


def test_the_paper_s_model_has_the_paper_s_size():
    sizes = {name: array.size for name, array in Lstm(10_004, 96, 670, 96).init(0).items()}
    assert sum(sizes.values()) == 4_050_748
    assert sizes == {
        "embedding.weight": 10_004 * 96,
        "lstm.bias": 4 * 670,
        "lstm.weight_hh": 4 * 670 * 670,
        "lstm.weight_ih": 4 * 670 * 96,
        "output.bias": 10_004,
        "output.weight": 96 * 10_004,
        "projection.bias": 96,
        "projection.weight": 670 * 96,
    }


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_sorted_float32_and_depend_on_the_seed_alone(model):
    first, again, other = model.init(3), model.init(3), model.init(4)
    assert list(first) == sorted(first)
    for name, array in first.items():
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.float32
        assert np.isfinite(array).all()
        np.testing.assert_array_equal(array, again[name])
        assert np.array_equal(array, other[name]) == name.endswith("bias")


def test_lstm_is_equinox_s_cell_step_by_step():
    parameters, inputs = LSTM.init(1), ragged(3, 6)[:, :-1]
    network = jax.tree.map(jnp.asarray, LSTM.network(parameters))
    cell = jax.jit(lambda word, state: network.lstm(network.embedding.weight[word], state))
    last = jax.jit(lambda h: network.output(network.projection(h)))
    all_scores = SCORES(LSTM, parameters, inputs)
    for row, scores_of_row in zip(inputs, all_scores, strict=True):
        state = (jnp.zeros(7), jnp.zeros(7))
        for word, scores in zip(row, scores_of_row, strict=True):
            state = cell(word, state)
            np.testing.assert_allclose(scores, last(state[0]), rtol=1e-5, atol=1e-6)


def test_window_reads_the_last_words_and_no_others():
    parameters, inputs = WINDOW.init(1), ragged(3, 6)[:, :-1]
    network = jax.tree.map(jnp.asarray, WINDOW.network(parameters))
    layers = jax.jit(lambda seen: network.output(jnp.tanh(network.hidden(seen))))
    all_scores = SCORES(WINDOW, parameters, inputs)
    for row, scores_of_row in zip(inputs, all_scores, strict=True):
        padded = [PAD, PAD, *row.tolist()]
        for step, scores in enumerate(scores_of_row):
            seen = np.ravel(network.embedding.weight[np.array(padded[step : step + 3])])
            expected = layers(seen)
            np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_predictions_do_not_depend_on_later_words(model):
    inputs = ragged(2, 8)[:, :-1]
    changed = inputs.copy()
    changed[:, 5:] = 22
    first, second = (SCORES(model, model.init(0), i) for i in (inputs, changed))
    np.testing.assert_array_equal(first[:, :5], second[:, :5])
    assert not np.array_equal(first[:, 5:], second[:, 5:])


def plain_loss(parameters, sentences, model):
    """Return the loss by its definition, with automatic differentiation and without blocks."""
    scores = logits(model, parameters, sentences[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), sentences[:, 1:, None], -1)[..., 0]
    counted = sentences[:, 1:] > UNKNOWN
    return -jnp.sum(jnp.where(counted, chosen, 0)) / jnp.sum(counted)


DEFINITION = jax.jit(jax.value_and_grad(plain_loss), static_argnums=2)


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_its_gradient_are_those_of_the_definition(model):
    batch, parameters = ragged(40, 9), model.init(2)
    batch[::5] = PAD  # sentences of PAD only do not count
    assert np.sum(batch[:, 1:] > UNKNOWN) > 2 * BLOCK
    slope = jax.jit(jax.value_and_grad(partial(loss, model)))
    value, gradient = slope(parameters, batch)
    expected, by_definition = DEFINITION(parameters, batch, model)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for name in parameters:
        np.testing.assert_allclose(gradient[name], by_definition[name], rtol=1e-4, atol=1e-7)
    value, gradient = slope(parameters, np.full_like(batch, PAD))
    assert value == 0
    assert all(not np.any(array) for array in gradient.values())


def test_loss_of_uniform_predictions_is_the_log_of_the_vocabulary_size():
    zeros = {name: np.zeros_like(array) for name, array in WINDOW.init(0).items()}
    assert float(jax.jit(partial(loss, WINDOW))(zeros, ragged(4, 5))) == pytest.approx(np.log(23))


def test_models_by_name():
    assert language_model("lstm", 23, embedding=5, hidden=7, projection=6) == LSTM
    assert hash(language_model("window", 23, embedding=5, hidden=6)) == hash(WINDOW)
    with pytest.raises(InvalidInput, match="lstm, window, got 'gru'"):
        language_model("gru", 23)
    with pytest.raises(InvalidInput, match="embedding, words, hidden, got 'projection'"):
        language_model("window", 23, projection=4)
    with pytest.raises(InvalidInput, match="hidden must be a whole number"):
        Lstm(23, hidden=0)


def test_the_layers_are_equinox_modules():
    assert isinstance(LSTM.network(LSTM.init(0)), eqx.Module)
