"""What an item of the paper comes to: rows for the table or the figure, and a verdict a claim."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from typing import Any, Generic, Literal, TypeVar, final

from dpftrl import __version__

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


Sizes = TypeVar("Sizes")
# Draws rows onto a matplotlib figure.
Draw = Callable[[Any, Sequence[Row]], None]


@final
@dataclass(frozen=True)
class Item(Generic[Sizes]):
    """What `dpftrl reproduce` can recompute.

    Attributes:
        name: What it is called on the command line.
        title: What it shows.
        full: The paper's sizes (or larger ones).
        quick: Sizes that take a second or so.
        compute: The work.
        draw: The picture, where the paper has one.
        height: Of the picture, in inches at a width of 11.
    """

    name: str
    title: str
    full: Sizes
    quick: Sizes
    compute: Callable[[Sizes, Say], Findings]
    draw: Draw | None = None
    height: float = 4.2

    def findings(self, quick: bool, say: Say) -> Findings:
        """Compute; at reduced sizes no verdict is given."""
        found = self.compute(self.quick if quick else self.full, say)
        if not self.is_reduced(quick):
            return found
        return Findings(found.rows, [claim.at_reduced_size() for claim in found.claims])

    def is_reduced(self, quick: bool) -> bool:
        """Whether a quick run of it is smaller than a full one: some items are quick anyway."""
        return quick and self.quick != self.full

    def settings(self, quick: bool) -> str:
        """A hash of all that the result depends on, but for the code."""
        text = f"{self.name} {__version__} {self.quick if quick else self.full!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
