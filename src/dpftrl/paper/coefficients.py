"""Toeplitz coefficients of BLTs: figure `blt_coeff` and table `c_inv_coef`.

The figure shows the coefficients of the three production BLTs and of their inverses. The table has
the time that it takes to compute the coefficients of C^-1, by solving or in closed form.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl import BLT, Toeplitz, mechanism
from dpftrl._internal.progress import Progress
from dpftrl.paper.item import Claim, Findings, Item, Row, curves, holds, looks, panels

PRESETS = ("blt-b100", "blt-b400", "blt-b1000")


@final
@dataclass(frozen=True)
class CurveSizes:
    """The number of lags to compute, and of lags to keep as points of the curves."""

    lags: int
    points: int


def coefficient_curves(sizes: CurveSizes, on_progress: Progress) -> Findings:
    """The coefficients of C and C^-1 at lags that are spread evenly on a logarithmic scale."""
    lags = np.unique(np.geomspace(1, sizes.lags - 1, sizes.points).round().astype(int))
    rows: list[Row] = []
    small_from: dict[str, int | None] = {}  # first lag with a coefficient below a hundredth
    for name in PRESETS:
        on_progress(None, name)
        blt = mechanism(name)
        if not isinstance(blt, BLT):
            raise TypeError("the presets are BLTs")
        strategy = blt.coefficients(sizes.lags)
        inverse = blt.inverse_coefficients(sizes.lags)
        small = np.flatnonzero(strategy[1:] < strategy[1] / 100)
        small_from[name] = int(small[0]) + 1 if len(small) else None
        for lag in lags.tolist():
            pair: Row = {"coefficient": float(strategy[lag]), "inverse": float(inverse[lag])}
            rows.append({"series": name, "lag": lag, **pair})
    claim = holds(
        "The coefficients for b = 100 decay faster than those for 400 and 1000 (lags to a "
        "hundredth of the first)",
        small_from["blt-b100"] is not None
        and all(later is None for name, later in small_from.items() if name != "blt-b100"),
        ", ".join(
            f"{name[4:]}: {lag or f'not in {sizes.lags:,}'}" for name, lag in small_from.items()
        ),
        "faster",
    )
    return Findings(rows, [claim])


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes, look = panels(figure, 2), looks(rows)
    curves(axes[0], rows, "lag", "coefficient", look)
    negated = [{**row, "inverse": -float(row["inverse"] or 0)} for row in rows]
    curves(axes[1], negated, "lag", "inverse", look)
    for panel, label, floor in (
        (axes[0], "coefficient of C", 1e-5),
        (axes[1], "minus the coefficient of C⁻¹", 1e-8),
    ):
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_ylim(floor, 1)
        panel.set_xlabel("lag (rounds)")
        panel.set_ylabel(label)
        panel.legend(frameon=False)


COEFFICIENTS = Item(
    "fig-blt-coeff",
    "Toeplitz coefficients of the three production BLTs",
    CurveSizes(4000, 60),
    CurveSizes(1500, 20),
    coefficient_curves,
    _draw,
)


# For each number of rounds, what the paper prints: the seconds by brute force and in closed form,
# and the speedup (compiled, on a V100).
PRINTED = {
    2000: ("0.021", "3.8e-5", "550"),
    20000: ("0.258", "3.6e-5", "7176"),
    200000: ("4.772", "4.5e-5", "104884"),
}


@final
@dataclass(frozen=True)
class TimeSizes:
    """Numbers of rounds; brute force is measured up to `solved_to` rounds."""

    rounds: tuple[int, ...]
    solved_to: int


def inverse_times(sizes: TimeSizes, on_progress: Progress) -> Findings:
    """The shortest time of a few runs of each method, and the difference of their results."""
    blt = mechanism("blt-b400")
    if not isinstance(blt, BLT):
        raise TypeError("the preset is a BLT")
    rows: list[Row] = []
    claims: list[Claim] = []
    for n in sizes.rounds:
        on_progress(None, f"{n:,} coefficients")
        closed = _seconds(lambda n=n: _closed(blt, n), 5)
        brute = agree = None
        if n <= sizes.solved_to:
            brute = _seconds(lambda n=n: _solved(blt, n), 5 if n < 10_000 else 2)
            agree = float(np.abs(_closed(blt, n) - _solved(blt, n)).max()) if n < 10**5 else None
        speedup = None if brute is None else brute / closed
        rows.append(
            {"rounds": n, "solved": brute, "closed": closed, "speedup": speedup, "differ_by": agree}
        )
        if brute is not None and n in PRINTED:
            claims += _time_claims(n, brute, closed)
    return Findings(rows, claims)


def _closed(blt: BLT, rounds: int) -> Any:
    """The coefficients of C^-1 in closed form."""
    theta_hat, omega_hat = blt.inverse_parameters()
    # This is equation 2 of the paper for the inverse BLT. Powers are exponentials of logarithms.
    powers = np.exp(np.multiply.outer(np.arange(rounds - 1.0), np.log(theta_hat)))
    return np.append(1.0, powers @ omega_hat)


def _solved(blt: BLT, rounds: int) -> Any:
    """The coefficients of C^-1 by solving a Toeplitz system."""
    return Toeplitz(blt.coefficients(rounds).tolist()).inverse_coefficients(rounds)


def _seconds(work: Callable[[], Any], runs: int) -> float:
    """The shortest time of several runs."""
    times: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _time_claims(rounds: int, brute: float, closed: float) -> list[Claim]:
    printed_brute, _, printed_speedup = PRINTED[rounds]
    quicker = brute < float(printed_brute)
    return [
        Claim(
            f"Seconds to solve for {rounds:,} coefficients",
            printed_brute,
            brute,
            "better" if quicker else "does not",
            "a dot product a step on one core, instead of a scan on a GPU"
            if quicker
            else "a shared core here, a V100 there",
        ),
        holds(
            f"Times faster in closed form, {rounds:,} coefficients",
            brute > 100 * closed,
            brute / closed,
            printed_speedup,
            "one core computes the closed form entry by entry, a GPU all at once",
        ),
    ]


CINV = Item(
    "tab-cinv",
    "Seconds for n Toeplitz coefficients of the inverse",
    TimeSizes((2000, 20_000, 200_000, 2_000_000), 200_000),
    TimeSizes((500, 2500), 2500),
    inverse_times,
)
