"""The learning rates behind the accuracies: tuned once, on a BLT, for all mechanisms."""

from dpftrl.paper.findings import Claim, Findings, Row, Say, holds
from dpftrl.paper.item import Item
from dpftrl.paper.recipes import FULL, QUICK, REACH, averaged
from dpftrl.paper.trainings import Recipe, tunings


def compute(recipe: Recipe, say: Say) -> Findings:
    """The learning rates that were tried, and whether the trainings use the best of them."""
    last = recipe.rounds - REACH
    rows: list[Row] = [
        {
            "epsilon": one.epsilon,
            "mechanism": one.mechanism,
            "learning_rate": rate,
            "accuracy": 100 * averaged(one, last, "accuracy"),
            "perplexity": averaged(one, last, "perplexity"),
        }
        for rate, one in tunings(recipe, say)
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
    compute,
)
