"""`Task`, the data of a training, and `Options`, the options for loading one."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import as_float, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.tasks.users import Encoder, Users, chance, checked_sentences, sample
from dpftrl.tasks.vocabulary import Cut, Vocabulary

# A progress callback: the share of the work that is done (None if unknown), and the current step.
Report = Callable[[float | None, str], None]


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
    report: Report

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
        """Return the path; refuse a missing one. `what` describes the file in the message."""
        if self.path is None:
            raise InvalidInput(f"this task reads {what}: give its path= (in a config: data.path)")
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
