"""The main job: train privately on real people's chats, twice, and say what may be published.

Once with a BLT and once with a binary tree, at the same epsilon; then what the same training would
guarantee for a fleet of millions.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dpftrl import MinSep, account
from dpftrl._internal.formatting import rounded_up
from dpftrl.plan import Fleet, load_plan
from dpftrl.simulation.config import read_config
from dpftrl.simulation.training import load_training_task
from dpftrl.tasks.evaluation import unigram_accuracy

OUT = Path("out")
MILLIONS = Fleet(population=4_000_000, report_goal=6_500)
DELTA = 1e-10
RUNS = {"blt": "a BLT made for it", "tree": "TreeAgg"}


def main() -> None:
    results = {name: train(name, what) for name, what in RUNS.items()}
    compare(results)
    print("\nDid the run keep what it promised? (dpftrl verify)", flush=True)
    command("verify", str(OUT / "blt"))
    command("export", str(OUT / "blt"), str(OUT / "model.safetensors"))
    at_scale()
    print(f"\nWhat may be published about it: {OUT / 'blt' / 'statement.md'} (and .html)")


def train(name: str, what: str) -> dict:
    print(f"\nTraining with {what}", flush=True)
    run = OUT / name
    shutil.rmtree(run, ignore_errors=True)
    command("train", "--out", str(run), "--set", f'privacy.mechanism="{name}"')
    points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {**points[-1], "sigma": load_plan(run / "plan.json").noise_multiplier}


def compare(results: dict[str, dict]) -> None:
    config = read_config(None)
    task = load_training_task(config)
    table = Table(title="\nThe same clients, model and epsilon")
    for column in ("noise", "accuracy", "perplexity", "noise multiplier", "epsilon"):
        table.add_column(column, justify="left" if column == "noise" else "right")
    for name, one in results.items():
        numbers = (
            f"{one['accuracy']:.2%}",
            f"{one['perplexity']:.0f}",
            f"{one['noise_multiplier']:.3f}",
        )
        table.add_row(RUNS[name], *numbers, rounded_up(one["epsilon"]))
    baseline = unigram_accuracy(task.heldout.sentences, task.heldout.sentences)
    table.add_row("(commonest word)", f"{baseline:.2%}", "", "", "")
    Console().print(table)
    print(f"Accuracy on {len(task.heldout)} held-out people; delta {config.privacy.delta:g}.")
    print("One run each: accuracy moves by up to a percent from run to run, perplexity by less.")


def at_scale() -> None:
    """The paper's scaling: noise and report goal that grow together keep the utility."""
    plan = load_plan(OUT / "blt" / "plan.json")
    factor = MILLIONS.report_goal / plan.fleet.report_goal
    clients = MinSep(plan.participation.rounds, MILLIONS.min_sep())
    there = account(plan.mechanism, clients, plan.noise_multiplier * factor, DELTA)
    print(
        f"\n{plan.fleet.population:,} people are too few for a strong guarantee at this accuracy: "
        f"epsilon is {rounded_up(plan.guarantee.epsilon, 3)} at delta {plan.guarantee.delta:g}.\n"
        f"With {MILLIONS.population:,} devices, {MILLIONS.report_goal:,} reports a round and noise "
        f"{factor:.0f} times as large, the signal stands out as much as here\n"
        f"(the paper's hypothesis), and the same training guarantees epsilon "
        f"{rounded_up(there.epsilon, 2)} at delta {DELTA:g}."
    )


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dpftrl", *arguments], check=True)


if __name__ == "__main__":
    main()
