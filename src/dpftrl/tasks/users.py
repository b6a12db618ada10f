"""People and their sentences, as one array."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import TypeVar, final
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, Cut, Vocabulary


def safe_name(name: str) -> str:
    """The name in its usual Unicode form, so that one person is not two; or say what is wrong.

    What passes can be printed, and written to a CSV file as it is.

    >>> safe_name("A" + chr(0x30A)) == safe_name(chr(0xC5))
    True
    """
    usual = normalize("NFC", name)
    if not usual or usual != usual.strip() or not usual.isprintable() or {",", '"'} & set(usual):
        raise InvalidInput(
            "a user's name has printable characters, no comma, no double quote and no space at "
            f"its ends, got {name!r:.60}; rename that user"
        )
    return usual


def chance(name: str, purpose: str) -> float:
    """A number from 0 up to 1 that depends on the name alone: others may come and go."""
    digest = sha256(f"{purpose}\0{name}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def sample(names: list[str], most: int | None) -> list[str]:
    """At most so many names, by chance, in sorted order."""
    if most is None or len(names) <= most:
        return sorted(names)
    return sorted(sorted(names, key=lambda name: (chance(name, "sample"), name))[:most])


@final
@dataclass(frozen=True)
class Encoder:
    """Makes text into rows of equal length.

    Attributes:
        vocabulary: Numbers the words.
        cut: Cuts a text into sentences, and these into words.
        length: Words kept of a sentence; END counts as one, and is left out where it does not fit.

    >>> from dpftrl.tasks.vocabulary import cut_chat
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


Number = TypeVar("Number", np.int32, np.int64)


@final
@dataclass(frozen=True, eq=False)
class Users:
    """Who has which sentences; nobody is without any.

    Attributes:
        names: Sorted, each once, safe to write to a CSV file.
        sentences: [sentences, length + 1] of int32: BEGIN, words, END if it fits, then PAD. A model
            reads [:, :-1] and predicts [:, 1:].
        offsets: User i has sentences[offsets[i]:offsets[i + 1]].
    """

    names: tuple[str, ...] = field(repr=False)
    sentences: NDArray[np.int32] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)

    def __post_init__(self) -> None:
        _check_names(self.names)
        object.__setattr__(self, "sentences", checked_sentences("sentences", self.sentences))
        _check_offsets(self.offsets, len(self.names), len(self.sentences))
        object.__setattr__(self, "offsets", _read_only(self.offsets))

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Users({len(self):,} people, {len(self.sentences):,} sentences)"

    def of(self, user: int) -> NDArray[np.int32]:
        """The sentences of one user, without copying them."""
        if not 0 <= user < len(self):
            raise InvalidInput(f"{len(self)} users are numbered from 0 on, got {user}")
        return self.sentences[self.offsets[user] : self.offsets[user + 1]]

    def select(self, indices: Sequence[int] | NDArray[np.integer]) -> "Users":
        """Some of the users; `indices` must rise, as the names do."""
        chosen = [int(index) for index in indices]
        if any(not low < high for low, high in pairwise(chosen)):
            raise InvalidInput("users are selected by indices that rise, each once; sort them")
        parts = [self.of(index) for index in chosen]
        sentences = np.concatenate([self.sentences[:0], *parts])
        return Users(tuple(self.names[index] for index in chosen), sentences, _offsets(parts))


def collect_users(texts: Iterable[tuple[str, str]], encoder: Encoder, most: int) -> Users:
    """Gather sentences by user; sentences without words, and users without sentences, are dropped.

    Args:
        texts: A user's name and a text, in any order; the order of a user's own is kept.
        encoder: Makes text into rows of numbers.
        most: How many sentences of one user are kept, the first ones.
    """
    width = encoder.length + 1
    rows: dict[str, array[int]] = {}
    for name, text in texts:
        # Before anything else: some people have a hundred times what is kept of them.
        room = most - len(rows.get(name, ())) // width
        if room > 0:
            for row in encoder.rows(text)[:room]:
                rows.setdefault(name, array("i")).extend(row)
    names = tuple(sorted(rows))
    offsets = _offsets([range(len(rows[name]) // width) for name in names])
    sentences = np.empty((int(offsets[-1]), width), dtype=np.int32)
    for (first, last), name in zip(pairwise(offsets.tolist()), names, strict=True):
        # Taken out one by one, so that a large task is not in memory twice.
        sentences[first:last] = np.array(rows.pop(name), dtype=np.int32).reshape(-1, width)
    return Users(names, sentences, offsets)


def checked_sentences(what: str, sentences: NDArray[np.int32]) -> NDArray[np.int32]:
    """The same, not to be written to; what is not rows of BEGIN, words and the rest is refused."""
    if sentences.ndim != 2 or sentences.dtype != np.int32 or sentences.shape[1] < 2:
        raise InvalidInput(
            f"{what} must be [sentences, length + 1] of int32, got {sentences.shape} of "
            f"{sentences.dtype}"
        )
    if len(sentences) and not (np.all(sentences[:, 0] == BEGIN) and sentences.min() >= PAD):
        raise InvalidInput(f"{what} must start with BEGIN ({BEGIN}) and hold no negative number")
    return _read_only(sentences)


def _read_only(values: NDArray[Number]) -> NDArray[Number]:
    view = values.view()
    view.setflags(write=False)
    return view


def _offsets(parts: Sequence[Sequence[int] | NDArray[np.int32]]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if safe_name(name) != name:
            raise InvalidInput(f"a user's name must be in Unicode's form NFC, got {name!r:.60}")
    for before, after in pairwise(names):
        if not before < after:
            raise InvalidInput(f"names must be sorted, each once, got {after!r:.60} too late")


def _check_offsets(offsets: NDArray[np.int64], users: int, sentences: int) -> None:
    if offsets.dtype != np.int64 or offsets.shape != (users + 1,):
        raise InvalidInput(f"{users} users need {users + 1} offsets of int64, got {offsets.shape}")
    if offsets[0] != 0 or offsets[-1] != sentences or not np.all(np.diff(offsets) > 0):
        raise InvalidInput(f"offsets must rise from 0 to {sentences}, one or more for each user")
