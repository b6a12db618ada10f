"""The main job so far: plan a training, compare mechanisms, make the noise, write the statement.

The training is Spanish in Spain of the paper's production table: 4.21 million devices, of which
6,500 report in a round, for 2,000 rounds.
"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.plan import load_plan

OUT = Path("out")
FLEET = ["--population", "4.21M", "--report-goal", "6500", "--rounds", "2000"]
RIVALS = ["blt-b400", "banded", "band-sqrt", "sqrt", "tree-full", "tree", "independent"]
SIZE = 6_400_000


def main() -> None:
    OUT.mkdir(exist_ok=True)
    print("Which mechanism, and how much noise, for epsilon 4?", flush=True)
    plan = [*FLEET, "--delta", "1e-10", "--epsilon", "4", "--parameters", str(SIZE)]
    command("plan", *plan, "--plot", "out/plan.png", "--out", "out/plan.json")

    print("\nOne more time, all mechanisms by their loss:", flush=True)
    command(
        "optimize",
        "blt",
        "--rounds",
        "2052",
        "--min-sep",
        "342",
        "--objective",
        "rms",
        "--out",
        "out/best.json",
    )
    training = ["--rounds", "2052", "--min-sep", "342"]
    command("compare", "out/best.json", *RIVALS, *training, "--plot", "out/compare.png")

    print(f"\nThe noise of the plan, for a model of {SIZE:,} parameters:", flush=True)
    noise()

    print("\nWhat may be published about the plan:", flush=True)
    command("statement", "out/plan.json", "--out", "out/statement")


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dpftrl", *arguments], check=True)


def noise() -> None:
    plan = load_plan(OUT / "plan.json")
    stream = NoiseStream(plan.mechanism, SIZE, sigma=plan.sigma, key=NoiseKey.generate())
    for _ in range(5):
        update = np.zeros(SIZE, np.float32)
        start = time.perf_counter()
        stream.add_to(update)
        seconds = time.perf_counter() - start
        each = f"{seconds / SIZE * 1e9:5.1f} ns a coordinate"
        print(f"round {stream.round}: standard deviation {update.std():.3f}, {each}")
    stream.save(OUT / "noise.safetensors")
    print(f"saved, for its owner's eyes only: {OUT / 'noise.safetensors'}", flush=True)


if __name__ == "__main__":
    main()
