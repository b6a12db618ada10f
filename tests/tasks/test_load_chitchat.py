"""The task chitchat: number of users, and coverage of the vocabulary."""

from itertools import chain

import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.tasks import BEGIN, END, PAD, UNKNOWN, load, load_task
from dpftrl.tasks.vocabulary import cut_chat


@pytest.fixture(scope="module")
def utterances():
    return list(load.read_utterances())


@pytest.fixture(scope="module")
def task():
    return load_task("chitchat")


def test_the_dataset_has_the_published_counts(utterances):
    assert len(utterances) == 258_145
    assert len({sender for sender, _ in utterances}) == 1_315


def test_all_senders_are_users_and_a_tenth_is_held_out(task):
    assert len(task.train) + len(task.heldout) == 1_315
    assert 0.08 < len(task.heldout) / 1_315 < 0.12
    assert not set(task.train.names) & set(task.heldout.names)
    assert task.public is None
    assert "0.9.0" in task.source
    assert "MIT" in task.source


def test_sentences_are_those_of_their_sender_in_order(task, utterances):
    for place in (0, len(task.train) // 2, len(task.train) - 1):
        name = task.train.names[place]
        texts = [cut_chat(text) for sender, text in utterances if sender == name]
        sentences = [words for words in chain(*texts) if words][:256]
        rows = task.train.of(place)
        assert len(rows) == len(sentences)
        for row, words in zip(rows, sentences, strict=True):
            known = task.vocabulary.encode(words[:20])
            assert np.array_equal(row[1 : 1 + len(known)], known)


@pytest.mark.slow
def test_there_are_322_088_sentences_with_words(utterances):
    assert sum(bool(words) for _, text in utterances for words in cut_chat(text)) == 322_088


def test_every_row_is_begin_words_end_and_padding(task):
    for users in (task.train, task.heldout):
        rows = users.sentences
        assert rows.shape[1] == 21
        assert np.all(rows[:, 0] == BEGIN)
        assert rows.max() < len(task.vocabulary) == 4_004
        assert not np.any(rows[:, 1:] == BEGIN)
        words = np.sum(rows >= UNKNOWN, axis=1)
        place = np.arange(20)
        expected = np.where(
            place < words[:, None], UNKNOWN, np.where(place == words[:, None], END, PAD)
        )
        assert words.min() >= 1
        assert np.array_equal(np.minimum(rows[:, 1:], UNKNOWN), expected)
        assert np.diff(users.offsets).max() == 256


def test_nine_of_ten_words_are_known(task):
    words = task.train.sentences[task.train.sentences >= UNKNOWN]
    assert 0.90 < np.mean(words != UNKNOWN) < 0.92


def test_it_takes_no_path(tmp_path):
    with pytest.raises(InvalidInput, match=r"takes no path.*--set 'task=.jsonl.'"):
        load_task("chitchat", path=tmp_path)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(load.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=r"pip install 'dpftrl\[train\]'"):
        load_task("chitchat")
