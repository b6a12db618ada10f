"""A simulated fleet: millions of clients, thousands of rounds, a tiny model, and no training.

`python benchmarks/fleet_simulation.py` lets 4 million clients, of which 6,500 are contacted per
round, send constant updates for 2,000 rounds. In each round another half of the fleet is
available. It prints the total time, the memory, the size of the folder, the time to resume it, and
whether `dpftrl verify` passes.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _fleet_server import cpu_seconds, create, names_of, one_round, resume
from peer import main
from process_memory import memory, memory_from_here

from dpftrl.verify import verify_run

CLIENTS, COHORT, ROUNDS = 4_000_000, 6_500, 2_000


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def simulate(clients: int, cohort: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Run all rounds; return the figures."""
    names, draw = names_of(clients), np.random.default_rng(0)
    before, start, cpu = memory_from_here(), time.perf_counter(), time.process_time()
    begun = list[float]()
    with create(folder, clients, cohort, rounds) as server:
        everybody = server.population(names)
        for done in range(1, rounds + 1):
            available = draw.integers(0, 2, clients, dtype=np.int8).astype(np.bool_)
            begun.append(one_round(server, everybody.select(available)))
            if done % 50 == 0:
                spent = time.perf_counter() - start
                print(f"{done:,} of {rounds:,} rounds, {spent:.0f} s", file=sys.stderr, flush=True)
        epsilon = server.epsilon
    figures = {
        "wall_hours": (time.perf_counter() - start) / 3600,
        "cpu_seconds_per_round": (time.process_time() - cpu) / rounds,
        "begin_seconds_median": sorted(begun)[rounds // 2],
        "begin_seconds_most": max(begun),
        "memory_MB_beyond_names": (memory("VmHWM") - before) / 1e6,
        "folder_MB": folder_bytes(folder / "run") / 1e6,
        "journal_MB": (folder / "run" / "private" / "journal.jsonl").stat().st_size / 1e6,
        "resume_seconds": min(cpu_seconds(lambda: resume(folder).close()) for _ in range(3)),
    }
    checked = time.process_time()
    verdict = verify_run(folder / "run", folder / "state")
    figures["verify_seconds"] = time.process_time() - checked
    figures["verified"] = verdict.passed
    figures["epsilon"] = epsilon
    return figures


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """The figures of one simulation."""
    clients, cohort, rounds = (200_000, 650, 60) if quick else (CLIENTS, COHORT, ROUNDS)
    with tempfile.TemporaryDirectory() as place:
        figures = simulate(clients, cohort, rounds, Path(place))
    title = f"{clients:,} clients, {cohort:,} per round, {rounds:,} rounds"
    return {title: [{"what": name, "figure": value} for name, value in figures.items()]}


if __name__ == "__main__":
    main("Simulate a fleet of millions of clients.", "200,000 clients, 60 rounds", measure)
