"""Accuracy and perplexity on sentences whose answers can be counted by hand."""

import math

import jax
import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.tasks.language_model import Evaluation, Window, evaluate, logits, unigram_accuracy
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, UNKNOWN

MODEL = Window(vocabulary=9, embedding=3, words=2, hidden=4)
# Words have the numbers 4 to 8. The sentences have four words, two words, and an unknown one.
SENTENCES = np.array(
    [
        [BEGIN, 5, 5, 6, 5, END],
        [BEGIN, 5, 7, END, PAD, PAD],
        [BEGIN, UNKNOWN, 5, END, PAD, PAD],
    ],
    np.int32,
)


def always(word: int):
    zeros = {name: np.zeros_like(array) for name, array in MODEL.init(0).items()}
    zeros["output.bias"][word] = 3.0
    return zeros


def test_accuracy_counts_known_words_only():
    result = evaluate(MODEL, always(5), SENTENCES)
    assert result.words == 7
    assert result.accuracy == 5 / 7
    # Right predictions of END and UNKNOWN do not count.
    assert evaluate(MODEL, always(END), SENTENCES).accuracy == 0
    assert evaluate(MODEL, always(UNKNOWN), SENTENCES).accuracy == 0


def test_perplexity_counts_the_same_words():
    certain = math.exp(3) / (math.exp(3) + 8)
    other = 1 / (math.exp(3) + 8)
    expected = -(5 * math.log(certain) + 2 * math.log(other)) / 7
    result = evaluate(MODEL, always(5), SENTENCES)
    assert result.cross_entropy == pytest.approx(expected, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-6)


def test_batches_give_the_same_result_as_the_definition():
    draws = np.random.default_rng(0)
    sentences = draws.integers(2, 9, (150, 6)).astype(np.int32)
    sentences[:, 0] = BEGIN
    sentences[::3, 4:] = PAD
    parameters = {name: 5 * array for name, array in MODEL.init(1).items()}
    scores = np.asarray(
        jax.jit(logits, static_argnums=0)(MODEL, parameters, sentences[:, :-1]), float
    )
    targets = sentences[:, 1:]
    likely = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    chosen = np.take_along_axis(likely, targets[..., None], -1)[..., 0]
    result = evaluate(MODEL, parameters, sentences)
    words = targets > UNKNOWN
    assert result.accuracy == np.mean(scores.argmax(-1)[words] == targets[words])
    assert result.cross_entropy == pytest.approx(-np.mean(chosen[words]), rel=1e-5)


def test_a_few_sentences_are_spread_over_all():
    rows = np.repeat(SENTENCES, 50, axis=0)
    result = evaluate(MODEL, always(5), rows, most_sentences=3)
    assert result == evaluate(MODEL, always(5), SENTENCES)
    assert evaluate(MODEL, always(5), SENTENCES, most_sentences=10).words == 7


def test_a_diverged_model_has_no_finite_perplexity():
    broken = {name: array * np.float32("nan") for name, array in always(5).items()}
    assert math.isnan(evaluate(MODEL, broken, SENTENCES).perplexity)
    assert Evaluation(0.0, 1e4, 1).perplexity == math.inf


def test_unigram_baseline():
    known = np.array([[BEGIN, 7, 7, 6, END, END], [BEGIN, END, END, END, PAD, PAD]], np.int32)
    assert unigram_accuracy(known, SENTENCES) == 1 / 7
    assert unigram_accuracy(SENTENCES, SENTENCES) == 5 / 7


@pytest.mark.parametrize("rows", [SENTENCES[:0], SENTENCES[2:, :2]])
def test_sentences_without_known_words_are_refused(rows):
    with pytest.raises(InvalidInput, match="no known word"):
        evaluate(MODEL, always(5), rows)
    with pytest.raises(InvalidInput, match="no known word"):
        unigram_accuracy(rows, SENTENCES)
