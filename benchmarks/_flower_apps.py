"""The apps that are timed, in a module of its own, so that Ray's workers load it once."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray

from dpftrl import MinSep, account, mechanism
from dpftrl.federated import Settings
from dpftrl.flower import DpFtrl, client_mod
from dpftrl.plan import Fleet, Plan

SIDE = 1000
BATCH = 64


def start() -> ArrayRecord:
    """A million parameters."""
    return ArrayRecord({"w": Array(np.zeros((SIDE, SIDE), np.float32))})


def trained(model: NDArray[np.float32], node: int, steps: int) -> NDArray[np.float32]:
    """Some steps of linear regression on a node's own batch."""
    dice = np.random.default_rng(node)
    model = model + np.float32(1e-6)
    if steps:
        x = dice.standard_normal((BATCH, SIDE), np.float32)
        y = dice.standard_normal((BATCH, SIDE), np.float32)
    for _ in range(steps):
        model -= np.float32(1e-4) * (x.T @ (x @ model - y))
    return model


def client_app(private: bool, steps: int) -> ClientApp:
    """The same ClientApp, with our mod or without."""
    app = ClientApp(mods=[client_mod(simulated=True)] if private else [])

    @app.train()
    def train(message: Message, context: Context) -> Message:  # pyright: ignore[reportUnusedFunction]
        model = message.content.array_records["arrays"]["w"].numpy()
        arrays = ArrayRecord({"w": Array(trained(model, context.node_id % 1000, steps))})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def strategy(private: bool, clients: int, rounds: int, folder: Path) -> Strategy:
    """DP-FTRL with a BLT of the paper, or plain FedAvg; both ask everybody."""
    if not private:
        return FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    promise = account(mechanism("blt-b400"), MinSep(rounds, 1), noise_multiplier=1.0, delta=1e-6)
    plan = Plan(Fleet(population=clients, report_goal=clients), promise)
    return DpFtrl(plan, Settings(clip_norm=1.0), folder / "run", state_folder=folder / "state")


def timed(run: Strategy, grid: Grid, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round but the first, in which things are compiled; and of all processors."""
    clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
    times: dict[str, list[float]] = {name: [] for name in clocks}

    def after_round(_: int, __: ArrayRecord) -> None:
        for name, clock in clocks.items():
            times[name].append(clock())

    start_run: Callable[..., object] = run.start
    told = {} if isinstance(run, DpFtrl) else {"num_rounds": rounds}
    start_run(grid, start(), evaluate_fn=after_round, **told)
    return {name: [b - a for a, b in pairwise(found[1:])] for name, found in times.items()}
