"""Losses by their definition, from dense matrices: what every optimiser is held against."""

import itertools

import numpy as np

from dpftrl import MinSep
from dpftrl.workload import Workload

WORKLOADS = {
    "prefix sums": Workload(),
    "momentum": Workload(momentum=0.9),
    "weight decay": Workload(weight_decay=0.01),
    "both": Workload(momentum=0.9, weight_decay=0.01),
    "cooldown": Workload.with_schedule("cooldown:last-quarter:0.05", 24),
    "all": Workload.with_schedule("cooldown:last-half:0.2", 24, momentum=0.9, weight_decay=0.1),
}


def workload_matrix(workload: Workload, rounds: int) -> np.ndarray:
    """A from the definition of the server's optimiser, an update at a time."""
    rates = workload.learning_rates or (1.0,) * rounds
    A = np.zeros((rounds, rounds))
    for j in range(rounds):
        model = step = 0.0
        for t in range(rounds):
            step = workload.momentum * step + (t == j)
            model = (1 - workload.weight_decay * rates[t]) * model + rates[t] * step
            A[t, j] = model
    return A


def errors(C: np.ndarray, workload: Workload) -> tuple[float, float]:
    """MaxError and RmsError of A C^-1."""
    rows = np.linalg.norm(workload_matrix(workload, len(C)) @ np.linalg.inv(C), axis=1)
    return rows.max(), np.sqrt(np.mean(rows**2))


def lower_toeplitz(c: np.ndarray, rounds: int) -> np.ndarray:
    """LtToep(c)."""
    return sum(np.diag(np.full(rounds - lag, x), -lag) for lag, x in enumerate(c) if lag < rounds)


def brute_sensitivity(C: np.ndarray, participation: MinSep) -> float:
    """The longest sum of columns over all patterns, of a strategy without negative entries."""
    assert np.all(C >= 0)
    rounds, gap = participation.rounds, participation.min_sep
    longest = 0.0
    for count in range(1, participation.max_participations + 1):
        for pattern in itertools.combinations(range(rounds), count):
            if all(b - a >= gap for a, b in itertools.pairwise(pattern)):
                longest = max(longest, float(np.linalg.norm(C[:, pattern].sum(axis=1))))
    return longest


def slope(function, point: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences."""
    gradient = np.zeros(point.size)
    for i in range(point.size):
        there, back = point.copy().ravel(), point.copy().ravel()
        there[i] += step
        back[i] -= step
        ahead, behind = (function(x.reshape(point.shape))[0] for x in (there, back))
        gradient[i] = (ahead - behind) / (2 * step)
    return gradient.reshape(point.shape)
