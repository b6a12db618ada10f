"""Tables as plain texts, which the command line prints and the web page shows."""

from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class TextTable:
    """A table whose cells are texts.

    Attributes:
        title: What it shows.
        columns: The headings.
        rows: The cells, row by row.
        caption: Notes, one per line.
        marked: The number of the row that is recommended; None if there is none.
        name_columns: How many of the first columns hold names.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    marked: int | None = None
    name_columns: int = 1

    def as_json(self) -> dict[str, Any]:
        """The table as plain data."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "caption": self.caption.split("\n") if self.caption else [],
            "marked": self.marked,
            "name_columns": self.name_columns,
        }
