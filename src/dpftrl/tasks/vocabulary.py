"""Vocabularies from public sources, and the functions that split text into words."""

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

# A function that splits a text into sentences, and each sentence into words; some may be empty.
Cut = Callable[[str], list[list[str]]]

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_AFTER_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def plain_words(text: str) -> list[str]:
    """Return the words of a text in lower case; keep apostrophes inside words, drop punctuation.

    English frequency lists have words of the same form.

    >>> plain_words("Don't know... MAYBE at 5?")
    ["don't", 'know', 'maybe', 'at', '5']
    """
    curly_apostrophe = "\N{RIGHT SINGLE QUOTATION MARK}"
    return _WORD.findall(normalize("NFC", text).lower().replace(curly_apostrophe, "'"))


def cut_chat(text: str) -> list[list[str]]:
    """Split a text into sentences after each full stop, exclamation or question mark and a space.

    >>> cut_chat("Oh no... Really? 3 of 4.")
    [['oh', 'no'], ['really'], ['3', 'of', '4']]
    """
    return [plain_words(sentence) for sentence in _AFTER_SENTENCE.split(text)]


def cut_lines(text: str) -> list[list[str]]:
    """Split a text into sentences at line ends only."""
    return [plain_words(sentence) for sentence in text.split("\n")]


def cut_spaces(text: str) -> list[list[str]]:
    """Split one sentence, whose words are separated by spaces already."""
    return [text.split()]


def cut_verse(text: str) -> list[list[str]]:
    """Split one line of verse into characters; drop a line with brackets, an editor's note.

    >>> cut_verse("江□千里 月"), cut_verse("《江》")
    ([['江', '□', '千', '里', '月']], [])
    """
    kept = text.translate(_PUNCTUATION)
    return [] if _BRACKET in kept else [list(kept)]


_BRACKET = "("


class _Punctuation(dict[int, str]):
    """A table for str.translate: deletes punctuation and spaces, and maps all brackets to one.

    Entries are added on first use.
    """

    def __missing__(self, code: int) -> str:
        kind = category(chr(code))
        kept = "" if kind[0] in "PZ" or chr(code).isspace() else chr(code)
        return self.setdefault(code, _BRACKET if kind in ("Ps", "Pe") else kept)


_PUNCTUATION = _Punctuation()


# The functions that split text, by the names that exported models use. A name keeps its meaning.
CUTS: dict[str, Cut] = {
    "chat": cut_chat,
    "lines": cut_lines,
    "spaces": cut_spaces,
    "verse": cut_verse,
}

# Numbers of the special tokens; words are numbered from SPECIAL on.
PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 3
SPECIAL = 4

# Extra entries to read from a frequency list: some entries are signs or abbreviations that
# `plain_words` never returns.
EXTRA_ENTRIES = 200


@final
@dataclass(frozen=True)
class Vocabulary:
    """Words, numbered from 4 on. Numbers 0 to 3 are padding, begin, end and unknown.

    Guarantees:
        Private training protects a text only if nothing else is computed from it. A vocabulary
        counted from users' text would reveal, without any noise, that somebody used a rare word.
        Therefore this class cannot count one from users: a vocabulary comes from a published list,
        from public text, or from a file that you vouch for.

    Attributes:
        words: The words, the most frequent first.

    Raises:
        InvalidInput: There is no word, a word occurs twice, or a word has a space.
    """

    words: tuple[str, ...] = field(repr=False)
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {word: SPECIAL + place for place, word in enumerate(self.words)}
        if not self.words:
            raise InvalidInput("a vocabulary needs at least one word, got none")
        for word in self.words:
            if [word] != word.split():
                raise InvalidInput(f"a word must not be empty or have spaces, got {word!r:.60}")
        if len(numbers) < len(self.words):
            repeated = next(word for word, times in Counter(self.words).items() if times > 1)
            raise InvalidInput(f"a vocabulary has every word once, got {repeated!r:.60} again")
        object.__setattr__(self, "_numbers", numbers)

    def __len__(self) -> int:
        return SPECIAL + len(self.words)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.words):,} words)"

    @classmethod
    def english(cls, size: int) -> Self:
        """Return the `size` most frequent English words of the wordfreq package.

        Raises:
            InvalidInput: wordfreq is not installed, or lists fewer words.
        """
        try:
            from wordfreq import top_n_list
        except ImportError:
            raise InvalidInput(
                "English words come with the wordfreq package, which is not installed; "
                "pip install 'dpftrl[train]', or give a vocabulary from a file"
            ) from None
        wanted = whole_number("vocabulary size", size)
        entries = top_n_list("en", wanted + EXTRA_ENTRIES)
        listed = [word for word in entries if plain_words(word) == [word]]
        if len(listed) < wanted:
            raise InvalidInput(
                f"wordfreq lists {len(listed):,} English words, {wanted:,} were requested"
            )
        return cls(tuple(listed[:wanted]))

    @classmethod
    def of_public_text(cls, words: Iterable[str], size: int) -> Self:
        """Return the most frequent words of a public text. Never use this on users' text.

        Args:
            words: The text, word by word.
            size: Number of words to keep; all of them if there are fewer.
        """
        counted = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
        return cls(tuple(word for word, _ in counted[: whole_number("vocabulary size", size)]))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], size: int | None = None) -> Self:
        """Read a vocabulary from a file: one word per line, the most frequent first.

        A count after the word is ignored. The word counts that come with the StackOverflow data are
        such a file. They were counted from its users, and the guarantee of a training does not
        cover that.

        Args:
            path: Text file in UTF-8.
            size: Number of words to read; by default all.

        Raises:
            InvalidInput: The file cannot be read, has fewer words, or a line is not one word.
        """
        target, wanted = Path(path), None if size is None else whole_number("size", size)
        try:
            with target.open(encoding="utf-8-sig", newline="\n") as file:
                lines = enumerate(islice(file, wanted), start=1)
                words = tuple(_word(line, number, target) for number, line in lines)
        except OSError as error:
            raise InvalidInput(f"{target} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidInput(f"{target} is not UTF-8 text with one word per line") from None
        if wanted is not None and len(words) < wanted:
            raise InvalidInput(f"{target} has {len(words):,} words, {wanted:,} were requested")
        return cls(words)

    @property
    def sha256(self) -> str:
        """SHA-256 of the words, in order: identifies the vocabulary."""
        return sha256("\n".join(self.words).encode()).hexdigest()

    def numbers(self, words: Iterable[str]) -> list[int]:
        """Return the number of each word; UNKNOWN for a word outside the vocabulary."""
        known = self._numbers
        return [known.get(word, UNKNOWN) for word in words]

    def encode(self, words: Iterable[str]) -> NDArray[np.int32]:
        """Return the number of each word, as an array.

        >>> Vocabulary(("hello", "you")).encode(["hello", "there", "you"]).tolist()
        [4, 3, 5]
        """
        return np.array(self.numbers(words), dtype=np.int32)


def _word(line: str, number: int, path: Path) -> str:
    """Return the word of a line, which may be followed by a count."""
    match line.split():
        case [word]:
            return word
        case [word, count] if count.isdecimal():
            return word
        case _:
            raise InvalidInput(f"line {number} of {path} is not one word, got {line!r:.60}")
