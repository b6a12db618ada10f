"""A program as a user would write it. It is type-checked in strict mode and run as it is."""

import tempfile
from pathlib import Path

import numpy as np

import dpftrl
from dpftrl import (
    Fleet,
    Guarantee,
    Mechanism,
    MinSep,
    NoiseKey,
    NoiseStream,
    Plan,
    Released,
    Round,
    Server,
    Settings,
)


def plans() -> Plan:
    """Compare mechanisms, calibrate, and make a plan in one call."""
    clients = MinSep(rounds=50, min_sep=10, max_participations=5)
    mechanisms: list[Mechanism] = [dpftrl.mechanism(name, clients) for name in ("tree", "blt-b400")]
    for mechanism in mechanisms:
        noise_multiplier = dpftrl.calibrate(mechanism, clients, epsilon=4.0, delta=1e-6)
        guarantee: Guarantee = dpftrl.account(mechanism, clients, noise_multiplier, delta=1e-6)
        error: float = mechanism.error_report(clients).rms_error
        print(f"{mechanism.name}: {noise_multiplier:.3f} {guarantee.epsilon:.3f} {error:.2f}")
    plan = dpftrl.make_plan(
        population=100, report_goal=5, rounds=6, epsilon=8.0, delta=1e-6, mechanism=mechanisms[1]
    )
    fleet: Fleet = plan.fleet
    print(fleet.min_sep(), plan.noise_multiplier, plan.effective_noise_multiplier)
    return plan


def own_loop(plan: Plan, folder: Path) -> None:
    """Use the noise in a training loop of one's own, and save and load its state."""
    key = NoiseKey.generate()
    stream = NoiseStream(plan, 4, key=key, clip_norm=1.0)
    total = np.zeros(4, np.float32)
    stream.add_to(total, updates=0)
    stream.save(folder / "noise.safetensors")
    again = NoiseStream.load(folder / "noise.safetensors", plan, key=key, at_least=stream.round)
    print(again.round, again.mode)


def federated(plan: Plan, folder: Path) -> None:
    """Run a federated server for two rounds, and check its files."""
    people = [f"client-{i}" for i in range(100)]
    model = {"weights": np.zeros((2, 2), np.float32)}
    settings = Settings(clip_norm=1.0)
    run, state = folder / "run", folder / "state"
    with Server.create(run, plan, settings, model, state_folder=state) as server:
        for _ in range(2):
            current: Round = server.begin(people)
            for client in current.clients:
                if current.report(client, {"weights": np.ones((2, 2))}, current.attempt):
                    break
            released: Released = server.commit(current)
            print(released.rounds, released.epsilon, released.model["weights"].shape)
        server.export(folder / "model.safetensors")
    dpftrl.save_plan(plan, folder / "plan.json")
    print(dpftrl.load_plan(folder / "plan.json") == plan)
    print(dpftrl.load_guarantee(run / "guarantee.json").epsilon)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        chosen = plans()
        own_loop(chosen, Path(temporary))
        federated(chosen, Path(temporary))
