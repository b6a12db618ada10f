"""Trainings that differ only in the mechanism, epsilon and seed, and the recipes for them.

Each training is run only once. An interrupted training is resumed. The numbers of a finished
training are kept in the cache.
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
from dpftrl._internal.progress import Progress
from dpftrl._internal.storage import read_json, replace_file
from dpftrl.accounting import account, calibrate
from dpftrl.errors import InvalidInput
from dpftrl.federated import RunFolder
from dpftrl.paper.item import TABLE_MECHANISMS
from dpftrl.plan import Fleet, Plan

TUNING_SEED = 100  # not one of the seeds of the trainings that are reported


@final
@dataclass(frozen=True)
class Recipe:
    """The settings of a series of trainings.

    Attributes:
        settings: Changes to the defaults of `dpftrl train`, in the format of `--set`.
        rounds: Rounds per training.
        min_sep: Smallest difference between two rounds of one client.
        report_goal: Clients per round.
        clients: Number of clients.
        stands_for: How many clients of a larger fleet each client represents. Epsilon is stated for
            that fleet: its population, report goal and noise multiplier are larger by this factor,
            so that the mean update has the same noise.
        delta: The delta of the guarantee.
        rates: Pairs of epsilon and the server's learning rate for it.
        mechanisms: Names of mechanisms in the paper's table.
        seeds: Number of seeds; each mechanism is trained once per seed.
        tried: Pairs of epsilon and the learning rates that were tried for it, with `tuned_on`.
        tuned_on: The mechanism with which the learning rates of all mechanisms were tuned.
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
        """The rounds in which a client may take part."""
        return MinSep(self.rounds, self.min_sep)


