"""Accuracy in real trainings on poetry: the accuracy columns of table `sonwp`, and curves.

The paper trains on StackOverflow, which is not available here. Poems of the Song dynasty replace
it, with one client per poet. The claims about mechanisms are checked. The numbers are not
checked, because they depend on the text. All items here use the same trainings: the table, the
learning rates behind it, and accuracy against the privacy spent, as in the paper's production
figures.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpftrl._internal.progress import Progress
from dpftrl.accounting import rho_of
from dpftrl.paper.item import (
    Claim,
    Findings,
    Item,
    Row,
    column,
    curves,
    holds,
    legend_below,
    log_ticks,
    looks,
    panels,
    series_of,
)
from dpftrl.paper.trainings import (
    FULL,
    QUICK,
    REACH,
    Recipe,
    Trained,
    averaged,
    deviation,
    trainings,
    tunings,
)

# Printed accuracy in percent, for epsilon 2 and 8.
PRINTED = {
    "BandMF": {2.0: 23.21, 8.0: 24.86},
    "TreeAgg-Full": {2.0: 22.54, 8.0: 24.47},
    "BLT(d=2, k=1)": {2.0: 22.37, 8.0: 24.64},
    "BLT(d=5, k=1)": {2.0: 22.40, 8.0: 24.63},
    "BLT(d=2, k=6)": {2.0: 23.09, 8.0: 24.83},
    "BLT(d=3, k=6)": {2.0: 23.13, 8.0: 24.87},
    "BLT(d=4, k=6)": {2.0: 23.13, 8.0: 24.83},
    "BLT(d=5, k=6)": {2.0: 23.07, 8.0: 24.84},
}
FEW = ("BLT(d=2, k=6)", "BLT(d=3, k=6)")
OURS = (*FEW, "BLT(d=4, k=6)", "BLT(d=5, k=6)")
WORSE = ("TreeAgg-Full", "BLT(d=2, k=1)", "BLT(d=5, k=1)")
# Accuracies in percent by mechanism: one per seed, or the mean over the seeds.
BySeed = Mapping[str, Sequence[float]]
Means = Mapping[str, float]


def accuracies(recipe: Recipe, on_progress: Progress) -> Findings:
    """Accuracy of each mechanism at each epsilon, with its standard deviation over the seeds."""
    runs = list(trainings(recipe, on_progress))
    rows: list[Row] = []
    claims: list[Claim] = []
    for epsilon, _ in recipe.rates:
        by_mechanism = {
            name: [run for run in runs if (run.mechanism, run.epsilon) == (name, epsilon)]
            for name in recipe.mechanisms
        }
        rows += [_accuracy_row(name, seeds, recipe) for name, seeds in by_mechanism.items()]
        if len(by_mechanism) == len(PRINTED):
            accuracy = {
                name: _accuracies(seeds, recipe.rounds - REACH)
                for name, seeds in by_mechanism.items()
            }
            claims += accuracy_claims(epsilon, accuracy)
    return Findings(rows, claims)


def _accuracy_row(name: str, seeds: Sequence[Trained], recipe: Recipe) -> Row:
    """The row of one mechanism, from its trainings with all seeds at one epsilon."""
    last, epsilon = recipe.rounds - REACH, seeds[0].epsilon
    accuracy = _accuracies(seeds, last)
    return {
        "epsilon": epsilon,
        "mechanism": name,
        "noise_multiplier": seeds[0].noise_multiplier * recipe.stands_for,
        "accuracy": statistics.fmean(accuracy),
        "spread": deviation(accuracy),
        "by_seed": " ".join(f"{value:.2f}" for value in accuracy),
        "before": 100 * statistics.fmean(run.looks[0].accuracy for run in seeds),
        "perplexity": statistics.fmean(averaged(run, last, "perplexity") for run in seeds),
        "paper_on_stackoverflow": PRINTED[name][epsilon],
        "seconds": statistics.fmean(run.seconds for run in seeds),
    }


def _accuracies(seeds: Sequence[Trained], last: int) -> list[float]:
    """The accuracy of each training in percent, averaged over the rounds around `last`."""
    return [100 * averaged(run, last, "accuracy") for run in seeds]


def accuracy_claims(epsilon: float, accuracy: BySeed) -> list[Claim]:
    """The claims at one epsilon. A difference counts only if it exceeds two standard errors."""
    ours = {name: statistics.fmean(values) for name, values in accuracy.items()}
    paper = {name: PRINTED[name][epsilon] for name in accuracy}
    variance = statistics.fmean(deviation(values) ** 2 for values in accuracy.values())
    error = 2 * math.sqrt(variance * 2 / len(accuracy["BandMF"]))

    def few_against_bandmf(mean: Means) -> float:
        return max(mean[name] for name in FEW) - mean["BandMF"]

    def five_against_few(mean: Means) -> float:
        return mean["BLT(d=5, k=6)"] - max(mean[name] for name in FEW)

    def claim(text: str, our_gap: float, paper_gap: float, truth: bool) -> Claim:
        return holds(
            f"Epsilon {epsilon:g}: {text} (points of accuracy)",
            truth,
            our_gap,
            f"{paper_gap:+.2f}",
            f"two standard errors of a difference are {error:.2f}",
        )

    competitive, more = few_against_bandmf(ours), five_against_few(ours)
    claims = [
        claim(
            "BLT* with 2 or 3 buffers against BandMF: very competitive",
            competitive,
            few_against_bandmf(paper),
            competitive > -error,
        ),
        claim(
            "BLT* with 5 buffers against 2 or 3: negligible",
            more,
            five_against_few(paper),
            abs(more) < error,
        ),
    ]
    for name in WORSE:
        below, paper_gap = (mean[name] - max(mean[blt] for blt in OURS) for mean in (ours, paper))
        claims.append(
            claim(f"{name} against the best BLT*: worse", below, paper_gap, below < -error)
        )
    return claims


def _draw_accuracies(figure: Any, rows: Sequence[Row]) -> None:
    """Draw the accuracy of each mechanism, in one panel per epsilon."""
    parts = series_of(rows, "epsilon")
    axes = panels(figure, len(parts), sharey=True)
    look = looks([{"series": row["mechanism"]} for row in rows])
    for panel, (epsilon, part) in zip(axes, parts.items(), strict=True):
        for place, row in enumerate(part):
            style = look[str(row["mechanism"])]
            seeds = [float(seed) for seed in str(row["by_seed"]).split()]
            label = "one training" if place == 0 else None
            panel.plot(
                seeds, [place] * len(seeds), ".", color=style["color"], alpha=0.5, label=label
            )
            panel.errorbar(
                float(row["accuracy"] or 0),
                place,
                xerr=float(row["spread"] or 0),
                color=style["color"],
                marker=style["marker"],
                capsize=3,
                label="mean ± standard deviation" if place == 0 else None,
            )
        panel.axvline(
            column(part, "before")[0], color="0.5", linestyle=":", label="before training"
        )
        panel.set_yticks(range(len(part)), [str(row["mechanism"]) for row in part])
        panel.set_xlabel("accuracy on held-out poets (%)")
        panel.set_title(f"epsilon = {epsilon}")
    axes[0].invert_yaxis()
    legend_below(figure, axes[0])


ACCURACY = Item(
    "tab-sonwp-accuracy",
    "Accuracy after training on poetry with each mechanism, at epsilon 2 and 8",
    FULL,
    QUICK,
    accuracies,
    _draw_accuracies,
)


def tuned_rates(recipe: Recipe, on_progress: Progress) -> Findings:
    """The accuracy with each learning rate, and whether the trainings use the best rate."""
    last = recipe.rounds - REACH
    rows: list[Row] = [
        {
            "epsilon": training.epsilon,
            "mechanism": training.mechanism,
            "learning_rate": rate,
            "accuracy": 100 * averaged(training, last, "accuracy"),
            "perplexity": averaged(training, last, "perplexity"),
        }
        for rate, training in tunings(recipe, on_progress)
    ]
    claims: list[Claim] = []
    for epsilon, rate in recipe.rates:
        tried = [row for row in rows if row["epsilon"] == epsilon]
        best = max(tried, key=lambda row: float(row["accuracy"] or 0))["learning_rate"]
        text = f"Epsilon {epsilon:g}: the learning rate of all trainings is the best that was tried"
        claims.append(holds(text, best == rate, float(best or 0), "not in the paper"))
    return Findings(rows, claims)


TUNING = Item(
    "accuracy-tuning",
    "The learning rates behind the accuracies, tuned once on a BLT",
    FULL,
    QUICK,
    tuned_rates,
)


POINTS = 9  # points per curve


def privacy_utility_curves(recipe: Recipe, on_progress: Progress) -> Findings:
    """Accuracy and the rho spent, at evenly spaced rounds of each training."""
    runs = list(trainings(recipe, on_progress))
    step = (recipe.rounds - REACH) / POINTS
    middles = [round(step * (number + 1)) for number in range(POINTS)]
    rows: list[Row] = []
    for name in recipe.mechanisms:
        for epsilon, _ in recipe.rates:
            seeds = [run for run in runs if (run.mechanism, run.epsilon) == (name, epsilon)]
            rows += [_curve_point(recipe, name, epsilon, seeds, middle) for middle in middles]
    return Findings(rows, _curve_claims(rows))


def _curve_point(
    recipe: Recipe, name: str, epsilon: float, seeds: Sequence[Trained], middle: int
) -> Row:
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
    """The claims about the accuracy at the end, where all mechanisms have spent the same rho."""
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


def _draw_curves(figure: Any, rows: Sequence[Row]) -> None:
    """Draw one panel for each epsilon that a whole training spends."""
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
    privacy_utility_curves,
    _draw_curves,
    height=5.2,
)
