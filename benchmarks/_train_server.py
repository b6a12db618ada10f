"""Run in a fresh process: CLIENTS SAMPLE REPEATS; what a round costs beside the clients' training.

The paper's LSTM on sentences of real chat, dealt out as the StackOverflow preset allows: up to 256
to a client. Training is timed on a sample of the clients and multiplied; the server takes as many
reports as there are clients, made of the sample's updates, while nobody trains.
"""

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from dpftrl.federated import Round, Server, Settings, Sgd
from dpftrl.federated.store.run_folder import Checkpoint
from dpftrl.noise import NoiseStream
from dpftrl.plan import Plan
from dpftrl.simulation.config import PRESETS, Privacy
from dpftrl.simulation.jax_clients import JaxClients, LocalTraining
from dpftrl.simulation.training import make_plan
from dpftrl.tasks import load_task
from dpftrl.tasks.language_model import Lstm
from dpftrl.tasks.task import Users

PRESET = PRESETS["stackoverflow"]
LOCAL = LocalTraining(PRESET.client.learning_rate, PRESET.client.batch_size, PRESET.client.epochs)
# People of StackOverflow; all of them are available.
POPULATION = 342_477
SENTENCES = (256, 64)

Vector = NDArray[np.float32]
Seconds = dict[str, float]


def dealt(sentences: NDArray[np.int32], people: int, each: int) -> Users:
    """The first so many sentences, the same number to everybody."""
    names = tuple(f"client-{i:03}" for i in range(people))
    return Users(names, sentences[: people * each], np.arange(people + 1, dtype=np.int64) * each)


def training(model: Lstm, users: Users, start: Vector, repeats: int) -> tuple[float, list[Vector]]:
    """The median time that all these people take, and their updates."""
    clients = JaxClients(model, users, LOCAL, seed=0)
    updates = [update for _, update in clients.updates(start, users.names, 0)]
    times: list[float] = []
    for number in range(1, repeats + 1):
        began = time.perf_counter()
        for _ in clients.updates(start, users.names, number):
            pass
        times.append(time.perf_counter() - began)
    return statistics.median(times), updates


def plan(clients: int) -> Plan:
    """The preset's, for fewer clients a round."""
    preset = PRESET.privacy
    privacy = Privacy(
        rounds=preset.rounds,
        report_goal=clients,
        over_selection=1.0,
        availability=1.0,
        min_sep=preset.min_sep,
        epsilon=preset.epsilon,
        delta=preset.delta,
    )
    return make_plan(privacy, POPULATION)


def watched(spent: Seconds, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that adds up the seconds it takes."""

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            spent[name] += time.perf_counter() - start

    return timed


def one_round(server: Server, names: list[str], updates: list[Vector]) -> Seconds:
    """Where the time of a round goes, without anybody's training."""
    spent: Seconds = defaultdict(float)
    parts = {
        "begin": (Server, "begin"),
        "reports": (Round, "report"),
        "commit": (Server, "commit"),
        "noise": (NoiseStream, "add_to"),
        "optimiser": (Sgd, "step"),
        "checkpoint": (Checkpoint, "save"),
        "snapshot": (NoiseStream, "save"),
    }
    with ExitStack() as stack:
        for part, (owner, method) in parts.items():
            timed = watched(spent, part, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, timed))
        attempt = server.begin(names)
        for number, client in enumerate(attempt.clients):
            attempt.report(client, updates[number % len(updates)], attempt.attempt)
        server.commit(attempt)
    inside = sum(spent[part] for part in ("noise", "optimiser", "checkpoint", "snapshot"))
    spent["journal"] = spent.pop("commit") - inside
    spent["snapshot"] /= PRESET.snapshot_every
    return spent


def bookkeeping(
    clients: int, start: dict[str, Vector], updates: list[Vector], repeats: int
) -> Seconds:
    """Medians over rounds, after one to warm up. Noise is saved every round, and shared out."""
    settings = Settings(clip_norm=PRESET.clip_norm, optimizer=PRESET.server, snapshot_every=1)
    names = [f"client-{i}" for i in range(POPULATION)]
    with (
        tempfile.TemporaryDirectory() as run,
        Server.create(
            f"{run}/run", plan(clients), settings, start, state_folder=f"{run}/state"
        ) as server,
    ):
        rounds = [one_round(server, names, updates) for _ in range(repeats + 1)][1:]
    return {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}


def main() -> None:
    """Print medians in seconds."""
    clients, sample, repeats = map(int, sys.argv[1:])
    sentences = load_task("chitchat", vocabulary_size=10_000, sentence_length=20).train.sentences
    model = Lstm(vocabulary=10_004)
    start = model.init(seed=0)
    flat = np.concatenate([array.reshape(-1) for array in start.values()])
    updates: list[Vector] = []
    seconds: dict[int, float] = {}
    for each in SENTENCES:
        taken, updates = training(model, dealt(sentences, sample, each), flat, repeats)
        seconds[each] = taken * clients / sample
    parts = bookkeeping(clients, start, updates, max(repeats, 3))
    print(
        json.dumps(
            {
                "parameters": len(flat),
                "population": POPULATION,
                "snapshot_every": PRESET.snapshot_every,
                "training": seconds,
                "parts": parts,
            }
        )
    )


if __name__ == "__main__":
    main()
