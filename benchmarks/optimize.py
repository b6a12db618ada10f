"""Optimising BLTs: time and loss against jax_privacy, time against the rounds, and C^-1 by formula.

Times are of the first call in a fresh process, without imports, on both sides.
"""

import sys
from typing import Any

import numpy as np
import peer

import dpftrl

SETTINGS = [
    (2000, 400, 5, 4, "max"),
    (2000, 400, 5, 4, "rms"),
    (2000, 400, 5, 3, "max"),
    (2000, 100, 20, 3, "max"),
    (300, 300, 1, 2, "max"),
    (1000, 10, 100, 2, "rms"),
    (500, 5, 100, 1, "max"),
    (100, 2, 50, 1, "rms"),
    (100, 2, 50, 1, "max"),
]
QUICK_SETTINGS = [(2000, 400, 5, 4, "max")]
ROUNDS = [2_000, 200_000, 20_000_000, 1_000_000_000]
COEFFICIENTS = [2_000, 20_000, 200_000]


def against_peer(settings: list[tuple[int, int, int, int, str]]) -> list[dict[str, Any]]:
    """Both optimisers on the same settings, each call in a process of its own."""
    rows: list[dict[str, Any]] = []
    for setting in settings:
        theirs = peer.in_fresh_process(peer.python(), "_peer_optimize.py", *setting)
        ours = min(
            (peer.in_fresh_process(sys.executable, "_our_optimize.py", *setting) for _ in range(3)),
            key=lambda run: run["seconds"],
        )
        loss = [_loss(run, setting) for run in (theirs, ours)]
        rows.append(
            {
                "setting": setting,
                "their_seconds": theirs["seconds"],
                "our_seconds": ours["seconds"],
                "times_faster": theirs["seconds"] / ours["seconds"],
                "their_loss": loss[0],
                "our_loss": loss[1],
                "loss_ratio": loss[1] / loss[0],
            }
        )
    return rows


def _loss(run: dict[str, Any], setting: tuple[int, int, int, int, str]) -> float:
    rounds, min_sep, participations, _, objective = setting
    found = dpftrl.BLT(run["theta"], run["omega"])
    loss = found.error_report(dpftrl.MinSep(rounds, min_sep, participations))
    return loss.max_loss if objective == "max" else loss.rms_loss


def against_rounds() -> list[dict[str, Any]]:
    """Our time at ever more rounds, k = 5 and d = 4."""
    runs = [
        min(
            peer.in_fresh_process(
                sys.executable, "_our_optimize.py", rounds, rounds // 5, 5, 4, "max"
            )["seconds"]
            for _ in range(3)
        )
        for rounds in ROUNDS
    ]
    return [
        {"rounds": rounds, "seconds": seconds, "ratio": seconds / min(runs)}
        for rounds, seconds in zip(ROUNDS, runs, strict=True)
    ]


def inverse_coefficients() -> list[dict[str, Any]]:
    """The paper's table: n coefficients of C^-1 by solving, and by the inverse BLT."""
    rows: list[dict[str, Any]] = []
    for rounds in COEFFICIENTS:
        blt = dpftrl.mechanism("blt-b400")
        assert isinstance(blt, dpftrl.BLT)

        def by_formula(blt: dpftrl.BLT = blt, rounds: int = rounds) -> None:
            dpftrl.BLT(blt.theta, blt.omega).inverse_coefficients(rounds)

        brute = dpftrl.Toeplitz(blt.coefficients(rounds).tolist())
        by_solving = peer.seconds(lambda brute=brute, n=rounds: brute.inverse_coefficients(n), 1)
        formula = peer.seconds(by_formula, 5)
        difference = brute.inverse_coefficients(2000) - blt.inverse_coefficients(2000)
        rows.append(
            {
                "rounds": rounds,
                "brute_force": by_solving,
                "formula": formula,
                "times_faster": by_solving / formula,
                "largest_difference": float(np.abs(difference).max()),
            }
        )
    return rows


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All tables."""
    return {
        f"against {peer.PEER}": against_peer(QUICK_SETTINGS if quick else SETTINGS),
        "time against rounds (k = 5, d = 4)": against_rounds(),
        "seconds for n coefficients of C^-1": inverse_coefficients(),
    }


if __name__ == "__main__":
    peer.main(__doc__ or "", "one setting, under a minute", measure)
