"""User-level privacy: the next word in people's chats, each person protected as a whole."""

import sys
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dpftrl.torch as dt
from dpftrl.tasks import load_task

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
TARGET = {"epsilon": 8.0, "delta": 1e-5, "epochs": EPOCHS, "clip_norm": 0.5}


class NextWord(nn.Module):
    """Predicts a word from the one before it."""

    def __init__(self, words: int, width: int = 32):
        super().__init__()
        self.words, self.scores = nn.Embedding(words, width), nn.Linear(width, words)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        return self.scores(self.words(sentences))


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    scores = model(batch[0][:, :-1])
    return cross_entropy(scores.transpose(1, 2), batch[0][:, 1:], ignore_index=0)


def main(folder: str) -> None:
    task = load_task("chitchat", vocabulary_size=500, sentence_length=10, sentences_per_user=32)
    sentences = torch.tensor(task.train.sentences, dtype=torch.long)
    owners = np.repeat(np.arange(len(task.train)), np.diff(task.train.offsets))

    torch.manual_seed(0)
    model = NextWord(len(task.vocabulary))
    private = dt.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9),
        TensorDataset(sentences),
        folder=f"{folder}/run",
        units=owners,
        examples_per_unit=8,
        batch_size=100,  # people, not sentences
        sampling="none",
        **TARGET,
    )
    for batch in private.loader:
        private.step(loss_fn, batch)
    print(private.statement(f"{folder}/statement").summary_sentence)


if __name__ == "__main__":
    main(tempfile.mkdtemp())
