"""What one client trains on in one round, and in which order."""

import hashlib
import json
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.checks import positive_number, whole_number


@final
@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: plain gradient descent, batch by batch.

    Attributes:
        learning_rate: Of the gradient descent.
        batch_size: Sentences in a batch; the last one of an epoch may have fewer.
        epochs: How often each sentence is seen, in a new order each time.
        most_batches: Stop after this many, however many sentences there are.
    """

    learning_rate: float
    batch_size: int = 16
    epochs: int = 1
    most_batches: int | None = None

    def __post_init__(self) -> None:
        positive_number("learning_rate", self.learning_rate)
        whole_number("batch_size", self.batch_size)
        whole_number("epochs", self.epochs)
        if self.most_batches is not None:
            whole_number("most_batches", self.most_batches)

    def batches(self, sentences: int) -> int:
        """How many batches a client with so many sentences goes through.

        >>> LocalTraining(0.1, batch_size=16, epochs=2).batches(17)
        4
        """
        wanted = self.epochs * -(-sentences // self.batch_size)
        return wanted if self.most_batches is None else min(wanted, self.most_batches)


def client_batches(
    sentences: NDArray[np.int32], local: LocalTraining, order: np.random.Generator, room: int
) -> NDArray[np.int32]:
    """A client's batches [room, batch_size, length + 1], in order; the rest is PAD."""
    count, per_epoch = local.batches(len(sentences)), -(-len(sentences) // local.batch_size)
    filled = np.zeros((room, local.batch_size, sentences.shape[1]), np.int32)
    for first in range(0, count, per_epoch or 1):
        last = min(first + per_epoch, count)
        chosen = order.permutation(len(sentences))[: (last - first) * local.batch_size]
        filled[first:last].reshape(-1, sentences.shape[1])[: len(chosen)] = sentences[chosen]
    return filled


def client_order(seed: int, round_number: int, name: str) -> np.random.Generator:
    """Randomness of one client in one round, whoever else takes part.

    It shuffles sentences and nothing else: no privacy rests on it.
    """
    text = json.dumps([seed, round_number, name]).encode()
    return np.random.Generator(
        np.random.Philox(key=int.from_bytes(hashlib.sha256(text).digest()[:16], "little"))
    )
