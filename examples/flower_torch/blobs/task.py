"""The data, the model and the training: nothing here knows of Flower or of privacy."""

import torch
from torch import nn

CLASSES = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 32)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(x)))


def load_data(partition: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Made up, so that nothing needs to be fetched: each class is a blob on a circle."""
    dice = torch.Generator().manual_seed(partition)
    labels = torch.randint(CLASSES, (size,), generator=dice)
    angle = labels * (2 * torch.pi / CLASSES)
    centres = torch.stack([angle.cos(), angle.sin()], dim=1) * 2
    return centres + 0.5 * torch.randn(size, 2, generator=dice), labels


def train(net: Net, data: tuple[torch.Tensor, torch.Tensor], lr: float) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(data[0]), data[1])
        loss.backward()
        optimizer.step()
    return loss.item()


def accuracy(net: Net) -> float:
    """On points that no device has."""
    points, labels = load_data(partition=-1, size=2000)
    with torch.no_grad():
        return (net(points).argmax(dim=1) == labels).float().mean().item()
