"""Mechanisms by name: what the command line and configuration files call them."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dpftrl.errors import DpftrlError, InvalidInput, UnknownMechanism
from dpftrl.mechanisms.banded import Banded
from dpftrl.mechanisms.banded_inverse import BandedInverse
from dpftrl.mechanisms.base import Mechanism
from dpftrl.mechanisms.blt import PRESETS
from dpftrl.mechanisms.generalized_blt import GeneralBLT
from dpftrl.mechanisms.independent import Independent
from dpftrl.mechanisms.smooth_tree import SmoothTree
from dpftrl.mechanisms.square_root import SquareRoot
from dpftrl.mechanisms.toeplitz import Toeplitz
from dpftrl.mechanisms.tree import BinaryTree, FullTree
from dpftrl.participation import Participation


class Request(NamedTuple):
    """A name taken apart at its colon, and what it is wanted for (which may be unknown)."""

    name: str
    parameter: str
    wanted_for: Participation | None

    def participation(self) -> Participation:
        """The planned participation, or an error that asks for it."""
        if self.wanted_for is None or self.wanted_for.observed:
            log = ", not the one that a log shows" if self.wanted_for is not None else ""
            raise InvalidInput(
                f"{self.name} is built for the planned participation{log}: state the rounds and "
                "the min-sep of the plan, or give the plan or the mechanism itself as a .json file"
            )
        return self.wanted_for

    def bands(self) -> int:
        """The number behind the colon; without one, as many bands as rounds of separation."""
        if not self.parameter:
            return min(self.participation().min_sep, self.participation().rounds)
        try:
            return int(self.parameter)
        except ValueError:
            raise InvalidInput(
                f"{self.name} takes a whole number of bands, as in {self.name}:16, "
                f"got {self.parameter!r}"
            ) from None

    def numbers(self) -> list[float]:
        """The numbers behind the colon, separated by commas."""
        try:
            return [float(part) for part in self.parameter.split(",")]
        except ValueError:
            raise InvalidInput(
                f"{self.name} takes numbers, as in {self.name}:1,0.5, or comes from a .json file, "
                f"got {self.parameter!r}"
            ) from None


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue: how to write it, what it is, how it is made."""

    form: str
    summary: str
    make: Callable[[Request], Mechanism]

    @property
    def name(self) -> str:
        """The form without its parameter."""
        return self.form.partition(":")[0]


def _lambda(request: Request) -> Mechanism:
    numbers = request.numbers()
    if len(numbers) != 1:
        raise InvalidInput(f"lambda takes one number, got {request.parameter!r}")
    return BandedInverse.one_parameter(numbers[0])


def _gblt(request: Request) -> Mechanism:
    try:
        pairs = [part.split("@") for part in request.parameter.split(",")]
        return GeneralBLT([complex(a) for a, _ in pairs], [complex(b) for _, b in pairs])
    except (ValueError, TypeError) as error:
        if isinstance(error, DpftrlError):
            raise
        raise InvalidInput(
            "gblt takes decays and scales, as in gblt:0.9@0.2,0.5+0.1j@0.05, or comes from a "
            f".json file, got {request.parameter!r}"
        ) from None


def _optimized(request: Request) -> Mechanism:
    raise InvalidInput(
        f"{request.name} is optimized for a participation, which `dpftrl.mechanism` does; here "
        "only presets such as blt-b400 are known"
    )


CATALOGUE: tuple[Entry, ...] = (
    Entry("independent", "fresh noise every round: DP-SGD, DP-FedAvg", lambda _: Independent()),
    Entry("blt", "BLT optimized for the planned participation", _optimized),
    *(
        Entry(
            name, f"BLT of the paper's appendix for min-sep {name[5:]}", lambda r: PRESETS[r.name]
        )
        for name in PRESETS
    ),
    Entry("gblt:THETA@OMEGA,...", "BLT with scales of any sign and pairs of decays", _gblt),
    Entry("sqrt", "square-root factorisation, full Toeplitz", lambda _: SquareRoot()),
    Entry("band-sqrt:P", "its first P coefficients (BandFHU)", lambda r: SquareRoot(r.bands())),
    Entry(
        "toeplitz:C0,C1,...",
        "any coefficients (BandToep when optimised)",
        lambda r: Toeplitz(r.numbers()),
    ),
    Entry(
        "banded:P",
        "P general bands, columns of norm 1 (BandMF when optimised)",
        lambda r: Banded.square_root(r.bands(), r.participation().rounds),
    ),
    Entry(
        "inv-sqrt:P",
        "inverse square root cut to P bands (BISR)",
        lambda r: BandedInverse.square_root(r.bands()),
    ),
    Entry(
        "banded-inverse:C0,C1,...",
        "any banded inverse (BandInvMF when optimised)",
        lambda r: BandedInverse(r.numbers()),
    ),
    Entry("lambda:L", "noise z(t) - L z(t-1)", _lambda),
    Entry("tree", "TreeAgg, refined as it goes (Honaker online)", lambda _: BinaryTree()),
    Entry("tree-vanilla", "TreeAgg, plain sums of nodes", lambda _: BinaryTree(refine=False)),
    Entry(
        "tree-full",
        "TreeAgg-Full, the best decoder of the tree",
        lambda r: FullTree(r.participation().rounds),
    ),
    Entry(
        "smooth-tree",
        "smooth binary mechanism (Andersson and Pagh)",
        lambda r: SmoothTree.for_rounds(r.participation().rounds),
    ),
)


def mechanism(name: str, participation: Participation | None = None) -> Mechanism:
    """The mechanism of this name.

    Some names leave a choice open that the participation settles: `tree-full`, `smooth-tree` and
    `banded:P` are built for its rounds, and bands that are not given are as many as its min-sep.
    It must be the participation that was planned: one that was observed in a log is refused, since
    it would describe a mechanism that was not run.

    >>> mechanism("band-sqrt:342")
    SquareRoot(bands=342)
    >>> mechanism("trea")
    Traceback (most recent call last):
    dpftrl.errors.UnknownMechanism: there is no mechanism 'trea'; did you mean tree or tree-vanilla?
    """
    family, colon, parameter = name.partition(":")
    for entry in CATALOGUE:
        if entry.name == family:
            if colon and ":" not in entry.form:
                raise InvalidInput(f"{family} takes no parameter, got {name!r}")
            return entry.make(Request(family, parameter, participation))
    near = difflib.get_close_matches(family, [entry.name for entry in CATALOGUE], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`dpftrl mechanisms` lists them"
    raise UnknownMechanism(f"there is no mechanism {name!r}; {hint}")
