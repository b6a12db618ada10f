"""Text from public frequencies: it follows the lists, and needs English words."""

import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.tasks import Vocabulary, public_english
from dpftrl.tasks.public_english import public_english as english
from dpftrl.tasks.public_english import why_not_english

WORDS = ("the", "of", "and", "new", "york")


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """A list of pairs: `new` is always followed by `york`, `of` mostly by `the`."""
    path = tmp_path / "pairs.txt"
    path.write_text("new york 100\nof the 900\nof and 100\nother words 5\n", encoding="utf-8-sig")
    monkeypatch.setattr(public_english, "_pairs_path", lambda: path)
    monkeypatch.setattr(public_english.util, "find_spec", lambda _: object())


@pytest.mark.usefixtures("pairs")
def test_words_follow_each_other_as_often_as_in_the_list():
    vocabulary = Vocabulary(WORDS)
    text = english(vocabulary, 4_000, 10, seed=1)
    assert text.shape == (4_000, 11)
    assert text.dtype == np.int32
    before, after = text[:, 1:-1].ravel(), text[:, 2:].ravel()
    the, of, and_, new, york = vocabulary.encode(WORDS)
    # A fifth of the words are drawn without regard to the word before.
    assert np.mean(after[before == new] == york) == pytest.approx(0.8, abs=0.02)
    ratio = np.sum(after[before == of] == the) / np.sum(after[before == of] == and_)
    assert 4 < ratio < 9
    assert set(np.unique(text[:, 1:])) <= {the, of, and_, new, york}


@pytest.mark.usefixtures("pairs")
def test_the_same_seed_gives_the_same_text():
    vocabulary = Vocabulary(WORDS)
    assert np.array_equal(english(vocabulary, 9, 5, seed=2), english(vocabulary, 9, 5, seed=2))
    assert not np.array_equal(english(vocabulary, 9, 5, seed=2), english(vocabulary, 9, 5, seed=3))


@pytest.mark.usefixtures("pairs")
def test_a_vocabulary_of_another_language_has_no_text():
    czech = Vocabulary(("který", "protože", "ještě", "the"))
    assert "25% of its words" in (why_not_english(czech) or "")
    with pytest.raises(InvalidInput, match="no public text"):
        english(czech, 3, 3)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(public_english.util, "find_spec", lambda _: None)
    assert "pip install" in (why_not_english(Vocabulary(WORDS)) or "")
