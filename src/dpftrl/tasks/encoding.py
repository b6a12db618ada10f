"""Sentences as rows of numbers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.tasks.cutting import Cut
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, Vocabulary


@final
@dataclass(frozen=True)
class Encoder:
    """Makes text into rows of equal length.

    Attributes:
        vocabulary: Numbers the words.
        cut: Cuts a text into sentences, and these into words.
        length: Words kept of a sentence; END counts as one, and is left out where it does not fit.

    >>> from dpftrl.tasks.cutting import cut_chat
    >>> Encoder(Vocabulary(("hello", "you")), cut_chat, length=3).rows("Hello you. Hello?")
    [[1, 4, 5, 2], [1, 4, 2, 0]]
    """

    vocabulary: Vocabulary
    cut: Cut
    length: int

    def rows(self, text: str) -> list[list[int]]:
        """Each sentence that has words as BEGIN, words, END, PAD...: length + 1 numbers."""
        return [self._row(words) for words in self.cut(text) if words]

    def encode(self, texts: Iterable[str]) -> NDArray[np.int32]:
        """The sentences of many texts."""
        rows = [row for text in texts for row in self.rows(text)]
        return np.array(rows, dtype=np.int32).reshape(-1, self.length + 1)

    def _row(self, words: list[str]) -> list[int]:
        row = [BEGIN, *self.vocabulary.numbers(words[: self.length]), END]
        return (row + [PAD] * self.length)[: self.length + 1]
