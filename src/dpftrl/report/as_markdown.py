"""A document as Markdown: CommonMark with GitHub's tables."""

import re
from collections.abc import Iterator
from typing import assert_never

from dpftrl.report.document import (
    Block,
    Bullets,
    Commands,
    Document,
    Figure,
    Notice,
    Paragraph,
    Section,
    Span,
    Table,
    Text,
    spans,
    visible,
)

# What could start markup in the middle of a line; and what could at its start.
SPECIAL = re.compile(r"[\\`*_\[\]<>|~&$#]")
OPENING = re.compile(r"^([-+=]|\d+(?=[.)]))")


def markdown(document: Document) -> str:
    """The document, one paragraph a line."""
    return "\n\n".join(_document(document)) + "\n"


def _document(document: Document) -> Iterator[str]:
    yield f"# {_inline(document.title)}"
    yield from map(_block, document.blocks)
    for section in document.sections:
        yield from _section(section, level=2)


def _section(section: Section, level: int) -> Iterator[str]:
    yield f"{'#' * level} {_inline(section.title)}"
    yield from map(_block, section.blocks)
    for inner in section.sections:
        yield from _section(inner, level + 1)


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return _line(text)
        case Notice(text):
            return f"> {_line(text)}"
        case Bullets(items):
            return "\n".join(f"- {_line(item)}" for item in items)
        case Table():
            return _table(block)
        case Commands(lines):
            return _fenced([visible(line) for line in lines])
        case Figure(caption, file, _):
            return f"![{_inline(caption)}]({file})"
        case _:
            assert_never(block)


def _table(table: Table) -> str:
    rows = [_row(table.head), "|" + "---|" * len(table.head), *map(_row, table.rows)]
    return _line(table.caption) + "\n\n" + "\n".join(rows)


def _row(cells: tuple[Text, ...]) -> str:
    return "|" + "|".join(f" {_inline(cell, in_table=True)} " for cell in cells) + "|"


def _fenced(lines: list[str]) -> str:
    fence = "`" * (_longest_ticks("\n".join(lines), least=2) + 1)
    return "\n".join([f"{fence}console", *lines, fence])


def _line(text: Text) -> str:
    """A line of its own, whose first character must not make a list or a rule of it."""
    line = _inline(text).strip()
    number = OPENING.match(line)
    if number is None:
        return line
    cut = number.end() if line[0].isdigit() else 0
    return f"{line[:cut]}\\{line[cut:]}"


def _inline(text: Text, in_table: bool = False) -> str:
    return "".join(_span(span, in_table) for span in spans(text))


def _span(span: Span, in_table: bool) -> str:
    if not span.text.strip():
        return span.text
    if span.style == "code" and not (in_table and re.search(r"[|\\]", span.text)):
        return _code(span.text)
    # In a table, code cannot hold a bar in a way that all renderers agree on: text can.
    escaped = SPECIAL.sub(r"\\\g<0>", span.text)
    return escaped if span.style in {"plain", "code"} else f"**{escaped}**"


def _code(text: str) -> str:
    ticks = "`" * (_longest_ticks(text) + 1)
    space = " " if text[0] in " `" or text[-1] in " `" else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _longest_ticks(text: str, least: int = 0) -> int:
    return max([least, *map(len, re.findall("`+", text))])
