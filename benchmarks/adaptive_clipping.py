"""Adaptive clipping: recovery from a wrong start, final accuracy, and what a moving norm costs.

`python benchmarks/adaptive_clipping.py` trains a small model on chitchat (60 rounds, epsilon 8)
with fixed clip norms and with adaptive clipping, for several seeds. Noise keys
are test keys, so that everybody gets the same figures.
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _small_settings import CHITCHAT
from numpy.typing import NDArray
from peer import main

from dpftrl import MinSep
from dpftrl.adaptive_clipping import AdaptiveClipping, ClipState
from dpftrl.optimize import optimize_blt
from dpftrl.simulation.config import Config, read_config
from dpftrl.simulation.population import Clients
from dpftrl.simulation.training import Training

FIXED = (0.3, 0.5, 0.7, 1.0)
ADAPTIVE = 'clip_norm="adaptive"'
WRONG = 100.0  # the factor by which a start is wrong
NEAR = 2.0  # recovered: within this factor of the median norm of the updates
LAST = 3  # evaluations at the end over which accuracy is averaged


@dataclass
class Result:
    """What a training showed: clip norms and median norms per round, and the final accuracy."""

    clip_norms: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Mean over the last evaluations."""
        return statistics.fmean(self.accuracies[-LAST:])

    @property
    def recovered(self) -> int | None:
        """The round from which on the clip norm stays near the median norm of the updates."""
        far = [
            row
            for row, (one, other) in enumerate(zip(self.clip_norms, self.medians, strict=True))
            if not 1 / NEAR <= one / other <= NEAR
        ]
        rounds = max(far, default=-1) + 1
        return None if rounds == len(self.clip_norms) else rounds


class Measured:
    """Clients whose update norms are measured; only a benchmark may look at these."""

    def __init__(self, clients: Clients):
        self._clients = clients
        self.norms: list[float] = []

    def updates(
        self, model: NDArray[np.float32], cohort: Sequence[str], number: int
    ) -> Iterator[tuple[str, Any]]:
        """The updates of the clients, unchanged."""
        self.norms = []
        for client, update in self._clients.updates(model, cohort, number):
            flat = (
                np.concatenate([np.ravel(one) for one in update.values()])
                if isinstance(update, dict)
                else update
            )
            self.norms.append(float(np.linalg.norm(flat.astype(np.float64))))
            yield client, update


@cache
def train(clip_norm: str, seed: int) -> Result:
    """Train with a clip norm, in TOML syntax."""
    config: Config = read_config(None, [*CHITCHAT, clip_norm, f"seed={seed}"])
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        training = Training.create(
            config, place / "run", state_folder=place / "state", insecure_test_key=seed
        )
        with training:
            loop = training._loop  # pyright: ignore[reportPrivateUsage]
            clients = Measured(loop._clients)  # pyright: ignore[reportPrivateUsage]
            loop._clients = clients  # pyright: ignore[reportPrivateUsage]
            result.clip_norms.append(training.server.clip_norm)

            def on_round(progress: Any) -> None:
                result.medians.append(statistics.median(clients.norms))
                result.clip_norms.append(training.server.clip_norm)
                if progress.point.accuracy is not None:
                    result.accuracies.append(progress.point.accuracy)

            training.run(on_round)
    result.clip_norms.pop()  # that of a round after the last
    print(f"{clip_norm}, seed {seed}: accuracy {result.accuracy:.2%}", file=sys.stderr, flush=True)
    return result


def recovery(seeds: int) -> list[dict[str, Any]]:
    """How long a wrong start takes to come near the median norm of the updates."""
    median = round(train(ADAPTIVE, 0).medians[0], 3)  # of the first round
    rows: list[dict[str, Any]] = []
    for name, start in [("adaptive", 0.1), ("", median / WRONG), ("", median * WRONG)]:
        change = ADAPTIVE if name else f"clip_norm.start={start!r}"
        results = [train(change, seed) for seed in range(seeds)]
        rows.append(
            {
                "start": start,
                "start_over_median": start / median,
                "rounds_to_recover": str([result.recovered for result in results]),
                "norm_over_median_at_40": str(
                    [round(one.clip_norms[40] / one.medians[40], 2) for one in results]
                ),
                "accuracy_%": 100 * statistics.fmean(one.accuracy for one in results),
            }
        )
    return rows


def accuracy(seeds: int, fixed: Sequence[float]) -> list[dict[str, Any]]:
    """Final accuracy with fixed clip norms, and with adaptive clipping."""
    rows: list[dict[str, Any]] = []
    for name, change in [
        *((f"{norm:g}", f"clip_norm={norm!r}") for norm in fixed),
        ("adaptive", ADAPTIVE),
    ]:
        results = [train(change, seed) for seed in range(seeds)]
        accuracies = [100 * one.accuracy for one in results]
        rows.append(
            {
                "clip_norm": name,
                "accuracy_%": statistics.fmean(accuracies),
                "lowest": min(accuracies),
                "highest": max(accuracies),
                "last_clip_norm": statistics.fmean(one.clip_norms[-1] for one in results),
            }
        )
    return rows


