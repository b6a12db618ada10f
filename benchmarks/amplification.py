"""Noise on prefix sums with each sampling, against epsilon and against epochs.

Every number is the certified or computed `rms_noise` of a row of `dpftrl plan --dataset`. Points
that the results file holds already are not computed again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dpftrl import Dataset
from dpftrl.plan import DatasetOption, options_for_dataset

SIZE, BATCH, DELTA = 50_000, 500, 1e-6
EPSILONS = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
EPOCHS = [1, 2, 5, 10, 20]
EPOCHS_OF_EPSILONS, EPSILON_OF_EPOCHS = 10, 2.0
HEIGHTS = [2, 3, 5, 10, 20, 30, 50, 100]
RESULTS = Path(__file__).parent / "results" / "amplification.json"
NAMES = {
    "dp-sgd + poisson": ("DP-SGD, Poisson", "#999999", "s:"),
    "band-toeplitz + cyclic-poisson": ("BandToep, cyclic Poisson", "#0072B2", "D--"),
    "blt + none": ("BLT, no sampling", "#009E73", "^-."),
    "blt + balls-in-bins": ("BLT, balls-in-bins (certified)", "#D55E00", "o-"),
}


def point(epsilon: float, epochs: int) -> dict[str, Any]:
    """The noise of every scheme."""
    schemes = dict[str, Any]()
    for row in options_for_dataset(Dataset(SIZE, BATCH, epochs), epsilon, DELTA):
        if isinstance(row, DatasetOption):
            schemes[f"{row.label} + {row.sampling}"] = {
                "rms_noise": row.rms_noise,
                "noise_multiplier": row.noise_multiplier,
                "failure_probability": row.failure,
                "seconds": row.seconds,
                "mechanism": repr(row.mechanism),
            }
    return {"epsilon": epsilon, "epochs": epochs, "schemes": schemes}


def measure(path: Path) -> list[dict[str, Any]]:
    """Compute the points that are missing, and save after each."""
    points: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    wanted = [(epsilon, EPOCHS_OF_EPSILONS) for epsilon in EPSILONS]
    wanted += [(EPSILON_OF_EPOCHS, epochs) for epochs in EPOCHS]
    for epsilon, epochs in dict.fromkeys(wanted):
        if not any(p["epsilon"] == epsilon and p["epochs"] == epochs for p in points):
            points.append(point(epsilon, epochs))
            path.write_text(json.dumps(points, indent=1) + "\n")
            print(f"epsilon {epsilon:g}, {epochs} epoch(s)", _short(points[-1]), flush=True)
    return points


def _short(one: dict[str, Any]) -> str:
    return ", ".join(f"{name} {row['rms_noise']:.3f}" for name, row in one["schemes"].items())


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """The noise against epsilon, and against epochs."""
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    panels = (
        (left, "epsilon", EPSILONS, {"epochs": EPOCHS_OF_EPSILONS}),
        (right, "epochs", EPOCHS, {"epsilon": EPSILON_OF_EPOCHS}),
    )
    for axes, along, ticks, fixed in panels:
        kept = [p for p in points if all(p[name] == value for name, value in fixed.items())]
        kept.sort(key=lambda p: p[along])
        for name, (label, color, style) in NAMES.items():
            there = [p for p in kept if name in p["schemes"]]
            noise = [p["schemes"][name]["rms_noise"] for p in there]
            axes.plot([p[along] for p in there], noise, style, color=color, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        lowest, highest = axes.get_ylim()
        heights = [height for height in HEIGHTS if lowest < height < highest]
        axes.set_yticks(heights, [str(height) for height in heights])
        axes.set_yticks([], minor=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, which="both")
    left.set_xlabel(f"epsilon at delta {DELTA:g} ({EPOCHS_OF_EPSILONS} epochs of 100 steps)")
    right.set_xlabel(f"epochs of 100 steps (epsilon {EPSILON_OF_EPOCHS:g})")
    left.set_ylabel("RMS noise on prefix sums, in clip norms")
    left.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print, and draw if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, help="draw FILE.png")
    chosen = parser.parse_args()
    points = measure(chosen.out)
    if chosen.plot:
        plot(points, chosen.plot)
    if chosen.json:
        print(json.dumps(points, indent=2))
        return
    for one in points:
        print(f"epsilon {one['epsilon']:g}, {one['epochs']} epoch(s): {_short(one)}")


if __name__ == "__main__":
    main()
