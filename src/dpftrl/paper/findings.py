"""What an item of the paper comes to: rows for the table or the figure, and a verdict a claim."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from typing import Literal, final

Verdict = Literal["reproduces", "better", "does not", "not at this size"]
Cell = float | int | str | None
Row = dict[str, Cell]
# Called with a line that says what is being computed.
Say = Callable[[str], None]


@final
@dataclass(frozen=True)
class Claim:
    """One thing that the paper says, and what we find.

    Attributes:
        text: What is claimed.
        paper: The paper's number as it is printed, or its words.
        ours: Our number, or words.
        verdict: How they compare.
        because: Why they differ, or what else to know.
    """

    text: str
    paper: str
    ours: float | str
    verdict: Verdict
    because: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's, where both are numbers."""
        try:
            printed = float(self.paper)
        except ValueError:
            return None
        return self.ours / printed if isinstance(self.ours, float) and printed else None

    def at_reduced_size(self) -> "Claim":
        """The same, found at sizes that say nothing about the paper's."""
        return replace(self, verdict="not at this size", because="")


@final
@dataclass(frozen=True)
class Findings:
    """Rows of one table, in the order of its columns, and the claims that they bear on."""

    rows: Sequence[Row]
    claims: Sequence[Claim]


def printed(text: str, paper: str, ours: float, because: str = "", *, up: bool = False) -> Claim:
    """A printed number: reproduced if ours rounds to it, better if ours is smaller.

    Args:
        text: What the number is.
        paper: The number as printed.
        ours: Ours, in full.
        because: Why it differs, if it does.
        up: Whether the paper rounds this number up.

    >>> printed("MaxLoss", "10.79", 10.7514).verdict
    'better'
    """
    if rounds_to(ours, paper, up=up):
        return Claim(text, paper, ours, "reproduces")
    return Claim(text, paper, ours, "better" if ours < float(paper) else "does not", because)


def rounds_to(value: float, paper: str, *, up: bool = False) -> bool:
    """Whether a value, rounded to as many places as were printed, is what was printed."""
    rounding = ROUND_CEILING if up else ROUND_HALF_EVEN
    return Decimal(value).quantize(Decimal(paper), rounding) == Decimal(paper)


def holds(text: str, truth: bool, ours: float | str, paper: str = "", because: str = "") -> Claim:
    """A statement in words, true or not; `because` says why not."""
    if truth:
        return Claim(text, paper, ours, "reproduces")
    return Claim(text, paper, ours, "does not", because)


def series_of(rows: Sequence[Row], key: str = "series") -> dict[str, list[Row]]:
    """Rows by what one column says, in the order of their first appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row[key]), []).append(row)
    return found


def column(rows: Sequence[Mapping[str, Cell]], key: str) -> list[float]:
    """One column of numbers; what is missing becomes NaN, a gap in a curve."""
    return [float(value) if (value := row[key]) is not None else float("nan") for row in rows]
