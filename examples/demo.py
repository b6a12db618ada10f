"""The main job so far: find a mechanism for a training, compare it with its rivals, draw it.

The training is the StackOverflow benchmark of the paper: 2,052 rounds, every client back after 342.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

import dpftrl

OUT = Path("out")
PARTICIPATION = dpftrl.MinSep(rounds=2052, min_sep=342)
BUFFERS = 3


def blt(parameters: np.ndarray) -> dpftrl.BLT:
    """Interlaced decays from free numbers: rates one minus the decay, each larger than the last."""
    rates = 1 - np.exp(-np.cumsum(np.exp(parameters)))
    return dpftrl.BLT.from_decays(1 - rates[::2], 1 - rates[1::2])


def objective(parameters: np.ndarray) -> float:
    try:
        return blt(parameters).loss(PARTICIPATION).max_loss
    except dpftrl.DpftrlError:  # neighbouring decays have met in the last digit
        return np.inf


def main() -> None:
    OUT.mkdir(exist_ok=True)
    start = np.linspace(np.log(1e-5), np.log(0.5), 2 * BUFFERS)
    print(f"Looking for the best BLT with {BUFFERS} buffers for {PARTICIPATION} ...")
    found = minimize(objective, start, method="Nelder-Mead", options={"maxiter": 4000})
    best = blt(found.x)
    dpftrl.save_mechanism(best, OUT / "best.json", about={"made_for": str(PARTICIPATION)})
    print(
        f"{best}\nMaxLoss {best.loss(PARTICIPATION).max_loss:.4f}, saved as {OUT / 'best.json'}\n"
    )
    command = [sys.executable, "-m", "dpftrl", "compare", str(OUT / "best.json")]
    command += [
        "blt-b400",
        "banded",
        "band-sqrt",
        "sqrt",
        "tree-full",
        "tree",
        "smooth-tree",
        "independent",
    ]
    command += f"--rounds {PARTICIPATION.rounds} --min-sep {PARTICIPATION.min_sep}".split()
    subprocess.run([*command, "--plot", str(OUT / "compare.png")], check=True)


if __name__ == "__main__":
    main()
