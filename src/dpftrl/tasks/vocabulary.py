"""The words a model knows, from public sources only."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Self, final
from unicodedata import category, normalize

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput

# Makes a text into sentences, and each of them into words; sentences may come out empty.
Cut = Callable[[str], list[list[str]]]

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_AFTER_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def plain_words(text: str) -> list[str]:
    """Words in lower case, with the apostrophes inside them; punctuation is dropped.

    English frequency lists hold the same words, and no punctuation.

    >>> plain_words("Don't know... MAYBE at 5?")
    ["don't", 'know', 'maybe', 'at', '5']
    """
    curly = "\N{RIGHT SINGLE QUOTATION MARK}"
    return _WORD.findall(normalize("NFC", text).lower().replace(curly, "'"))


def cut_chat(text: str) -> list[list[str]]:
    """A sentence ends with a full stop, exclamation or question mark before a space.

    >>> cut_chat("Oh no... Really? 3 of 4.")
    [['oh', 'no'], ['really'], ['3', 'of', '4']]
    """
    return [plain_words(sentence) for sentence in _AFTER_SENTENCE.split(text)]


def cut_lines(text: str) -> list[list[str]]:
    """A sentence ends with its line, and nowhere else."""
    return [plain_words(sentence) for sentence in text.split("\n")]


def cut_spaces(text: str) -> list[list[str]]:
    """One sentence that somebody has cut into words before, with spaces in between."""
    return [text.split()]


def cut_verse(text: str) -> list[list[str]]:
    """One sentence of characters; what has brackets is an editor's note, and none of it is kept.

    >>> cut_verse("江□千里 月"), cut_verse("《江》")
    ([['江', '□', '千', '里', '月']], [])
    """
    kept = text.translate(_PUNCTUATION)
    return [] if _BRACKET in kept else [list(kept)]


_BRACKET = "("


class _Punctuation(dict[int, str]):
    """Nothing for punctuation and spaces, one bracket for all of them; filled as it is asked."""

    def __missing__(self, code: int) -> str:
        kind = category(chr(code))
        kept = "" if kind[0] in "PZ" or chr(code).isspace() else chr(code)
        return self.setdefault(code, _BRACKET if kind in ("Ps", "Pe") else kept)


_PUNCTUATION = _Punctuation()


PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 3
SPECIAL = 4

# A few entries of a frequency list are signs or abbreviations that our text never holds.
SPARE = 200


@final
@dataclass(frozen=True)
class Vocabulary:
    """Words, numbered from 4 on; below are padding, begin, end and unknown.

    Guarantees:
        Training protects what people wrote only if nothing else is taken from it. A vocabulary
        counted from their text tells, without any noise, that somebody used a rare word. So there
        is no way here to count one from users: it comes from a published list, from public text,
        or from a file that you vouch for.

    Attributes:
        words: The most frequent first.
    """

    words: tuple[str, ...] = field(repr=False)
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {word: SPECIAL + place for place, word in enumerate(self.words)}
        if not self.words:
            raise InvalidInput("a vocabulary needs at least one word, got none")
        for word in self.words:
            if [word] != word.split():
                raise InvalidInput(f"a word has no spaces and is not empty, got {word!r:.60}")
        if len(numbers) < len(self.words):
            twice = next(word for word, times in Counter(self.words).items() if times > 1)
            raise InvalidInput(f"a vocabulary has every word once, got {twice!r:.60} again")
        object.__setattr__(self, "_numbers", numbers)

    def __len__(self) -> int:
        return SPECIAL + len(self.words)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.words):,} words)"

    @classmethod
    def english(cls, size: int) -> Self:
        """The most frequent English words of the wordfreq package."""
        try:
            from wordfreq import top_n_list
        except ImportError:
            raise InvalidInput(
                "English words come with the wordfreq package, which is not installed; "
                "pip install 'dpftrl[train]', or give a vocabulary from a file"
            ) from None
        wanted = whole_number("vocabulary size", size)
        listed = [word for word in top_n_list("en", wanted + SPARE) if plain_words(word) == [word]]
        if len(listed) < wanted:
            raise InvalidInput(
                f"wordfreq lists {len(listed):,} English words, {wanted:,} were wanted"
            )
        return cls(tuple(listed[:wanted]))

    @classmethod
    def of_public_text(cls, words: Iterable[str], size: int) -> Self:
        """The most frequent words of text that is public, never of users' text.

        Args:
            words: The text, word by word.
            size: How many words to keep; all, if there are fewer.
        """
        counted = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
        return cls(tuple(word for word, _ in counted[: whole_number("vocabulary size", size)]))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], size: int | None = None) -> Self:
        """One word a line, the most frequent first; a count after the word is passed over.

        The word counts that come with the StackOverflow data are such a file. They were counted
        from its users, and no guarantee of a training covers that.

        Args:
            path: The file, UTF-8.
            size: How many words to take; by default all.
        """
        target, wanted = Path(path), None if size is None else whole_number("size", size)
        try:
            with target.open(encoding="utf-8-sig", newline="\n") as file:
                lines = enumerate(islice(file, wanted), start=1)
                words = tuple(_word(line, number, target) for number, line in lines)
        except OSError as error:
            raise InvalidInput(f"{target} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidInput(f"{target} is not UTF-8 text, one word a line") from None
        if wanted is not None and len(words) < wanted:
            raise InvalidInput(f"{target} has {len(words):,} words, {wanted:,} were wanted")
        return cls(words)

    @property
    def sha256(self) -> str:
        """What tells this vocabulary from any other."""
        return sha256("\n".join(self.words).encode()).hexdigest()

    def numbers(self, words: Iterable[str]) -> list[int]:
        """Each word's number; a word that is not known is UNKNOWN."""
        known = self._numbers
        return [known.get(word, UNKNOWN) for word in words]

    def encode(self, words: Iterable[str]) -> NDArray[np.int32]:
        """The numbers as an array.

        >>> Vocabulary(("hello", "you")).encode(["hello", "there", "you"]).tolist()
        [4, 3, 5]
        """
        return np.array(self.numbers(words), dtype=np.int32)


def _word(line: str, number: int, path: Path) -> str:
    match line.split():
        case [word]:
            return word
        case [word, count] if count.isdecimal():
            return word
        case _:
            raise InvalidInput(f"line {number} of {path} is not one word, got {line!r:.60}")
