"""The people, the model and the training: nothing here knows of Flower or of privacy."""

from functools import cache

import numpy as np

from dpftrl.federated import Layout
from dpftrl.simulation.config import Network
from dpftrl.simulation.jax_clients import JaxClients, LocalTraining
from dpftrl.simulation.training import network, starting_arrays
from dpftrl.tasks import Task, load_task
from dpftrl.tasks.language_model import evaluate

Arrays = dict[str, np.ndarray]

NETWORK = Network(name="window", sizes={"embedding": 16, "hidden": 32})


@cache
def task() -> Task:
    return load_task("chitchat", vocabulary_size=1000, sentence_length=20)


@cache
def clients() -> JaxClients:
    local = LocalTraining(learning_rate=1.0, batch_size=16, epochs=1)
    return JaxClients(network(NETWORK, task()), task().train, local, seed=0)


def start() -> Arrays:
    """Fresh, but for how common words are, which is public."""
    return {name: np.asarray(array) for name, array in starting_arrays(NETWORK, task(), 0).items()}


def train(model: Arrays, person: int, round_number: int) -> Arrays:
    """What a person's sentences make of the model."""
    layout, name = Layout.of(model), task().train.names[person]
    flat = layout.flat(model)
    ((_, update),) = clients().updates(flat, [name], round_number)
    return layout.arrays(flat + update)


def accuracy(model: Arrays) -> float:
    """On people who were held out."""
    return evaluate(network(NETWORK, task()), model, task().heldout.sentences, 2000).accuracy
