"""Tasks by name."""

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
    """Read a task: chitchat, poetry, stackoverflow or jsonl.

    Args:
        name: Which task.
        vocabulary_size: Words of a vocabulary that is not given; by default what suits the task.
        sentence_length: Words of a sentence; by default what suits the task.
        sentences_per_user: How many sentences of one user are kept, the first ones.
        heldout_share: The share of users held out, by a hash of their names. StackOverflow comes
            with users to hold out: there, 0 leaves them out and all else takes them.
        most_users: How many users to train on, and to hold out, at most, by a hash of their names.
        path: The file to read: jsonl and stackoverflow need it; poetry takes the tarball.
        vocabulary: A public vocabulary, instead of the task's own.
        report: Is told how far the work is, and what is being done.
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
        report or _silence,
    )
    return kind.load(options)


def _silence(_: float | None, __: str) -> None:
    pass
