"""The task stackoverflow, on a small SQLite file."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
from serialized import INDEX, TABLES, example, feature, field, write_database

from dpftrl.errors import InvalidInput
from dpftrl.tasks import Vocabulary, load_task

VOCABULARY = Vocabulary(("how", "do", "i", "?"))
ROWS = [
    ("train", "00002", example("how do i ?")),
    ("train", "00001", example("do")),
    ("test", "00001", example("how")),
    ("train", "00002", example("how rust")),
    ("train", "00003", example("  ")),
    ("train", "00002", example("i i i i i i")),
    ("heldout", "00010", example("do i")),
]


@pytest.fixture
def path(tmp_path):
    return write_database(tmp_path / "stack overflow#1?.sqlite", ROWS)


def load(path, **options):
    return load_task("stackoverflow", path=path, **{"vocabulary": VOCABULARY, **options})


def test_users_by_split(path):
    task = load(path, sentence_length=4)
    assert task.train.names == ("00001", "00002")
    assert task.train.of(0).tolist() == [[1, 5, 2, 0, 0]]
    assert task.train.of(1).tolist() == [[1, 4, 5, 6, 7], [1, 4, 3, 2, 0], [1, 6, 6, 6, 6]]
    assert task.heldout.names == ("00010",)
    assert task.public is None
    assert "CC BY-SA" in task.source


def test_the_paper_s_preset(path):
    task = load(path, vocabulary=None)
    assert len(task.vocabulary) == 10_004
    assert task.train.sentences.shape[1] == 21


def test_the_cap_is_on_the_first_sentences_in_the_file(path):
    task = load(path, sentence_length=4, sentences_per_user=2)
    assert task.train.of(1).tolist() == [[1, 4, 5, 6, 7], [1, 4, 3, 2, 0]]


def test_nobody_is_held_out_at_a_share_of_zero(path):
    task = load(path, heldout_share=0)
    assert len(task.train) == 2
    assert len(task.heldout) == 0


def test_a_sample_of_users_is_part_of_a_larger_one(tmp_path):
    rows = [
        (split, f"{split}{i:03}", example("how do i"))
        for split in ("train", "heldout")
        for i in range(40)
    ]
    path = write_database(tmp_path / "many.sqlite", rows)
    small, large, everybody = (load(path, most_users=most) for most in (5, 20, None))
    assert [len(task.train) for task in (small, large, everybody)] == [5, 20, 40]
    assert [len(task.heldout) for task in (small, large, everybody)] == [5, 20, 40]
    assert set(small.train.names) < set(large.train.names) < set(everybody.train.names)
    assert small.train.names != everybody.train.names[:5]


def test_only_the_selected_users_are_read(tmp_path):
    rows = [("train", f"user{i}", example("how")) for i in range(10)]
    path = write_database(tmp_path / "some.sqlite", rows)
    (kept,) = load(path, most_users=1, heldout_share=0).train.names
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "UPDATE examples SET serialized_example_proto = x'ff' WHERE client_id <> ?", (kept,)
        )
    assert load(path, most_users=1, heldout_share=0).train.names == (kept,)
    with pytest.raises(InvalidInput, match="no readable text"):
        load(path, heldout_share=0)


def test_progress_is_reported(path):
    progress = []
    load(path, on_progress=lambda done, what: progress.append((done, what)))
    assert progress == [(0.0, "0 of 3 users of train"), (0.0, "0 of 1 users of heldout")]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        field(1, feature("title", b"how")),
        field(1, feature("tokens", b"how", b"do")),
        field(1, feature("tokens", b"\xff")),
        "text, not bytes",
    ],
)
def test_a_damaged_example_names_its_user(tmp_path, content):
    path = write_database(tmp_path / "bad.sqlite", [*ROWS, ("train", "00004", content)])
    with pytest.raises(InvalidInput, match="an example of user '00004' has no readable text"):
        load(path)


def test_a_damaged_file_is_refused(tmp_path, path):
    half = tmp_path / "half.sqlite"
    content = bytearray(path.read_bytes())
    content[4096:] = np.random.default_rng(0).bytes(len(content) - 4096)
    half.write_bytes(content)
    with pytest.raises(InvalidInput, match="cannot be read as stackoverflow") as caught:
        load(half)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_databases_are_refused(tmp_path):
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"not a database at all, but long enough to look like one" * 20)
    empty = tmp_path / "empty.sqlite"
    empty.touch()
    for path in (other, empty, tmp_path / "none.sqlite", tmp_path):
        with pytest.raises(InvalidInput, match="cannot be read as stackoverflow"):
            load(path)
    assert not (tmp_path / "none.sqlite").exists()


def test_a_database_without_an_index_is_refused_with_the_fix(tmp_path):
    path = write_database(tmp_path / "slow.sqlite", ROWS, index="")
    with pytest.raises(InvalidInput, match="CREATE INDEX by_user ON examples"):
        load(path)
    for index in (INDEX, "CREATE INDEX c ON examples (client_id);"):
        fast = write_database(tmp_path / f"{len(index)}.sqlite", ROWS, index)
        assert len(load(fast).train) == 2


def test_a_split_without_users_is_refused(tmp_path):
    path = write_database(tmp_path / "train.sqlite", ROWS[:2])
    with pytest.raises(InvalidInput, match="no users of split 'heldout'"):
        load(path)
    blobs = TABLES.replace("client_id TEXT", "client_id BLOB")
    path = write_database(tmp_path / "blobs.sqlite", [("train", b"1", b"")], tables=blobs)
    with pytest.raises(InvalidInput, match="no users of split 'train'"):
        load(path)


def test_a_path_is_needed():
    with pytest.raises(InvalidInput, match=r"stackoverflow\.sqlite .*: give its path"):
        load(None)
