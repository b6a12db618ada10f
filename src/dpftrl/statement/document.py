"""A small document model, and its rendering as Markdown and as HTML with the same words.

All content is text, never markup: both renderers escape it. Invisible characters (such as control
characters and changes of text direction) are replaced by a visible sign. The HTML page is one file
without scripts. It loads nothing from elsewhere, and has styles for dark screens and for paper.
"""

import re
import unicodedata
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Final, Literal, assert_never, final

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


# Characters that can start Markdown markup anywhere in a line.
SPECIAL = re.compile(r"[\\`*_\[\]<>|~&$#]")
# Characters that can start a list or a horizontal rule at the start of a line.
LINE_START = re.compile(r"^([-+=]|\d+(?=[.)]))")


def markdown(document: Document) -> str:
    """Return the document as Markdown, with one line per paragraph."""
    return "\n\n".join(_markdown_parts(document)) + "\n"


def _markdown_parts(document: Document) -> Iterator[str]:
    yield f"# {_markdown_inline(document.title)}"
    yield from map(_markdown_block, document.blocks)
    for section in document.sections:
        yield from _markdown_section(section, level=2)


def _markdown_section(section: Section, level: int) -> Iterator[str]:
    yield f"{'#' * level} {_markdown_inline(section.title)}"
    yield from map(_markdown_block, section.blocks)
    for inner in section.sections:
        yield from _markdown_section(inner, level + 1)


def _markdown_block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return _markdown_line(text)
        case Notice(text):
            return f"> {_markdown_line(text)}"
        case Bullets(items):
            return "\n".join(f"- {_markdown_line(item)}" for item in items)
        case Table():
            return _markdown_table(block)
        case Commands(lines):
            return _fenced_code([visible(line) for line in lines])
        case Figure(caption, file, _):
            return f"![{_markdown_inline(caption)}]({file})"
        case _:
            assert_never(block)


def _markdown_table(table: Table) -> str:
    rows = [
        _markdown_row(table.head),
        "|" + "---|" * len(table.head),
        *map(_markdown_row, table.rows),
    ]
    return _markdown_line(table.caption) + "\n\n" + "\n".join(rows)


def _markdown_row(cells: tuple[Text, ...]) -> str:
    return "|" + "|".join(f" {_markdown_inline(cell, in_table=True)} " for cell in cells) + "|"


def _fenced_code(lines: list[str]) -> str:
    fence = "`" * (_longest_backticks("\n".join(lines), least=2) + 1)
    return "\n".join([f"{fence}console", *lines, fence])


def _markdown_line(text: Text) -> str:
    """Return text as a line of its own, escaped so that it starts no list or rule."""
    line = _markdown_inline(text).strip()
    start = LINE_START.match(line)
    if start is None:
        return line
    cut = start.end() if line[0].isdigit() else 0
    return f"{line[:cut]}\\{line[cut:]}"


def _markdown_inline(text: Text, in_table: bool = False) -> str:
    return "".join(_markdown_span(span, in_table) for span in spans(text))


def _markdown_span(span: Span, in_table: bool) -> str:
    if not span.text.strip():
        return span.text
    if span.style == "code" and not (in_table and re.search(r"[|\\]", span.text)):
        return _inline_code(span.text)
    # Renderers disagree about bars and backslashes in code inside a table, but agree in plain text.
    escaped = SPECIAL.sub(r"\\\g<0>", span.text)
    return escaped if span.style in {"plain", "code"} else f"**{escaped}**"


def _inline_code(text: str) -> str:
    ticks = "`" * (_longest_backticks(text) + 1)
    space = " " if text[0] in " `" or text[-1] in " `" else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _longest_backticks(text: str, least: int = 0) -> int:
    return max([least, *map(len, re.findall("`+", text))])


