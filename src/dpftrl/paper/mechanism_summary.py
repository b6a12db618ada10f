"""Table `mechanism_summary`: measurements for its adjectives (low, medium, high)."""

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from dpftrl import Mechanism, MinSep, mechanism
from dpftrl._internal.progress import Progress
from dpftrl.errors import RoundsExceeded
from dpftrl.optimize import optimize_band_toeplitz, optimize_bandmf, optimize_blt
from dpftrl.paper.item import Claim, Findings, Item, Row, band_toeplitz, bandmf, blt, holds

LAST_STEPS = 6  # steps over which the time per step is measured


@final
@dataclass(frozen=True)
class Sizes:
    """Rounds and min-sep for the losses; rounds and bands for the growth of the time per step."""

    rounds: int
    min_sep: int
    growth_rounds: int
    growth_bands: int


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """One row per mechanism: cost, memory, losses, and losses under another participation."""
    clients = MinSep(sizes.rounds, sizes.min_sep)
    rivals: dict[str, Mechanism] = {
        "BLT": blt(clients, 4, "rms"),
        "BandMF": bandmf(sizes.rounds, sizes.min_sep),
        "BandToep": band_toeplitz(clients, sizes.min_sep),
        "TreeAgg": mechanism("tree"),
    }
    cost = _costs(sizes, on_progress)
    rows: list[Row] = []
    for name, rival in rivals.items():
        on_progress(None, f"{name}: losses")
        report = rival.error_report(clients)
        seconds, growth = cost[name]
        halved, doubled = _min_sep_fragility(rival, clients)
        rows.append(
            {
                "mechanism": name,
                "seconds": seconds,
                "growth": growth,
                "memory": rival.memory(sizes.rounds),
                "rms_loss": report.rms_loss,
                "max_loss": report.max_loss,
                "half_min_sep": halved,
                "twice_min_sep": doubled,
                "half_rounds": _fragility(rival, clients, rounds=sizes.rounds // 2),
                "twice_rounds": _fragility(rival, clients, rounds=2 * sizes.rounds),
            }
        )
    return Findings(rows, _claims({str(row["mechanism"]): row for row in rows}, sizes))


def _costs(sizes: Sizes, on_progress: Progress) -> dict[str, tuple[float, float | None]]:
    """By mechanism: seconds of an optimization, and the exponent of n in the time per step."""
    n, bands = sizes.growth_rounds, sizes.growth_bands
    on_progress(None, "time to optimise")
    quick = optimize_blt(MinSep(sizes.rounds, sizes.min_sep), 4, "rms").seconds
    ten_times = optimize_blt(MinSep(10 * sizes.rounds, 10 * sizes.min_sep), 4, "rms").seconds
    toeplitz = [
        _step_time(lambda on_step, n=n: _optimize_toeplitz(n, bands, on_step))
        for n in (4 * n, 16 * n)
    ]
    general = [
        _step_time(lambda on_step, n=n: _optimize_bandmf(n, bands, on_step)) for n in (n, 2 * n)
    ]
    home = MinSep(sizes.rounds, sizes.min_sep)
    with tempfile.TemporaryDirectory() as empty:
        slow = optimize_bandmf(home, sizes.min_sep, cache=empty).seconds
    return {
        "BLT": (quick, math.log10(ten_times / quick)),
        "BandMF": (slow, math.log2(general[1] / general[0])),
        "BandToep": (
            optimize_band_toeplitz(home, sizes.min_sep).seconds,
            math.log(toeplitz[1] / toeplitz[0], 4),
        ),
        "TreeAgg": (0.0, None),
    }


def _optimize_toeplitz(rounds: int, bands: int, on_step: Progress) -> None:
    optimize_band_toeplitz(MinSep(rounds, bands), bands, on_progress=on_step)


def _optimize_bandmf(rounds: int, bands: int, on_step: Progress) -> None:
    with tempfile.TemporaryDirectory() as empty:
        optimize_bandmf(MinSep(rounds, bands), bands, on_progress=on_step, cache=empty)


def _step_time(work: Callable[[Progress], None]) -> float:
    """The median time of the last steps; the first steps may belong to smaller problems."""
    times: list[float] = []
    work(lambda _fraction, _message: times.append(time.perf_counter()))
    last = times[-LAST_STEPS:]
    return statistics.median(b - a for a, b in pairwise(last))


def _min_sep_fragility(rival: Mechanism, clients: MinSep) -> tuple[float | None, float | None]:
    """The result of `_fragility` at half and at twice the expected min-sep."""
    b = clients.min_sep
    return _fragility(rival, clients, min_sep=b // 2), _fragility(rival, clients, min_sep=2 * b)


def _fragility(
    rival: Mechanism, clients: MinSep, rounds: int | None = None, min_sep: int | None = None
) -> float | None:
    """How much a mechanism loses if the participation is not the expected one.

    For each participation, the RmsLoss of the mechanism is divided by that of the best BLT. The
    result is this ratio at the other participation, divided by the ratio at the expected one; None
    if the mechanism cannot run for so many rounds.
    """
    other = MinSep(rounds or clients.rounds, min_sep or clients.min_sep)

    def ratio(at: MinSep) -> float:
        return rival.error_report(at).rms_loss / blt(at, 4, "rms").error_report(at).rms_loss

    try:
        return ratio(other) / ratio(clients)
    except RoundsExceeded:
        return None


def _claims(rows: dict[str, Row], sizes: Sizes) -> list[Claim]:
    def at(name: str, key: str) -> float:
        return float(rows[name][key] or 0)

    depth = math.ceil(math.log2(sizes.rounds))
    order = sorted(rows, key=lambda name: at(name, "rms_loss"))
    bands_min_sep, blt_min_sep = at("BandMF", "half_min_sep"), at("BLT", "half_min_sep")
    growth = at("BandMF", "growth")
    return [
        holds("BLT keeps about 4 vectors", at("BLT", "memory") <= 4, at("BLT", "memory"), "4"),
        holds(
            "BandMF keeps as many vectors as bands",
            abs(at("BandMF", "memory") - sizes.min_sep) <= 1,
            at("BandMF", "memory"),
            str(sizes.min_sep),
            "one less is enough: this round's row is not kept",
        ),
        holds(
            "TreeAgg keeps ceil(log2 n) vectors",
            at("TreeAgg", "memory") == depth,
            at("TreeAgg", "memory"),
            str(depth),
        ),
        holds(
            "Noise: BandMF lowest, BLT and BandToep low, TreeAgg high (RmsLoss in order)",
            order[0] == "BandMF" and order[-1] == "TreeAgg",
            ", ".join(f"{name} {at(name, 'rms_loss'):.2f}" for name in order),
            "in this order",
        ),
        holds(
            "A gradient of BandMF costs O(n^2) (exponent of n in the time of a step)",
            growth < 2.5,
            growth,
            "2",
            "the inverse of a banded matrix is dense, and its Gram matrix takes n^3",
        ),
        holds(
            "A gradient of a BLT costs O(n) (exponent)",
            at("BLT", "growth") <= 1,
            at("BLT", "growth"),
            "1",
        ),
        holds(
            "BandToep is optimised slower than BLTs (times)",
            at("BandToep", "seconds") > at("BLT", "seconds"),
            at("BandToep", "seconds") / at("BLT", "seconds"),
            "above 1",
        ),
        holds(
            "BandMF is the more fragile when min-sep is half of what was expected (extra loss, "
            "BandMF against BLT)",
            bands_min_sep > blt_min_sep,
            f"{bands_min_sep:.3f} against {blt_min_sep:.3f}",
            "Med against Low",
        ),
        holds(
            "BandMF cannot run past its n; BLT at twice the rounds loses",
            rows["BandMF"]["twice_rounds"] is None and at("BLT", "twice_rounds") < 1.1,
            at("BLT", "twice_rounds"),
            "little",
        ),
    ]


SUMMARY = Item(
    "tab-mech",
    "The mechanisms in short, with numbers for adjectives",
    Sizes(2052, 342, 512, 64),
    Sizes(96, 16, 64, 8),
    compute,
)
