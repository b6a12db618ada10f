"""A private multilayer perceptron in PyTorch, on scikit-learn's handwritten digits."""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dpftrl.torch as dt

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def main(folder: str) -> float:
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    parts = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0)
    train_images, test_images, train_labels, test_labels = parts

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    private = dt.make_private(
        model,
        optimizer,
        TensorDataset(train_images, train_labels),
        folder=f"{folder}/run",
        epsilon=8.0,
        delta=1e-5,
        epochs=EPOCHS,
        batch_size=128,
        clip_norm=1.0,
    )
    for batch in private.loader:
        private.step(loss_fn, batch)
    statement = private.statement(f"{folder}/statement")

    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    print(statement.summary_sentence)
    print(f"accuracy on held-out digits {accuracy:.3f}, epsilon {private.epsilon:g}")
    return accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
