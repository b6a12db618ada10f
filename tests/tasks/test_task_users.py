"""Users and their sentences in one array."""

from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl.errors import InvalidInput
from dpftrl.tasks import BEGIN, Users, Vocabulary
from dpftrl.tasks.task import Encoder, chance, collect_users, safe_name, sample
from dpftrl.tasks.vocabulary import cut_chat

ENCODER = Encoder(Vocabulary(("a", "b", "c")), cut_chat, 3)
TEXTS = st.lists(
    st.tuples(st.sampled_from(["ann", "bob", "cy", "Zoë"]), st.text("abx. ?", max_size=8)),
    max_size=30,
)


def rows(*first_words: int) -> np.ndarray:
    return np.array([[BEGIN, word, 2] for word in first_words], np.int32).reshape(-1, 3)


def users() -> Users:
    return Users(("ann", "bob", "cy"), rows(4, 5, 6, 7), np.array([0, 1, 3, 4]))


@given(TEXTS, st.integers(1, 4))
def test_each_user_keeps_the_first_sentences(texts, most):
    expected: dict[str, list[list[int]]] = {}
    for name, text in texts:
        for row in ENCODER.rows(text):
            expected.setdefault(name, []).append(row)
    collected = collect_users(iter(texts), ENCODER, most)
    assert collected.names == tuple(sorted(expected))
    assert collected.offsets[-1] == len(collected.sentences)
    assert collected.sentences.size == 0 or collected.sentences.max() < len(ENCODER.vocabulary)
    for place, name in enumerate(collected.names):
        assert collected.of(place).tolist() == expected[name][:most]


@given(TEXTS, st.sets(st.integers(0, 3)))
def test_a_selection_has_the_same_sentences(texts, wanted):
    everybody = collect_users(texts, ENCODER, 10)
    chosen = sorted(index for index in wanted if index < len(everybody))
    some = everybody.select(chosen)
    assert some.names == tuple(everybody.names[index] for index in chosen)
    for place, index in enumerate(chosen):
        assert np.array_equal(some.of(place), everybody.of(index))


def test_arrays_are_read_only():
    ours = users()
    for array in (ours.sentences, ours.offsets, ours.of(1)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(FrozenInstanceError):
        ours.names = ()
    assert np.shares_memory(ours.of(1), ours.sentences)
    assert repr(ours) == "Users(3 people, 4 sentences)"


@pytest.mark.parametrize("user", [-1, 3])
def test_an_unknown_user_number_is_refused(user):
    with pytest.raises(InvalidInput, match=f"3 users are numbered from 0 on, got {user}"):
        users().of(user)


@pytest.mark.parametrize("indices", [[1, 0], [1, 1], [-1], [0, 3]])
def test_invalid_selections_are_refused(indices):
    with pytest.raises(InvalidInput):
        users().select(indices)


@pytest.mark.parametrize(
    ("names", "sentences", "offsets", "message"),
    [
        (("b", "a"), rows(4, 5), [0, 1, 2], "names must be sorted"),
        (("a", "a"), rows(4, 5), [0, 1, 2], "names must be sorted"),
        (("a", "b"), rows(4, 5), [0, 2, 2], "offsets must rise"),
        (("a", "b"), rows(4, 5), [0, 1, 3], "offsets must rise"),
        (("a", "b"), rows(4, 5), [1, 1, 2], "offsets must rise"),
        (("a", "b"), rows(4, 5), [0, 2], "need 3 offsets"),
        (("a",), rows(-1), [0, 1], "no negative"),
        (("a",), rows(4)[:, 1:], [0, 1], "start with BEGIN"),
        (("a",), rows(4).astype(np.int64), [0, 1], r"int32, got \(1, 3\) of int64"),
        (("a",), rows(4)[0], [0, 1], "int32, got"),
        (("a\n",), rows(4), [0, 1], "no space at its ends"),
        (("e\u0301",), rows(4), [0, 1], "form NFC"),
    ],
)
def test_inconsistent_arrays_are_refused(names, sentences, offsets, message):
    with pytest.raises(InvalidInput, match=message):
        Users(names, sentences, np.array(offsets))


@pytest.mark.parametrize(
    "name", ["", " a", "a ", ", ", "a\nb", "a\tb", "a\0", "a\u202eb", "a\u3000b", "\ud800"]
)
def test_unsafe_names_are_refused(name):
    with pytest.raises(InvalidInput, match="rename that user") as caught:
        safe_name(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["22578ac2-6317", "王安石", "@ann", "Ann B.", "#1'", "Smith,", ",", 'a"b', '"a", "b",']
)
def test_safe_names_are_kept(name):
    assert safe_name(name) == name


def test_chance_is_uniform_and_differs_by_purpose():
    names = [f"user {i}" for i in range(4000)]
    values = np.array([[chance(n, purpose) for n in names] for purpose in ("x", "y")])
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert np.abs(np.histogram(values, 10)[0] / 8000 - 0.1).max() < 0.02
    assert abs(np.corrcoef(values)[0, 1]) < 0.05


def test_a_larger_sample_contains_the_smaller_one():
    names = [f"user {i}" for i in range(100)]
    samples = [set(sample(names, most)) for most in (1, 5, 50, 100, 1000)]
    assert [len(chosen) for chosen in samples] == [1, 5, 50, 100, 100]
    assert all(small <= large for small, large in pairwise(samples))
    assert sample(names[::-1], 5) == sample(names, 5) == sorted(sample(names, 5))
    assert sample(names, None) == sorted(names)
