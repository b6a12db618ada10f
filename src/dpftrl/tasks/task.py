"""The data of a training: `Users` with their sentences, and the `Task` that they belong to.

An `Encoder` turns text into rows of numbers. `Options` are the options for loading a task.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TypeVar, final
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import as_float, whole_number
from dpftrl._internal.progress import Progress
from dpftrl.errors import InvalidInput
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, Cut, Vocabulary


def safe_name(name: str) -> str:
    """Return a user's name in Unicode's form NFC, so that two encodings of a name are one user.

    The result can be printed. It may have commas and quotes: the ledger puts names in quotes.

    Raises:
        InvalidInput: The name is empty or has a space at its ends or a control character.

    >>> safe_name("A" + chr(0x30A)) == safe_name(chr(0xC5))
    True
    >>> safe_name("Smith,")
    'Smith,'
    """
    composed = normalize("NFC", name)
    if not composed or composed != composed.strip() or not composed.isprintable():
        raise InvalidInput(
            "a user's name must have printable characters and no space at its ends, got "
            f"{name!r:.60}; rename that user"
        )
    return composed


def chance(name: str, purpose: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends on the name and the purpose only."""
    digest = sha256(f"{purpose}\0{name}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def sample(names: list[str], most: int | None) -> list[str]:
    """Return at most `most` names, chosen by a hash of the name, in sorted order."""
    if most is None or len(names) <= most:
        return sorted(names)
    return sorted(sorted(names, key=lambda name: (chance(name, "sample"), name))[:most])


@final
@dataclass(frozen=True)
class Encoder:
    """Encodes text as rows of numbers of equal length.

    Attributes:
        vocabulary: Gives the number of each word.
        cut: Splits a text into sentences, and sentences into words.
        length: Words kept per sentence. END counts as one, and is left out if it does not fit.

    >>> from dpftrl.tasks.vocabulary import cut_chat
    >>> Encoder(Vocabulary(("hello", "you")), cut_chat, length=3).rows("Hello you. Hello?")
    [[1, 4, 5, 2], [1, 4, 2, 0]]
    """

    vocabulary: Vocabulary
    cut: Cut
    length: int

    def rows(self, text: str) -> list[list[int]]:
        """Encode each sentence that has words as length + 1 numbers: BEGIN, words, END, PAD..."""
        return [self._row(words) for words in self.cut(text) if words]

    def encode(self, texts: Iterable[str]) -> NDArray[np.int32]:
        """Encode the sentences of many texts as one array [sentences, length + 1]."""
        rows = [row for text in texts for row in self.rows(text)]
        return np.array(rows, dtype=np.int32).reshape(-1, self.length + 1)

    def _row(self, words: list[str]) -> list[int]:
        row = [BEGIN, *self.vocabulary.numbers(words[: self.length]), END]
        return (row + [PAD] * self.length)[: self.length + 1]


Number = TypeVar("Number", np.int32, np.int64)


@final
@dataclass(frozen=True, eq=False)
class Users:
    """Users and their sentences. Every user has at least one sentence.

    Attributes:
        names: Names of the users, sorted and unique, as `safe_name` returns them.
        sentences: [sentences, length + 1] of int32: BEGIN, words, END if it fits, then PAD. A model
            reads [:, :-1] and predicts [:, 1:].
        offsets: User i has sentences[offsets[i]:offsets[i + 1]].

    Raises:
        InvalidInput: The names, sentences or offsets do not have this form.
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
        """Return the sentences of the user with this number, as a view."""
        if not 0 <= user < len(self):
            raise InvalidInput(f"{len(self)} users are numbered from 0 on, got {user}")
        return self.sentences[self.offsets[user] : self.offsets[user + 1]]

    def select(self, indices: Sequence[int] | NDArray[np.integer]) -> "Users":
        """Return the users with these numbers, which must be in increasing order."""
        chosen = [int(index) for index in indices]
        if any(not low < high for low, high in pairwise(chosen)):
            raise InvalidInput("indices of users must be unique and in increasing order; sort them")
        parts = [self.of(index) for index in chosen]
        sentences = np.concatenate([self.sentences[:0], *parts])
        return Users(tuple(self.names[index] for index in chosen), sentences, _offsets(parts))


def collect_users(texts: Iterable[tuple[str, str]], encoder: Encoder, most: int) -> Users:
    """Collect sentences by user; drop sentences without words and users without sentences.

    Args:
        texts: Pairs of a user's name and a text, in any order. The order of each user's own texts
            is kept.
        encoder: Encodes text as rows of numbers.
        most: Largest number of sentences per user; the first ones are kept.
    """
    width = encoder.length + 1
    rows: dict[str, array[int]] = {}
    for name, text in texts:
        # Tested before encoding: some users have a hundred times more sentences than are kept.
        room = most - len(rows.get(name, ())) // width
        if room > 0:
            for row in encoder.rows(text)[:room]:
                rows.setdefault(name, array("i")).extend(row)
    names = tuple(sorted(rows))
    offsets = _offsets([range(len(rows[name]) // width) for name in names])
    sentences = np.empty((int(offsets[-1]), width), dtype=np.int32)
    for (first, last), name in zip(pairwise(offsets.tolist()), names, strict=True):
        # Rows are freed user by user, so that a large task is not in memory twice.
        sentences[first:last] = np.array(rows.pop(name), dtype=np.int32).reshape(-1, width)
    return Users(names, sentences, offsets)


def checked_sentences(what: str, sentences: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a read-only view of sentences; refuse arrays that do not have the form of `Users`."""
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
            raise InvalidInput(
                f"names must be sorted and unique, got {after!r:.60} after {before!r:.60}"
            )


def _check_offsets(offsets: NDArray[np.int64], users: int, sentences: int) -> None:
    if offsets.dtype != np.int64 or offsets.shape != (users + 1,):
        raise InvalidInput(f"{users} users need {users + 1} offsets of int64, got {offsets.shape}")
    if offsets[0] != 0 or offsets[-1] != sentences or not np.all(np.diff(offsets) > 0):
        raise InvalidInput(
            f"offsets must rise from 0 to {sentences}, with one or more sentences per user"
        )


@final
@dataclass(frozen=True, eq=False)
class Task:
    """A task of next-word prediction on text of real people.

    Attributes:
        name: Name of the task.
        source: Origin, version and license of the text, in one line.
        vocabulary: The words of the model, from public sources only.
        train: Users to train on.
        heldout: Other users, to evaluate on; may be empty.
        public: Sentences of public text for pre-training, in the form of `Users.sentences`; None if
            there are none.

    Raises:
        InvalidInput: Nobody is left to train on, a user is in both groups, or sentences do not fit
            the vocabulary.
    """

    name: str
    source: str
    vocabulary: Vocabulary
    train: Users
    heldout: Users
    public: NDArray[np.int32] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not len(self.train):
            raise InvalidInput(f"{self.name} has nobody to train on; give text of more users")
        if both := set(self.train.names) & set(self.heldout.names):
            raise InvalidInput(
                f"{len(both)} users are both held out and trained on, for example {min(both)!r}"
            )
        public = self.train.sentences[:0]
        if self.public is not None:
            public = checked_sentences("public text", self.public)
            object.__setattr__(self, "public", public)
        for rows in (self.train.sentences, self.heldout.sentences, public):
            if rows.shape[1] != self.train.sentences.shape[1]:
                raise InvalidInput(f"sentences of {self.name} have different lengths")
            if len(rows) and not rows.max() < len(self.vocabulary):
                raise InvalidInput(f"sentences of {self.name} hold words beyond the vocabulary")


@final
@dataclass(frozen=True)
class Options:
    """Options for loading a task; `load_task` documents each of them."""

    vocabulary_size: int
    sentence_length: int
    sentences_per_user: int
    heldout_share: float
    most_users: int | None
    path: Path | None
    vocabulary: Vocabulary | None
    on_progress: Progress

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "sentence_length", "sentences_per_user"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        if self.most_users is not None:
            object.__setattr__(self, "most_users", whole_number("most_users", self.most_users))
        object.__setattr__(self, "heldout_share", as_float(self.heldout_share))
        if not 0 <= self.heldout_share < 1:
            raise InvalidInput(f"heldout_share must be from 0 to below 1, got {self.heldout_share}")

    def english_encoder(self, cut: Cut) -> Encoder:
        """Return an encoder with the given vocabulary, or with the most frequent English words."""
        vocabulary = self.vocabulary or Vocabulary.english(self.vocabulary_size)
        return Encoder(vocabulary, cut, self.sentence_length)

    def needed_path(self, what: str) -> Path:
        """Return the path, or raise if it is missing. `what` describes the file in the message."""
        if self.path is None:
            raise InvalidInput(
                f"this task reads {what}: give its path, with --set 'data.path=\"FILE\"' or, in "
                "Python, path="
            )
        return self.path

    def split(self, users: Users) -> tuple[Users, Users]:
        """Split users into those to train on and those to hold out, by a hash of the name.

        A user who joins or leaves does not move any other user to the other group.
        """
        heldout_names = [
            name for name in users.names if chance(name, "heldout") < self.heldout_share
        ]
        if self.heldout_share > 0 and len(users) and not heldout_names:
            raise InvalidInput(
                f"none of {len(users)} users is held out at a share of {self.heldout_share}; "
                "raise heldout_share"
            )
        train_names = sorted({*users.names} - {*heldout_names})
        train, heldout = (
            users.select(
                [bisect_left(users.names, name) for name in sample(names, self.most_users)]
            )
            for names in (train_names, heldout_names)
        )
        return train, heldout
