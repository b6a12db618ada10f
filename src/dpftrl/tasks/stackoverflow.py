"""StackOverflow questions and answers, from the SQLite file of TensorFlow Federated.

The file has a table `examples` (split_name, client_id, serialized_example_proto), where a row is a
sentence whose words are cut already, and a table `client_metadata` (client_id, split_name, ...). It
is larger than memory, and read user by user.
"""

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from dpftrl.errors import InvalidInput
from dpftrl.tasks.task import Options, Task
from dpftrl.tasks.users import Encoder, Users, collect_users, sample
from dpftrl.tasks.vocabulary import cut_spaces

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10


def bytes_feature(example: bytes, name: bytes) -> list[bytes]:
    """The values of a feature that holds bytes; none if there is no such feature."""
    values: list[bytes] = []
    for features in _contents(example, 1):
        for entry in _contents(features, 1):
            # Of a key that is there twice, the last entry counts. Few entries need a closer look.
            if name in entry and _contents(entry, 1)[-1:] == [name]:
                lists = [made for value in _contents(entry, 2) for made in _contents(value, 1)]
                values = [value for made in lists for value in _contents(made, 1)]
    return values


def _contents(message: bytes, wanted: int) -> list[bytes]:
    """What the fields of one number hold, if that is bytes."""
    return [content for number, content in _fields(message) if number == wanted]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the fields that hold bytes; those of other types are passed over."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(message, at)
            if size <= end - at:
                yield tag >> 3, message[at : at + size]
            at += size
        elif kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if kind == _EIGHT_BYTES else 4
        else:
            raise _damaged()
    if at > end:
        raise _damaged()


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and where the next thing begins."""
    number, shift = 0, 0
    for byte in message[at : at + _LONGEST_VARINT]:
        at += 1
        if byte < 0x80:
            return number | byte << shift, at
        number |= (byte & 0x7F) << shift
        shift += 7
    raise _damaged()


def _damaged() -> InvalidInput:
    return InvalidInput("this is not a serialised tf.train.Example")


# The paper's.
VOCABULARY_SIZE = 10_000
SENTENCE_LENGTH = 20

USERS_PER_REPORT = 500

_CLIENTS = "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ?"
_EXAMPLES = (
    "SELECT serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? "
    "ORDER BY rowid LIMIT ?"
)


def load_stackoverflow(options: Options) -> Task:
    """Users are those of split `train`; held out are those of `heldout`, who are other people."""
    encoder = options.english_encoder(cut_spaces)
    train = split_users("train", encoder, options)
    nobody = Users((), train.sentences[:0], train.offsets[:1])
    heldout = split_users("heldout", encoder, options) if options.heldout_share else nobody
    source = "Stack Overflow's users, SQLite file of TensorFlow Federated, CC BY-SA 3.0"
    return Task("stackoverflow", source, encoder.vocabulary, train, heldout)


def split_users(split: str, encoder: Encoder, options: Options) -> Users:
    """The users of one split: `train`, `heldout`, or `test`, which is later text of `train`'s."""
    path = options.needed_path("stackoverflow.sqlite of TensorFlow Federated")
    with _open(path) as database:
        clients = [client for (client,) in database.execute(_CLIENTS, (split,))]
        if not clients or not all(isinstance(client, str) for client in clients):
            raise InvalidInput(f"{path} names no users of split {split!r} in its client_metadata")
        chosen = sample(clients, options.most_users)
        texts = _texts(database, split, chosen, options)
        return collect_users(texts, encoder, options.sentences_per_user)


def _texts(
    database: sqlite3.Connection, split: str, clients: list[str], options: Options
) -> Iterator[tuple[str, str]]:
    for done, client in enumerate(clients):
        if done % USERS_PER_REPORT == 0:
            options.report(done / len(clients), f"{done:,} of {len(clients):,} users of {split}")
        for row in database.execute(_EXAMPLES, (split, client, options.sentences_per_user)):
            yield client, _text(row[0], client)


def _text(example: object, client: str) -> str:
    """Exactly one value, as the dataset's own reader wants it."""
    try:
        values = bytes_feature(example, b"tokens") if isinstance(example, bytes) else []
        if len(values) == 1:
            return values[0].decode()
    except (InvalidInput, UnicodeDecodeError):
        pass
    raise InvalidInput(f"an example of user {client!r:.60} has no readable text in `tokens`")


@contextmanager
def _open(path: Path) -> Generator[sqlite3.Connection]:
    """The database, never written to."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            plan = database.execute(f"EXPLAIN QUERY PLAN {_EXAMPLES}", ("", "", 1)).fetchall()
            if any(str(step[-1]).startswith("SCAN") for step in plan):
                raise InvalidInput(
                    f"{path} has no index by user, so that each would take a pass over the file; "
                    "make one: CREATE INDEX by_user ON examples (split_name, client_id)"
                )
            yield database
    except sqlite3.Error as error:
        raise InvalidInput(
            f"{path} cannot be read as stackoverflow.sqlite of TensorFlow Federated: {error}"
        ) from None
