"""Pre-training: Adam against its definition in float64, learning, and reproducibility."""

from functools import partial

import jax
import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.tasks.language_model import Window, evaluate, loss, pretrain
from dpftrl.tasks.vocabulary import BEGIN, END

MODEL = Window(vocabulary=12, embedding=4, words=2, hidden=8)
# Each word is followed by the word with the next number, so the text can be learned.
ROWS = np.array([[BEGIN, a, a + 1, a + 2, a + 3, END] for a in range(4, 9)], np.int32)
HOW = {"batch_size": 8, "learning_rate": 0.03}


def test_pretraining_lowers_the_loss_and_reports_progress():
    steps_and_losses = []
    after = pretrain(
        MODEL,
        ROWS,
        0,
        steps=150,
        **HOW,
        on_step=lambda step, value: steps_and_losses.append((step, value)),
    )
    assert [step for step, _ in steps_and_losses] == list(range(1, 151))
    assert steps_and_losses[-1][1] < 0.7 < steps_and_losses[0][1]
    # Only the first word of a sentence cannot be predicted.
    assert evaluate(MODEL, after, ROWS).accuracy >= 0.75


def test_the_learning_rate_cools_down_over_the_second_half():
    def steps(cooldown: bool, number: int):
        return pretrain(MODEL, ROWS, 0, steps=number, cooldown=cooldown, **HOW)["output.bias"]

    # Three of five steps have the full rate; the last ones have a smaller one.
    assert not np.array_equal(steps(True, 5), steps(False, 5))
    assert np.array_equal(steps(True, 1), steps(False, 1))


def test_equal_seeds_give_equal_parameters():
    first, again, other = (pretrain(MODEL, ROWS, seed, steps=5, **HOW) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not all(np.array_equal(first[name], other[name]) for name in first)


def test_steps_equal_adam_in_float64():
    trained = pretrain(MODEL, ROWS[:1], 3, steps=4, **HOW)
    batch = np.repeat(ROWS[:1], 8, axis=0)
    slope = jax.jit(jax.grad(partial(loss, MODEL)))
    expected = {name: array.astype(np.float64) for name, array in MODEL.init(3).items()}
    mean = {name: np.zeros_like(array) for name, array in expected.items()}
    square = {name: np.zeros_like(array) for name, array in expected.items()}
    for step in range(1, 5):
        gradient = slope(
            {name: array.astype(np.float32) for name, array in expected.items()}, batch
        )
        for name in expected:
            g = np.asarray(gradient[name], np.float64)
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.999 * square[name] + 0.001 * g * g
            first, second = mean[name] / (1 - 0.9**step), square[name] / (1 - 0.999**step)
            # Where a gradient is nearly zero its sign is rounding, and Adam steps by the sign.
            expected[name] -= 0.03 * first / (np.sqrt(second) + 1e-8)
    for name in expected:
        np.testing.assert_allclose(trained[name], expected[name], atol=1e-3)


def test_invalid_arguments_are_refused():
    with pytest.raises(InvalidInput, match="no public sentences"):
        pretrain(MODEL, ROWS[:0], 0, steps=1)
    with pytest.raises(InvalidInput, match="steps"):
        pretrain(MODEL, ROWS, 0, steps=0)
    with pytest.raises(InvalidInput, match="learning_rate"):
        pretrain(MODEL, ROWS, 0, steps=1, learning_rate=float("nan"))
