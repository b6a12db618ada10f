"""`dpftrl observe` on a log of 13 million rows: time and memory, against a plain loop in Python.

Times are of the whole command in a fresh process; memory is the peak of its resident set.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import peer

# Rounds, clients a round, population.
SIZE = (2000, 6500, 4_000_000)
QUICK_SIZE = (200, 3250, 400_000)
SHARE = 20


def command(path: Path, rows: int) -> dict[str, Any]:
    """Run it once on one file."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "dpftrl", "observe", str(path), "--json"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    answer = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    assert status == 0
    assert answer["participations"] == rows
    return {
        "format": path.suffix[1:],
        "rows": rows,
        "file_MB": path.stat().st_size / 1e6,
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_MiB": usage.ru_maxrss / 1024,
        "min_sep": answer["min_sep"],
        "max_participations": answer["max_participations"],
    }


def plain_loop(path: Path, rows: int) -> dict[str, Any]:
    """What one would write first, on a share of the CSV."""
    start = time.perf_counter()
    patterns: defaultdict[str, list[int]] = defaultdict(list)
    with path.open(newline="") as file:
        lines = csv.reader(file)
        next(lines)
        for when, client in islice(lines, rows // SHARE):
            patterns[client].append(int(when))
    for pattern in patterns.values():
        pattern.sort()
    gaps = (later - sooner for p in patterns.values() for sooner, later in pairwise(p))
    min(gaps, default=None)
    max(map(len, patterns.values()))
    return {"rows": rows // SHARE, "seconds": time.perf_counter() - start}


def measure(size: tuple[int, int, int]) -> dict[str, list[dict[str, Any]]]:
    """Write the logs to a temporary folder and read them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = peer.in_fresh_process(sys.executable, "_make_log.py", folder, *size)["rows"]
        ours = [command(folder / f"log.{ending}", rows) for ending in ("csv", "parquet", "jsonl")]
        plain = plain_loop(folder / "log.csv", rows)
    plain["seconds_for_all_at_this_rate"] = plain["seconds"] * rows / plain["rows"]
    plain["times_slower_than_csv"] = plain["seconds_for_all_at_this_rate"] / ours[0]["seconds"]
    return {"dpftrl observe": ours, "a plain loop over csv.reader, on a share": [plain]}


if __name__ == "__main__":
    peer.main(
        __doc__ or "",
        "650,000 rows, some seconds",
        lambda quick: measure(QUICK_SIZE if quick else SIZE),
    )
