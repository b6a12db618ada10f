"""DP-FTRL against plain FedAvg on Flower, our Grid against Ray, and memory against clients.

A model of a million parameters. Each measurement is a fresh process with one BLAS thread a client;
seconds are the median of its rounds without the first. Those that are compared take turns; the
overhead is the median of the ratios of such pairs, beside the least and the most.
"""

import os
import statistics
import sys
from itertools import product
from typing import Any

import _flower_round
import peer

CLIENTS = 100
# Steps of training in a round: none shows what surrounds it, 10 take about 0.1 s a client.
STEPS = (0, 10)


def measured(strategy: str, grid: str, clients: int, rounds: int, steps: int) -> dict[str, Any]:
    """One fresh process."""
    found = peer.in_fresh_process(
        sys.executable, "_flower_round.py", strategy, grid, clients, rounds, steps
    )
    medians = {name: statistics.median(found[name]) for name in ("seconds", "cpu_seconds")}
    return {**medians, "peak_MiB": found["peak_MiB"]}


def overhead(rounds: int, repeats: int) -> list[dict[str, Any]]:
    """The same grid and the same training, with privacy and without."""
    rows: list[dict[str, Any]] = []
    for steps in STEPS:
        runs: dict[str, list[dict[str, Any]]] = {"fedavg": [], "dpftrl": []}
        for _, strategy in product(range(repeats), runs):
            runs[strategy].append(measured(strategy, "in-process", CLIENTS, rounds, steps))
        for clock in ("seconds", "cpu_seconds"):
            plain, ours = ([one[clock] for one in runs[name]] for name in ("fedavg", "dpftrl"))
            # Of neighbours in time: the machine is not as fast at all times.
            ratios = [b / a for a, b in zip(plain, ours, strict=True)]
            rows.append(
                {
                    "training_steps": steps,
                    "a_round_in": clock,
                    "FedAvg": statistics.median(plain),
                    "DP-FTRL": statistics.median(ours),
                    "overhead_%": 100 * (statistics.median(ratios) - 1),
                    "least_%": 100 * (min(ratios) - 1),
                    "most_%": 100 * (max(ratios) - 1),
                }
            )
    return rows


def grids(rounds: int) -> list[dict[str, Any]]:
    """The same strategy and ClientApp, in this process and on Ray."""
    rows: list[dict[str, Any]] = []
    for steps in STEPS:
        here, ray = (
            measured("dpftrl", grid, CLIENTS, rounds, steps)["seconds"]
            for grid in ("in-process", "ray")
        )
        rows.append(
            {
                "training_steps": steps,
                "in-process_s_a_round": here,
                "Ray_s_a_round": ray,
                "Ray_takes_times_as_long": ray / here,
            }
        )
    return rows


def memory(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Peak memory of the process with server and clients in it."""
    return [
        {
            "clients_a_round": clients,
            "FedAvg_peak_MiB": measured("fedavg", "in-process", clients, 2, 0)["peak_MiB"],
            "DP-FTRL_peak_MiB": measured("dpftrl", "in-process", clients, 2, 0)["peak_MiB"],
        }
        for clients in sizes
    ]


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All of it."""
    os.environ.update(_flower_round.ENVIRONMENT)
    return {
        f"{CLIENTS} clients, in-process grid": overhead(3 if quick else 5, 1 if quick else 7),
        f"{CLIENTS} clients, DP-FTRL": grids(2 if quick else 4),
        "memory": memory((50, 200) if quick else (100, 200, 400)),
    }


if __name__ == "__main__":
    peer.main(__doc__ or "", "fewer rounds, a few minutes", measure)
