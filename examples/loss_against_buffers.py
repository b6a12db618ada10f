"""Draw the loss of BLTs and generalized BLTs against their number of buffers.

The best Toeplitz mechanism found is drawn for comparison. The script takes about a minute, and
writes the plot to `out/buffers.png` and the numbers to `out/buffers.json`.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from dpftrl import MinSep
from dpftrl.optimize import optimize_band_toeplitz, optimize_blt, optimize_general_blt

PARTICIPATION = MinSep(rounds=2052, min_sep=342)
BUFFERS = [1, 2, 3, 4, 5, 6]
OUT = Path("out")


def main() -> None:
    OUT.mkdir(exist_ok=True)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    results = {}
    for axes, objective in zip(figure.subplots(1, 2), ("max", "rms"), strict=True):
        blt = [optimize_blt(PARTICIPATION, d, objective).value for d in BUFFERS]
        general = [optimize_general_blt(PARTICIPATION, d, objective).value for d in BUFFERS]
        best = optimize_band_toeplitz(PARTICIPATION, PARTICIPATION.min_sep, objective).value
        results[objective] = {"blt": blt, "gblt": general, "best Toeplitz found": best}
        print(objective, results[objective], flush=True)
        axes.plot(BUFFERS, blt, "o-", color="#0072B2", label="BLT")
        axes.plot(BUFFERS, general, "D--", color="#D55E00", label="generalized BLT")
        axes.axhline(best, color="#000000", linestyle=":", label="best Toeplitz found")
        axes.set_xlabel("buffers")
        axes.set_ylabel("MaxLoss" if objective == "max" else "RmsLoss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.suptitle(str(PARTICIPATION))
    figure.savefig(OUT / "buffers.png", dpi=130)
    (OUT / "buffers.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
