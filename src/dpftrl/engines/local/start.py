"""The model that a training starts from: fresh, trained on public text, or from a file."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dpftrl.engines.local.sections import Network
from dpftrl.errors import InvalidInput
from dpftrl.federated import Layout, StartModel
from dpftrl.tasks import UNKNOWN, Task
from dpftrl.tasks.language_model import Lstm, Window, language_model
from dpftrl.tasks.pretraining import pretrain

Arrays = dict[str, NDArray[np.float32]]
# Called with the step and the loss.
Report = Callable[[int, float], None]

# What is never a target hardly counts.
NEVER = 1e-5


def network(settings: Network, task: Task) -> Lstm | Window:
    """The model for a task's vocabulary."""
    return language_model(settings.name, len(task.vocabulary), **settings.sizes)


def starting_arrays(
    settings: Network, task: Task, seed: int, report: Report | None = None
) -> Arrays:
    """The arrays of `starting_model`, where no private run is behind them.

    Raises:
        InvalidInput: A private run made the model. Arrays alone would not say so, and a run that
            starts from them would state too small an epsilon.
    """
    model = starting_model(settings, task, seed, report)
    if not isinstance(model, StartModel):
        return model
    if model.start.earlier:
        raise InvalidInput(
            f"{settings.start} was made by a private run, which must be composed with what starts "
            "from it; use starting_model, and hand over what it returns"
        )
    return dict(model.arrays)


def starting_model(
    settings: Network, task: Task, seed: int, report: Report | None = None
) -> StartModel | Arrays:
    """A model from a file, one trained on the task's public text, or a fresh one.

    Arrays without a file hold nothing from the clients. A file says where its model comes from, and
    a run that starts from it is composed with the private runs behind it.
    """
    model = network(settings, task)
    if settings.start is not None:
        start = StartModel.load(settings.start, settings.other_people)
        if why := Layout.of(model.init(seed)).misfit(start.arrays):
            raise InvalidInput(f"{settings.start} is a model of another kind: {why}")
        return start
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
