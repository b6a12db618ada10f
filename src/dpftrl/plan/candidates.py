"""The mechanisms that a plan weighs against one another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from dpftrl.errors import DpftrlError
from dpftrl.mechanisms import Mechanism, mechanism
from dpftrl.optimize import (
    Objective,
    optimize_band_toeplitz,
    optimize_bandmf,
    optimize_blt,
    optimize_robust_blt,
)
from dpftrl.participation import MinSep

# What takes a second or two: rounds of BandMF; rounds, and rounds times bands, of BandToep; rounds
# times participations of a tree's sensitivity.
QUICK_BANDMF = 400
QUICK_BAND_TOEPLITZ = 50_000
QUICK_BANDS = 10_000_000
QUICK_TREE = 400_000
# What the candidates are called, in their order.
LABELS = ("blt", "blt-robust", "blt-default", "tree", "tree-full", "band-toeplitz", "bandmf")
# Points a side on which the robust BLT is checked.
QUICK_GRID = 3


@final
@dataclass(frozen=True)
class Candidate:
    """A mechanism under consideration, or why there is none.

    Attributes:
        label: What to call it here.
        mechanism: The mechanism, where there is one.
        note: Why not, or what is special.
    """

    label: str
    mechanism: Mechanism | None
    note: str = ""


Maker = Callable[[], Mechanism]


def candidates(
    participation: MinSep,
    objective: Objective,
    buffers: int,
    max_participations: int,
    with_bandmf: bool,
) -> Iterator[Candidate]:
    """One after another, the optimised BLT first; each may take a second or so."""
    n, b = participation.rounds, participation.min_sep
    doubled = (max(1, b // 2), 2 * b)

    def robust() -> Mechanism:
        around = (max(1, n // 2), 2 * n)
        fitting = min(buffers, around[0])
        return optimize_robust_blt(
            around, doubled, max_participations, fitting, objective, QUICK_GRID
        ).mechanism

    def band_toeplitz() -> Mechanism:
        bands = max(1, min(n, b, QUICK_BANDS // n))
        return optimize_band_toeplitz(participation, bands, objective).mechanism

    # The others are measured by this one: without it there is no comparison, so it may fail loudly.
    yield Candidate("blt", optimize_blt(participation, min(buffers, n), objective).mechanism)
    yield _made("blt-robust", robust)
    yield _made("blt-default", lambda: mechanism("blt"))
    if quick_tree(participation):
        yield _made("tree", lambda: mechanism("tree"))
        yield _made("tree-full", lambda: mechanism("tree-full", participation))
    else:
        note = "left out, its sensitivity takes a while here: dpftrl account tree"
        yield from (Candidate(label, None, note) for label in ("tree", "tree-full"))
    if n <= QUICK_BAND_TOEPLITZ:
        yield _made("band-toeplitz", band_toeplitz)
    else:
        yield Candidate("band-toeplitz", None, f"left out beyond {QUICK_BAND_TOEPLITZ:,} rounds")
    if with_bandmf or n <= QUICK_BANDMF:
        yield _made("bandmf", lambda: optimize_bandmf(participation, min(n, b)).mechanism)
    else:
        yield Candidate("bandmf", None, "left out, it takes a while: --with-bandmf")


def quick_tree(participation: MinSep) -> bool:
    """Whether the sensitivity of a tree is a matter of moments."""
    return participation.rounds * participation.max_participations <= QUICK_TREE


def _made(label: str, make: Maker) -> Candidate:
    try:
        return Candidate(label, make())
    except DpftrlError as error:
        return Candidate(label, None, str(error))
