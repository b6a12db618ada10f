"""`dpftrl tune` against a grid search that may see the people of the training.

`python benchmarks/tune.py chitchat` tunes as a user would, on the default stand-in. It trains with
the settings that come out on the people of the task, and with every point of a grid of clip norms
and learning rates of the server. Accuracy is that of validation people (see `ablation.py`). The
grid search is an oracle: choosing by that accuracy would not be private, and the best of many
trainings is also the luckiest. Every training is kept in --runs: a benchmark that was interrupted
goes on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from ablation import one_run
from rich.console import Console
from rich.table import Table

from dpftrl.simulation.config import PRESETS

HERE = Path(__file__).parent
# Factors of the default clip norm and of the server's default learning rate.
GRID = (0.5, 1.0, 2.0)
GOAL = 0.05  # the largest relative loss of accuracy against the best point of the grid


def main() -> None:
    """Tune, train with the result and on the grid, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("chitchat", "poetry"))
    parser.add_argument("--minutes", type=float, default=10.0, help="time budget of the tuning")
    parser.add_argument("--seeds", type=int, default=2, help="trainings with the tuned settings")
    parser.add_argument("--runs", type=Path, default=Path("out/tune"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tune.json")
    chosen = parser.parse_args()
    tuned = tune(chosen.task, chosen.minutes, chosen.runs)
    changes = [as_toml(name, value) for name, value in tuned["changes"].items()]

    def accuracy(name: str, changes: list[str], seed: int) -> float:
        return one_run(chosen.task, name, changes, seed, False, chosen.runs)["accuracy"]

    grid = [
        {"settings": point, "accuracy": accuracy(f"grid-{place}", point, 0)}
        for place, point in enumerate(grid_points(chosen.task))
    ]
    best = max(grid, key=lambda point: point["accuracy"])
    seeds = range(chosen.seeds)
    result = {
        "stand_in": tuned["stand_in"],
        "minutes": chosen.minutes,
        "tuning_seconds": tuned["seconds"],
        "tuned_settings": changes,
        "defaults": [accuracy("grid-defaults", [], seed) for seed in seeds],
        "tuned": [accuracy("tuned", changes, seed) for seed in seeds],
        "best_of_grid": best,
        "grid": grid,
    }
    result["loss"] = 1 - statistics.fmean(result["tuned"]) / best["accuracy"]
    stored = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    stored[chosen.task] = result
    chosen.out.write_text(json.dumps(stored, indent=2) + "\n")
    show(chosen.task, result)


def tune(task: str, minutes: float, runs: Path) -> dict:
    """Run `dpftrl tune` on the defaults of a task; its result is kept."""
    kept, config = runs / f"{task}-tuned.json", runs / f"{task}.toml"
    if kept.exists():
        return json.loads(kept.read_text())
    runs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dpftrl", "tune", "--set", f'task="{task}"', "--json"]
    command += ["--minutes", str(minutes), "--out", str(config)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    result = json.loads(done.stdout) | {"seconds": round(time.monotonic() - started, 1)}
    kept.write_text(json.dumps(result))
    return result


def as_toml(name: str, value: float | dict[str, int]) -> str:
    """One setting, as `--set` takes it."""
    if isinstance(value, dict):
        return f"{name}={{{','.join(f'{size}={width}' for size, width in value.items())}}}"
    return f"{name}={value}"


def grid_points(task: str) -> list[list[str]]:
    """The settings of every point of the grid."""
    preset = PRESETS[task]
    return [
        [f"clip_norm={preset.clip_norm * clip}", f"server.learning_rate={rate}"]
        for clip, rate in product(GRID, [preset.server.learning_rate * factor for factor in GRID])
    ]


def show(task: str, result: dict) -> None:
    """Print the comparison."""
    table = Table("settings", "accuracy on validation people", title=task)
    for name in ("defaults", "tuned"):
        mean = statistics.fmean(result[name])
        table.add_row(f"{name}, mean of {len(result[name])} seeds", f"{mean:.2%}")
    best = result["best_of_grid"]
    table.add_row(f"best of {len(result['grid'])} grid points", f"{best['accuracy']:.2%}")
    console = Console(width=110)
    console.print(table)
    console.print(f"best point: {', '.join(best['settings'])}")
    console.print(f"tuned: {', '.join(result['tuned_settings']) or 'the defaults'}")
    verdict = "within" if result["loss"] <= GOAL else "not within"
    console.print(f"relative loss {result['loss']:.1%}: {verdict} the goal of {GOAL:.0%}")


if __name__ == "__main__":
    main()
