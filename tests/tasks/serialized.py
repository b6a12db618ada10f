"""Writers of serialised `tf.train.Example` messages and of TensorFlow Federated's SQLite file."""

import sqlite3
from contextlib import closing
from pathlib import Path

TABLES = """
CREATE TABLE examples (
    split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (
    client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
"""
INDEX = "CREATE INDEX by_split_and_client ON examples (split_name, client_id);"


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    """Return a field that holds bytes (wire type 2)."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(name: str, *values: bytes) -> bytes:
    listed = b"".join(field(1, value) for value in values)
    return field(1, field(1, name.encode()) + field(2, field(1, listed)))


def numbers_feature(name: str, *values: int) -> bytes:
    """Return a packed int64_list, as TensorFlow writes it."""
    packed = field(1, b"".join(varint(value) for value in values))
    return field(1, field(1, name.encode()) + field(2, field(3, packed)))


def example(text: str) -> bytes:
    """Return an example in the form of the dataset."""
    features = [
        feature("creation_date", b"2010-08-12 19:57:43.59 UTC"),
        numbers_feature("score", 6),
        feature("tags", b"c#|xml"),
        feature("title", b"how do i parse this"),
        feature("tokens", text.encode()),
        feature("type", b"question"),
    ]
    return field(1, b"".join(features))


def write_database(
    path: Path, rows: list[tuple[str, str, bytes]], index: str = INDEX, tables: str = TABLES
) -> Path:
    """Write a database; each row is a split, a client and an example."""
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(tables)
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        database.execute(
            "INSERT INTO client_metadata "
            "SELECT client_id, split_name, count(*) FROM examples GROUP BY 1, 2"
        )
        database.executescript(index)
    return path
