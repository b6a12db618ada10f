"""Text into sentences, and sentences into words: how each task cuts its text."""

import re
from collections.abc import Callable
from unicodedata import category, normalize

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
