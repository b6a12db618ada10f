"""What each ingredient of the default settings brings, at the same epsilon.

`python benchmarks/ablation.py chitchat` trains with the defaults and with one ingredient taken away
at a time. Accuracy is that of validation people: a part of the training people, chosen by a hash of
their names, whom these trainings leave out. `--final` trains the defaults and the earlier defaults
with five seeds, and reports the held-out people, who decided nothing. Every training is kept in
--runs: a benchmark that was interrupted goes on.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from _small_settings import CHITCHAT, POETRY
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from dpftrl.federated import RunFolder, Server, Settings
from dpftrl.simulation.config import Config, read_config
from dpftrl.simulation.training import (
    Training,
    load_training_task,
    make_plan,
    starting_model,
)
from dpftrl.tasks.task import Task, chance

HERE = Path(__file__).parent
# Share of the training people who are left out of these trainings, to choose settings on.
VALIDATION_SHARE = 0.15
EARLIER = {"chitchat": CHITCHAT, "poetry": POETRY}
WITHOUT = {
    "chitchat": {
        "the defaults": [],
        "no public pre-training": ["model.pretraining_steps=0"],
        "no cooldown of the learning rate": ['server.schedule="constant"'],
        "twice the learning rate": ["server.learning_rate=1.0"],
        "report goal 100": ["privacy.report_goal=100"],
        "60 rounds": ["privacy.rounds=60"],
        "epsilon 1000": ["privacy.epsilon=1000.0"],
        "TreeAgg": ['privacy.mechanism="tree"'],
        "the earlier defaults": CHITCHAT,
    },
    "poetry": {
        "the defaults": [],
        "a quarter of the pre-training": ["model.pretraining_steps=1000"],
        "the earlier, smaller model": ["model.sizes={embedding=16,words=3,hidden=16}"],
        "no cooldown of the learning rate": ['server.schedule="constant"'],
        "TreeAgg": ['privacy.mechanism="tree"'],
        "the earlier defaults": POETRY,
    },
}


def main() -> None:
    """Train every variant that is not there yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(WITHOUT))
    parser.add_argument("--final", action="store_true", help="held-out people, five seeds")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--runs", type=Path, default=Path("out/ablation"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ablation.json")
    chosen = parser.parse_args()
    seeds = chosen.seeds or (5 if chosen.final else 2)
    variants = WITHOUT[chosen.task]
    if chosen.final:
        variants = {name: variants[name] for name in ("the defaults", "the earlier defaults")}
    people = "held-out people" if chosen.final else "validation people"
    stored = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    section = stored.setdefault(f"{chosen.task}, {people}", {})
    for name, changes in variants.items():
        if chosen.only and name not in chosen.only:
            continue
        runs = [
            one_run(chosen.task, name, changes, seed, chosen.final, chosen.runs)
            for seed in range(seeds)
        ]
        section[name] = {"settings": changes, "runs": runs}
        chosen.out.write_text(json.dumps(stored, indent=2) + "\n")
    show(f"{chosen.task}, {people}", section)


def one_run(
    task_name: str, name: str, changes: list[str], seed: int, final: bool, runs: Path
) -> dict:
    """One training, from the beginning or from where it stopped; its result is kept."""
    people = "final" if final else "validation"
    folder = runs / f"{task_name}-{people}-{name.replace(' ', '-')}-{seed}"
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    config = read_config(None, [f'task="{task_name}"', *changes, f"seed={seed}"])
    task = load_training_task(config)
    if not final:
        task = with_validation(task)
    started = time.monotonic(), time.process_time()
    with training_in(folder, config, task) as training:
        before = None if training.server.rounds else training.evaluate().accuracy
        training.run()
        evaluated = training.evaluate()
    found = {
        "seed": seed,
        "start_accuracy": before,
        "accuracy": evaluated.accuracy,
        "perplexity": evaluated.perplexity,
        "noise_multiplier": training.server.plan.noise_multiplier,
        "epsilon": training.server.epsilon,
        "seconds": round(time.monotonic() - started[0], 1),
        "cpu_seconds": round(time.process_time() - started[1], 1),
    }
    result.write_text(json.dumps(found))
    print(f"{task_name}, {name}, seed {seed}: {evaluated.accuracy:.2%}", flush=True)
    return found


def with_validation(task: Task) -> Task:
    """The task without its held-out people: a part of the training people takes their place."""
    names = task.train.names
    is_validation = [chance(name, "validation") < VALIDATION_SHARE for name in names]
    train = [number for number, held in enumerate(is_validation) if not held]
    validation = [number for number, held in enumerate(is_validation) if held]
    groups = task.train.select(train), task.train.select(validation)
    return Task(task.name, task.source, task.vocabulary, *groups, task.public)


def training_in(folder: Path, config: Config, task: Task) -> Training:
    """The training in a folder: created, or resumed."""
    witness = folder / "witness"
    if RunFolder(folder / "run").exists:
        server = Server.resume(folder / "run", state_folder=witness)
    else:
        settings = Settings(
            clip_norm=config.clip_norm,
            optimizer=config.server,
            seed=config.seed,
            snapshot_every=config.snapshot_every,
        )
        server = Server.create(
            folder / "run",
            make_plan(config.privacy, len(task.train)),
            settings,
            starting_model(config.model, task, config.seed),
            state_folder=witness,
        )
    # Evaluated at the start and at the end only, but on all sentences of the people.
    every = config.privacy.rounds
    config = replace(config, evaluate_sentences=10**9, evaluate_every=every)
    return Training(config, task, server, witness)


def show(title: str, section: dict) -> None:
    """A table with means and spreads."""
    table = Table("variant", "accuracy", "spread", "perplexity", "seeds", "CPU s", title=title)
    for name, variant in section.items():
        runs = variant["runs"]
        accuracies = [run["accuracy"] for run in runs]
        spread = statistics.stdev(accuracies) if len(runs) > 1 else 0.0
        table.add_row(
            name,
            f"{statistics.fmean(accuracies):.2%}",
            f"{spread:.2%}",
            f"{statistics.fmean(run['perplexity'] for run in runs):.1f}",
            str(len(runs)),
            f"{statistics.fmean(run['cpu_seconds'] for run in runs):.0f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
