"""Small federated runs with canaries, with noise as planned or with less of it."""

import numpy as np
import pytest

import dpftrl.federated.store.run_store as run_store
from dpftrl import MinSep, Server, Settings, account, calibrate, mechanism
from dpftrl.auditing.canaries import PUBLIC, Canaries, canary_file
from dpftrl.noise import NoiseStream
from dpftrl.plan import Fleet, Plan
from dpftrl.simulation.population import Population, PythonClients, next_round

SIZE, ROUNDS, MIN_SEP, GOAL = 4000, 6, 2, 4
PEOPLE = [f"client-{i}" for i in range(24)]
PARTICIPATION = MinSep(ROUNDS, MIN_SEP)


def plan_for(epsilon: float = 8.0, delta: float = 1e-4) -> Plan:
    chosen = mechanism("blt-b400")
    scale = calibrate(chosen, PARTICIPATION, epsilon, delta)
    return Plan(Fleet(len(PEOPLE), GOAL), account(chosen, PARTICIPATION, scale, delta))


def divide_noise(monkeypatch: pytest.MonkeyPatch, divisor: float) -> None:
    """Let servers use noise that is too small: what no option of dpftrl can do."""

    def too_small(plan, file, layout, key):
        return NoiseStream.unchecked(
            plan.mechanism,
            layout.size,
            noise_multiplier=plan.noise_multiplier / divisor,
            key=key,
            clip_norm=file.settings.grid(plan).clip_norm,
        )

    monkeypatch.setattr(run_store, "_noise", too_small)


def create(folder, canaries: int, plan: Plan | None = None) -> Server:
    plan = plan or plan_for()
    model = {"weights": np.zeros(SIZE, np.float32)}
    files = {PUBLIC: canary_file(canaries, plan, PARTICIPATION, SIZE).encoded()} if canaries else {}
    settings = Settings(clip_norm=0.5, snapshot_every=1)
    state = folder.parent / "state"
    return Server.create(folder, plan, settings, model, state_folder=state, files=files)


def train(server: Server, rounds: int = ROUNDS) -> None:
    """Train up to this number of rounds."""

    def local(model, client, number):
        random = np.random.default_rng([len(client), number])
        return {"weights": model["weights"] + random.normal(0, 0.1, SIZE).astype(np.float32)}

    clients = PythonClients(local, server.arrays())
    population = Population(PEOPLE, seed=1, drop_out=0.0, least=1.0, most=1.0)
    canaries = Canaries.resume(server.folder.root, server.plan, server.rounds)
    while server.rounds < rounds:
        next_round(server, clients, population, 1.0, canaries)