def noise_of_model(rates: NDArray[np.float64], clip_norms: NDArray[np.float64]) -> float:
    """The standard deviation of the noise in the model after the last round.

    Args:
        rates: The coefficients of 1 / C(x).
        clip_norms: The clip norm of each round.
    """
    # Entry s of 1^T diag(clip norms) C^-1.
    rounds = len(clip_norms)
    entries = [clip_norms[s:] @ rates[: rounds - s] for s in range(rounds)]
    return float(np.linalg.norm(entries))


def moved(
    options: AdaptiveClipping, constant: bool, rounds: int, goal: int, seed: int
) -> tuple[NDArray[np.float64], float]:
    """Simulated clip norms: log-normal norms of updates around 1, and noisy bits.

    Args:
        options: The options, with the start in medians.
        constant: Whether the rate stays as it is and the model is never spared, which is not what
            the library does.
        rounds: Number of rounds.
        goal: The report goal.
        seed: Seed of the norms and of the noise.

    Returns:
        The factor of each round's noise in the model, which is the clip norm or 0 for a round in
        which the model is spared; and the last clip norm.
    """
    generator = np.random.default_rng(seed)
    noise = NOISE * np.convolve(coefficients(rounds), generator.standard_normal(rounds))[:rounds]
    state, factors = ClipState(options.start), list[float]()
    for row in range(rounds):
        within = (generator.normal(0, SPREAD, goal) <= math.log(state.clip_norm)).mean()
        share = within + noise[row] / (2 * options.beta * goal)
        spared = not constant and options.holds(state, share)
        factors.append(0.0 if spared else state.clip_norm)
        last = state.clip_norm
        if constant:
            rate = options.learning_rate * (share - options.quantile)
            state = ClipState(last * math.exp(-rate))
        else:
            state = options.following(state, share)
    return np.array(factors), last


NOISE = 2.432  # the noise multiplier of 60 rounds with a report goal of 100
SPREAD = 0.5  # standard deviation of the logarithm of norms
_COEFFICIENTS: dict[int, NDArray[np.float64]] = {}


def coefficients(rounds: int) -> NDArray[np.float64]:
    """The inverse of a BLT that is optimized for these rounds, as coefficients."""
    if rounds not in _COEFFICIENTS:
        found = optimize_blt(MinSep(rounds, max(1, rounds // 8)), 4, objective="rms").mechanism
        _COEFFICIENTS[rounds] = found.inverse_coefficients(rounds)
    return _COEFFICIENTS[rounds]


def cancellation(quick: bool) -> list[dict[str, Any]]:
    """Noise in the last model, over what it would be with the last clip norm in all rounds."""
    rows: list[dict[str, Any]] = []
    rules = [("as it is", 1.0, False), ("constant 0.2", 0.2, True), ("constant 1", 1.0, True)]
    for rounds in (60, 300) if quick else (60, 300, 2000):
        still = noise_of_model(coefficients(rounds), np.ones(rounds))
        for name, rate, constant in rules:
            row: dict[str, Any] = {"rounds": rounds, "rate": name}
            for start in (1 / WRONG, 1.0, WRONG):
                options = AdaptiveClipping(start=start, learning_rate=rate)
                ratios: list[float] = []
                for seed in range(20):
                    factors, last = moved(options, constant, rounds, 100, seed)
                    ratios.append(noise_of_model(coefficients(rounds), factors) / (last * still))
                row[f"noise_from_{start:g}"] = statistics.fmean(ratios)
            rows.append(row)
    return rows


def beta_trade(_: bool) -> list[dict[str, Any]]:
    """What the share of the bits costs the updates, and how accurate the estimate becomes."""
    rounds, goal = 60, 100
    rates = coefficients(rounds)
    weights = 1 / np.sqrt(np.arange(1, rounds + 1))
    rows: list[dict[str, Any]] = []
    for beta in (0.01, 0.03, 0.1, 0.2, 0.3, 0.5):
        per_round = NOISE * float(np.linalg.norm(rates)) / (2 * beta * goal)
        of_log = NOISE * noise_of_model(rates, weights) / (2 * beta * goal)
        rows.append(
            {
                "beta": beta,
                "more_noise_on_updates_%": 100 * (1 / math.sqrt(1 - beta**2) - 1),
                "noise_of_share": per_round,
                "noise_of_log_clip_norm": of_log,
            }
        )
    return rows


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All tables."""
    seeds = 1 if quick else 3
    return {
        "What beta costs and gives (noise multiplier 2.43, report goal 100)": beta_trade(quick),
        "Noise in the model with a moving clip norm, over that with its last value": cancellation(
            quick
        ),
        "Recovery from a wrong start (chitchat, epsilon 8)": recovery(seeds),
        "Final accuracy (chitchat, epsilon 8)": accuracy(seeds, (0.5,) if quick else FIXED),
    }


if __name__ == "__main__":
    main(__doc__ or "", "one seed and one fixed norm", measure)
