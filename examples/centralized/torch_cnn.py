"""A private convolutional network, with a learning-rate schedule, killed and resumed."""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dpftrl.torch as dt

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
TARGET = {"epsilon": 8.0, "delta": 1e-5, "epochs": EPOCHS, "batch_size": 128, "clip_norm": 1.0}


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def start(folder: str) -> tuple[nn.Module, dt.PrivateTraining]:
    """Create the run, or resume it."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, dt.make_private(
        model,
        optimizer,
        TensorDataset(images, labels),
        folder=f"{folder}/run",
        sampling="none",
        **TARGET,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150),
        commit_every=10,
    )


def main(folder: str) -> None:
    _, private = start(folder)
    for batch in private.loader:
        private.step(loss_fn, batch)
        if len(private.loader) < 10:
            break  # here the machine loses power
    private.close()
    model, private = start(folder)
    print(f"resumed after {private.steps} saved steps; {private.run.repeating} are repeated")
    for batch in private.loader:
        private.step(loss_fn, batch)
    print(f"trained {type(model).__name__}, epsilon {private.epsilon:g}")


if __name__ == "__main__":
    main(tempfile.mkdtemp())
