"""Words and their numbers, from lists, public text and files."""

import hashlib
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl.errors import InvalidInput
from dpftrl.tasks import UNKNOWN, Vocabulary
from dpftrl.tasks.vocabulary import plain_words

WORDS = st.lists(st.text("abcde'é月", min_size=1, max_size=4), min_size=1, max_size=30, unique=True)


@given(WORDS, st.lists(st.text("abc月", max_size=3)))
def test_known_words_have_numbers_and_others_are_unknown(words, text):
    vocabulary = Vocabulary(tuple(words))
    numbers = vocabulary.encode(text)
    assert numbers.dtype == np.int32
    assert len(vocabulary) == 4 + len(words)
    for word, number in zip(text, numbers.tolist(), strict=True):
        assert (words[number - 4] == word) if word in words else (number == UNKNOWN)


@given(WORDS)
def test_from_file_reads_the_words_back(tmp_path_factory, words):
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join(words) + "\n", encoding="utf-8")
    assert Vocabulary.from_file(path) == Vocabulary(tuple(words))


def test_the_digest_is_that_of_the_file():
    vocabulary = Vocabulary(("hello", "né"))
    assert vocabulary.sha256 == hashlib.sha256("hello\nné".encode()).hexdigest()
    assert vocabulary.sha256 != Vocabulary(("né", "hello")).sha256
    assert vocabulary != Vocabulary(("né", "hello"))


def test_english_words_have_the_form_of_plain_words():
    vocabulary = Vocabulary.english(1000)
    assert len(vocabulary) == 1004
    assert vocabulary.words[:3] == ("the", "to", "and")
    assert {"don't", "i'm"} <= set(vocabulary.words)
    assert all(plain_words(word) == [word] for word in vocabulary.words)
    assert Vocabulary.english(100).words == vocabulary.words[:100]


def test_more_english_words_than_listed_are_refused():
    with pytest.raises(InvalidInput, match=r"wordfreq lists \d+,\d+ English words, 9,999,999"):
        Vocabulary.english(9_999_999)


def test_public_text_is_counted_with_ties_in_order():
    assert Vocabulary.of_public_text(["b", "a", "c", "c", "b", "d"], 3).words == ("b", "c", "a")
    assert Vocabulary.of_public_text(["b", "a"], 100).words == ("a", "b")


def test_word_counts_are_read_as_the_dataset_ships_them(tmp_path):
    path = tmp_path / "stackoverflow.word_count"
    path.write_bytes("\ufeffthe\t341937\r\ni\t340521\r\n.\t3\r\n5 2\r\n".encode())
    assert Vocabulary.from_file(path).words == ("the", "i", ".", "5")
    assert Vocabulary.from_file(path, 2).words == ("the", "i")


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        (b"the\nyou and me\n", None, "line 2 of .* is not one word, got 'you and me"),
        (b"the\n\nyou\n", None, "line 2 of .* is not one word"),
        (b"the 3.5\n", None, "line 1 of .* is not one word"),
        (b"the\nthe\n", None, "every word once, got 'the' again"),
        (b"the\xff\n", None, "is not UTF-8 text"),
        (b"the\nyou\n", 3, "has 2 words, 3 were requested"),
        (b"the\n", 0, "at least 1, got 0"),
        (b"", None, "at least one word"),
    ],
)
def test_invalid_files_are_refused(tmp_path, content, size, message):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=message) as caught:
        Vocabulary.from_file(path, size)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        Vocabulary.from_file(tmp_path / "none.txt")


@pytest.mark.parametrize("words", [(), ("",), ("a b",), ("a\n",), ("a", "a")])
def test_invalid_words_are_refused(words):
    with pytest.raises(InvalidInput):
        Vocabulary(words)


def test_a_vocabulary_is_an_immutable_value():
    vocabulary = Vocabulary(("a",))
    assert repr(vocabulary) == "Vocabulary(1 words)"
    assert hash(vocabulary) == hash(Vocabulary(("a",)))
    with pytest.raises(FrozenInstanceError):
        vocabulary.words = ("b",)
