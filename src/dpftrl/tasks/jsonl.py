"""The task `jsonl`: your own text, from a file of {"user": ..., "text": ...} lines."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dpftrl.errors import InvalidInput
from dpftrl.tasks.task import Options, Task
from dpftrl.tasks.users import collect_users, safe_name
from dpftrl.tasks.vocabulary import cut_lines

# Defaults of the task.
VOCABULARY_SIZE = 4_000
SENTENCE_LENGTH = 20


class Line(msgspec.Struct):
    """One line of the file. Other fields are ignored."""

    user: str
    text: str


def load_jsonl(options: Options) -> Task:
    """Load the task: each line of a text is a sentence, and words are letters and digits.

    Raises:
        InvalidInput: No path is given, or a line of the file is not valid.
    """
    path = options.needed_path('a file of {"user": ..., "text": ...} lines')
    options.report(None, f"reading {path.name}")
    encoder = options.english_encoder(cut_lines)
    users = collect_users(_texts(path), encoder, options.sentences_per_user)
    return Task("jsonl", f"text of {path.name}", encoder.vocabulary, *options.split(users))


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the user and the text of each line."""
    decoder = msgspec.json.Decoder(Line)
    for number, content in _lines(path):
        try:
            line = decoder.decode(content)
            name = safe_name(line.user)
        except (msgspec.ValidationError, RecursionError, UnicodeDecodeError, InvalidInput) as error:
            raise InvalidInput(f"line {number} of {path}: {error}") from None
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"line {number} of {path} is not JSON ({error}); each line is "
                '{"user": ..., "text": ...}'
            ) from None
        yield name, line.text


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each line that is not empty; the file may exceed memory."""
    try:
        with path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                if content.strip():
                    yield number, content
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None