# Text has a contrast of at least 4.5 to its background (WCAG AA). Color is never the only sign.
STYLE: Final = """\
:root { color-scheme: light dark; --text: #1b1b1b; --ground: #fff; --line: #c8c8c8;
  --soft: #f3f3f3; --enforced: #00664f; --observed: #004f9e; --claimed: #6b2fa0;
  --assumed: #8a4300; }
@media screen and (prefers-color-scheme: dark) { :root { --text: #e8e8e8; --ground: #161616;
  --line: #4a4a4a; --soft: #242424; --enforced: #5fd3b0; --observed: #8ec5ff;
  --claimed: #d0a8ff; --assumed: #ffb65c; } }
body { margin: 0; color: var(--text); background: var(--ground);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 2rem 1rem 4rem; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; break-after: avoid; }
h2 { margin-top: 2.4rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
figure { margin: 1rem 0; break-inside: avoid; } figcaption { font-style: italic; }
img { max-width: 100%; background: #fff; }
table { width: 100%; margin: 1rem 0; border-collapse: collapse; font-size: .925em; }
caption { padding: .3rem 0; break-after: avoid; text-align: left; font-style: italic; }
th, td { padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; overflow-wrap: break-word; }
td { overflow-wrap: anywhere; }
thead th { border-bottom-width: 2px; }
tbody th { font-weight: 600; }
tr { break-inside: avoid; }
code, pre { font: .9em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { padding: .7rem .9rem; background: var(--soft); white-space: pre-wrap; }
.notice { margin: 1rem 0; padding: .7rem .9rem; border-left: .4rem solid var(--assumed);
  background: var(--soft); }
.enforced { color: var(--enforced); } .observed { color: var(--observed); }
.claimed { color: var(--claimed); } .assumed { color: var(--assumed); }
.enforced, .observed, .claimed, .assumed { white-space: nowrap; }
@media print { body { font-size: 10pt; } main { max-width: none; padding: 0; }
  pre { border: 1px solid var(--line); } }
@page { margin: 18mm; }"""

# A second protection: with this policy, the browser refuses to load anything, even if markup got
# into the page.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html(document: Document) -> str:
    """Return the document as a complete HTML page."""
    return "\n".join(_html_lines(document)) + "\n"


def _html_lines(document: Document) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en">'
    yield "<head>"
    yield '<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(plain(document.title))}</title>"
    yield f"<style>\n{STYLE}\n</style>"
    yield "</head>"
    yield "<body>\n<main>"
    yield f"<h1>{_html_inline(document.title)}</h1>"
    yield from map(_html_block, document.blocks)
    for number, section in enumerate(document.sections, 1):
        yield from _html_section(section, f"s{number}", level=2)
    yield "</main>\n</body>\n</html>"


def _html_section(section: Section, name: str, level: int) -> Iterator[str]:
    yield f'<section aria-labelledby="{name}">'
    yield f'<h{level} id="{name}">{_html_inline(section.title)}</h{level}>'
    yield from map(_html_block, section.blocks)
    for number, inner in enumerate(section.sections, 1):
        yield from _html_section(inner, f"{name}-{number}", level + 1)
    yield "</section>"


def _html_block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{_html_inline(text)}</p>"
        case Notice(text):
            return f'<p class="notice" role="note">{_html_inline(text)}</p>'
        case Bullets(items):
            return (
                "<ul>\n" + "".join(f"<li>{_html_inline(item)}</li>\n" for item in items) + "</ul>"
            )
        case Table():
            return "\n".join(_html_table(block))
        case Commands(lines):
            return "<pre><code>" + escape("\n".join(map(visible, lines))) + "</code></pre>"
        case Figure():
            return "\n".join(_html_figure(block))
        case _:
            assert_never(block)


def _html_figure(figure: Figure) -> Iterator[str]:
    data = b64encode(figure.png).decode()
    caption = _html_inline(figure.caption)
    yield f'<figure><img alt="{escape(plain(figure.caption))}" src="data:image/png;base64,{data}">'
    yield f"<figcaption>{caption}</figcaption></figure>"


def _html_table(table: Table) -> Iterator[str]:
    yield "<table>"
    yield f"<caption>{_html_inline(table.caption)}</caption>"
    head = "".join(f'<th scope="col">{_html_inline(cell)}</th>' for cell in table.head)
    yield f"<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>"
    for first, *rest in table.rows:
        cells = "".join(f"<td>{_html_inline(cell)}</td>" for cell in rest)
        yield f'<tr><th scope="row">{_html_inline(first)}</th>{cells}</tr>'
    yield "</tbody>\n</table>"


def _html_inline(text: Text) -> str:
    return "".join(map(_html_span, spans(text)))


def _html_span(span: Span) -> str:
    text = escape(span.text)
    match span.style:
        case "plain":
            return text
        case "code":
            return f"<code>{text}</code>"
        case "strong":
            return f"<strong>{text}</strong>"
        case _:
            return f'<strong class="{span.style}">{text}</strong>'
