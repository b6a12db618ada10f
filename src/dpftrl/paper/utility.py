"""Accuracy against the privacy spent, as in the production figures, in trainings on poetry."""

import statistics
from collections.abc import Sequence
from typing import Any

from dpftrl._internal.progress import Progress
from dpftrl.accounting import rho_of
from dpftrl.paper.findings import Claim, Findings, Item, Row, holds, series_of
from dpftrl.paper.pictures import curves, legend_below, log_ticks, looks, panels
from dpftrl.paper.trainings import FULL, QUICK, REACH, Recipe, Trained, deviation, trainings

POINTS = 9  # per curve


def compute(recipe: Recipe, on_progress: Progress) -> Findings:
    """Accuracy and the rho spent, at evenly spaced rounds of each training."""
    runs = list(trainings(recipe, on_progress))
    step = (recipe.rounds - REACH) / POINTS
    middles = [round(step * (number + 1)) for number in range(POINTS)]
    rows: list[Row] = []
    for name in recipe.mechanisms:
        for epsilon, _ in recipe.rates:
            seeds = [run for run in runs if (run.mechanism, run.epsilon) == (name, epsilon)]
            rows += [_point(recipe, name, epsilon, seeds, middle) for middle in middles]
    return Findings(rows, _curve_claims(rows))


def _point(recipe: Recipe, name: str, epsilon: float, seeds: Sequence[Trained], middle: int) -> Row:
    """One point of a curve: rho and mean accuracy over all seeds, around the round `middle`."""
    around = [look for run in seeds for look in run.around(middle, REACH)]
    accuracy = [100 * look.accuracy for look in around]
    spent = min(seeds[0].looks, key=lambda look: abs(look.round - middle))
    return {
        "epsilon_of_run": epsilon,
        "series": name,
        "round": middle,
        "rho": rho_of(spent.epsilon, recipe.delta) / recipe.stands_for**2,
        "accuracy": statistics.fmean(accuracy),
        "deviation": deviation(accuracy),
    }


def _curve_claims(rows: Sequence[Row]) -> list[Claim]:
    """The claims about the accuracy at the end of training, where all have spent the same rho."""
    claims: list[Claim] = []
    for epsilon, part in series_of(rows, "epsilon_of_run").items():
        ends = {name: float(curve[-1]["accuracy"] or 0) for name, curve in series_of(part).items()}
        blts = [ends[name] for name in ends if name.startswith("BLT") and name.endswith("k=6)")]
        if blts and "TreeAgg-Full" in ends:
            claims.append(
                holds(
                    f"BLTs have the better privacy-utility curve than TreeAgg (end of the run of "
                    f"epsilon {float(epsilon):g}, points of accuracy)",
                    max(blts) > ends["TreeAgg-Full"],
                    max(blts) - ends["TreeAgg-Full"],
                    "better",
                )
            )
    return claims


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Draw one panel per epsilon of the whole training."""
    parts, look = series_of(rows, "epsilon_of_run"), looks(rows)
    axes = panels(figure, len(parts))
    for panel, (epsilon, part) in zip(axes, parts.items(), strict=True):
        curves(panel, part, "rho", "accuracy", look)
        log_ticks(panel.xaxis)
        panel.set_title(f"runs of epsilon = {epsilon}")
        panel.set_xlabel("rho spent (zCDP)")
        panel.set_ylabel("accuracy (%)")
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
