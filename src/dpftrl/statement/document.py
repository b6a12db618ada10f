"""A tiny document: one structure, rendered as Markdown and as HTML, so that the two say the same.

Whatever goes in is text, never markup: both renderers escape it, and characters that do not show
(control characters, changes of direction) are replaced by a sign that does.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal, final

Style = Literal["plain", "code", "strong", "enforced", "observed", "claimed", "assumed"]

# Control, format, surrogate, private and unassigned characters: they hide, or hide others.
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn"}


@final
@dataclass(frozen=True)
class Span:
    """A stretch of text in one style."""

    text: str
    style: Style = "plain"


# What one may write: a string, a span, or several of both in a row.
Text = str | Span | tuple[str | Span, ...]


@final
@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: Text


@final
@dataclass(frozen=True)
class Notice:
    """A paragraph that nobody may overlook."""

    text: Text


@final
@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: tuple[Text, ...]


@final
@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row names it.

    Attributes:
        caption: What it shows, in a sentence.
        head: A word or two over each column.
        rows: As many cells as the head has.
    """

    caption: Text
    head: tuple[Text, ...]
    rows: tuple[tuple[Text, ...], ...]


@final
@dataclass(frozen=True)
class Commands:
    """Lines to type at a shell."""

    lines: tuple[str, ...]


@final
@dataclass(frozen=True)
class Figure:
    """A picture; its file lies beside the document.

    Attributes:
        caption: What it shows, in a sentence.
        file: The name of the file, a plain word.
        png: Its content.
    """

    caption: str
    file: str
    png: bytes


Block = Paragraph | Notice | Bullets | Table | Commands | Figure


@final
@dataclass(frozen=True)
class Section:
    """A heading with what stands below it; sections inside it come last."""

    title: str
    blocks: tuple[Block, ...] = ()
    sections: tuple["Section", ...] = ()


@final
@dataclass(frozen=True)
class Document:
    """A title, what comes first, and the sections."""

    title: str
    blocks: tuple[Block, ...]
    sections: tuple[Section, ...]


def visible(text: str) -> str:
    """The text with a sign in place of every character that would not show.

    >>> visible("plan" + chr(0x202E) + "nosj." + chr(10))
    'plan\ufffdnosj.\ufffd'
    """
    return "".join("\ufffd" if unicodedata.category(c) in HIDDEN else c for c in text)


def spans(text: Text) -> tuple[Span, ...]:
    """The text as spans on one line."""
    parts = text if isinstance(text, tuple) else (text,)
    found = (Span(part) if isinstance(part, str) else part for part in parts)
    return tuple(Span(visible(re.sub(r"\s+", " ", span.text)), span.style) for span in found)


def plain(text: Text) -> str:
    """The words alone."""
    return "".join(span.text for span in spans(text))
