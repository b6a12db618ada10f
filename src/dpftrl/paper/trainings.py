"""Trainings with one mechanism after the other, everything else equal: each is run only once.

A training that was stopped goes on where it was; of one that is over, the cache keeps the numbers.
"""

import hashlib
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import final

import msgspec
from msgspec.structs import replace

from dpftrl import Mechanism, MinSep, __version__
from dpftrl._internal.cache import cache_folder
from dpftrl._internal.storage import read_json, replace_file
from dpftrl.accounting import account, calibrate
from dpftrl.errors import InvalidInput
from dpftrl.federated import RunFolder
from dpftrl.paper.findings import Claim, Findings, Item, Row, Say, holds
from dpftrl.paper.shared_mechanisms import TABLE_MECHANISMS
from dpftrl.plan import Fleet, Plan

TUNING_SEED = 100


@final
@dataclass(frozen=True)
class Recipe:
    """What all trainings share, and in what they differ.

    Attributes:
        settings: Changes to the defaults of `dpftrl train`, as `--set` takes them.
        rounds: Rounds of a training.
        min_sep: Rounds between two turns of a client.
        report_goal: Clients of a round.
        clients: All of them.
        stands_for: How many clients each of them stands for. Epsilon is that of a fleet, report
            goal and noise multiplier so many times as large, where the mean has the same noise.
        delta: Where epsilon is stated.
        rates: The server's learning rate for each epsilon.
        mechanisms: By their names in the paper's table.
        seeds: Trainings of each.
        tried: The learning rates that were tried for each epsilon, with `tuned_on` alone.
        tuned_on: The mechanism that all others take their learning rates from.
    """

    settings: tuple[str, ...]
    rounds: int
    min_sep: int
    report_goal: int
    clients: int
    stands_for: int
    delta: float
    rates: tuple[tuple[float, float], ...]
    mechanisms: tuple[str, ...]
    seeds: int
    tried: tuple[tuple[float, tuple[float, ...]], ...]
    tuned_on: str

    @property
    def participation(self) -> MinSep:
        """Which rounds a client may take part in."""
        return MinSep(self.rounds, self.min_sep)


@final
class Look(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model after a round, on held-out people."""

    round: int
    epsilon: float
    accuracy: float
    perplexity: float


@final
class Trained(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training that is over.

    Attributes:
        mechanism: By its name in the table.
        epsilon: That of the fleet which the clients stand for.
        seed: Of everything but the noise.
        noise_multiplier: Of the run itself.
        seconds: Since it was last started.
        looks: With epsilons of the run itself.
    """

    mechanism: str
    epsilon: float
    seed: int
    noise_multiplier: float
    seconds: float
    looks: list[Look]

    def around(self, middle: int, reach: int) -> list[Look]:
        """The looks at rounds from middle - reach to middle + reach."""
        return [one for one in self.looks if abs(one.round - middle) <= reach]


def trainings(recipe: Recipe, say: Say) -> Iterator[Trained]:
    """Every training of a recipe: seed by seed, so that a part of them is a smaller study."""
    for seed in range(recipe.seeds):
        for epsilon, rate in recipe.rates:
            for name in recipe.mechanisms:
                yield _one(recipe, name, epsilon, rate, seed, say)


def tunings(recipe: Recipe, say: Say) -> Iterator[tuple[float, Trained]]:
    """A training for each learning rate that was tried, with a seed that nothing else uses."""
    for epsilon, rates in recipe.tried:
        for rate in rates:
            yield rate, _one(recipe, recipe.tuned_on, epsilon, rate, TUNING_SEED, say)


def _one(recipe: Recipe, name: str, epsilon: float, rate: float, seed: int, say: Say) -> Trained:
    settings = (*recipe.settings, f"seed={seed}", f"server.learning_rate={rate}")
    numbers = (recipe.rounds, recipe.min_sep, recipe.report_goal, recipe.stands_for, recipe.delta)
    folder = _folder(name, epsilon, *numbers, *settings)
    result = folder.with_suffix(".json")
    if not result.exists():
        label = f"{name}, epsilon {epsilon:g}, seed {seed}"
        found = _trained(
            recipe, name, epsilon, settings, folder, lambda line: say(f"{label}{line}")
        )
        replace_file(result, msgspec.json.encode(found))
        shutil.rmtree(folder, ignore_errors=True)
    return read_json(result, Trained, "training")


def _trained(
    recipe: Recipe, name: str, epsilon: float, settings: tuple[str, ...], folder: Path, say: Say
) -> Trained:
    if find_spec("jax") is None or find_spec("equinox") is None:
        raise InvalidInput("training needs JAX: pip install 'dpftrl[train]'")
    from dpftrl.simulation import Progress, Training

    started = time.monotonic()
    say(": getting ready")
    # The witness of the run stays beside it: both are thrown away in the end.
    witness = folder / "witness"
    if RunFolder(folder / "run").exists:
        training = Training.resume(folder / "run", state_folder=witness)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # it was stopped before it had begun
        config = _config(settings, folder.parent, say)
        plan = _plan(recipe, TABLE_MECHANISMS[name](recipe.participation), epsilon)
        training = Training.begin(config, folder / "run", plan=plan, state_folder=witness)

    def tell(progress: Progress) -> None:
        say(f": round {progress.point.round}, {progress.accuracy:.2%}")

    with training:
        training.run(tell)
        return Trained(
            name,
            epsilon,
            training.config.seed,
            training.server.plan.noise_multiplier,
            round(time.monotonic() - started, 1),
            _looks(folder / "run" / "metrics.jsonl"),
        )


def _plan(recipe: Recipe, mechanism: Mechanism, epsilon: float) -> Plan:
    clients = recipe.participation
    noise_multiplier = calibrate(mechanism, clients, epsilon, recipe.delta) / recipe.stands_for
    fleet = Fleet(recipe.clients, recipe.report_goal)
    return Plan(fleet, account(mechanism, clients, noise_multiplier, recipe.delta))


def _config(settings: tuple[str, ...], folder: Path, say: Say):
    """The settings, with the public start that all trainings of a seed share."""
    from safetensors.numpy import save

    from dpftrl.simulation import load_training_task, read_config, starting_arrays

    config = read_config(None, settings)
    same = repr((config.task, config.data, config.model, config.seed))
    start = folder / f"{_key('start', same)}.safetensors"
    if not start.exists():
        say(": the public start")
        arrays = starting_arrays(config.model, load_training_task(config), config.seed)
        replace_file(start, save(arrays))
    return replace(config, model=replace(config.model, start=str(start), pretraining_steps=0))


def _looks(path: Path) -> list[Look]:
    from dpftrl.simulation import read_points

    return [
        Look(one.round, one.epsilon, one.accuracy, one.perplexity)
        for one in read_points(path)
        if one.accuracy is not None and one.perplexity is not None
    ]


def _folder(*parts: object) -> Path:
    folder = cache_folder() / "trainings"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / _key("training", repr(parts))


def _key(kind: str, text: str) -> str:
    return f"{kind}-{hashlib.sha256(f'{__version__} {text}'.encode()).hexdigest()[:24]}"


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
