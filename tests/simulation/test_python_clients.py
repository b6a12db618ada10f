"""Clients that call a Python function."""

import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.simulation.python_clients import PythonClients

MODEL = {"b": np.zeros(2, np.float32), "a": np.zeros((2, 2), np.float32)}
START = np.arange(6, dtype=np.float32)


def test_updates_are_differences_in_sorted_order():
    calls = []

    def train(model, client, round_number):
        calls.append((client, round_number))
        # Changed in place on purpose: the function gets its own copy.
        model["a"] *= 2
        return {"b": model["b"].astype(np.float64) - 1, "a": model["a"]}

    updates = list(PythonClients(train, MODEL).updates(START, ["ann", "bob"], 4))
    assert calls == [("ann", 4), ("bob", 4)]
    assert [name for name, _ in updates] == ["ann", "bob"]
    for _, update in updates:
        assert update.dtype == np.float32
        np.testing.assert_array_equal(update, [0, 1, 2, 3, -1, -1])
    np.testing.assert_array_equal(START, np.arange(6))


def test_nan_is_passed_on_to_the_server():
    def train(model, _client, _round):
        return {name: array * np.float32("nan") for name, array in model.items()}

    ((_, update),) = PythonClients(train, MODEL).updates(START, ["ann"], 0)
    assert np.isnan(update).all()


def test_arrays_that_do_not_fit_are_refused():
    def train(model, _client, _round):
        return {"a": model["a"]}

    with pytest.raises(InvalidInput, match="training 'ann' does not fit: got 1 arrays"):
        list(PythonClients(train, MODEL).updates(START, ["ann"], 0))
    with pytest.raises(InvalidInput, match="must have 6 numbers"):
        list(PythonClients(train, MODEL).updates(START[:4], ["ann"], 0))
