"""The trainings behind the accuracies: eight mechanisms, two epsilons, three seeds, on poetry."""

import statistics
from collections.abc import Sequence

from dpftrl.paper.made import TABLE_MECHANISMS
from dpftrl.paper.trainings import Recipe, Trained

# Rounds before and after one over which accuracy is averaged, as in the production figures.
REACH = 10
# Everybody answers, at once: min-sep and participations are exactly what the noise is made for.
IDEAL_CLIENTS = (
    "simulation.drop_out=0.0",
    "simulation.straggler_share=0.0",
    "simulation.least_available=1.0",
    "simulation.most_available=1.0",
)
FULL = Recipe(
    settings=(
        'task="poetry"',
        "data.sentences_per_user=16",
        "model.pretraining_steps=0",
        "evaluate_every=10",
        *IDEAL_CLIENTS,
        "server.momentum=0.9",
    ),
    rounds=342,
    min_sep=57,
    report_goal=136,
    clients=7793,
    stands_for=4,
    delta=1e-5,
    rates=((2.0, 3.0), (8.0, 10.0)),
    mechanisms=tuple(TABLE_MECHANISMS),
    seeds=3,
    tried=((2.0, (1.0, 3.0, 10.0)), (8.0, (1.0, 3.0, 10.0, 30.0))),
    tuned_on="BLT(d=4, k=6)",
)
QUICK = Recipe(
    settings=(
        'task="chitchat"',
        "data.vocabulary_size=50",
        "data.sentences_per_user=2",
        "evaluate_every=2",
        "evaluate_sentences=50",
        *IDEAL_CLIENTS,
        "server.momentum=0.9",
    ),
    rounds=24,
    min_sep=4,
    report_goal=4,
    clients=1174,
    stands_for=1,
    delta=1e-4,
    rates=((8.0, 1.0),),
    mechanisms=("TreeAgg-Full", "BLT(d=2, k=6)"),
    seeds=1,
    tried=((8.0, (1.0,)),),
    tuned_on="BLT(d=2, k=6)",
)


def averaged(one: Trained, middle: int, what: str) -> float:
    """Accuracy or perplexity, averaged over the rounds around one."""
    return statistics.fmean(getattr(look, what) for look in one.around(middle, REACH))


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
