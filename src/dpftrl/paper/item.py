"""One table or figure of the paper: its sizes, how to compute it, how to draw it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from dpftrl import __version__
from dpftrl.paper.findings import Findings, Row, Say

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
