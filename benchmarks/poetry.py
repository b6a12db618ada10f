"""BLT against TreeAgg at the same epsilon: Song poets, several seeds, everything else equal.

Every run is one of `dpftrl train`, kept in out/poetry: stop it, start it again, and it goes on.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from _small_settings import POETRY
from rich.console import Console
from rich.table import Table

from dpftrl.simulation.config import read_config
from dpftrl.simulation.training import Training, TrainingProgress

HERE = Path(__file__).parent
MECHANISMS = ("blt", "tree")
# Rounds at the end over which accuracy is averaged: one model more or less should not decide.
LAST = 3


def main() -> None:
    """Train with each mechanism and seed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("out/poetry"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "poetry.json")
    chosen = parser.parse_args()
    found = {
        name: [one_run(name, seed, chosen.set, chosen.runs) for seed in range(chosen.seeds)]
        for name in chosen.mechanisms
    }
    config = read_config(None, [*POETRY, *chosen.set])
    result = {"privacy": {"epsilon": config.privacy.epsilon, "delta": config.privacy.delta}}
    result |= {"settings": chosen.set, "runs": found}
    chosen.out.write_text(json.dumps(result, indent=2) + "\n")
    show(found)


def one_run(name: str, seed: int, changes: list[str], runs: Path) -> dict:
    """One training, from the beginning or from where it stopped."""
    folder = runs / f"{name}-{seed}"
    chosen = [*POETRY, f'privacy.mechanism="{name}"', f"seed={seed}", *changes]
    started = time.monotonic()
    if (folder / "private" / "journal.jsonl").exists():
        training = Training.resume(folder)
    else:
        training = Training.create(read_config(None, chosen), folder)

    def tell(progress: TrainingProgress) -> None:
        if progress.point.accuracy is not None:
            left = f"{progress.seconds_left:.0f} s left"
            print(
                f"{folder.name} round {progress.point.round} {progress.accuracy:.3%} {left}",
                flush=True,
            )

    with training:
        training.run(tell)
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [point for point in points if "accuracy" in point]
    return {
        "seed": seed,
        "noise_multiplier": training.server.plan.noise_multiplier,
        "epsilon": points[-1]["epsilon"],
        "accuracy_before": measured[0]["accuracy"],
        "accuracy": statistics.fmean(point["accuracy"] for point in measured[-LAST:]),
        "perplexity": statistics.fmean(point["perplexity"] for point in measured[-LAST:]),
        "curve": [[point["round"], point["accuracy"]] for point in measured],
        "seconds": round(time.monotonic() - started, 1),
    }


def show(found: dict[str, list[dict]]) -> None:
    """A table with the spread over seeds."""
    table = Table(title="Poetry: next character, held-out poets, same epsilon")
    for column in ("mechanism", "accuracy", "by seed", "perplexity", "noise multiplier", "epsilon"):
        table.add_column(column)
    for name, runs in found.items():
        accuracy = [run["accuracy"] for run in runs]
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        table.add_row(
            name,
            f"{statistics.fmean(accuracy):.2%} +- {spread:.2%}",
            " ".join(f"{one:.2%}" for one in accuracy),
            f"{statistics.fmean(run['perplexity'] for run in runs):.1f}",
            f"{runs[0]['noise_multiplier']:.3f}",
            f"{runs[0]['epsilon']:.3f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
