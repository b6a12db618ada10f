"""Small min-seps: where the best inverse has a negative decay, and the peer stops short of it."""

import argparse
import json
from pathlib import Path
from typing import Any

import peer
from matplotlib.figure import Figure

import dpftrl
from dpftrl.optimize import optimize_blt

ROUNDS = 100
MIN_SEPS = [1, 2, 3, 5, 8, 12, 20]
QUICK_MIN_SEPS = [2, 20]


def compare(min_seps: list[int], buffers: int = 1) -> list[dict[str, Any]]:
    """RmsLoss of both at every min-sep, and the last decay of our inverse."""
    rows: list[dict[str, Any]] = []
    for min_sep in min_seps:
        wanted = dpftrl.MinSep(ROUNDS, min_sep)
        found = optimize_blt(wanted, buffers, "rms")
        run = peer.in_fresh_process(
            peer.python(),
            "_peer_optimize.py",
            ROUNDS,
            min_sep,
            wanted.max_participations,
            buffers,
            "rms",
        )
        theirs = dpftrl.BLT(run["theta"], run["omega"]).error_report(wanted).rms_loss
        rows.append(
            {
                "min_sep": min_sep,
                "buffers": buffers,
                "our_loss": found.error_report.rms_loss,
                "their_loss": theirs,
                "ratio": found.error_report.rms_loss / theirs,
                "last_decay_of_inverse": float(found.mechanism.inverse_parameters()[0].min()),
            }
        )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The peer's loss over ours, and our last decay, against min-sep."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    gaps = [row["min_sep"] for row in rows]
    left.plot(gaps, [1 / row["ratio"] for row in rows], "o-", color="#D55E00")
    left.set_ylabel("RmsLoss of jax_privacy over ours")
    right.plot(gaps, [row["last_decay_of_inverse"] for row in rows], "D-", color="#0072B2")
    right.axhline(0, color="#999999", linewidth=1)
    right.set_ylabel("last decay of the best inverse")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(gaps, [str(gap) for gap in gaps])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"min-sep ({ROUNDS} rounds, one buffer)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print, and draw if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two min-seps, under a minute")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, help="draw FILE.png")
    chosen = parser.parse_args()
    rows = compare(QUICK_MIN_SEPS if chosen.quick else MIN_SEPS)
    if chosen.plot:
        plot(rows, chosen.plot)
    if chosen.json:
        print(json.dumps(rows, indent=2))
    else:
        peer.table(f"{ROUNDS} rounds, RmsLoss, {peer.PEER}", rows)


if __name__ == "__main__":
    main()
