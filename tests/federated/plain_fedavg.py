"""Federated averaging as a textbook has it: linear regression, numpy, float64, no privacy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Examples(NamedTuple):
    """What one client holds."""

    inputs: Array
    targets: Array


def everybody(names: Sequence[str], size: int, examples: int = 4) -> dict[str, Examples]:
    """Data of the same line, seen through noise, of each client its own."""
    dice = np.random.default_rng(11)
    truth = dice.normal(size=size)
    found: dict[str, Examples] = {}
    for name in names:
        inputs = dice.normal(size=(examples, size))
        found[name] = Examples(inputs, inputs @ truth + 0.1 * dice.normal(size=examples))
    return found


def gradient(model: Array, data: Examples) -> Array:
    """Of half the mean squared error."""
    return data.inputs.T @ (data.inputs @ model - data.targets) / len(data.targets)


def local_update(model: Array, data: Examples, rate: float = 0.1) -> Array:
    """One step on the client: its model minus the one it was handed."""
    return -rate * gradient(model, data)


def fedavg(start: Array, cohorts: Sequence[Sequence[Examples]], server_rate: float) -> Array:
    """The model after a round with each cohort."""
    model = start.copy()
    for cohort in cohorts:
        updates = [local_update(model, data) for data in cohort]
        model = model + server_rate * sum(updates) / len(updates)
    return model
