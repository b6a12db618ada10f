"""The task `chitchat`: English chats of real people, from the BYU Chit-Chat Challenge."""

from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import msgspec

from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput
from dpftrl.tasks.task import Options, Task
from dpftrl.tasks.users import collect_users
from dpftrl.tasks.vocabulary import cut_chat

# Defaults of the task.
VOCABULARY_SIZE = 4_000
SENTENCE_LENGTH = 20


class Utterance(msgspec.Struct):
    """One text that a person sent."""

    text: str
    sender: str


class Conversation(msgspec.Struct):
    """A conversation. A message is all that one person sent before the other one answered."""

    messages: list[list[Utterance]]


def load_chitchat(options: Options) -> Task:
    """Load the task: users are the senders, and each text is split into sentences.

    Raises:
        InvalidInput: The dataset's package is not installed, or a path is given.
    """
    if options.path is not None:
        raise InvalidInput(
            "chitchat is read from an installed package and takes no path; leave path out"
        )
    options.report(None, "reading chitchat")
    encoder = options.english_encoder(cut_chat)
    users = collect_users(read_utterances(), encoder, options.sentences_per_user)
    return Task("chitchat", _source(), encoder.vocabulary, *options.split(users))


def read_utterances() -> Iterator[tuple[str, str]]:
    """Yield the sender and the text of every utterance, in the order of the dataset."""
    for conversation in read_json(_path(), dict[str, Conversation], "chitchat").values():
        for message in conversation.messages:
            for utterance in message:
                yield utterance.sender, utterance.text


def _path() -> Path:
    """Return the path of the dataset inside its package, without importing the package."""
    spec = util.find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise InvalidInput(
            "the chitchat-dataset package is not installed; pip install 'dpftrl[train]'"
        )
    return Path(spec.origin).with_name("dataset.json")


def _source() -> str:
    """Return the origin, version and license of the dataset."""
    version = metadata.version("chitchat-dataset")
    return f"Chit-Chat Challenge of the BYU PCC lab, chitchat-dataset {version} of PyPI, MIT"
