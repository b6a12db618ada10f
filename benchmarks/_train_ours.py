"""Run in a fresh process: FOLDER ROUNDS CLIENTS; time whole rounds of the local engine.

Everything of a round is in it: cohort, training, clipping, exact sum, noise, optimiser, ledger,
journal and checkpoint, each flushed to the disk.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import _train_setting as setting
import numpy as np
from numpy.typing import NDArray

from dpftrl.federated import Server, Settings
from dpftrl.plan import Plan
from dpftrl.simulation.config import PRESETS, Privacy
from dpftrl.simulation.jax_clients import JaxClients
from dpftrl.simulation.population import Population, next_round
from dpftrl.simulation.training import make_plan

Vector = NDArray[np.float32]
PRESET = PRESETS["chitchat"]


class Noted:
    """Clients, and whom they were; of the first round also what they sent."""

    def __init__(self, clients: JaxClients, size: int):
        self._clients = clients
        self.cohorts: list[list[str]] = []
        self.first_sum = np.zeros(size)

    def updates(
        self, model: Vector, cohort: Sequence[str], round_number: int, /
    ) -> Iterator[tuple[str, Vector]]:
        """As they come."""
        self.cohorts.append(list(cohort))
        updates = self._clients.updates(model, cohort, round_number)
        return self._added(updates) if len(self.cohorts) == 1 else updates

    def _added(self, updates: Iterator[tuple[str, Vector]]) -> Iterator[tuple[str, Vector]]:
        for name, update in updates:
            self.first_sum += update
            yield name, update


def plan(clients: int) -> Plan:
    """As the task's own config has it, but for clients who always answer."""
    privacy = Privacy(
        report_goal=clients,
        over_selection=1.0,
        availability=1.0,
        epsilon=PRESET.privacy.epsilon,
        delta=PRESET.privacy.delta,
    )
    return make_plan(privacy, len(setting.task().train))


def train(server: Server, noted: Noted, rounds: int) -> list[float]:
    """Seconds of each round."""
    population = Population(
        setting.task().train.names, setting.SEED, drop_out=0, straggler_share=0, least=1, most=1
    )
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        next_round(server, noted, population, rounds_per_hour=1.0)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Train, note the cohorts, print the seconds of each round."""
    folder, rounds, clients = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model, settings = setting.model(), Settings(clip_norm=PRESET.clip_norm, optimizer=PRESET.server)
    start = model.init(setting.SEED)
    people = JaxClients(model, setting.task().train, setting.LOCAL, setting.SEED)
    with (
        tempfile.TemporaryDirectory() as run,
        Server.create(
            f"{run}/run", plan(clients), settings, start, state_folder=f"{run}/state"
        ) as server,
    ):
        setting.save_vector(folder, "start", server.model)
        noted = Noted(people, server.layout.size)
        seconds = train(server, noted, rounds)
    setting.save_cohorts(folder, noted.cohorts)
    setting.save_vector(folder, "ours", noted.first_sum / clients)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
