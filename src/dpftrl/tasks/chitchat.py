"""Real people chatting in English: the BYU Chit-Chat Challenge."""

from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import msgspec

from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput
from dpftrl.tasks.task import Options, Task
from dpftrl.tasks.users import collect_users
from dpftrl.tasks.vocabulary import cut_chat

VOCABULARY_SIZE = 4_000
SENTENCE_LENGTH = 20


class Utterance(msgspec.Struct):
    """What one person sent at once."""

    text: str
    sender: str


class Conversation(msgspec.Struct):
    """A message is what one person sent before the other one answered."""

    messages: list[list[Utterance]]


def load_chitchat(options: Options) -> Task:
    """Users are senders; an utterance is cut into its sentences, in the order of the dataset."""
    if options.path is not None:
        raise InvalidInput("chitchat is an installed package and takes no path; leave path out")
    options.report(None, "reading chitchat")
    encoder = options.english_encoder(cut_chat)
    users = collect_users(read_utterances(), encoder, options.sentences_per_user)
    return Task("chitchat", _source(), encoder.vocabulary, *options.split(users))


def read_utterances() -> Iterator[tuple[str, str]]:
    """Sender and text of everything that was sent."""
    for conversation in read_json(_path(), dict[str, Conversation], "chitchat").values():
        for message in conversation.messages:
            for utterance in message:
                yield utterance.sender, utterance.text


def _path() -> Path:
    # Found, not imported: importing it would not read the data either.
    found = util.find_spec("chitchat_dataset")
    if found is None or found.origin is None:
        raise InvalidInput(
            "the chitchat-dataset package is not installed; pip install 'dpftrl[train]'"
        )
    return Path(found.origin).with_name("dataset.json")


def _source() -> str:
    version = metadata.version("chitchat-dataset")
    return f"Chit-Chat Challenge of the BYU PCC lab, chitchat-dataset {version} of PyPI, MIT"
