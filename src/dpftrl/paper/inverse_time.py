"""Table `c_inv_coef`: time of computing the coefficients of C^-1, by solving or in closed form."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dpftrl import BLT, Toeplitz, mechanism
from dpftrl._internal.progress import Progress
from dpftrl.paper.findings import Claim, Findings, Item, Row, holds

# By rounds: printed seconds by brute force and in closed form, and speedup (compiled, on a V100).
PRINTED = {
    2000: ("0.021", "3.8e-5", "550"),
    20000: ("0.258", "3.6e-5", "7176"),
    200000: ("4.772", "4.5e-5", "104884"),
}


@final
@dataclass(frozen=True)
class Sizes:
    """Numbers of rounds; brute force is measured up to `solved_to` rounds."""

    rounds: tuple[int, ...]
    solved_to: int


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """Seconds of both methods, the shortest of a few runs, and the difference of their results."""
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
            claims += _claims(n, brute, closed)
    return Findings(rows, claims)


def _closed(blt: BLT, rounds: int) -> Any:
    """The coefficients of C^-1 in closed form."""
    theta_hat, omega_hat = blt.inverse_parameters()
    # Equation 2 applied to the inverse BLT; powers by logarithms, with one exponential per entry.
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


def _claims(rounds: int, brute: float, closed: float) -> list[Claim]:
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
    Sizes((2000, 20_000, 200_000, 2_000_000), 200_000),
    Sizes((500, 2500), 2500),
    compute,
)