@final
class Look(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An evaluation of the model after a round, on held-out clients."""

    round: int
    epsilon: float
    accuracy: float
    perplexity: float


@final
class Trained(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished training.

    Attributes:
        mechanism: Name of the mechanism in the table.
        epsilon: Epsilon of the fleet that the clients represent (see `Recipe.stands_for`).
        seed: Seed of everything except the noise.
        noise_multiplier: Noise multiplier of the run itself.
        seconds: Duration since the training was last started or resumed.
        looks: The evaluations, with the epsilon of the run itself.
    """

    mechanism: str
    epsilon: float
    seed: int
    noise_multiplier: float
    seconds: float
    looks: list[Look]

    def around(self, middle: int, reach: int) -> list[Look]:
        """The evaluations after rounds from middle - reach to middle + reach."""
        return [look for look in self.looks if abs(look.round - middle) <= reach]


def trainings(recipe: Recipe, on_progress: Progress) -> Iterator[Trained]:
    """Yield every training of a recipe, seed by seed.

    The trainings with the first seeds are thus a complete smaller study.
    """
    for seed in range(recipe.seeds):
        for epsilon, rate in recipe.rates:
            for name in recipe.mechanisms:
                yield _run_once(recipe, name, epsilon, rate, seed, on_progress)


def tunings(recipe: Recipe, on_progress: Progress) -> Iterator[tuple[float, Trained]]:
    """Yield each learning rate that was tried, and its training with a separate seed."""
    for epsilon, rates in recipe.tried:
        for rate in rates:
            yield rate, _run_once(recipe, recipe.tuned_on, epsilon, rate, TUNING_SEED, on_progress)


def all_settings(recipe: Recipe) -> tuple[str, ...]:
    """The settings of a recipe, behind the defaults that its stored results were computed with."""
    task, *others = recipe.settings
    return (task, f"clip_norm={CLIP_NORMS[task]}", *DEFAULTS, *others)


def _run_once(
    recipe: Recipe, name: str, epsilon: float, rate: float, seed: int, on_progress: Progress
) -> Trained:
    """The training with these settings: from the cache, or run (or resumed) now."""
    settings = (*all_settings(recipe), f"seed={seed}", f"server.learning_rate={rate}")
    numbers = (recipe.rounds, recipe.min_sep, recipe.report_goal, recipe.stands_for, recipe.delta)
    folder = _folder(name, epsilon, *numbers, *settings)
    result = folder.with_suffix(".json")
    if not result.exists():
        label = f"{name}, epsilon {epsilon:g}, seed {seed}"
        trained = _train(
            recipe,
            name,
            epsilon,
            settings,
            folder,
            lambda fraction, line: on_progress(fraction, f"{label}{line}"),
        )
        replace_file(result, msgspec.json.encode(trained))
        shutil.rmtree(folder, ignore_errors=True)
    return read_json(result, Trained, "training")


def _train(
    recipe: Recipe,
    name: str,
    epsilon: float,
    settings: tuple[str, ...],
    folder: Path,
    on_progress: Progress,
) -> Trained:
    """Run a training in a folder, or resume the training that is there."""
    if find_spec("jax") is None or find_spec("equinox") is None:
        raise InvalidInput("training needs JAX: pip install 'dpftrl[train]'")
    from dpftrl.simulation import Training, TrainingProgress

    started = time.monotonic()
    on_progress(None, ": preparing")
    # The witness is kept beside the run: both are deleted when the training has finished.
    witness = folder / "witness"
    if RunFolder(folder / "run").exists:
        training = Training.resume(folder / "run", state_folder=witness)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interruption before round 1
        config = _config(settings, folder.parent, on_progress)
        plan = _plan(recipe, TABLE_MECHANISMS[name](recipe.participation), epsilon)
        training = Training.create(config, folder / "run", plan=plan, state_folder=witness)

    def on_round(progress: TrainingProgress) -> None:
        on_progress(None, f": round {progress.point.round}, {progress.accuracy:.2%}")

    with training:
        training.run(on_round)
        return Trained(
            name,
            epsilon,
            training.config.seed,
            training.server.plan.noise_multiplier,
            round(time.monotonic() - started, 1),
            _looks(folder / "run" / "metrics.jsonl"),
        )


def _plan(recipe: Recipe, mechanism: Mechanism, epsilon: float) -> Plan:
    """The plan of the run itself, whose noise multiplier is that of the fleet / `stands_for`."""
    clients = recipe.participation
    noise_multiplier = calibrate(mechanism, clients, epsilon, recipe.delta) / recipe.stands_for
    fleet = Fleet(recipe.clients, recipe.report_goal)
    return Plan(fleet, account(mechanism, clients, noise_multiplier, recipe.delta))


def _config(settings: tuple[str, ...], folder: Path, on_progress: Progress):
    """The training configuration, with the pretrained model that all trainings of a seed share."""
    from safetensors.numpy import save

    from dpftrl.simulation import load_training_task, read_config, starting_arrays

    config = read_config(None, settings)
    start_settings = repr((config.task, config.data, config.model, config.seed))
    start = folder / f"{_key('start', start_settings)}.safetensors"
    if not start.exists():
        on_progress(None, ": pretraining on public data")
        arrays = starting_arrays(config.model, load_training_task(config), config.seed)
        replace_file(start, save(arrays))
    return replace(config, model=replace(config.model, start=str(start), pretraining_steps=0))


def _looks(path: Path) -> list[Look]:
    """The evaluations in a metrics file."""
    from dpftrl.simulation import read_points

    return [
        Look(point.round, point.epsilon, point.accuracy, point.perplexity)
        for point in read_points(path)
        if point.accuracy is not None and point.perplexity is not None
    ]


def _folder(*parts: object) -> Path:
    """The folder in the cache for the training with these settings."""
    folder = cache_folder() / "trainings"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / _key("training", repr(parts))


def _key(kind: str, text: str) -> str:
    """A file name from a hash of the text and of the version of dpftrl."""
    return f"{kind}-{hashlib.sha256(f'{__version__} {text}'.encode()).hexdigest()[:24]}"


# Accuracy is averaged over this many rounds before and after a round, as in the production figures.
REACH = 10
# All contacted clients report, without delay: min-sep and participations are exactly as planned.
IDEAL_CLIENTS = (
    "simulation.drop_out=0.0",
    "simulation.straggler_share=0.0",
    "simulation.least_available=1.0",
    "simulation.most_available=1.0",
)
# The defaults of `dpftrl train` when the stored results were computed. They come before the
# settings of a recipe, so that the trainings do not follow newer defaults.
DEFAULTS = (
    "data.vocabulary_size=1000",
    'model={name="window",pretraining_steps=0,sizes={embedding=16,words=3,hidden=16}}',
    "client={epochs=1,batch_size=16,learning_rate=1.0}",
    'server={name="sgd",momentum=0.9,nesterov=false,schedule="constant"}',
)
CLIP_NORMS = {'task="poetry"': 0.3, 'task="chitchat"': 0.5}
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


def averaged(training: Trained, middle: int, metric: str) -> float:
    """Accuracy or perplexity, averaged over the evaluations around the round `middle`."""
    return statistics.fmean(getattr(look, metric) for look in training.around(middle, REACH))


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
