"""The model that a training starts from: nothing in it comes from the clients."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpftrl.engines.local.sections import Network
from dpftrl.errors import InvalidInput
from dpftrl.federated import Layout
from dpftrl.storage import read_file
from dpftrl.tasks import UNKNOWN, Task
from dpftrl.tasks.language_model import Lstm, Window, language_model
from dpftrl.tasks.pretraining import pretrain

Arrays = dict[str, NDArray[np.float32]]
# Called with the step and the loss.
Report = Callable[[int, float], None]

# What is never a target hardly counts.
NEVER = 1e-5
MOST_BYTES = 2**40


def network(settings: Network, task: Task) -> Lstm | Window:
    """The model for a task's vocabulary."""
    return language_model(settings.name, len(task.vocabulary), **settings.sizes)


def starting_arrays(
    settings: Network, task: Task, seed: int, report: Report | None = None
) -> Arrays:
    """A model that was given, one trained on the task's public text, or a fresh one."""
    model = network(settings, task)
    if settings.start is not None:
        return _read(Path(settings.start), model.init(seed))
    if settings.pretraining_steps:
        if task.public is None:
            raise InvalidInput(f"{task.name} has no public text to train on beforehand")
        steps, rate = settings.pretraining_steps, settings.pretraining_rate
        return pretrain(model, task.public, seed, steps=steps, learning_rate=rate, report=report)
    arrays = dict(model.init(seed))
    arrays["output.bias"] = _by_rank(len(task.vocabulary))
    return arrays


def _by_rank(size: int) -> NDArray[np.float32]:
    """Zipf's law: vocabularies list the most frequent words first, which is public."""
    share = np.full(size, NEVER)
    share[UNKNOWN + 1 :] = 1 / np.arange(1, size - UNKNOWN)
    return np.log(share / share.sum()).astype(np.float32)


def _read(path: Path, like: Mapping[str, NDArray[Any]]) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        found = load(read_file(path, MOST_BYTES))
    except SafetensorError as error:
        raise InvalidInput(f"{path} is not a model: {error}") from None
    if why := Layout.of(like).misfit(found):
        raise InvalidInput(f"{path} is a model of another kind: {why}")
    return found
