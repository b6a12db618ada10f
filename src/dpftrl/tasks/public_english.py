"""English text made from public frequencies of words and of pairs of words.

A model that is pre-trained on this text knows, before it has seen any user, which words are
frequent and which words often follow each other. The frequencies of words come from the wordfreq
package, those of pairs come with the symspellpy package.
"""

from importlib import util
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.tasks.vocabulary import BEGIN, SPECIAL, Vocabulary

PAIRS_FILE = "frequency_bigramdictionary_en_243_342.txt"
# Share of the words that are drawn without regard to the word before. Rare pairs are not listed, so
# a word can be followed by others than the list says.
SHARE_WITHOUT_PAIR = 0.2
# A vocabulary is English if at least this share of its words has more than this frequency.
LEAST_ENGLISH, RARE = 0.5, 1e-6


class _Pairs(NamedTuple):
    """Pairs of words of a vocabulary, sorted by the first word.

    Attributes:
        second: Second word of each pair.
        total: Running total of the counts, from 0; one longer than `second`.
        starts: Pairs whose first word is w are those from starts[w] to starts[w + 1].
    """

    second: NDArray[np.int32]
    total: NDArray[np.float64]
    starts: NDArray[np.int64]


def public_english(
    vocabulary: Vocabulary, sentences: int, length: int, seed: int = 0
) -> NDArray[np.int32]:
    """Return sentences in which each word is drawn from the words that often follow the last one.

    Guarantees:
        The text depends on the arguments and on two published lists only, never on users.

    Args:
        vocabulary: Words to use. Words that the lists do not have are left out.
        sentences: Number of sentences.
        length: Words per sentence.
        seed: Seed of all draws.

    Returns:
        [sentences, length + 1], in the form of `Task.public`.

    Raises:
        InvalidInput: A package is missing, or few of the words are English.
    """
    whole_number("sentences", sentences)
    whole_number("length", length)
    if reason := why_not_english(vocabulary):
        raise InvalidInput(f"there is no public text for this vocabulary: {reason}")
    shares: NDArray[np.float64] = np.cumsum(word_frequencies(vocabulary))
    all_shares = float(shares[-1])
    pairs = _read_pairs(vocabulary)
    draws = np.random.default_rng(seed)
    text = np.full((sentences, length + 1), BEGIN, np.int32)
    for place in range(1, length + 1):
        before = text[:, place - 1]
        drawn: NDArray[np.float64] = draws.random(sentences) * all_shares
        alone = np.searchsorted(shares, drawn, side="right")
        first, last = pairs.starts[before], pairs.starts[before + 1]
        low, high = pairs.total[first], pairs.total[last]
        chosen = np.searchsorted(
            pairs.total, low + draws.random(sentences) * (high - low), side="right"
        )
        chosen = np.clip(chosen - 1, first, np.maximum(last - 1, first))
        by_pair = (draws.random(sentences) >= SHARE_WITHOUT_PAIR) & (last > first)
        text[:, place] = alone
        text[by_pair, place] = pairs.second[chosen[by_pair]]
    return text


def why_not_english(vocabulary: Vocabulary) -> str | None:
    """Return why `public_english` has no text for a vocabulary; None if it has."""
    for package in ("wordfreq", "symspellpy"):
        if util.find_spec(package) is None:
            return f"the {package} package is not installed; pip install 'dpftrl[train]'"
    english = np.mean(word_frequencies(vocabulary)[SPECIAL:] > RARE)
    if not english >= LEAST_ENGLISH:
        return f"only {english:.0%} of its words are common in English"
    return None


def word_frequencies(vocabulary: Vocabulary) -> NDArray[np.float64]:
    """Return the frequency of each number of a vocabulary in English; 0 for special tokens."""
    from wordfreq import word_frequency

    shares = np.zeros(len(vocabulary))
    shares[SPECIAL:] = [word_frequency(word, "en") for word in vocabulary.words]
    return shares


def _read_pairs(vocabulary: Vocabulary) -> _Pairs:
    """Read the pairs that consist of words of the vocabulary."""
    rows = list[tuple[int, int, float]]()
    numbers = {word: SPECIAL + place for place, word in enumerate(vocabulary.words)}
    with _pairs_path().open(encoding="utf-8-sig") as lines:
        for line in lines:
            first, second, count = line.split()
            if first in numbers and second in numbers:
                rows.append((numbers[first], numbers[second], float(count)))
    rows.sort()
    firsts = np.array([row[0] for row in rows], np.int64)
    return _Pairs(
        np.array([row[1] for row in rows], np.int32),
        np.concatenate([[0.0], np.cumsum([row[2] for row in rows])]),
        np.searchsorted(firsts, np.arange(len(vocabulary) + 1)).astype(np.int64),
    )


def _pairs_path() -> Path:
    """Return the path of the list inside its package, without importing the package."""
    spec = util.find_spec("symspellpy")
    if spec is None or spec.origin is None:
        raise InvalidInput("the symspellpy package is not installed; pip install 'dpftrl[train]'")
    return Path(spec.origin).with_name(PAIRS_FILE)
