"""The loss columns of table `sonwp`: the mechanisms of the StackOverflow benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from dpftrl import ErrorReport, Mechanism, MinSep
from dpftrl._internal.progress import Progress
from dpftrl.optimize import Objective, optimize_general_blt
from dpftrl.paper.item import (
    TABLE_MECHANISMS,
    Claim,
    Findings,
    Item,
    Row,
    blt,
    holds,
    printed,
    rounds_to,
)

# Printed values: the column headed RMS loss, then the column headed Max loss.
PRINTED = {
    "BandMF": ("10.21", "8.60"),
    "TreeAgg-Full": ("14.98", "12.47"),
    "BLT(d=2, k=1)": ("11.80", "11.15"),
    "BLT(d=5, k=1)": ("11.40", "10.87"),
    "BLT(d=2, k=6)": ("10.81", "9.34"),
    "BLT(d=3, k=6)": ("10.79", "9.33"),
    "BLT(d=4, k=6)": ("10.79", "9.33"),
    "BLT(d=5, k=6)": ("10.79", "9.33"),
}


@final
@dataclass(frozen=True)
class Sizes:
    """Rounds and min-sep."""

    rounds: int
    min_sep: int


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """The losses of the paper's mechanisms, and of three further mechanisms of this library."""
    clients = MinSep(sizes.rounds, sizes.min_sep)
    rivals: dict[str, Mechanism] = {
        **{name: make(clients) for name, make in TABLE_MECHANISMS.items()},
        "BLT(d=4, for RmsLoss)": blt(clients, 4, "rms"),
    }
    on_progress(None, "generalised BLTs")
    loss_names: dict[Objective, str] = {"max": "MaxLoss", "rms": "RmsLoss"}
    for objective, loss_name in loss_names.items():
        general_blt = optimize_general_blt(clients, 4, objective).mechanism
        rivals[f"generalised BLT(d=4, for {loss_name})"] = general_blt
    losses: dict[str, ErrorReport] = {}
    for name, mechanism in rivals.items():
        on_progress(None, name)
        losses[name] = mechanism.error_report(clients)
    memory = {name: mechanism.memory(sizes.rounds) for name, mechanism in rivals.items()}
    claims = [*_printed_claims(losses), *_text_claims(losses, sizes)]
    return Findings(_rows(losses, memory), claims)


def _rows(losses: Mapping[str, ErrorReport], memory: Mapping[str, int]) -> list[Row]:
    return [
        {
            "mechanism": name,
            "max_loss": loss.max_loss,
            "rms_loss": loss.rms_loss,
            "memory": memory[name],
            "printed_as_rms_loss": PRINTED.get(name, (None, None))[0],
            "printed_as_max_loss": PRINTED.get(name, (None, None))[1],
        }
        for name, loss in losses.items()
    ]


def _printed_claims(losses: Mapping[str, ErrorReport]) -> list[Claim]:
    """The claims about the printed numbers, whose column headers are swapped."""
    swapped = all(
        rounds_to(losses[name].max_loss, first) and rounds_to(losses[name].rms_loss, second)
        for name, (first, second) in PRINTED.items()
        if name in ("BandMF", "TreeAgg-Full", "BLT(d=2, k=1)", "BLT(d=2, k=6)")
    )
    claims = [
        holds(
            "The columns are headed RMS loss, then Max loss",
            False,
            "the other way round" if swapped else "neither way",
            "RMS above Max",
            "RmsLoss never exceeds MaxLoss; with the headers swapped the rows come out",
        )
    ]
    for name, (first, second) in PRINTED.items():
        max_claim = printed(f"{name}: MaxLoss (printed under RMS)", first, losses[name].max_loss)
        rms_claim = printed(
            f"{name}: RmsLoss (printed under Max)",
            second,
            losses[name].rms_loss,
            "it is optimised for MaxLoss, and better there"
            if max_claim.verdict == "better"
            else "",
        )
        claims += [max_claim, rms_claim]
    return claims


def _text_claims(losses: Mapping[str, ErrorReport], sizes: Sizes) -> list[Claim]:
    """The claims that the paper's text makes about the table."""
    bands, single = losses["BandMF"], losses["BLT(d=5, k=1)"]
    two = losses["BLT(d=2, k=6)"]
    more = losses["BLT(d=5, k=6)"].max_loss / losses["BLT(d=3, k=6)"].max_loss
    return [
        Claim("Memory, BandMF over 2 buffers", "171", sizes.min_sep / 2, "reproduces"),
        Claim("Memory, BandMF over 3 buffers", "114", sizes.min_sep / 3, "reproduces"),
        holds(
            "BLTs for one participation are noticeably worse (RmsLoss, k=1 over k=6)",
            single.rms_loss > 1.05 * two.rms_loss,
            single.rms_loss / two.rms_loss,
            "above 1",
        ),
        holds(
            "BLTs with 2 buffers are very competitive with BandMF (MaxLoss ratio)",
            two.max_loss < 1.1 * bands.max_loss,
            two.max_loss / bands.max_loss,
            "about 1",
        ),
        Claim(
            "More buffers are negligibly worse, which may be regularisation (MaxLoss, 5 over 3)",
            "about 1",
            more,
            "better" if more < 1 else "reproduces",
            "without a barrier more buffers never hurt" if more < 1 else "",
        ),
    ]


LOSSES = Item(
    "tab-sonwp-loss",
    "Losses at 2,052 rounds, min-sep 342 and 6 participations",
    Sizes(2052, 342),
    Sizes(120, 20),
    compute,
)
