"""Small runs of the real server, and what their files say, read without the library."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from journal_codes import ledger_rows

from dpftrl import MinSep, account, mechanism
from dpftrl.federated import Released, Round, Server, Settings, write_ledger
from dpftrl.participation import UNCAPPED
from dpftrl.plan import Fleet, Plan

DELTA = 1e-6
SIZE = 5
PEOPLE = tuple(f"person {i}" for i in range(60))

Update = Callable[[str, int], Any]


def small_plan(
    rounds: int = 20,
    min_sep: int = 4,
    cap: int = UNCAPPED,
    *,
    goal: int = 3,
    over_selection: float = 1.0,
    population: int = len(PEOPLE),
    noise_multiplier: float = 1.0,
    name: str = "blt-b400",
) -> Plan:
    fleet = Fleet(population=population, report_goal=goal, over_selection=over_selection)
    limits = MinSep(rounds, min_sep, cap)
    return Plan(
        fleet,
        account(mechanism(name, limits), limits, noise_multiplier=noise_multiplier, delta=DELTA),
    )


def create(
    place: Path,
    plan: Plan | None = None,
    model: dict[str, Any] | None = None,
    *,
    key: int = 1,
    **settings: Any,
) -> Server:
    told = Settings(**{"clip_norm": 1.0, **settings})
    start = {"w": np.zeros(SIZE)} if model is None else model
    return Server.create(
        place / "run",
        plan or small_plan(),
        told,
        start,
        state_folder=place / "state",
        insecure_test_key=key,
    )


def reopen(server: Server) -> Server:
    """The same run in another server."""
    server.close()
    root = server.folder.root
    return Server.resume(root, state_folder=root.parent / "state")


def zeros(_client: str, _row: int) -> np.ndarray:
    return np.zeros(SIZE)


def fill(attempt: Round, update: Update = zeros) -> None:
    """Report for clients of the cohort, in their order, until there are enough."""
    for client in attempt.clients:
        if attempt.report(client, update(client, attempt.number), attempt.attempt):
            return


def one_round(
    server: Server,
    people: Sequence[str] = PEOPLE,
    update: Update = zeros,
    now: float | None = None,
) -> Released:
    attempt = server.begin(people, now)
    fill(attempt, update)
    return server.commit(attempt)


def sum_of(server: Server, attempt: Round) -> tuple[list[int], float]:
    """The exact sum so far, as whole steps, and how large a step is."""
    grid = server._grid
    return [int(step) for step in attempt.reports._sum.steps], grid.step


def ledger(server: Server) -> list[tuple[int, str, str]]:
    """Round, client and status of each contact, from the journal."""
    return ledger_rows(records(server))


def written_ledger(server: Server) -> Path:
    """A file with the ledger of a run."""
    path = server.folder.root.parent / "ledger.csv"
    write_ledger(server.folder.root, path)
    return path


def contacts(server: Server) -> dict[str, list[int]]:
    """The rows for which each client of the ledger was contacted, in the order of the file."""
    found: dict[str, list[int]] = defaultdict(list)
    for row, client, _ in ledger(server):
        found[client].append(row)
    return found


def least_gap(found: dict[str, list[int]]) -> int | None:
    """By looking at every two contacts of one client."""
    gaps = [
        abs(a - b) for rows in found.values() for i, a in enumerate(rows) for b in rows[i + 1 :]
    ]
    return min(gaps, default=None)


def most_contacts(found: dict[str, list[int]]) -> int:
    return max(map(len, found.values()), default=0)


def records(server: Server) -> list[dict[str, Any]]:
    """What the journal says."""
    return [json.loads(line)["record"] for line in server.folder.journal.read_bytes().splitlines()]


def log(server: Server) -> list[dict[str, Any]]:
    path = server.folder.log
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
