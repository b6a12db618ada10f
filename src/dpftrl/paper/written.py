"""Findings as CSV and as Markdown."""

import csv
import io
from collections.abc import Sequence

from dpftrl.paper.findings import Cell, Claim, Row

# Longer tables stay in the CSV.
MOST_ROWS = 16
HEADINGS = ("claim", "paper", "ours", "ratio", "verdict")


def as_csv(rows: Sequence[Row]) -> str:
    """With all digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(
    name: str, title: str, claims: Sequence[Claim], rows: Sequence[Row], has_picture: bool
) -> str:
    """One page: the picture, the verdicts, and the table where it is short."""
    parts = [f"# {title}", f"`dpftrl reproduce {name}`"]
    if has_picture:
        parts.append(f"![{title}]({name}.png)")
    parts.append(claims_table(claims))
    if 0 < len(rows) <= MOST_ROWS and "claim" not in rows[0]:
        parts.append(rows_table(rows))
    parts.append(f"All numbers: [{name}.csv]({name}.csv).")
    return "\n\n".join(parts) + "\n"


def claims_table(claims: Sequence[Claim]) -> str:
    """What the paper says, what we find, and the verdict."""
    return table(HEADINGS, [claim_cells(claim) for claim in claims])


def rows_table(rows: Sequence[Row]) -> str:
    """The rows as they are."""
    return table([*rows[0]], [[shown(row[key]) for key in row] for row in rows])


def claim_cells(claim: Claim) -> list[str]:
    """One row of the table of claims."""
    ratio = "" if claim.ratio is None else shown(claim.ratio)
    because = f": {claim.because}" if claim.because else ""
    return [claim.text, claim.paper, shown(claim.ours), ratio, f"*{claim.verdict}*{because}"]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Cell) -> str:
    """A number with as many digits as people read.

    >>> shown(10.73408), shown(1234567), shown(0.0000321), shown(None)
    ('10.73', '1,234,567', '3.21e-05', '')
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if abs(value) < 1e15 and float(value).is_integer():
        return f"{value:,.0f}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}"
