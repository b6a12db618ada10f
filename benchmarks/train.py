"""Rounds a second of the local engine, what privacy costs in a round, and memory of the timers.

The engine runs whole rounds, with noise and a journal that is flushed to the disk. A plain loop and
Flower's simulation, which keep nothing and add no noise, then train the same people in the same
order, in fresh processes of their own. Flower's clients train with our compiled program, and it has
no more nodes than a cohort has clients: both are in its favour. That all of them do the same work
is checked on the mean update of the first round.
"""

import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _train_setting as setting
import numpy as np
import peer

WHO = ("ours", "plain", "flower")
WARM_UP = 2
LARGEST_DIFFERENCE = 1e-3
# Clients, cohort, available.
TIMERS = (10_000_000, 6_500, 100_000)
QUICK_TIMERS = (1_000_000, 6_500, 100_000)

PARTS = {
    "begin": "choose and journal the cohort, all {population:,} people available",
    "reports": "clip and add up {clients} reports",
    "noise": "noise",
    "optimiser": "optimiser",
    "checkpoint": "checkpoint, flushed",
    "journal": "journal, ledger, guarantee",
    "snapshot": "noise buffers saved, a share of 1/{snapshot_every}",
}


def turn(rounds: int, clients: int) -> dict[str, dict[str, Any]]:
    """All three, one after the other, on the cohorts that ours has chosen."""
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for who in WHO:
            arguments = (rounds + WARM_UP, clients) if who == "ours" else ()
            start = time.perf_counter()
            run = peer.in_fresh_process(sys.executable, f"_train_{who}.py", name, *arguments)
            total = time.perf_counter() - start
            measured = run["seconds"][WARM_UP:]
            runs[who] = {"seconds": measured, "other_seconds": total - sum(measured)}
        check_same_work(Path(name))
    return runs


def check_same_work(folder: Path) -> None:
    """Everybody's first mean update is the same, but for rounding."""
    ours = setting.vector(folder, "ours")
    for who in WHO[1:]:
        difference = np.linalg.norm(setting.vector(folder, who) - ours) / np.linalg.norm(ours)
        if not difference < LARGEST_DIFFERENCE:
            raise SystemExit(f"{who} trains something else: its first mean is {difference:.2g} off")


def rounds_a_second(rounds: int, clients: int, turns: int) -> list[dict[str, Any]]:
    """Medians over all rounds; ratios are of the same round."""
    runs = [turn(rounds, clients) for _ in range(turns)]
    names = {
        "ours": "dpftrl: noise, journal and all",
        "plain": "a plain loop, no privacy",
        "flower": f"Flower {version('flwr')} simulation, no privacy",
    }
    rows: list[dict[str, Any]] = []
    for who in WHO:
        seconds = [s for run in runs for s in run[who]["seconds"]]
        ours = [s for run in runs for s in run["ours"]["seconds"]]
        ratios = [theirs / own for theirs, own in zip(seconds, ours, strict=True)]
        rows.append(
            {
                "who": names[who],
                "rounds_a_second": 1 / statistics.median(seconds),
                "seconds_a_round": statistics.median(seconds),
                "least": min(seconds),
                "most": max(seconds),
                "times_ours": statistics.median(ratios),
                "start_warm_up_and_end": statistics.median(
                    run[who]["other_seconds"] for run in runs
                ),
            }
        )
    return rows


def share_of_a_round(clients: int, sample: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """All but the training, part by part, as a share of the time that training takes."""
    run = peer.in_fresh_process(sys.executable, "_train_server.py", clients, sample, repeats)
    parts = {PARTS[part].format(clients=clients, **run): run["parts"][part] for part in PARTS}
    parts["all of these"] = sum(parts.values())
    shares = {
        f"%_of_training,_{each}_sentences_a_client": seconds
        for each, seconds in run["training"].items()
    }
    rows: list[dict[str, Any]] = [
        {"part": part, "seconds": seconds}
        | {heading: 100 * seconds / training for heading, training in shares.items()}
        for part, seconds in parts.items()
    ]
    trained = f"training {clients} clients ({sample} timed, times {clients / sample:g})"
    times = {heading: f"{seconds:.4g} s" for heading, seconds in shares.items()}
    rows.append({"part": trained, "seconds": "", **times})
    title = f"a round of {clients} clients, LSTM of {run['parameters']:,} parameters; target 10%"
    return {title: rows}


def timers(size: tuple[int, int, int], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Memory is the peak of the process, while everybody is contacted for the first time."""
    run = peer.in_fresh_process(sys.executable, "_train_timers.py", *size, repeats)
    clients, cohort, available = size
    row = {
        "peak_MB": run["extra_bytes"] / 1e6,
        "bytes_a_client": run["extra_bytes"] / run["clients"],
        f"ms_to_mark_{cohort:,}": run["mark_seconds"] * 1e3,
        f"ms_to_find_eligible_of_{available:,}": run["eligible_seconds"] * 1e3,
        f"ms_to_hash_{available:,}_names_the_first_time": run["names_seconds"] * 1e3,
        "seconds_to_mark_everybody": run["fill_seconds"],
    }
    return {f"timers of {clients:,} clients; target 500 MB": [row]}


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All tables."""
    rounds, clients, turns = (3, 20, 1) if quick else (6, 100, 2)
    sample, repeats = (2, 1) if quick else (4, 3)
    title = f"{clients} clients a round, chitchat, window model, batches of 16; seconds"
    machine = {name: version(name) for name in ("jax", "numpy", "flwr", "ray")} | {
        "processors": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
    }
    return {
        title: rounds_a_second(rounds, clients, turns),
        **share_of_a_round(clients, sample, repeats),
        **timers(QUICK_TIMERS if quick else TIMERS, 5),
        "versions and machine": [machine],
    }


if __name__ == "__main__":
    peer.main(__doc__ or "", "20 clients a round, a million timers, one turn", measure)
