"""Tiny private trainings of PyTorch models, which are the same bits every time."""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from small_training_runs import Place, plan_in_order
from torch import Tensor, nn

from dpftrl.plan import Dataset
from dpftrl.torch import PrivateTraining, make_private

EXAMPLES = 24
DATASET = Dataset(EXAMPLES, 7, 3)  # batches of 7, 7, 7 and 3; 12 steps
STEPS = DATASET.steps
PLAN = plan_in_order(DATASET)
COMMIT_EVERY = 3
_GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(EXAMPLES, 3, generator=_GENERATOR)
LABELS = (INPUTS.sum(dim=1) > 0).long()


class Augmented(torch.utils.data.Dataset[Any]):
    """Examples with random changes, by all three global generators."""

    def __init__(self, length: int = EXAMPLES):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        jitter = 0.1 * torch.randn(3) + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002
        return INPUTS[index] + jitter, LABELS[index]


def plain_data(length: int = EXAMPLES) -> Any:
    return torch.utils.data.TensorDataset(INPUTS[:length], LABELS[:length])


def small_model(seed: int = 0, *, dropout: float = 0.0, frozen: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 2))
    if frozen:
        model[0].requires_grad_(False)
    return model


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def private(
    place: Place | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dataset: Any = None,
    **changes: Any,
) -> PrivateTraining:
    options: dict[str, Any] = {
        "folder": None if place is None else place.folder,
        "state_folder": None if place is None else place.state,
        "clip_norm": 0.8,
        "plan": PLAN,
        "commit_every": COMMIT_EVERY,
        "insecure_test_key": 3,
        **changes,
    }
    return make_private(
        model, optimizer or sgd(model), plain_data() if dataset is None else dataset, **options
    )


def train(training: PrivateTraining, until: int | None = None, loss: Any = loss_fn) -> None:
    """Steps up to a number of steps, or to the end."""
    if until is not None and training.steps >= until:
        return
    for batch in training.loader:
        training.step(loss, batch)
        if training.steps == until:
            return


def bits(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers of a model."""
    hasher = hashlib.sha256()
    for name, value in model.state_dict().items():
        hasher.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()
