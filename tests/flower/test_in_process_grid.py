"""The in-process grid behaves as Flower's strategies expect of any Grid."""

import time
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from dpftrl.errors import InvalidInput
from dpftrl.flower import InProcessGrid


@pytest.fixture
def app() -> ClientApp:
    client_app = ClientApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content["arrays"]["w"].numpy() + context.node_config["partition-id"]
        message.content["arrays"]["w"] = Array(
            np.full(2, np.nan)
        )  # other nodes must not see this change
        message.content["config"]["lr"] = -1.0
        metrics = MetricRecord({"num-examples": 1})
        return Message(
            RecordDict({"arrays": ArrayRecord({"w": Array(model)}), "metrics": metrics}),
            reply_to=message,
        )

    @client_app.query()
    def count(message: Message, context: Context) -> Message:
        calls = int(context.state.config_records.get("calls", ConfigRecord()).get("n", 0)) + 1
        context.state["calls"] = ConfigRecord({"n": calls})
        answer = ConfigRecord({"n": calls, "lr": context.run_config["lr"]})
        return Message(RecordDict({"answer": answer}), reply_to=message)

    @client_app.query("fail")
    def fail(_: Message, __: Context) -> Message:
        raise RuntimeError("my salary is 3")

    return client_app


def query(node: int, kind: str = "query", group: str = "1") -> Message:
    return Message(RecordDict(), node, kind, group_id=group)


def test_plain_fedavg_runs_on_it(app: ClientApp) -> None:
    grid = InProcessGrid(app, range(10, 20), workers=3)
    start = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=10, min_available_nodes=10)
    config = ConfigRecord({"lr": 0.1})
    result = strategy.start(grid, start, num_rounds=2, train_config=config)
    # FedAvg sums in the order of arrival, in float32.
    assert result.arrays["w"].numpy().tolist() == pytest.approx([9.0, 9.0], rel=1e-6)


def test_a_node_keeps_its_state_and_knows_the_run_config(app: ClientApp) -> None:
    grid = InProcessGrid(app, [5, 6], run_config={"lr": 0.25})
    for call in (1, 2, 3):
        (reply,) = grid.send_and_receive([query(6)])
        assert dict(reply.content["answer"]) == {"n": call, "lr": 0.25}
    (reply,) = grid.send_and_receive([query(5)])
    assert reply.content["answer"]["n"] == 1


def test_failures_are_error_replies(app: ClientApp) -> None:
    grid = InProcessGrid(app, [5, 6])
    failed, unknown = grid.send_and_receive([query(5, "query.fail"), query(7)])
    assert failed.has_error()
    assert "salary" not in str(failed.error)
    assert unknown.has_error()


def test_replies_come_in_the_order_of_the_ids_and_once(app: ClientApp) -> None:
    grid = InProcessGrid(app, range(50), run_config={"lr": 0.0}, workers=4)
    ids = list(grid.push_messages([query(node) for node in range(50)]))
    message_ids = [ids[i] for i in (40, 3, 17)]
    replies = list(grid.pull_messages(message_ids))
    assert [reply.metadata.reply_to_message_id for reply in replies] == message_ids
    assert [reply.metadata.src_node_id for reply in replies] == [40, 3, 17]
    assert list(grid.pull_messages(message_ids)) == []


def test_messages_of_a_closed_round_are_dropped(app: ClientApp) -> None:
    grid = InProcessGrid(app, range(50), run_config={"lr": 0.0})
    old = list(grid.push_messages([query(node) for node in range(50)]))
    list(grid.push_messages([query(0, group="2")]))
    assert list(grid.pull_messages(old)) == []


@pytest.mark.parametrize("wrong", [{"node_ids": [1, 1]}, {"node_ids": [1], "workers": -1}])
def test_invalid_arguments_are_refused(app: ClientApp, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        InProcessGrid(app, **wrong)


def test_a_node_trains_one_message_at_a_time() -> None:
    app, running, overlaps = ClientApp(), set[int](), []

    @app.query()
    def slow(message: Message, context: Context) -> Message:
        overlaps.extend({context.node_id} & running)
        running.add(context.node_id)
        time.sleep(0.3 if context.node_id else 0)  # the first node finishes before the others
        running.discard(context.node_id)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, range(4), workers=4)
    next(iter(grid.pull_messages(list(grid.push_messages([query(i) for i in (0, 1, 2, 3)])))))
    list(grid.send_and_receive([query(i, group="2") for i in (3, 2, 1, 0)]))
    assert not overlaps


def test_few_nodes_train_before_their_replies_are_pulled() -> None:
    app, trained = ClientApp(), list[int]()

    @app.query()
    def train(message: Message, context: Context) -> Message:
        trained.append(context.node_id)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, range(50), workers=2)
    replies = iter(grid.pull_messages(list(grid.push_messages([query(i) for i in range(50)]))))
    for pulled in range(1, 11):
        next(replies)
        time.sleep(0.02)
        assert pulled <= len(trained) < pulled + 4


def test_replies_trained_ahead_are_dropped_with_their_round(app: ClientApp) -> None:
    grid = InProcessGrid(app, range(50), run_config={"lr": 0.0}, workers=4)
    old = list(grid.push_messages([query(node) for node in range(50)]))
    next(iter(grid.pull_messages(old)))
    list(grid.push_messages([query(0, group="2")]))
    assert list(grid.pull_messages(old)) == []


def test_a_reply_is_pulled_only_once(app: ClientApp) -> None:
    grid = InProcessGrid(app, range(4), run_config={"lr": 0.0}, workers=2)
    ids = list(grid.push_messages([query(node) for node in range(4)]))
    assert len(list(grid.pull_messages([*ids, *ids]))) == 4
    assert list(grid.pull_messages(ids)) == []


def test_pulling_ends_when_another_round_begins(app: ClientApp) -> None:
    grid = InProcessGrid(app, range(4), run_config={"lr": 0.0}, workers=1)
    replies = iter(grid.pull_messages(list(grid.push_messages([query(i) for i in range(4)]))))
    next(replies)
    list(grid.push_messages([query(0, group="2")]))
    assert list(replies) == []
