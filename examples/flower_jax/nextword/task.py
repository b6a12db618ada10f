"""The people, the model and the training: nothing here knows of Flower or of privacy."""

from functools import cache

import numpy as np

from dpftrl.engines.local.batches import LocalTraining
from dpftrl.engines.local.jax_clients import JaxClients
from dpftrl.federated import Layout
from dpftrl.tasks import Task, load_task
from dpftrl.tasks.evaluation import evaluate
from dpftrl.tasks.language_model import language_model

Arrays = dict[str, np.ndarray]


@cache
def task() -> Task:
    return load_task("chitchat", vocabulary_size=1000, sentence_length=20)


@cache
def network():
    return language_model("window", len(task().vocabulary), embedding=16, hidden=32)


@cache
def clients() -> JaxClients:
    return JaxClients(network(), task().train, LocalTraining(1.0, batch_size=16, epochs=1), seed=0)


def start() -> Arrays:
    return {name: np.asarray(array) for name, array in network().init(0).items()}


def train(model: Arrays, person: int, round_number: int) -> Arrays:
    """What a person's sentences make of the model."""
    layout, name = Layout.of(model), task().train.names[person]
    flat = layout.flat(model)
    ((_, update),) = clients().updates(flat, [name], round_number)
    return layout.arrays(flat + update)


def accuracy(model: Arrays) -> float:
    """On people who were held out."""
    return evaluate(network(), model, task().heldout.sentences, 2000).accuracy
