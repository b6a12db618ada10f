"""Flower's side, in a module of its own, so that its workers load it once.

A client trains with our own engine's compiled program: what is compared is all that is around it.
"""

import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import _train_setting as setting
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

if TYPE_CHECKING:
    from dpftrl.simulation.jax_clients import JaxClients

client_app = ClientApp()


@lru_cache
def clients() -> "JaxClients":
    """Data and compiled program of a worker."""
    from dpftrl.simulation.jax_clients import JaxClients

    return JaxClients(setting.model(), setting.task().train, setting.LOCAL, setting.SEED)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client of a cohort: node i is its i-th."""
    config = message.content.config_records["config"]
    number = int(str(config["server-round"])) - 1
    cohort = setting.cohorts(str(config["folder"]))[number]
    model = message.content.array_records["arrays"]["model"].numpy()
    name = cohort[int(context.node_config["partition-id"])]
    ((_, update),) = clients().updates(model, [name], number)
    trained = ArrayRecord({"model": Array(model + update)})
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)


def server_app(folder: Path, seconds: list[float]) -> ServerApp:
    """FedAvg over all nodes, which are as many as a cohort has clients."""
    app, cohorts = ServerApp(), setting.cohorts(str(folder))
    rounds, nodes = len(cohorts), len(cohorts[0])
    start = setting.vector(folder, "start")
    last = time.perf_counter()

    def after_round(number: int, arrays: ArrayRecord) -> None:
        nonlocal last
        now = time.perf_counter()
        if number > 0:
            seconds.append(now - last)
        if number == 1:
            setting.save_vector(folder, "flower", arrays["model"].numpy() - start)
        last = time.perf_counter()

    @app.main()
    def run(grid: Grid, _: Context) -> None:  # pyright: ignore[reportUnusedFunction]
        # It begins while nodes still register, and would take the first few of them for all.
        FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes).start(
            grid,
            ArrayRecord({"model": Array(start)}),
            num_rounds=rounds,
            train_config=ConfigRecord({"folder": str(folder)}),
            evaluate_fn=after_round,
        )

    return app
