"""Accuracy against the privacy spent, as in the production figures: real trainings on poetry."""

import statistics
from collections.abc import Sequence
from typing import Any

from dpftrl.accounting import rho_of
from dpftrl.paper.findings import Claim, Findings, Item, Row, Say, holds, series_of
from dpftrl.paper.pictures import curves, legend_below, log_ticks, looks, panels
from dpftrl.paper.trainings import FULL, QUICK, REACH, Recipe, Trained, deviation, trainings

# Points of a curve.
POINTS = 9


def compute(recipe: Recipe, say: Say) -> Findings:
    """Accuracy against what was spent, around some rounds of each training."""
    runs = list(trainings(recipe, say))
    step = (recipe.rounds - REACH) / POINTS
    middles = [round(step * (number + 1)) for number in range(POINTS)]
    rows: list[Row] = []
    for name in recipe.mechanisms:
        for epsilon, _ in recipe.rates:
            same = [one for one in runs if (one.mechanism, one.epsilon) == (name, epsilon)]
            rows += [_point(recipe, name, epsilon, same, middle) for middle in middles]
    return Findings(rows, _curve_claims(rows))


def _point(recipe: Recipe, name: str, epsilon: float, same: Sequence[Trained], middle: int) -> Row:
    around = [look for one in same for look in one.around(middle, REACH)]
    accuracy = [100 * look.accuracy for look in around]
    spent = min(same[0].looks, key=lambda look: abs(look.round - middle))
    return {
        "epsilon_of_run": epsilon,
        "series": name,
        "round": middle,
        "rho": rho_of(spent.epsilon, recipe.delta) / recipe.stands_for**2,
        "accuracy": statistics.fmean(accuracy),
        "deviation": deviation(accuracy),
    }


def _curve_claims(rows: Sequence[Row]) -> list[Claim]:
    """At the end of the training, for the same rho: who is closer to the top left?"""
    found: list[Claim] = []
    for epsilon, part in series_of(rows, "epsilon_of_run").items():
        ends = {name: float(one[-1]["accuracy"] or 0) for name, one in series_of(part).items()}
        blts = [ends[name] for name in ends if name.startswith("BLT") and name.endswith("k=6)")]
        if blts and "TreeAgg-Full" in ends:
            found.append(
                holds(
                    f"BLTs have the better privacy-utility curve than TreeAgg (end of the run of "
                    f"epsilon {float(epsilon):g}, points of accuracy)",
                    max(blts) > ends["TreeAgg-Full"],
                    max(blts) - ends["TreeAgg-Full"],
                    "better",
                )
            )
    return found


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """One panel an epsilon of the whole training."""
    parts, look = series_of(rows, "epsilon_of_run"), looks(rows)
    axes = panels(figure, len(parts))
    for one, (epsilon, part) in zip(axes, parts.items(), strict=True):
        curves(one, part, "rho", "accuracy", look)
        log_ticks(one.xaxis)
        one.set_title(f"runs of epsilon = {epsilon}")
        one.set_xlabel("rho spent (zCDP)")
        one.set_ylabel("accuracy (%)")
    legend_below(figure, axes[0])


UTILITY = Item(
    "fig-utility",
    "Accuracy against the privacy spent, while training on poetry",
    FULL,
    QUICK,
    compute,
    draw,
    height=5.2,
)
