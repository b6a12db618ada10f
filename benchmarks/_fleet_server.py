"""Run in a fresh process: PART CLIENTS COHORT ROUNDS FOLDER; a server with a very large fleet."""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from process_memory import memory, memory_from_here

from dpftrl import MinSep, account, mechanism
from dpftrl.federated import Server, Settings
from dpftrl.federated.pseudonyms import Population
from dpftrl.plan import Fleet, Plan

SIZE = 16  # parameters of the model: the fleet is measured, not the training
UPDATE = np.ones(SIZE, np.float32)


def create(folder: Path, clients: int, cohort: int, rounds: int) -> Server:
    """A run of a tiny model, whose clients may return after half the rounds of a rotation."""
    limits = MinSep(rounds, max(1, clients // cohort // 2))
    promise = account(mechanism("blt-b400"), limits, noise_multiplier=1.0, delta=1e-9)
    fleet = Fleet(population=clients, report_goal=cohort)
    model = {"w": np.zeros(SIZE)}
    state = folder / "state"
    return Server.create(
        folder / "run", Plan(fleet, promise), Settings(clip_norm=1.0), model, state_folder=state
    )


def resume(folder: Path) -> Server:
    """The run that `create` has made."""
    return Server.resume(folder / "run", state_folder=folder / "state")


def names_of(clients: int) -> list[str]:
    """Names as a fleet has them: all of the same form."""
    return [f"client-{i:08d}" for i in range(clients)]


def one_round(server: Server, available: list[str] | Population) -> float:
    """Let the cohort report, and release the round; returns the CPU time of `begin`."""
    start = time.process_time()
    current = server.begin(available)
    begun = time.process_time() - start
    for client in current.clients:
        if current.report(client, UPDATE, current.attempt):
            break
    server.commit(current)
    return begun


def cpu_seconds(action: Callable[[], Any]) -> float:
    """The CPU time of an action."""
    start = time.process_time()
    action()
    return time.process_time() - start


def hashed(names: list[str]) -> None:
    """The floor of `begin`: one call of hashlib per name."""
    key = bytes(32)
    for name in names:
        hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()


def read_and_hashed(folder: Path) -> None:
    """The floor of resuming: the bytes of the journal, read and hashed."""
    with (folder / "run" / "private" / "journal.jsonl").open("rb") as file:
        hashlib.file_digest(file, "sha256")


def measure_begin(clients: int, cohort: int, rounds: int, folder: Path) -> dict[str, Any]:
    """`begin` with a list of names, with a population and with a part of it, in several rounds."""
    names = names_of(clients)
    floor = cpu_seconds(lambda: hashed(names))
    with create(folder, clients, cohort, rounds) as server:
        before = memory_from_here()
        with_list = [one_round(server, names) for _ in range(3)]
        extra = memory("VmHWM") - before
        everybody = list[Population]()
        making = cpu_seconds(lambda: everybody.append(server.population(names)))
        with_population = [one_round(server, everybody[0]) for _ in range(rounds - 6)]
        mask = np.arange(clients) % 3 > 0
        with_mask = list[float]()
        for _ in range(3):
            selecting = list[Population]()
            selected = cpu_seconds(lambda: selecting.append(everybody[0].select(mask)))  # noqa: B023
            with_mask.append(selected + one_round(server, selecting[0]))
    return {
        "floor": floor,
        "first_list": with_list[0],
        "list": min(with_list[1:]),
        "extra_bytes": extra,
        "make_population": making,
        "population": min(with_population),
        "mask": min(with_mask),
    }


def measure_files(clients: int, cohort: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Rounds with the whole fleet; then the sizes of the files, and resuming."""
    start, began = time.perf_counter(), time.process_time()
    before = memory_from_here()
    with create(folder, clients, cohort, rounds) as server:
        everybody = server.population(names_of(clients))
        for done in range(1, rounds + 1):
            one_round(server, everybody)
            if done % 100 == 0:
                print(f"{done} of {rounds} rounds", file=sys.stderr, flush=True)
        snapshot, ledger = server.folder.snapshot, server.folder.ledger
    ran = time.perf_counter() - start, time.process_time() - began
    extra = memory("VmHWM") - before
    private = folder / "run" / "private"
    floor = min(cpu_seconds(lambda: read_and_hashed(folder)) for _ in range(3))
    return {
        "seconds": ran[0],
        "cpu_seconds": ran[1],
        "extra_bytes": extra,
        "journal_bytes": (private / "journal.jsonl").stat().st_size,
        "snapshot_bytes": snapshot.stat().st_size if snapshot.exists() else 0,
        "kept_ledger_bytes": ledger.stat().st_size if ledger.exists() else 0,
        "floor": floor,
    }


def measure_resume(clients: int, cohort: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Resuming a run with and without its snapshot, and writing its ledger."""
    from dpftrl.federated import write_ledger

    resume(folder).close()  # loads compiled code
    with_snapshot = min(cpu_seconds(lambda: resume(folder).close()) for _ in range(3))
    snapshot = folder / "run" / "private" / "snapshot.bin"
    if snapshot.exists():
        snapshot.rename(folder / "kept")
    full = cpu_seconds(lambda: resume(folder).close())
    if (folder / "kept").exists():
        (folder / "kept").rename(snapshot)
    ledger = folder / "ledger.csv"
    writing = cpu_seconds(lambda: write_ledger(folder / "run", ledger))
    return {
        "resume": with_snapshot,
        "full_replay": full,
        "ledger": writing,
        "ledger_bytes": ledger.stat().st_size,
        "contacts": cohort * rounds,
        "clients": clients,
    }


PARTS = {"begin": measure_begin, "files": measure_files, "resume": measure_resume}


def main() -> None:
    """Measure a part, and print it as JSON."""
    part, clients, cohort, rounds, folder = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    print(json.dumps(PARTS[part](int(clients), int(cohort), int(rounds), Path(folder))))


if __name__ == "__main__":
    main()
