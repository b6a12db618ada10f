"""`load_task`, which loads a task by its name, and the two tasks with little code.

The task `jsonl` is your own text, from a file of {"user": ..., "text": ...} lines. The task
`chitchat` is English chats of real people, from the BYU Chit-Chat Challenge. The tasks `poetry` and
`stackoverflow` have their own modules.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Final

import msgspec

from dpftrl._internal.deprecation import renamed_argument
from dpftrl._internal.progress import Progress, ignore_progress
from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput
from dpftrl.tasks import poetry, stackoverflow
from dpftrl.tasks.task import Options, Task, collect_users, safe_name
from dpftrl.tasks.vocabulary import Vocabulary, cut_chat, cut_lines


@renamed_argument("report", "on_progress")
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
    on_progress: Progress | None = None,
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
        on_progress: Called with the share of the work that is done (None if unknown)
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
        on_progress or ignore_progress,
    )
    return kind.load(options)


# For messages about a file of the task `jsonl`.
LINE_FORM: Final = 'each line is {"user": "name", "text": "..."}'
GZIP: Final = b"\x1f\x8b"  # the first bytes of a gzip file


class Line(msgspec.Struct):
    """One line of the file of `jsonl`. Other fields are ignored."""

    user: str
    text: str


def load_jsonl(options: Options) -> Task:
    """Load `jsonl`: each line of a text is a sentence, and words are letters and digits.

    Raises:
        InvalidInput: No path is given, or a line of the file is not valid.
    """
    path = options.needed_path('a file of {"user": ..., "text": ...} lines')
    options.on_progress(None, f"reading {path.name}")
    encoder = options.english_encoder(cut_lines)
    users = collect_users(_read_texts(path), encoder, options.sentences_per_user)
    return Task("jsonl", f"text of {path.name}", encoder.vocabulary, *options.split(users))


def _read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the user and the text of each line."""
    decoder = msgspec.json.Decoder(Line)
    for number, content in _lines(path):
        if number == 1 and content.startswith(GZIP):
            raise InvalidInput(
                f"{path} is compressed with gzip; decompress it first (gunzip); {LINE_FORM}"
            )
        try:
            line = decoder.decode(content)
            name = safe_name(line.user)
        except (msgspec.ValidationError, RecursionError, UnicodeDecodeError, InvalidInput) as error:
            raise InvalidInput(f"line {number} of {path}: {error}; {LINE_FORM}") from None
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"line {number} of {path} is not JSON ({error}); {LINE_FORM}"
            ) from None
        yield name, line.text


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each line that is not empty, without loading the whole file."""
    try:
        with path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                if content.strip():
                    yield number, content
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None


class Utterance(msgspec.Struct):
    """One text that a person sent."""

    text: str
    sender: str


class Conversation(msgspec.Struct):
    """A conversation. A message is all that one person sent before the other one answered."""

    messages: list[list[Utterance]]


def load_chitchat(options: Options) -> Task:
    """Load `chitchat`: users are the senders, and each text is split into sentences.

    Raises:
        InvalidInput: The dataset's package is not installed, or a path is given.
    """
    if options.path is not None:
        raise InvalidInput(
            "chitchat is read from an installed package and takes no path; leave the path out, or, "
            f"for a file of your own, choose the task jsonl: --set 'task=\"jsonl\"'; {LINE_FORM}"
        )
    options.on_progress(None, "reading chitchat")
    encoder = options.english_encoder(cut_chat)
    users = collect_users(read_utterances(), encoder, options.sentences_per_user)
    return Task("chitchat", _chitchat_source(), encoder.vocabulary, *options.split(users))


def read_utterances() -> Iterator[tuple[str, str]]:
    """Yield the sender and the text of every utterance, in the order of the dataset."""
    for conversation in read_json(_chitchat_path(), dict[str, Conversation], "chitchat").values():
        for message in conversation.messages:
            for utterance in message:
                yield utterance.sender, utterance.text


def _chitchat_path() -> Path:
    """Return the path of the dataset inside its package, without importing the package."""
    spec = util.find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise InvalidInput(
            "the chitchat-dataset package is not installed; pip install 'dpftrl[train]'"
        )
    return Path(spec.origin).with_name("dataset.json")


def _chitchat_source() -> str:
    """Return the origin, version and license of the dataset."""
    version = metadata.version("chitchat-dataset")
    return f"Chit-Chat Challenge of the BYU PCC lab, chitchat-dataset {version} of PyPI, MIT"


@dataclass(frozen=True)
class _Kind:
    """A kind of task: the function that loads it, how it splits text, and its defaults."""

    load: Callable[[Options], Task]
    cut: str
    vocabulary_size: int = 4_000
    sentence_length: int = 20


_KINDS = {
    "chitchat": _Kind(load_chitchat, "chat"),
    "poetry": _Kind(poetry.load_poetry, "verse", poetry.VOCABULARY_SIZE, poetry.SENTENCE_LENGTH),
    "stackoverflow": _Kind(
        stackoverflow.load_stackoverflow,
        "spaces",
        stackoverflow.VOCABULARY_SIZE,
        stackoverflow.SENTENCE_LENGTH,
    ),
    "jsonl": _Kind(load_jsonl, "lines"),
}
TASKS = tuple(_KINDS)


def cut_of(task: str) -> str:
    """Return how a task splits text into words: a name in `vocabulary.CUTS`."""
    if task not in _KINDS:
        raise InvalidInput(f"tasks are {', '.join(TASKS)}; got {task!r:.60}")
    return _KINDS[task].cut
