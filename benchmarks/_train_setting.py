"""What all who train are given: the same people, model, batches, and cohorts of every round."""

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpftrl.simulation.jax_clients import LocalTraining
from dpftrl.tasks import Task, load_task

if TYPE_CHECKING:
    from dpftrl.tasks.language_model import Model

SEED = 0
LOCAL = LocalTraining(learning_rate=0.5, batch_size=16, epochs=1)


@lru_cache
def task() -> Task:
    """Real people's chat."""
    return load_task("chitchat", vocabulary_size=1000, sentence_length=20)


def model() -> "Model":
    """About 34,000 parameters, so that what surrounds the training shows."""
    # Flower's server starts processes, which JAX does not allow once it is loaded.
    from dpftrl.tasks.language_model import language_model

    return language_model("window", len(task().vocabulary), embedding=16, hidden=16)


def save_cohorts(folder: Path, cohorts: list[list[str]]) -> None:
    """Who took part, so that others can train the same people."""
    (folder / "cohorts.json").write_text(json.dumps(cohorts))


@lru_cache
def cohorts(folder: str) -> list[list[str]]:
    """Whom to train, round by round."""
    return json.loads((Path(folder) / "cohorts.json").read_text())


def save_vector(folder: Path, name: str, vector: NDArray[np.floating]) -> None:
    """A model to start from, or the mean update of the first round."""
    np.save(folder / f"{name}.npy", vector)


def vector(folder: Path, name: str) -> NDArray[np.floating]:
    """What was saved."""
    return np.load(folder / f"{name}.npy")
