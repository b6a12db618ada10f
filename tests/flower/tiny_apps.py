"""A ClientApp with a model of a few numbers, and plans, strategies and grids for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from dpftrl import MinSep, account, mechanism
from dpftrl.federated import Settings
from dpftrl.flower import DpFtrl, InProcessGrid, Patience, client_mod
from dpftrl.flower.messages import Instruction
from dpftrl.participation import UNCAPPED
from dpftrl.plan import Fleet, Plan

SIZE = 6
DELTA = 1e-6
QUICK = Patience(replies=30.0, nodes=0.0, attempts=3, backoff=0.0)

Trained = Callable[[NDArray[Any], int, int], NDArray[Any]]


def target(partition: int) -> NDArray[np.float64]:
    """Return the model that fits a node's data best."""
    return np.cos(np.arange(SIZE)) + 0.05 * np.sin(partition + np.arange(SIZE))


def half_way(model: NDArray[Any], partition: int, _round: int) -> NDArray[Any]:
    return (model + 0.5 * (target(partition) - model)).astype(np.float32)


def client_app(trained: Trained = half_way, **mod: Any) -> ClientApp:
    app = ClientApp(mods=[client_mod(**{"simulated": True, **mod})])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content.array_records["arrays"]["w"].numpy()
        number = int(message.content.config_records["config"]["server-round"])
        # Not by partition id: Flower's own simulation assigns these at random.
        after = trained(model, context.node_id % 97, number)
        arrays, metrics = ArrayRecord({"w": Array(after)}), MetricRecord({"num-examples": 7})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def plan(
    rounds: int = 6,
    min_sep: int = 2,
    *,
    population: int = 12,
    goal: int = 3,
    over_selection: float = 1.0,
    noise_multiplier: float = 0.05,
    cap: int = UNCAPPED,
) -> Plan:
    limits = MinSep(rounds, min_sep, cap)
    fleet = Fleet(population=population, report_goal=goal, over_selection=over_selection)
    return Plan(
        fleet,
        account(mechanism("blt-b400"), limits, noise_multiplier=noise_multiplier, delta=DELTA),
    )


def start_arrays() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})


def strategy(place: Path, planned: Plan | None = None, **options: Any) -> DpFtrl:
    settings = {"clip_norm": 2.0, **options.pop("settings", {})}
    return DpFtrl(
        planned or plan(),
        Settings(**settings),
        place / "run",
        **{
            "patience": QUICK,
            "state_folder": place / "state",
            "insecure_test_key": 1,
            **options,
        },
    )


def grid(app: ClientApp | None = None, nodes: int = 12, **options: Any) -> InProcessGrid:
    return InProcessGrid(app or client_app(), range(100, 100 + nodes), **options)


def instruction(**changes: Any) -> Instruction:
    """Return the instruction for the first row of a run, with changes."""
    usual: dict[str, Any] = {"run": "ab12", "attempt": 0, "row": 0, "rounds": 100, "clip_norm": 1.0}
    usual |= {"min_sep": 3, "timer_hours": 0.0, "nonce": "only this device knows"}
    return Instruction(**{**usual, **changes})
