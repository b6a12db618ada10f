"""A small document model that `render` turns into Markdown and into HTML with the same words.

All content is text, never markup: both renderers escape it. Invisible characters (such as control
characters and changes of text direction) are replaced by a visible sign.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal, final

Style = Literal["plain", "code", "strong", "enforced", "observed", "claimed", "assumed"]

# Unicode categories of control, format, surrogate, private and unassigned characters. They are
# invisible, or change how other characters are shown.
INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn"}


@final
@dataclass(frozen=True)
class Span:
    """A piece of text in one style."""

    text: str
    style: Style = "plain"


# Inline text: a string, a span, or a sequence of both.
Text = str | Span | tuple[str | Span, ...]


@final
@dataclass(frozen=True)
class Paragraph:
    """A normal paragraph."""

    text: Text


@final
@dataclass(frozen=True)
class Notice:
    """A highlighted paragraph, such as a warning."""

    text: Text


@final
@dataclass(frozen=True)
class Bullets:
    """A bulleted list."""

    items: tuple[Text, ...]


@final
@dataclass(frozen=True)
class Table:
    """A table. The first cell of each row is the name of the row.

    Attributes:
        caption: One sentence that says what the table shows.
        head: The column headings.
        rows: The cells of each row, one per column.
    """

    caption: Text
    head: tuple[Text, ...]
    rows: tuple[tuple[Text, ...], ...]


@final
@dataclass(frozen=True)
class Commands:
    """Shell commands, one per line."""

    lines: tuple[str, ...]


@final
@dataclass(frozen=True)
class Figure:
    """A picture. Its file is in the folder of the document.

    Attributes:
        caption: One sentence that says what the picture shows.
        file: The name of the file, without special characters.
        png: The content of the file.
    """

    caption: str
    file: str
    png: bytes


Block = Paragraph | Notice | Bullets | Table | Commands | Figure


@final
@dataclass(frozen=True)
class Section:
    """A heading, the blocks below it, and then its subsections."""

    title: str
    blocks: tuple[Block, ...] = ()
    sections: tuple["Section", ...] = ()


@final
@dataclass(frozen=True)
class Document:
    """A document: a title, introductory blocks, and sections."""

    title: str
    blocks: tuple[Block, ...]
    sections: tuple[Section, ...]


def visible(text: str) -> str:
    """Return the text with a visible sign in place of every invisible character.

    >>> visible("plan" + chr(0x202E) + "nosj." + chr(10))
    'plan\ufffdnosj.\ufffd'
    """
    return "".join("\ufffd" if unicodedata.category(c) in INVISIBLE else c for c in text)


def spans(text: Text) -> tuple[Span, ...]:
    """Return the text as visible spans, with every run of white space as one space."""
    parts = text if isinstance(text, tuple) else (text,)
    all_spans = (Span(part) if isinstance(part, str) else part for part in parts)
    return tuple(Span(visible(re.sub(r"\s+", " ", span.text)), span.style) for span in all_spans)


def plain(text: Text) -> str:
    """Return the text without its styles."""
    return "".join(span.text for span in spans(text))
