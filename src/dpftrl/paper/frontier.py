"""Beyond the paper: loss against memory for every mechanism, with lower bounds on the loss."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dpftrl import BandedInverse, Mechanism, MinSep, SquareRoot, mechanism
from dpftrl._internal.progress import Progress
from dpftrl.optimize import optimize_band_inverse, optimize_band_toeplitz, optimize_general_blt
from dpftrl.paper.item import (
    FINE_STEPS,
    Claim,
    Findings,
    Item,
    Row,
    bandmf,
    blt,
    curves,
    holds,
    log_ticks,
    looks,
    panels,
)

BOUND = "lower bound"
KNOWN = "lower bound (nuclear norm)"


@final
@dataclass(frozen=True)
class Sizes:
    """Rounds and min-sep, and the numbers of buffers or bands to try."""

    rounds: int
    min_sep: int
    buffers: tuple[int, ...]
    inverse_bands: tuple[int, ...]
    bands: tuple[int, ...]
    general_bands: tuple[int, ...]


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """Loss and memory of each mechanism, and two lower bounds on RmsLoss."""
    clients = MinSep(sizes.rounds, sizes.min_sep)
    rows: list[Row] = []
    for series, label, build in _builders(sizes, clients):
        on_progress(None, f"{series} {label}")
        built = build()
        report = built.error_report(clients)
        rows.append(
            {
                "series": series,
                "of": label,
                "memory": built.memory(sizes.rounds),
                "rms_loss": report.rms_loss,
                "max_loss": report.max_loss,
                "sensitivity": report.sensitivity.kind,
            }
        )
    on_progress(None, "lower bounds")
    known, best = lower_bound(clients, (0.0,)), lower_bound(clients, (0.2, 0.3, 0.4, 0.5))
    for name, bound in ((KNOWN, known), (BOUND, max(known, best))):
        row: Row = {"series": name, "of": "", "memory": None, "rms_loss": bound}
        rows.append({**row, "max_loss": None, "sensitivity": ""})
    return Findings(rows, _claims(rows, max(known, best)))


def _claims(rows: Sequence[Row], bound: float) -> list[Claim]:
    def least(*series: str) -> float:
        kept = (row for row in rows if row["memory"] is not None)
        return min(float(r["rms_loss"] or 0) for r in kept if not series or r["series"] in series)

    factor = "RmsLoss of the best {} over the lower bound"
    return [
        holds(
            "No mechanism is below the lower bound (least RmsLoss over it)",
            least() >= bound,
            least() / bound,
            "not in the paper",
        ),
        *(
            holds(
                factor.format(name), least(name) >= bound, least(name) / bound, "not in the paper"
            )
            for name in ("BLT", "generalised BLT", "BandMF")
        ),
    ]


# The name of a series, the label of a point, and a function that builds the mechanism.
Builder = tuple[str, str, Callable[[], Mechanism]]


def _builders(sizes: Sizes, clients: MinSep) -> Iterator[Builder]:
    """Yield every mechanism of the figure, not yet built."""
    for d in sizes.buffers:
        yield "BLT", f"d={d}", lambda d=d: blt(clients, d, "rms")
    for d in sizes.buffers:
        yield (
            "generalised BLT",
            f"d={d}",
            lambda d=d: optimize_general_blt(clients, d, "rms").mechanism,
        )
    for p in sizes.inverse_bands:
        build = lambda p=p: optimize_band_inverse(clients, p).mechanism  # noqa: E731
        yield ("lambda" if p == 2 else "BandInvMF"), f"p={p}", build
    for p in sizes.bands:
        yield "BISR", f"p={p}", lambda p=p: BandedInverse.square_root(p)
    for p in sizes.bands:
        yield "BandToep", f"p={p}", lambda p=p: optimize_band_toeplitz(clients, p).mechanism
    for p in sizes.bands:
        yield "BandFHU", f"p={p}", lambda p=p: SquareRoot(p)
    for p in sizes.general_bands:
        yield "BandMF", f"p={p}", lambda p=p: bandmf(sizes.rounds, p)
    for name in ("tree-vanilla", "tree", "smooth-tree", "tree-full", "sqrt"):
        yield name, "", lambda name=name: mechanism(name, clients)


def lower_bound(clients: MinSep, correlations: Sequence[float]) -> float:
    """A lower bound on the RmsLoss of every factorization A = B C.

    Let u be a random contribution of one client. It has one entry per round, which is zero or a
    vector of norm 1. Let M = E[u u^T] and R R^T = M. Then sens(C)^2 >= E ||C u||^2 = tr(C M C^T).
    With ||A R||_* <= ||B||_F ||C R||_F it follows that RmsLoss >= ||A R||_* / sqrt(n). Here the
    client participates in the rounds j, j + b, ... for a uniform j, and all its entries have the
    same pairwise inner product. With inner product 0, this is the nuclear norm bound
    sqrt(k) ||A||_* / n.

    Args:
        clients: The participation. Min-sep must divide the rounds, so that every j has the same
            number of participations.
        correlations: The inner products to try. Each gives a bound; the largest is returned.
    """
    n, b, k = clients.rounds, clients.min_sep, clients.max_participations
    bounds: list[float] = []
    for inner in correlations:
        plain = (1 - inner) ** 0.5
        shared = ((1 - inner + inner * k) ** 0.5 - plain) / k
        root = plain * np.eye(k) + shared * np.ones((k, k))
        weighted = np.tri(n) @ _spread(root, b)
        bounds.append(float(np.linalg.svd(weighted, compute_uv=False).sum()) / n**0.5)
    return max(bounds)


def _spread(root: NDArray[np.float64], gap: int) -> NDArray[np.float64]:
    """R for all rounds, from `root`, the block of R for one of the `gap` possible first rounds."""
    n = len(root) * gap
    spread = np.einsum("st,ij->sitj", root, np.eye(gap) / gap**0.5)
    return spread.reshape(n, n)


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    (axes,) = panels(figure, 1)
    kept = [row for row in rows if row["memory"] is not None]
    curves(axes, kept, "memory", "rms_loss", looks(kept))
    for row in rows:
        if row["memory"] is None:
            dash, side = (":", "top") if row["series"] == KNOWN else ("-", "bottom")
            height = float(row["rms_loss"] or 0)
            axes.axhline(height, color="black", linewidth=1, linestyle=dash)
            where: Any = {"ha": "right", "va": side, "transform": axes.get_yaxis_transform()}
            axes.text(1, height, str(row["series"]), fontsize="small", **where)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis, FINE_STEPS)
    axes.set_xlabel("memory: model-sized vectors kept between rounds")
    axes.set_ylabel("RmsLoss")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


FRONTIER = Item(
    "fig-frontier",
    "Beyond the paper: loss against memory, with a lower bound",
    Sizes(2052, 342, (1, 2, 3, 4, 6), (2, 3, 4, 6, 8), (4, 16, 64, 171, 342), (16, 64, 342)),
    Sizes(60, 10, (1, 2, 4), (2, 3), (4, 10), (4, 10)),
    compute,
    _draw,
    height=5,
)
