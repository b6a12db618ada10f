"""Small federated runs and audits in a process with a planted bug, or without one.

Usage: python _planted_runs.py FOLDER [BUG]. The runs stay in FOLDER; what the audits say is printed
as JSON. `_planted_verify.py` verifies the runs in a process without the bug.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CONFIDENCE = 1 - 1e-5
MOST_HOURS = 500  # of a run with timers, on its own clock
NOISE = 0.01  # little noise, so that a single run shows mu to a few percent


def main(folder: Path, bug: str | None) -> dict[str, Any]:
    """Run everything, and return the outcome of each part."""
    if bug is not None:
        from _planted_bugs import plant

        plant(bug)
    outcomes: dict[str, Any] = {}
    for name, part in (
        ("white-box", audit_stream),
        ("server", audit_runs),
        ("hours", run_with_timers),
        ("adaptive", run_with_adaptive_clipping),
    ):
        start = time.process_time()
        try:
            outcomes[name] = part(folder)
        except Exception as error:
            outcomes[name] = {"error": f"{type(error).__name__}: {error}"}
        outcomes[name]["seconds"] = round(time.process_time() - start, 2)
    return outcomes


def audit_stream(_: Path) -> dict[str, Any]:
    """The white-box audit of the noise stream, as `dpftrl audit mechanism` runs it."""
    from dpftrl import MinSep, mechanism
    from dpftrl.auditing.mechanism import audit_mechanism

    audit = audit_mechanism(
        mechanism("blt-b400"), MinSep(8, 4), 4.0, 0.01, trials=2**17, failure=1 - CONFIDENCE
    )
    return {"flagged": audit.exceeds_claim, "lower_bound": audit.lower_bound}


def audit_runs(folder: Path) -> dict[str, Any]:
    """The audit of the server, for every behavior of the target."""
    from dpftrl import MinSep, mechanism
    from dpftrl.auditing.server import BEHAVIORS, audit_server

    flagged, bounds = [], {}
    for number, behavior in enumerate(BEHAVIORS):
        audit = audit_server(
            folder / f"server-{number}",
            mechanism("blt-b400"),
            MinSep(9, 4, 2),
            NOISE,
            behavior,
            1 - CONFIDENCE,
        )
        bounds[behavior] = {"mu": audit.mu, "lower_bound": audit.mu_lower_bound}
        if audit.exceeds_claim:
            flagged.append(behavior)
    return {"flagged": bool(flagged), "behaviors": flagged, "bounds": bounds}


def _run(folder: Path, rounds: int, hours: bool, **settings: Any) -> None:
    """A run in which clients are contacted as early as the server allows."""
    from dpftrl import MinSep, account, mechanism
    from dpftrl.errors import TooFewClients
    from dpftrl.federated import Server, Settings
    from dpftrl.plan import Fleet, Plan

    # With timers in hours there are so few clients that all of them have to return.
    clients = [f"client {i}" for i in range(12 if hours else 24)]
    plan = Plan(
        Fleet(population=len(clients), report_goal=3),
        account(mechanism("blt-b400"), MinSep(rounds, 4), 3.0, 1e-6),
    )
    options = Settings(**{"clip_norm": 1.0, **settings})
    where = {"state_folder": folder / "state"}
    server = Server.create(folder / "run", plan, options, {"w": np.zeros(20)}, **where)
    clock = 0.0
    while server.rounds < rounds:
        try:
            open_round = server.begin(clients, clock if hours else None)
        except TooFewClients:
            clock += 1.0
            if not hours or clock > MOST_HOURS:
                break
            continue
        for client in open_round.clients[:3]:
            open_round.report(client, np.full(20, 0.1), open_round.attempt)
        server.commit(open_round)
    server.close()


def run_with_timers(folder: Path) -> dict[str, Any]:
    """A run with timers in hours."""
    _run(folder / "hours", 8, True, timer_hours=6.0)
    return {}


def run_with_adaptive_clipping(folder: Path) -> dict[str, Any]:
    """A run whose clip norm moves."""
    from dpftrl import AdaptiveClipping

    _run(folder / "adaptive", 8, False, clip_norm=AdaptiveClipping())
    return {}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)))
