"""Figures `extrapolate` and `varyn`: the guarantee when fleet, rounds or min-sep are others.

The paper's hypothesis: a report goal and a noise multiplier that grow together keep the utility,
and so does min-sep. What is compared is then rho alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

from dpftrl import Mechanism, MinSep, mechanism
from dpftrl.paper.findings import Claim, Findings, Item, Row, Say, holds, series_of
from dpftrl.paper.pictures import curves, legend_below, log_ticks, looks, panels
from dpftrl.paper.shared_mechanisms import bandmf
from dpftrl.plan import Fleet

GOAL = 6500
POPULATIONS = (3_000_000, 10_000_000)


@final
@dataclass(frozen=True)
class Rival:
    """A production mechanism with its noise multiplier at a report goal of 6,500."""

    name: str
    mechanism: Mechanism
    noise_multiplier: float

    def rho(self, participation: MinSep, scale: float = 1.0) -> float | None:
        """The zCDP guarantee; None past the rounds that the mechanism has."""
        if (last := self.mechanism.rounds) is not None and last < participation.rounds:
            return None
        sensitivity = self.mechanism.sensitivity(participation).value
        return (sensitivity / (self.noise_multiplier * scale)) ** 2 / 2


@final
@dataclass(frozen=True)
class Sizes:
    """Report goals, rounds and min-seps to walk over, and the rounds that BandMF is made for."""

    goals: tuple[int, ...]
    rounds: tuple[int, ...]
    min_seps: tuple[int, ...]
    bandmf_rounds: int


def _rivals(sizes: Sizes, say: Say) -> list[Rival]:
    """The es-ES and id-ID settings.

    The scale of the production BandMF is not given; this is the reading under which its sigma of
    1.411 gives about the guarantee of the BLT: sensitivity 1 for what the matrix was made for.
    """
    say("BandMF")
    n = sizes.bandmf_rounds
    bands = n // 5
    made = bandmf(n, bands)
    unit = made.sensitivity(MinSep(n, bands)).value
    return [
        Rival("BLT(b=400)", mechanism("blt-b400"), 7.379),
        Rival("BandMF(400)", made, 1.411 * unit),
        Rival("TreeAgg", mechanism("tree"), 7.0),
    ]


def extrapolate(sizes: Sizes, say: Say) -> Findings:
    """By report goal for two populations, then by min-sep for two caps."""
    rivals = _rivals(sizes, say)
    rows = [*_by_goal(sizes, rivals, say), *_by_min_sep(sizes, rivals, say)]
    return Findings(rows, _claims(rows, sizes))


def _by_goal(sizes: Sizes, rivals: Sequence[Rival], say: Say) -> Iterator[Row]:
    for population in POPULATIONS:
        for rounds in sizes.rounds:
            for goal in sizes.goals:
                say(f"{population:,} devices, {rounds:,} rounds, report goal {goal:,}")
                clients = MinSep(rounds, Fleet(population, goal).min_sep())
                for one in rivals:
                    if (rho := one.rho(clients, goal / GOAL)) is None:
                        continue
                    yield {
                        "panel": f"population {population // 10**6}M",
                        "series": f"{one.name}, {rounds:,} rounds",
                        "x": goal,
                        "min_sep": clients.min_sep,
                        "participations": clients.max_participations,
                        "rho": rho,
                    }


def _by_min_sep(sizes: Sizes, rivals: Sequence[Rival], say: Say) -> Iterator[Row]:
    rounds = sizes.rounds[-2]
    for panel, cap in (("as often as min-sep allows", rounds), ("at most twice", 2)):
        for min_sep in sizes.min_seps:
            say(f"min-sep {min_sep}, {panel}")
            clients = MinSep(rounds, min_sep, cap)
            for one in rivals:
                yield {
                    "panel": panel,
                    "series": f"{one.name}, {rounds:,} rounds",
                    "x": min_sep,
                    "min_sep": min_sep,
                    "participations": clients.max_participations,
                    "rho": one.rho(clients),
                }


def _claims(rows: Sequence[Row], sizes: Sizes) -> list[Claim]:
    table = {(row["panel"], row["series"], row["x"]): row["rho"] for row in rows}

    def rho(panel: str, series: str, x: int) -> float:
        return float(table[panel, series, x] or 0)

    middle, longest = sizes.rounds[-2], sizes.rounds[-1]
    blt, bands, tree = (
        f"{name}, {middle:,} rounds" for name in ("BLT(b=400)", "BandMF(400)", "TreeAgg")
    )
    goals = [(f"population {p // 10**6}M", goal) for p in POPULATIONS for goal in sizes.goals]
    over_bands = [rho(p, blt, goal) / rho(p, bands, goal) for p, goal in goals]
    over_tree = [rho(p, blt, goal) / rho(p, tree, goal) for p, goal in goals]
    first, last = sizes.goals[0], sizes.goals[-1]
    gain = max(rho(p, blt, last) / rho(p, blt, first) for p, _ in goals)
    large = "population 10M"
    longer = rho(large, f"BLT(b=400), {longest:,} rounds", first) / rho(large, blt, first)
    apart = rho("at most twice", blt, sizes.min_seps[-1]) / rho(
        "at most twice", blt, sizes.min_seps[0]
    )
    return [
        holds(
            "BLT has the stronger guarantee than BandMF (rho over rho, least and most)",
            max(over_bands) < 1.02,
            f"{min(over_bands):.2f} to {max(over_bands):.2f}",
            "below 1",
            "with our BandMF under our reading of its scale, which is not given",
        ),
        holds(
            "... and than TreeAgg (largest rho over rho)",
            max(over_tree) < 1,
            max(over_tree),
            "below 1",
        ),
        holds(
            f"A larger report goal gives a stronger guarantee (rho at {last:,} over {first:,}, at "
            "worst)",
            gain < 1,
            gain,
            "below 1",
        ),
        holds(
            f"More rounds need not cost privacy where min-sep is large (10M, goal {first:,}: rho "
            f"of {longest:,} over {middle:,} rounds)",
            longer < 1.05,
            longer,
            "about 1",
        ),
        holds(
            "A larger min-sep gives a smaller rho (last over first)", apart < 1, apart, "below 1"
        ),
        _smoother(rows),
    ]


def _smoother(rows: Sequence[Row]) -> Claim:
    """Compare the largest step of rho from one min-sep to the next."""
    steps: dict[str, float] = {}
    part = [row for row in rows if row["panel"] == "at most twice"]
    for name, curve in series_of(part).items():
        values = [float(row["rho"] or 0) for row in curve]
        steps[name.split("(")[0]] = max(a / b for a, b in pairwise(values))
    return holds(
        "BLT has the smoother transition over min-seps (largest fall of rho in one step, BLT "
        "against BandMF)",
        steps["BLT"] < steps["BandMF"],
        f"{steps['BLT']:.2f} against {steps['BandMF']:.2f}",
        "smoother",
    )


def _looks(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """A colour and a marker a mechanism, a dash a number of rounds."""
    by_name = looks([{"series": str(row["series"]).partition(", ")[0]} for row in rows])
    by_rounds = looks([{"series": str(row["series"]).partition(", ")[2]} for row in rows])
    return {
        name: {**by_name[first], "linestyle": by_rounds[second]["linestyle"]}
        for name in series_of(rows)
        for first, _, second in [name.partition(", ")]
    }


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    axes, look = panels(figure, 2, 2), _looks(rows)
    for one, (panel, part) in zip(axes, series_of(rows, "panel").items(), strict=True):
        curves(one, part, "x", "rho", look)
        log_ticks(one.xaxis)
        log_ticks(one.yaxis)
        one.set_title(panel)
        is_goal = panel.startswith("population")
        one.set_xlabel("report goal (noise scales with it)" if is_goal else "min-sep (rounds)")
        one.set_ylabel("rho (zCDP)")
    legend_below(figure, axes[0], 3)


EXTRAPOLATE = Item(
    "fig-extrapolate",
    "The guarantee by population, report goal, rounds and min-sep",
    Sizes(
        (500, 1000, 2000, 3000, 4500, 6500, 9000, 13_000, 20_000),
        (1000, 2000, 4000),
        (100, 150, 200, 250, 300, 350, 399, 400, 450, 500, 600, 700, 800, 1000),
        2000,
    ),
    Sizes((2000, 6500, 13_000), (50, 100, 200), (10, 20, 40, 60), 100),
    extrapolate,
    _draw,
    height=8,
)
