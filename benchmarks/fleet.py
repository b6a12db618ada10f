"""Fleets of millions: `begin`, the journal, the ledger, and resuming.

`python benchmarks/fleet.py` measures a server with 4 million clients, of which 6,500 are contacted
in each of 2,000 rounds. Times are CPU times of one core, in fresh processes. Each is compared with
a floor: for `begin`, a loop that calls `hashlib.blake2b` once per name; for resuming, reading the
journal and computing its SHA-256; for the journal, 8 bytes per contact.
`benchmarks/_fleet_reports.py` has the figures of `report` and of Flower's replies.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import _fleet_reports
from peer import in_fresh_process, main

CLIENTS, COHORT, ROUNDS = 4_000_000, 6_500, 2_000
BEGIN_ROUNDS = 20  # rounds in which `begin` is measured


def row(
    what: str, measured: float, unit: str, target: float, floor: float | None
) -> dict[str, Any]:
    """One figure; the ratio is to the floor, and `target` is the largest value we want."""
    return {
        "what": what,
        "measured": round(measured, 4),
        "target": target,
        "unit": unit,
        "floor": "" if floor is None else round(floor, 4),
        "ratio to floor": "" if floor is None else round(measured / floor, 3),
    }


def begin_rows(clients: int, folder: Path) -> list[dict[str, Any]]:
    """Figures of `begin`. The targets grow with the number of clients."""
    scale = clients / CLIENTS
    got = in_fresh_process(
        sys.executable, "_fleet_server.py", "begin", clients, COHORT, BEGIN_ROUNDS, folder
    )
    floor, megabytes = got["floor"], got["extra_bytes"] / 1e6
    return [
        row("begin, list of names, first round", got["first_list"], "s", 3 * scale, floor),
        row("begin, list of names, later rounds", got["list"], "s", 3 * scale, floor),
        row("make a population", got["make_population"], "s", 3 * scale, floor),
        row("begin, population", got["population"], "s", 0.1, floor),
        row("begin, two thirds of a population", got["mask"], "s", 0.1, floor),
        row("begin, memory beyond the names", megabytes, "MB", 300 * scale, None),
    ]


def file_rows(clients: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Figures of the files of a long run, and of resuming it."""
    size = (clients, COHORT, rounds, folder)
    files = in_fresh_process(sys.executable, "_fleet_server.py", "files", *size)
    opened = in_fresh_process(sys.executable, "_fleet_server.py", "resume", *size)
    scale = rounds / ROUNDS
    raw = 8 * COHORT * rounds / 1e6  # 8 bytes per contact
    journal, snapshot = files["journal_bytes"] / 1e6, files["snapshot_bytes"] / 1e6
    return [
        row("journal", journal, "MB", 120 * scale, raw),
        row("snapshot of the state", snapshot, "MB", 70, None),
        row("ledger kept up in every round", files["kept_ledger_bytes"] / 1e6, "MB", 0.0, None),
        row("resume", opened["resume"], "s", 1.0, files["floor"]),
        row("resume without a snapshot", opened["full_replay"], "s", 12.7 * scale, files["floor"]),
        row("write the ledger on demand", opened["ledger"], "s", 30 * scale, None),
        row("a whole round, CPU", files["cpu_seconds"] / rounds, "s", 1.0, None),
    ]


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All figures in one run."""
    clients, rounds = (400_000, 40) if quick else (CLIENTS, ROUNDS)
    with tempfile.TemporaryDirectory() as place:
        rows = begin_rows(clients, Path(place) / "begin")
        rows += file_rows(clients, rounds, Path(place) / "files")
    title = f"{clients:,} clients, {COHORT:,} per round, {rounds:,} rounds"
    return {title: rows, **_fleet_reports.measure(quick)}


if __name__ == "__main__":
    main(
        "Measure a server with millions of clients: begin, files, resuming.",
        "a tenth of the clients, and 40 rounds",
        measure,
    )
