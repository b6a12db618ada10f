"""The task jsonl: your own text, line by line."""

import gzip
import json

import pytest

from dpftrl.errors import InvalidInput
from dpftrl.tasks import Vocabulary, load_task

VOCABULARY = Vocabulary(("hello", "there", "you"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "texts.jsonl"


def write(path, *lines: dict) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def load(path, **options):
    given = {"vocabulary": VOCABULARY, "heldout_share": 0, "sentence_length": 3, **options}
    return load_task("jsonl", path=path, **given)


def test_each_line_of_a_text_is_a_sentence(path):
    write(
        path,
        {"user": "zoe", "text": "Hello. You?\nthere"},
        {"user": "ann", "text": "hello you there hello"},
        {"user": "zoe", "text": "you", "when": [1, {"a": None}]},
        {"user": "silent", "text": " \n..."},
    )
    task = load(path)
    assert task.train.names == ("ann", "zoe")
    assert task.train.of(0).tolist() == [[1, 4, 6, 5]]
    assert task.train.of(1).tolist() == [[1, 4, 6, 2], [1, 5, 2, 0], [1, 6, 2, 0]]
    assert len(task.heldout) == 0
    assert task.source == "text of texts.jsonl"


def test_two_unicode_forms_of_a_name_are_one_user(path):
    write(path, {"user": "Zoe\u0308", "text": "hello"}, {"user": "Zo\u00eb", "text": "you"})
    task = load(path)
    assert task.train.names == ("Zo\u00eb",)
    assert len(task.train.of(0)) == 2


def test_the_vocabulary_does_not_depend_on_users(path):
    write(path, {"user": "ann", "text": "zzyzx zzyzx zzyzx"})
    task = load(path, vocabulary=None)
    assert task.vocabulary == Vocabulary.english(4000)
    assert task.train.of(0).tolist() == [[1, 3, 3, 3]]


def test_who_is_held_out_does_not_depend_on_the_others(path):
    people = [f"user{i}" for i in range(60)]
    write(path, *[{"user": name, "text": "hello"} for name in people])
    everybody = load(path, heldout_share=0.3)
    write(path, *[{"user": name, "text": "hello"} for name in reversed(people[:30])])
    half = load(path, heldout_share=0.3)
    assert set(half.heldout.names) == set(everybody.heldout.names) & set(people[:30])
    assert set(half.train.names) == set(everybody.train.names) & set(people[:30])
    assert 8 < len(everybody.heldout) < 30
    assert set(load(path, heldout_share=0.1).heldout.names) < set(half.heldout.names)


def test_most_users_selects_a_subset(path):
    write(path, *[{"user": f"user{i}", "text": f"hello {i}"} for i in range(60)])
    everybody, some = (load(path, heldout_share=0.3, most_users=most) for most in (None, 10))
    assert len(some.train) == len(some.heldout) == 10
    assert set(some.train.names) < set(everybody.train.names)
    assert set(some.heldout.names) < set(everybody.heldout.names)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "line 3 of .*malformed|line 3 of .*truncated"),
        (b'{"user": "ann"}', "line 3 of .* missing required field `text`"),
        (b'{"user": 5, "text": "hello"}', r"line 3 of .* Expected `str`, got `int`"),
        (b'["ann", "hello"]', "line 3 of .* Expected `object`"),
        (b'{"user": "a\\nb", "text": "hello"}', "line 3 of .* rename that user"),
        (b'{"user": "", "text": "hello"}', "line 3 of .* rename that user"),
        (b'{"user": "ann", "text": "\xff"}', "line 3 of"),
        (b'{"user": "ann", "text": "", "x": ' + b"[" * 10**5 + b"}", "line 3 of"),
    ],
)
def test_a_bad_line_is_named_by_its_number(path, bad, message):
    path.write_bytes(b'{"user": "ann", "text": "hello"}\n\n' + bad + b"\n")
    with pytest.raises(InvalidInput, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith('; each line is {"user": "name", "text": "..."}')


@pytest.mark.parametrize("content", [gzip.compress(b'{"user": "ann"}'), b"\x00\x01 no gzip"])
def test_a_file_that_is_not_lines_of_json_is_refused(tmp_path, content):
    path = tmp_path / "texts.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        load(path)
    is_gzip = content.startswith(b"\x1f\x8b")
    assert ("is compressed with gzip; decompress it first" in str(caught.value)) == is_gzip
    assert str(caught.value).endswith('; each line is {"user": "name", "text": "..."}')


def test_unreadable_or_empty_files_are_refused(path, tmp_path):
    for none in (path, tmp_path):
        with pytest.raises(InvalidInput, match="cannot be read"):
            load(none)
    path.touch()
    with pytest.raises(InvalidInput, match="nobody to train on"):
        load(path)
    with pytest.raises(
        InvalidInput,
        match=r"""\{"user": \.\.\., "text": \.\.\.\} lines: .*--set 'data\.path="FILE"'""",
    ):
        load(None)
