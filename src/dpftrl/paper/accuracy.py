"""Table `sonwp`, its accuracy columns: real trainings on poetry.

The paper trains on StackOverflow, which is not at hand; Song poets are real people too. What the
table says about mechanisms is checked, not its numbers: those are of another text.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpftrl.paper.findings import Claim, Findings, Item, Row, Say, column, holds, series_of
from dpftrl.paper.pictures import looks, panels
from dpftrl.paper.trainings import (
    FULL,
    QUICK,
    REACH,
    Recipe,
    Trained,
    averaged,
    deviation,
    trainings,
)

# As printed, for epsilon 2 and 8, in percent.
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
# Accuracies by mechanism, in percent: one of each seed, or their mean.
BySeed = Mapping[str, Sequence[float]]
Means = Mapping[str, float]


def compute(recipe: Recipe, say: Say) -> Findings:
    """Accuracy of each mechanism at each epsilon, with its spread over seeds."""
    runs = list(trainings(recipe, say))
    rows: list[Row] = []
    claims: list[Claim] = []
    for epsilon, _ in recipe.rates:
        same = {
            name: [one for one in runs if (one.mechanism, one.epsilon) == (name, epsilon)]
            for name in recipe.mechanisms
        }
        rows += [_row(name, ones, recipe) for name, ones in same.items()]
        if len(same) == len(PRINTED):
            accuracy = {
                name: _accuracies(ones, recipe.rounds - REACH) for name, ones in same.items()
            }
            claims += compared(epsilon, accuracy)
    return Findings(rows, claims)


def _row(name: str, same: Sequence[Trained], recipe: Recipe) -> Row:
    last, epsilon = recipe.rounds - REACH, same[0].epsilon
    accuracy = _accuracies(same, last)
    return {
        "epsilon": epsilon,
        "mechanism": name,
        "noise_multiplier": same[0].noise_multiplier * recipe.stands_for,
        "accuracy": statistics.fmean(accuracy),
        "spread": deviation(accuracy),
        "by_seed": " ".join(f"{one:.2f}" for one in accuracy),
        "before": 100 * statistics.fmean(one.looks[0].accuracy for one in same),
        "perplexity": statistics.fmean(averaged(one, last, "perplexity") for one in same),
        "paper_on_stackoverflow": PRINTED[name][epsilon],
        "seconds": statistics.fmean(one.seconds for one in same),
    }


def _accuracies(same: Sequence[Trained], last: int) -> list[float]:
    return [100 * averaged(one, last, "accuracy") for one in same]


def compared(epsilon: float, accuracy: BySeed) -> list[Claim]:
    """What the paper says at one epsilon; a difference counts from two standard errors on."""
    ours = {name: statistics.fmean(values) for name, values in accuracy.items()}
    paper = {name: PRINTED[name][epsilon] for name in accuracy}
    variance = statistics.fmean(deviation(values) ** 2 for values in accuracy.values())
    error = 2 * math.sqrt(variance * 2 / len(accuracy["BandMF"]))

    def few_against_bandmf(mean: Means) -> float:
        return max(mean[name] for name in FEW) - mean["BandMF"]

    def five_against_few(mean: Means) -> float:
        return mean["BLT(d=5, k=6)"] - max(mean[name] for name in FEW)

    def claim(text: str, found: float, said: float, truth: bool) -> Claim:
        return holds(
            f"Epsilon {epsilon:g}: {text} (points of accuracy)",
            truth,
            found,
            f"{said:+.2f}",
            f"two standard errors of a difference are {error:.2f}",
        )

    competitive, more = few_against_bandmf(ours), five_against_few(ours)
    found = [
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
        below, said = (mean[name] - max(mean[one] for one in OURS) for mean in (ours, paper))
        found.append(claim(f"{name} against the best BLT*: worse", below, said, below < -error))
    return found


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """Accuracy a mechanism, one panel an epsilon."""
    parts = series_of(rows, "epsilon")
    axes = panels(figure, len(parts), sharey=True)
    look = looks([{"series": row["mechanism"]} for row in rows])
    for one, (epsilon, part) in zip(axes, parts.items(), strict=True):
        for place, row in enumerate(part):
            style = look[str(row["mechanism"])]
            seeds = [float(seed) for seed in str(row["by_seed"]).split()]
            one.plot(seeds, [place] * len(seeds), ".", color=style["color"], alpha=0.5)
            one.errorbar(
                float(row["accuracy"] or 0),
                place,
                xerr=float(row["spread"] or 0),
                color=style["color"],
                marker=style["marker"],
                capsize=3,
            )
        one.axvline(column(part, "before")[0], color="0.5", linestyle=":", label="before training")
        one.set_yticks(range(len(part)), [str(row["mechanism"]) for row in part])
        one.set_xlabel("accuracy on held-out poets (%)")
        one.set_title(f"epsilon = {epsilon}")
    axes[0].invert_yaxis()
    axes[-1].legend(frameon=False, loc="center left")


ACCURACY = Item(
    "tab-sonwp-accuracy",
    "Accuracy after training on poetry with each mechanism, at epsilon 2 and 8",
    FULL,
    QUICK,
    compute,
    draw,
)
