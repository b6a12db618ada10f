"""The main job so far: find a mechanism for a training, compare it with its rivals, draw it.

The training is the StackOverflow benchmark of the paper: 2,052 rounds, every client back after 342.
"""

import subprocess
import sys
from pathlib import Path

import dpftrl
from dpftrl.optimize import optimize_blt

OUT = Path("out")
PARTICIPATION = dpftrl.MinSep(rounds=2052, min_sep=342)
RIVALS = ["blt-b400", "banded", "band-sqrt", "sqrt", "tree-full", "tree", "independent"]


def main() -> None:
    OUT.mkdir(exist_ok=True)
    print(f"The best BLT for {PARTICIPATION}:", flush=True)
    found = optimize_blt(PARTICIPATION, objective="rms")
    dpftrl.save_mechanism(found.mechanism, OUT / "best.json")
    print(f"{found.mechanism!r}")
    print(f"RmsLoss {found.loss.rms_loss:.4f}, found in {found.seconds:.3f} s\n", flush=True)
    command = [sys.executable, "-m", "dpftrl", "compare", "out/best.json", *RIVALS]
    command += ["--rounds", str(PARTICIPATION.rounds), "--min-sep", str(PARTICIPATION.min_sep)]
    subprocess.run([*command, "--plot", "out/compare.png"], check=True)


if __name__ == "__main__":
    main()
