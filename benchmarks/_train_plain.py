"""Run in a fresh process: FOLDER; time the loop that one writes first, without any privacy.

A jitted step of gradient descent on one batch, a Python loop over the batches of a client and over
the clients, and sums by numpy.
"""

# JAX leaves much of its interface untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import _train_setting as setting
import jax
import numpy as np

from dpftrl.federated import Layout
from dpftrl.simulation.jax_clients import client_batches, client_order
from dpftrl.tasks.language_model import loss

Arrays = dict[str, Any]


@jax.jit
def step(parameters: Arrays, batch: Any) -> Arrays:
    """One step of gradient descent."""
    gradients = jax.grad(partial(loss, setting.model()))(parameters, batch)
    return jax.tree.map(lambda p, g: p - setting.LOCAL.learning_rate * g, parameters, gradients)


def mean_update(parameters: Arrays, cohort: list[str], round_number: int) -> Arrays:
    """Train everybody, one after the other."""
    users, local = setting.task().train, setting.LOCAL
    index = {name: i for i, name in enumerate(users.names)}
    total = {name: np.zeros(array.shape, np.float32) for name, array in parameters.items()}
    for name in cohort:
        sentences = users.of(index[name])
        order = client_order(setting.SEED, round_number, name)
        trained = parameters
        for batch in client_batches(sentences, local, order, local.batches(len(sentences))):
            trained = step(trained, batch)
        for key, array in trained.items():
            total[key] += np.asarray(array) - parameters[key]
    return {key: array / len(cohort) for key, array in total.items()}


def main() -> None:
    """Train the same cohorts, print the seconds of each round."""
    folder = Path(sys.argv[1])
    parameters: Arrays = dict(setting.model().init(setting.SEED))
    layout = Layout.of(parameters)
    seconds: list[float] = []
    for number, cohort in enumerate(setting.cohorts(str(folder))):
        start = time.perf_counter()
        mean = mean_update(parameters, cohort, number)
        parameters = {key: array + mean[key] for key, array in parameters.items()}
        seconds.append(time.perf_counter() - start)
        if number == 0:
            setting.save_vector(folder, "plain", layout.flat(mean))
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
