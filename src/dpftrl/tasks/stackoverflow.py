"""The task `stackoverflow`: questions and answers, from the SQLite file of TensorFlow Federated.

The file has two tables. Each row of `examples` (split_name, client_id, serialized_example_proto) is
one sentence, already split into words. The other table is `client_metadata` (client_id, split_name,
...). The file is larger than memory, so it is read user by user. The sentences are serialized
tf.train.Example messages; this module reads that format itself, without TensorFlow.
"""

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from dpftrl.errors import InvalidInput
from dpftrl.tasks.task import Encoder, Options, Task, Users, collect_users, sample
from dpftrl.tasks.vocabulary import cut_spaces

# The values that the paper uses.
VOCABULARY_SIZE = 10_000
SENTENCE_LENGTH = 20

# Users between two calls of the progress callback.
USERS_PER_PROGRESS_CALL = 500

_CLIENTS = "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ?"
_EXAMPLES = (
    "SELECT serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? "
    "ORDER BY rowid LIMIT ?"
)

# Wire types of protocol buffers.
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
# A number of 64 bits takes at most 10 bytes of 7 bits each.
_LONGEST_VARINT = 10


def load_stackoverflow(options: Options) -> Task:
    """Load the task: users of the split `train`, and held-out users of the split `heldout`.

    The two splits have no user in common.

    Raises:
        InvalidInput: No path is given, or the file cannot be read.
    """
    encoder = options.english_encoder(cut_spaces)
    train = split_users("train", encoder, options)
    nobody = Users((), train.sentences[:0], train.offsets[:1])
    heldout = split_users("heldout", encoder, options) if options.heldout_share else nobody
    source = "Stack Overflow's users, SQLite file of TensorFlow Federated, CC BY-SA 3.0"
    return Task("stackoverflow", source, encoder.vocabulary, train, heldout)


def split_users(split: str, encoder: Encoder, options: Options) -> Users:
    """Return the users of a split: `train`, `heldout`, or `test` (later text of `train` users)."""
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
    """Yield the name and the text of each example, user by user."""
    for done, client in enumerate(clients):
        if done % USERS_PER_PROGRESS_CALL == 0:
            options.on_progress(
                done / len(clients), f"{done:,} of {len(clients):,} users of {split}"
            )
        for row in database.execute(_EXAMPLES, (split, client, options.sentences_per_user)):
            yield client, _text(row[0], client)


def _text(example: object, client: str) -> str:
    """Return the text of an example. It must be the only value of the feature `tokens`."""
    try:
        values = bytes_feature(example, b"tokens") if isinstance(example, bytes) else []
        if len(values) == 1:
            return values[0].decode()
    except (InvalidInput, UnicodeDecodeError):
        pass
    raise InvalidInput(f"an example of user {client!r:.60} has no readable text in `tokens`")


@contextmanager
def _open(path: Path) -> Generator[sqlite3.Connection]:
    """Open the database read-only; refuse a database without an index by user."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            plan = database.execute(f"EXPLAIN QUERY PLAN {_EXAMPLES}", ("", "", 1)).fetchall()
            if any(str(step[-1]).startswith("SCAN") for step in plan):
                raise InvalidInput(
                    f"{path} has no index by user, so each user would need a pass over the file; "
                    "create one: CREATE INDEX by_user ON examples (split_name, client_id)"
                )
            yield database
    except sqlite3.Error as error:
        raise InvalidInput(
            f"{path} cannot be read as stackoverflow.sqlite of TensorFlow Federated: {error}"
        ) from None


def bytes_feature(example: bytes, name: bytes) -> list[bytes]:
    """Return the values of a bytes feature in a serialized Example; none if it does not exist."""
    values: list[bytes] = []
    for features in _contents(example, 1):
        for entry in _contents(features, 1):
            # If a key occurs twice, the last entry counts. `name in entry` is a quick first test.
            if name in entry and _contents(entry, 1)[-1:] == [name]:
                byte_lists = [part for value in _contents(entry, 2) for part in _contents(value, 1)]
                values = [value for part in byte_lists for value in _contents(part, 1)]
    return values


def _contents(message: bytes, field_number: int) -> list[bytes]:
    """Return the contents of all fields of a message that hold bytes and have this number."""
    return [content for number, content in _fields(message) if number == field_number]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of the fields that hold bytes; skip fields of other types."""
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
    """Return the number at a position (7 bits per byte, lowest first) and the position after it."""
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
