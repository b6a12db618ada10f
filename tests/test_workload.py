"""Workloads: the matrix that the server's optimizer applies to the updates."""

import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.workload import PREFIX_SUM, Workload


def by_hand(workload: Workload, rounds: int) -> np.ndarray:
    """The matrix, computed column by column with a training loop."""
    columns = []
    for j in range(rounds):
        model, step, column = 0.0, 0.0, []
        for t in range(rounds):
            step = workload.momentum * step + (t == j)
            rate = workload.learning_rates[t] if workload.learning_rates else 1.0
            model = (1 - workload.weight_decay * rate) * model + rate * step
            column.append(model)
        columns.append(column)
    return np.array(columns).T


WORKLOADS = [
    PREFIX_SUM,
    Workload(momentum=0.9),
    Workload(momentum=0.5, weight_decay=0.1),
    Workload.with_schedule([1, 0.5, 2, 0, 0.25, 1, 1], 7, momentum=0.3, weight_decay=0.2),
    Workload.with_schedule("cooldown:last-half:0.05", 7),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_the_matrix_agrees_with_a_training_loop(workload):
    matrix = by_hand(workload, 7)
    assert workload.matrix(7) == pytest.approx(matrix, abs=1e-12)
    given = np.random.default_rng(0).normal(size=(7, 3))
    assert workload.apply(given) == pytest.approx(matrix @ given, abs=1e-12)


def test_the_default_workload_is_the_prefix_sum():
    assert np.array_equal(PREFIX_SUM.matrix(4), np.tri(4))
    assert PREFIX_SUM.is_prefix_sum
    assert Workload(learning_rates=(1.0, 1.0)).is_prefix_sum
    assert not Workload(momentum=0.1).is_prefix_sum


def test_coefficients_are_the_first_column_of_a_toeplitz_workload():
    workload = Workload(momentum=0.9, weight_decay=0.01)
    assert workload.coefficients(6) == pytest.approx(workload.matrix(6)[:, 0])
    with pytest.raises(InvalidInput):
        WORKLOADS[3].coefficients(3)


def test_the_cooldown_schedule_of_the_paper():
    rates = Workload.with_schedule("cooldown:last-quarter:0.05", 2000).rates(2000)
    assert np.all(rates[:1500] == 1)
    assert rates[-1] == pytest.approx(0.05)
    assert np.all(np.diff(rates[1499:]) < 0)


def test_a_constant_schedule_has_the_rate_1():
    assert Workload.with_schedule("constant", 3).is_toeplitz


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: Workload(momentum=1.0),
        lambda: Workload(momentum=-0.1),
        lambda: Workload(momentum=float("nan")),
        lambda: Workload(weight_decay=2),
        lambda: Workload(learning_rates=(1.0, -1.0)),
        lambda: Workload(learning_rates=(0.0, 0.0)),
        lambda: Workload.with_schedule([1.0, 1.0], 3),
        lambda: Workload.with_schedule("cooldown:last-eighth:0.05", 3),
        lambda: Workload.with_schedule("cooldown:last-half:x", 3),
        lambda: Workload.with_schedule("warmup", 3),
    ],
)
def test_invalid_workloads_are_refused(mistake):
    with pytest.raises(InvalidInput):
        mistake()
