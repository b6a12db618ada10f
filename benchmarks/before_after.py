"""Time an earlier revision against a later one, in turns, in fresh processes.

Both source trees run in the same environment, so only our own code differs. One turn runs both
trees, one after the other; every second turn runs them in the other order. A first turn is not
counted: it compiles, and fills the caches. All ratios are after / before: above 1, the later
revision is slower. `median_ratio` is the median over the turns of the ratio of two medians.
`least_ratio` compares the shortest time of each tree, and `least_cpu_ratio` the least CPU seconds
of all cores: they depend less on what else the machine does. The result is saved in
`results/before_after.json`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peer

ROOT = peer.HERE.parent
RESULT = peer.HERE / "results" / "before_after.json"
# The last revision before files, folders and names were reorganized.
BEFORE = "4717ac0"
LOG_SIZE = (1000, 1000, 200_000)  # rounds, clients per round, population: a million rows

Measurement = dict[str, list[float]]


@contextmanager
def worktree(revision: str) -> Generator[Path]:
    """A checkout of a revision, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="before-") as folder:
        tree = Path(folder) / "tree"
        command = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*command, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*command, "remove", "--force", str(tree)], check=True)


def run_script(tree: Path, *arguments: str) -> dict[str, Any]:
    """What `_timings.py` prints in a fresh process that imports the package from this tree."""
    process = subprocess.run(
        [sys.executable, str(peer.HERE / "_timings.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    printed = json.loads(process.stdout.splitlines()[-1])
    source = Path(printed.pop("source"))
    if not source.is_relative_to(tree.resolve()):
        raise SystemExit(f"the timing of {tree} imported {source}")
    return printed


def compare(name: str, trees: dict[str, Path], log_folder: str, turns: int) -> dict[str, Any]:
    """Run one timing on both trees, in turns."""
    measured: dict[str, list[Measurement]] = {"before": [], "after": []}
    for turn in range(turns + 1):
        for label in ("before", "after") if turn % 2 else ("after", "before"):
            measurement = run_script(trees[label], name, log_folder)
            if turn > 0:
                measured[label].append(measurement)

    def medians(label: str) -> list[float]:
        return [statistics.median(one["seconds"]) for one in measured[label]]

    def least(label: str, clock: str) -> float:
        return min(min(one[clock]) for one in measured[label])

    pairs = zip(medians("before"), medians("after"), strict=True)
    return {
        "timing": name,
        "before_ms": 1e3 * statistics.median(medians("before")),
        "after_ms": 1e3 * statistics.median(medians("after")),
        "median_ratio": statistics.median(after / before for before, after in pairs),
        "least_ratio": least("after", "seconds") / least("before", "seconds"),
        "least_cpu_ratio": least("after", "cpu_seconds") / least("before", "cpu_seconds"),
    }


def full_hash(revision: str) -> str:
    """The full hash of a revision."""
    command = ["git", "-C", str(ROOT), "rev-parse", revision]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Measure, print a table, and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", nargs="?", default=BEFORE, help=f"default: {BEFORE}")
    parser.add_argument("after", nargs="?", default="HEAD", help="default: HEAD")
    parser.add_argument("--turns", type=int, default=5, help="turns per timing (default: 5)")
    parser.add_argument("--only", default="", help="only timings whose name contains this text")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with (
        worktree(chosen.before) as old_tree,
        worktree(chosen.after) as new_tree,
        tempfile.TemporaryDirectory() as log_folder,
    ):
        peer.in_fresh_process(sys.executable, "_make_log.py", log_folder, *LOG_SIZE)
        trees = {"before": old_tree, "after": new_tree}
        for name in run_script(new_tree)["names"]:
            if chosen.only in name:
                print(f"{name} ...", file=sys.stderr)
                rows.append(compare(name, trees, log_folder, chosen.turns))
    peer.table(f"{chosen.after} against {chosen.before}", rows)
    if not chosen.only:
        result = {
            "before": full_hash(chosen.before),
            "after": full_hash(chosen.after),
            "turns": chosen.turns,
            "cores": len(os.sched_getaffinity(0)),
            "timings": rows,
        }
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
