"""`load_task`, which loads a task by its name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpftrl.errors import InvalidInput
from dpftrl.tasks import chitchat, jsonl, poetry, stackoverflow
from dpftrl.tasks.task import Options, Report, Task
from dpftrl.tasks.vocabulary import Vocabulary


@dataclass(frozen=True)
class _Kind:
    """A kind of task: how to load it, and its defaults."""

    load: Callable[[Options], Task]
    vocabulary_size: int
    sentence_length: int


_KINDS = {
    "chitchat": _Kind(chitchat.load_chitchat, chitchat.VOCABULARY_SIZE, chitchat.SENTENCE_LENGTH),
    "poetry": _Kind(poetry.load_poetry, poetry.VOCABULARY_SIZE, poetry.SENTENCE_LENGTH),
    "stackoverflow": _Kind(
        stackoverflow.load_stackoverflow,
        stackoverflow.VOCABULARY_SIZE,
        stackoverflow.SENTENCE_LENGTH,
    ),
    "jsonl": _Kind(jsonl.load_jsonl, jsonl.VOCABULARY_SIZE, jsonl.SENTENCE_LENGTH),
}
TASKS = tuple(_KINDS)


def load_task(
    name: str,
    *,
    vocabulary_size: int | None = None,
    sentence_length: int | None = None,
    sentences_per_user: int = 256,
    heldout_share: float = 0.1,
    most_users: int | None = None,
    path: str | os.PathLike[str] | None = None,
    vocabulary: Vocabulary | None = None,
    report: Report | None = None,
) -> Task:
    """Load a task: chitchat, poetry, stackoverflow or jsonl.

    Args:
        name: Name of the task.
        vocabulary_size: Number of words in the task's own vocabulary. The default depends on the
            task.
        sentence_length: Words per sentence. The default depends on the task.
        sentences_per_user: Largest number of sentences per user; the first ones are kept.
        heldout_share: Share of users to hold out, chosen by a hash of their names. StackOverflow
            has its own held-out users: 0 leaves them out, any other value takes all of them.
        most_users: Largest number of users to train on, and largest number of users to hold out,
            chosen by a hash of their names.
        path: File to read. Required by jsonl and stackoverflow; for poetry, an optional tarball.
        vocabulary: Public vocabulary to use instead of the task's own.
        report: Progress callback, called with the share of the work that is done (None if unknown)
            and a description of the current step.

    Raises:
        InvalidInput: The task is unknown, an option is not valid, or the data cannot be read.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise InvalidInput(f"tasks are {', '.join(TASKS)}; got {name!r:.60}")
    if vocabulary is not None and vocabulary_size is not None:
        raise InvalidInput("give a vocabulary or a vocabulary_size, not both")
    options = Options(
        kind.vocabulary_size if vocabulary_size is None else vocabulary_size,
        kind.sentence_length if sentence_length is None else sentence_length,
        sentences_per_user,
        heldout_share,
        most_users,
        None if path is None else Path(path),
        vocabulary,
        report or _ignore_progress,
    )
    return kind.load(options)


def _ignore_progress(_: float | None, __: str) -> None:
    pass
