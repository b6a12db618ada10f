"""Splitting text into sentences and words."""

# ruff: noqa: RUF001 - Chinese text has Chinese commas.

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl.tasks import BEGIN, END, PAD, UNKNOWN, Vocabulary
from dpftrl.tasks.task import Encoder
from dpftrl.tasks.vocabulary import cut_chat, cut_lines, cut_spaces, cut_verse, plain_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I don't know!", ["i", "don't", "know"]),
        ("I don\u2019t know", ["i", "don't", "know"]),
        ("'quoted' rock 'n' roll", ["quoted", "rock", "n", "roll"]),
        ("snake_case, e-mail; 3.5", ["snake", "case", "e", "mail", "3", "5"]),
        ("Cafe\u0301", ["caf\u00e9"]),
        (";)* ... \t", []),
        ("", []),
    ],
)
def test_words_are_lower_case_without_punctuation(text, words):
    assert plain_words(text) == words


@given(st.text())
def test_splitting_into_words_is_idempotent(text):
    words = plain_words(text)
    assert plain_words(" ".join(words)) == words


def test_chat_sentences_end_at_punctuation():
    text = "I took a nap. But... it was 3.5 hours!!  See example.com? Yes"
    assert [" ".join(words) for words in cut_chat(text)] == [
        "i took a nap",
        "but",
        "it was 3 5 hours",
        "see example com",
        "yes",
    ]


def test_cut_lines_splits_at_line_ends_only():
    assert cut_lines("One. Two?\nThree\r\n") == [["one", "two"], ["three"], []]


def test_cut_spaces_keeps_words_unchanged():
    assert cut_spaces("What 's  <code> ?") == [["What", "'s", "<code>", "?"]]


@pytest.mark.parametrize("note", list("()[]{}（）《〔「"))
def test_verse_with_an_editors_note_is_dropped(note):
    assert cut_verse(f"江{note}山") == []


@given(st.text("江山月□\ue829，。！？、：；… \t\u3000"))
def test_verse_keeps_everything_but_punctuation(text):
    (characters,) = cut_verse(text)
    assert characters == [c for c in text if c in "江山月□\ue829"]


@given(st.lists(st.sampled_from(["a", "b", "c", "rare"]), max_size=8), st.integers(1, 6))
def test_a_row_is_begin_words_end_and_padding(words, length):
    vocabulary = Vocabulary(("a", "b", "c"))
    rows = Encoder(vocabulary, cut_spaces, length).rows(" ".join(words))
    if not words:
        assert rows == []
        return
    (row,) = rows
    expected = [BEGIN, *[4 + "abc".index(w) if w != "rare" else UNKNOWN for w in words], END]
    assert len(row) == length + 1
    assert row == (expected + [PAD] * length)[: length + 1]
    assert (END in row) == (len(words) < length)


def test_no_sentences_give_an_empty_array():
    encoder = Encoder(Vocabulary(("a",)), cut_chat, 5)
    assert encoder.encode(["", "?"]).shape == (0, 6)
    assert encoder.encode(["a. a", "?"]).tolist() == [[1, 4, 2, 0, 0, 0]] * 2
