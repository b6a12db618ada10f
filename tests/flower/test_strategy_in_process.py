"""The strategy over the in-process grid: rounds, drop-outs, refusals, resume."""

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tiny_apps import (
    QUICK,
    client_app,
    grid,
    half_way,
    plan,
    start_arrays,
    strategy,
    target,
)

from dpftrl import AdaptiveClipping
from dpftrl.errors import InvalidInput, RunInUse, TooFewClients, UnsafeState
from dpftrl.federated import Server, Settings, StartModel, write_ledger
from dpftrl.flower import InProcessGrid, Patience
from dpftrl.plan import Plan
from dpftrl.verify import verify_run


def final(place: Path) -> np.ndarray:
    with Server.resume(place / "run", state_folder=place / "state") as server:
        return server.model.copy()


def hypotheses(place: Path) -> dict[str, str]:
    hypotheses = json.loads((place / "run" / "guarantee.json").read_text())["hypotheses"]
    return {hypothesis["name"]: hypothesis["basis"] for hypothesis in hypotheses}


def ledger(place: Path) -> list[tuple[int, str, str]]:
    write_ledger(place / "run", place / "ledger.csv")
    with (place / "ledger.csv").open(newline="") as file:
        return [(int(row), who, status) for row, who, status in list(csv.reader(file))[1:]]


def test_a_run_learns_and_verifies(tmp_path: Path) -> None:
    seen: list[float] = []

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        loss = float(np.linalg.norm(arrays["w"].numpy() - target(0)))
        seen.append(loss)
        return MetricRecord({"loss": loss})

    result = strategy(tmp_path).start(grid(), start_arrays(), evaluate_fn=evaluate)
    assert len(seen) == 7
    assert seen[-1] < 0.3 * seen[0]
    assert list(result.evaluate_metrics_serverapp) == list(range(7))
    assert list(result.train_metrics_clientapp) == list(range(1, 7))
    for rounds, metrics in result.train_metrics_clientapp.items():
        assert dict(metrics) == {
            "epsilon": metrics["epsilon"],
            "reports": 3,
            "drop-outs": 0,
            "attempts": 1,
        }
        evaluated = dict(result.evaluate_metrics_serverapp[rounds])
        assert evaluated == {**metrics, "loss": seen[rounds]}
    guarantee = json.loads((tmp_path / "run/guarantee.json").read_text())
    assert metrics["epsilon"] == guarantee["epsilon"]
    assert dict(result.evaluate_metrics_serverapp[0]) == {"epsilon": 0.0, "loss": seen[0]}
    assert (result.arrays["w"].numpy() == final(tmp_path)).all()
    assert verify_run(tmp_path / "run", tmp_path / "state").passed
    rows = ledger(tmp_path)
    assert len(rows) == 18
    assert {status for _, _, status in rows} == {"counted"}
    assert hypotheses(tmp_path)["identity"] == "assumed"
    assert hypotheses(tmp_path)["participation"] == "enforced"


@pytest.mark.parametrize("factor", [2, 1])
def test_with_adaptive_clipping_clients_leave_the_clipping_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    """A client that clips to the clip norm itself (factor 1) hides that its update is longer."""
    start = 1e-3  # far too small
    adaptive = {"clip_norm": AdaptiveClipping(start=start, beta=0.9)}
    with monkeypatch.context() as patched:
        patched.setattr(
            Server, "client_clip_norm", property(lambda server: factor * server.clip_norm)
        )
        strategy(tmp_path, settings=adaptive).start(grid(), start_arrays())
    assert verify_run(tmp_path / "run", tmp_path / "state").passed
    with Server.resume(tmp_path / "run", state_folder=tmp_path / "state") as server:
        assert server.client_clip_norm == 2 * server.clip_norm
        grew = server.clip_norm > start * 3  # six rounds of at most e^0.5, and noise
    assert grew == (factor == 2)


def test_resuming_a_finished_run_returns_its_model(tmp_path: Path) -> None:
    first = strategy(tmp_path).start(grid(), start_arrays())
    again = strategy(tmp_path).start(grid(), start_arrays())
    assert (first.arrays["w"].numpy() == again.arrays["w"].numpy()).all()


def test_a_run_from_an_exported_model_composes(tmp_path: Path) -> None:
    strategy(tmp_path / "first").start(grid(), start_arrays())
    with Server.resume(tmp_path / "first/run", state_folder=tmp_path / "first/state") as server:
        before = server.epsilon
        server.export(tmp_path / "model.safetensors")
    start = StartModel.load(tmp_path / "model.safetensors")
    second = tmp_path / "second"
    result = strategy(second).start(grid(), start)
    assert (result.arrays["w"].numpy() == final(second)).all()
    with Server.resume(second / "run", state_folder=second / "state") as server:
        assert server.epsilon > before * 1.2
        assert server.start == start.start
    assert verify_run(second / "run", second / "state").passed
    again = strategy(second).start(grid(), StartModel.load(tmp_path / "model.safetensors"))
    assert (result.arrays["w"].numpy() == again.arrays["w"].numpy()).all()
    run = start.start.earlier[0].run or ""
    other = StartModel.load(tmp_path / "model.safetensors", other_people=[run])
    with pytest.raises(InvalidInput, match="another statement about its people"):
        strategy(second).start(grid(), other)


class Stopped(Exception):
    pass


class StoppingGrid(InProcessGrid):
    """A grid that raises after a number of pulled replies."""

    left = 0

    def pull_messages(self, message_ids: Any) -> Any:
        for message in super().pull_messages(message_ids):
            if self.left == 0:
                raise Stopped
            self.left -= 1
            yield message


@pytest.mark.parametrize("pulled", [0, 1, 3, 4, 8, 17])
def test_a_stopped_run_resumes_to_the_same_model(tmp_path: Path, pulled: int) -> None:
    strategy(tmp_path / "whole").start(grid(), start_arrays())
    stopping = StoppingGrid(client_app(), range(100, 112))
    stopping.left = pulled
    with pytest.raises(Stopped):
        strategy(tmp_path / "broken").start(stopping, start_arrays())
    strategy(tmp_path / "broken").start(grid(), start_arrays())
    assert (final(tmp_path / "whole") == final(tmp_path / "broken")).all()
    records = [
        json.loads(line)["record"]
        for line in (tmp_path / "broken/run/private/journal.jsonl").read_bytes().splitlines()
    ]
    attempts = [record["attempt"] for record in records if record["kind"] == "cohort"]
    assert attempts == list(range(6)), "the interrupted round was repeated, not abandoned"


class NoAnswers(InProcessGrid):
    """A grid whose nodes never reply."""

    def pull_messages(self, message_ids: Any) -> Any:
        list(super().pull_messages(message_ids))
        return []


def test_training_that_fails_counts_as_zeros(tmp_path: Path) -> None:
    def fails(model: Any, partition: int, number: int) -> Any:
        if partition % 4 == 0:
            raise RuntimeError("no battery")
        return half_way(model, partition, number)

    planned = plan(rounds=4, min_sep=1, goal=3, over_selection=2.0)
    patient = Patience(replies=30, nodes=0, attempts=20, backoff=0)
    strategy(tmp_path, planned, patience=patient).start(grid(client_app(fails)), start_arrays())
    rows = ledger(tmp_path)
    assert {status for _, _, status in rows} <= {"counted", "contacted", "abandoned"}
    assert all(sum(r == row and s == "counted" for r, _, s in rows) == 3 for row in range(4))


def test_too_few_reports_abandon_the_attempt_and_keep_the_row(tmp_path: Path) -> None:
    short = Patience(replies=0.2, nodes=0, attempts=3, backoff=0)
    nobody = NoAnswers(client_app(), range(100, 112))
    with pytest.raises(TooFewClients, match="3 attempts in a row"):
        strategy(tmp_path, patience=short).start(nobody, start_arrays())
    assert {(row, status) for row, _, status in ledger(tmp_path)} == {(0, "abandoned")}


def cohorts(place: Path) -> list[int]:
    """The sizes of the cohorts in the journal."""
    lines = (place / "run/private/journal.jsonl").read_bytes().splitlines()
    records = [json.loads(line)["record"] for line in lines]
    return [one["size"] for one in records if one["kind"] == "cohort"]


def without_mod() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content.array_records["arrays"]["w"].numpy()
        arrays = ArrayRecord({"w": Array(half_way(model, context.node_id % 97, 0))})
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    return app


def test_a_forgotten_client_mod_costs_nobody_a_contact(tmp_path: Path) -> None:
    strategy(tmp_path / "right").start(grid(), start_arrays())
    broken = tmp_path / "forgotten"
    for _ in range(3):  # as a supervisor does that starts it again and again
        with pytest.raises(InvalidInput, match=r"ClientApp\(mods=\[client_mod\(\)\]\)"):
            strategy(broken).start(grid(without_mod()), start_arrays())
    assert cohorts(broken) == [3], "the first reply stops the run, and nobody else is contacted"
    strategy(broken).start(grid(), start_arrays())
    assert (final(broken) == final(tmp_path / "right")).all()
    assert ledger(broken) == ledger(tmp_path / "right"), "nobody lost a contact"


def test_one_node_without_client_mod_does_not_stop_a_run(tmp_path: Path) -> None:
    class OneWithout(InProcessGrid):
        """The first reply of each later round comes without the mod's record."""

        def pull_messages(self, message_ids: Any) -> Any:
            for i, reply in enumerate(super().pull_messages(message_ids)):
                if i == 0 and self._count > 4:
                    del reply.content["dpftrl"]
                yield reply

    planned = plan(goal=3, over_selection=4 / 3, min_sep=1)
    result = strategy(tmp_path, planned).start(OneWithout(client_app(), range(12)), start_arrays())
    drop_outs = [metrics["drop-outs"] for metrics in result.train_metrics_clientapp.values()]
    assert drop_outs == [1] * 6  # of four contacted
    assert len(cohorts(tmp_path)) == 6


def test_an_app_that_always_raises_stops_the_run(tmp_path: Path) -> None:
    app = ClientApp()

    @app.train()
    def train(_: Message, __: Context) -> Message:
        raise RuntimeError("my salary is 3")

    with pytest.raises(InvalidInput, match=r"every contacted node refuses: .*client_mod missing"):
        strategy(tmp_path).start(grid(app), start_arrays())
    assert cohorts(tmp_path) == [3]


class Leaving(StoppingGrid):
    """A grid whose nodes can go offline."""

    gone: frozenset[int] = frozenset()

    def get_node_ids(self) -> Any:
        return [node for node in super().get_node_ids() if node not in self.gone]


def interrupted(place: Path, planned: Plan, nodes: int) -> set[int]:
    """Interrupt the first round after one reply; return the ids of its cohort."""
    asked: set[int] = set()

    class Listening(Leaving):
        def push_messages(self, messages: Any) -> Any:
            sent = list(messages)
            asked.update(message.metadata.dst_node_id for message in sent)
            return super().push_messages(sent)

    stopping = Listening(client_app(), range(nodes))
    stopping.left = 1
    with pytest.raises(Stopped):
        strategy(place, planned).start(stopping, start_arrays())
    return asked


def test_a_lost_node_does_not_hold_up_a_restarted_run(tmp_path: Path) -> None:
    """999 of 1,000 nodes are online, and one of the ten that were contacted is gone."""
    planned = plan(rounds=2, population=1000, goal=10)
    grid = Leaving(client_app(), range(1000))
    grid.left, grid.gone = 10**6, frozenset([min(interrupted(tmp_path, planned, 1000))])
    patient = Patience(replies=30, nodes=3600, attempts=1)
    strategy(tmp_path, planned, patience=patient).start(grid, start_arrays())
    assert cohorts(tmp_path) == [10, 10, 10]
    statuses = [status for _, _, status in ledger(tmp_path)]
    assert statuses == ["abandoned"] * 10 + ["counted"] * 20
    assert verify_run(tmp_path / "run", tmp_path / "state").passed


def test_fewer_nodes_than_the_goal_are_never_asked(tmp_path: Path) -> None:
    """Nobody can replace the lost node: the interrupted attempt is kept until it is back."""
    planned = plan(rounds=2, min_sep=1, population=4, goal=3)
    lost = min(interrupted(tmp_path, planned, 4))
    grid = Leaving(client_app(), range(4))
    grid.left, grid.gone = 10**6, frozenset([lost])
    with pytest.raises(TooFewClients, match="2 of the nodes of the interrupted attempt"):
        strategy(tmp_path, planned).start(grid, start_arrays())
    assert cohorts(tmp_path) == [3]
    assert not ledger(tmp_path), "the attempt is neither abandoned nor asked"
    grid.gone = frozenset()
    strategy(tmp_path, planned).start(grid, start_arrays())
    assert cohorts(tmp_path) == [3, 3]


class Deaf(InProcessGrid):
    """A grid whose nodes do not answer the first messages."""

    deaf = 0

    def pull_messages(self, message_ids: Any) -> Any:
        for message in super().pull_messages(message_ids):
            if self.deaf == 0:
                yield message
            else:
                self.deaf -= 1


def test_a_standstill_is_explained(tmp_path: Path) -> None:
    deaf = Deaf(client_app(), range(7))
    deaf.deaf = 6
    planned = plan(min_sep=2, population=7, goal=3)
    short = Patience(replies=0.2, nodes=0, attempts=9, backoff=0)
    with pytest.raises(TooFewClients) as error:
        strategy(tmp_path, planned, patience=short).start(deaf, start_arrays())
    for part in ("1 of the 7 available", "no others", "register more", "close_empty_rounds=True"):
        assert part in str(error.value)
    assert cohorts(tmp_path) == [3, 3], "twice in vain, and nobody is left for the round"
    more = InProcessGrid(client_app(), range(13))
    result = strategy(tmp_path, planned).start(more, start_arrays())
    assert result.train_metrics_clientapp[1]["reports"] == 3, "registering clients ends it"


def test_a_standstill_is_ended_by_an_empty_round(tmp_path: Path) -> None:
    deaf = Deaf(client_app(), range(7))
    deaf.deaf = 6
    planned = plan(rounds=6, min_sep=2, population=7, goal=3)
    short = Patience(replies=0.2, nodes=3600, attempts=9, backoff=0)
    unattended = strategy(tmp_path, planned, patience=short, close_empty_rounds=True)
    result = unattended.start(deaf, start_arrays())
    metrics = result.train_metrics_clientapp
    assert [one["reports"] for one in metrics.values()] == [0, 0, 3, 3, 3, 3]
    assert [one["drop-outs"] for one in metrics.values()] == [6, 0, 0, 0, 0, 0]
    assert (result.arrays["w"].numpy() == final(tmp_path)).all()
    verdict = verify_run(tmp_path / "run", tmp_path / "state")
    assert verdict.passed
    assert (verdict.rounds, verdict.empty_rounds) == (6, 2)


def test_nodes_that_never_reply_do_not_use_up_all_rounds(tmp_path: Path) -> None:
    deaf = Deaf(client_app(), range(4))
    deaf.deaf = 10**9
    planned = plan(rounds=20, min_sep=1, population=4, goal=3)
    short = Patience(replies=0.05, nodes=0, attempts=3, backoff=0)
    for _ in range(2):  # a restart closes no further rounds either
        with pytest.raises(TooFewClients, match=r"3 attempts in a row .* do not reply in time"):
            strategy(tmp_path, planned, patience=short, close_empty_rounds=True).start(
                deaf, start_arrays()
            )
        assert cohorts(tmp_path) == [3, 3, 3]
        assert verify_run(tmp_path / "run", tmp_path / "state").empty_rounds == 2
    deaf.deaf = 0
    more = replace(short, attempts=4)
    result = strategy(tmp_path, planned, patience=more, close_empty_rounds=True).start(
        deaf, start_arrays()
    )
    reports = [one["reports"] for one in result.train_metrics_clientapp.values()]
    assert reports == [0] + 17 * [3]


def test_absent_nodes_do_not_use_up_rounds(tmp_path: Path) -> None:
    grid = InProcessGrid(client_app(), range(2))
    with pytest.raises(TooFewClients, match="wait for more clients"):
        strategy(tmp_path, close_empty_rounds=True).start(grid, start_arrays())
    assert cohorts(tmp_path) == []


def test_simulated_nodes_leave_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "devices"))
    strategy(tmp_path).start(grid(client_app(simulated=False)), start_arrays())
    assert not (tmp_path / "devices").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_diverged_model_counts_as_zeros(tmp_path: Path, bad: float) -> None:
    def diverges(model: Any, partition: int, number: int) -> Any:
        return model * 0 + bad if partition == 3 else half_way(model, partition, number)

    result = strategy(tmp_path).start(grid(client_app(diverges)), start_arrays())
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert len(ledger(tmp_path)) == 18


def test_an_update_of_zeros_is_counted(tmp_path: Path) -> None:
    result = strategy(tmp_path).start(grid(client_app(lambda model, *_: model)), start_arrays())
    assert np.isfinite(result.arrays["w"].numpy()).all()


def test_replies_hold_only_arrays_and_the_attempt(tmp_path: Path) -> None:
    kept: list[Message] = []

    class Listening(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            replies = list(super().pull_messages(message_ids))
            kept.extend(replies)
            return replies

    strategy(tmp_path).start(Listening(client_app(), range(12)), start_arrays())
    assert len(kept) == 18
    for reply in kept:
        assert set(reply.content) == {"arrays", "dpftrl"}
        assert set(reply.content.config_records["dpftrl"]) == {"attempt", "nonce"}
        update = reply.content.array_records["arrays"]["w"].numpy()
        assert np.linalg.norm(update.astype(np.float64)) <= 2.0 * (1 + 1e-6)


def test_replies_of_other_nodes_or_attempts_are_refused(tmp_path: Path) -> None:
    class Confused(InProcessGrid):
        """The first reply of each round claims to be for an earlier attempt."""

        def pull_messages(self, message_ids: Any) -> Any:
            for i, reply in enumerate(super().pull_messages(message_ids)):
                if i == 0:
                    reply.content.config_records["dpftrl"]["attempt"] = 77
                yield reply

    planned = plan(goal=3, over_selection=4 / 3, min_sep=1)
    strategy(tmp_path, planned).start(Confused(client_app(), range(12)), start_arrays())
    assert sum(status == "contacted" for _, _, status in ledger(tmp_path)) == 6


def test_a_reply_counts_for_the_node_that_was_sent_its_nonce(tmp_path: Path) -> None:
    """The sender writes Flower's sender field itself, but cannot guess another node's nonce."""

    class Forging(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            for i, reply in enumerate(super().pull_messages(message_ids)):
                if i == 0:
                    reply.content.config_records["dpftrl"]["nonce"] = "0" * 32
                yield reply

    planned = plan(goal=3, over_selection=4 / 3, min_sep=1)
    strategy(tmp_path, planned).start(Forging(client_app(), range(12)), start_arrays())
    assert sum(status == "contacted" for _, _, status in ledger(tmp_path)) == 6


@pytest.mark.parametrize("raised", [IndexError, AttributeError, KeyError, ValueError])
def test_a_reply_that_flower_cannot_read_is_a_drop_out(tmp_path: Path, raised: Any) -> None:
    class Broken(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            raise raised(f"no message in {message_ids}")

    with pytest.raises(TooFewClients, match="attempts in a row"):
        strategy(tmp_path).start(Broken(client_app(), range(12)), start_arrays())
    strategy(tmp_path).start(InProcessGrid(client_app(), range(12, 24)), start_arrays())


def test_a_run_is_not_resumed_with_less_reliable_identities(tmp_path: Path) -> None:
    strategy(tmp_path).start(grid(), start_arrays())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpftrl.flower.run.identity_of", lambda _: "unregistered")
        with pytest.raises(UnsafeState, match="stated"):
            strategy(tmp_path).start(grid(), start_arrays())


def test_simulated_nodes_are_not_waited_for(tmp_path: Path) -> None:
    large, patient = plan(population=50, goal=20), Patience(nodes=3600.0)
    with pytest.raises(TooFewClients, match="may be contacted"):
        strategy(tmp_path, large, patience=patient).start(grid(nodes=12), start_arrays())


def test_min_sep_holds_and_waiting_for_nodes_ends(tmp_path: Path) -> None:
    with pytest.raises(TooFewClients, match="may be contacted"):
        strategy(tmp_path, plan(min_sep=4)).start(grid(nodes=6), start_arrays())
    contacts = [who for _, who, _ in ledger(tmp_path)]
    assert len(contacts) == len(set(contacts)) == 6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"planned": plan(goal=30, min_sep=1)}, "a round would contact 30"),
        ({"require_auth": True}, "authentication is required"),
        ({"settings": {"clip_norm": -1.0}}, "clip_norm"),
    ],
)
def test_bad_deployments_fail_at_the_start(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidInput, match=expected):
        strategy(tmp_path, **options).start(grid(), start_arrays())
    assert not (tmp_path / "run").exists()


def test_a_clip_norm_that_clients_refuse_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="every contacted node refuses: the server's clip"):
        strategy(tmp_path).start(grid(client_app(clip_norm=1.0)), start_arrays())


def test_a_contact_rule_that_clients_refuse_fails_at_once(tmp_path: Path) -> None:
    own = client_app(simulated=False, timer_folder=tmp_path / "device", min_sep=9)
    with pytest.raises(InvalidInput, match="every contacted node refuses: the server's rule"):
        strategy(tmp_path).start(grid(own), start_arrays())


def test_a_model_with_integer_arrays_fails_at_the_start(tmp_path: Path) -> None:
    """PyTorch's batch normalisation has such arrays."""
    model = {"w": np.zeros(6, np.float32), "batches": np.zeros(1, np.int64)}
    arrays = ArrayRecord({name: Array(array) for name, array in model.items()})
    with pytest.raises(InvalidInput, match="'batches' must be of float32 or float64, got int64"):
        strategy(tmp_path).start(grid(), arrays)
    assert not (tmp_path / "run").exists()


def test_a_client_of_another_shape_fails_at_once(tmp_path: Path) -> None:
    other = client_app(lambda *_: np.zeros(SIZE_OF_ANOTHER, np.float32))
    with pytest.raises(InvalidInput, match="other arrays than the model"):
        strategy(tmp_path).start(grid(other), start_arrays())


SIZE_OF_ANOTHER = 9


def test_resuming_with_another_plan_settings_or_model_is_refused(tmp_path: Path) -> None:
    strategy(tmp_path).start(grid(), start_arrays())
    wrong = ArrayRecord([np.zeros(3, np.float32)])
    for options, arrays, expected in (
        ({}, wrong, "another model"),
        ({"planned": plan(noise_multiplier=0.06)}, start_arrays(), "another plan"),
        ({"settings": {"clip_norm": 3.0}}, start_arrays(), "other settings"),
    ):
        with pytest.raises(InvalidInput, match=expected):
            strategy(tmp_path, **options).start(grid(), arrays)


def test_a_run_of_registered_nodes_is_not_resumed_without_authentication(tmp_path: Path) -> None:
    model = {"w": np.zeros(6)}
    settings = Settings(clip_norm=2.0, identity="registered")
    with Server.create(tmp_path / "run", plan(), settings, model, state_folder=tmp_path / "state"):
        pass
    with pytest.raises(UnsafeState, match="promises that its nodes are registered"):
        strategy(tmp_path).start(grid(), start_arrays())


def test_a_run_in_use_is_waited_for_or_refused(tmp_path: Path) -> None:
    model = {"w": np.zeros(6)}
    settings, state = Settings(clip_norm=2.0), tmp_path / "state"
    alive = Server.create(tmp_path / "run", plan(), settings, model, state_folder=state)
    with pytest.raises(RunInUse, match="another object"):
        strategy(tmp_path).start(grid(), start_arrays())
    ends = Timer(0.3, alive.close)
    ends.start()
    waits = Patience(replies=30, nodes=0, attempts=1, lock=30)
    strategy(tmp_path, patience=waits).start(grid(), start_arrays())
    ends.join()
    assert len(ledger(tmp_path)) == 18


def test_timers_by_hours_use_the_clock(tmp_path: Path) -> None:
    planned = plan(rounds=4, min_sep=1)
    options = {"settings": {"timer_hours": 1.0}}
    strategy(tmp_path, planned, **options).start(grid(), start_arrays())
    contacts = [who for _, who, _ in ledger(tmp_path)]
    assert len(contacts) == len(set(contacts)) == 12
    assert verify_run(tmp_path / "run", tmp_path / "state").passed


class StoppedAfterOne(InProcessGrid):
    """A grid whose nodes leave after the first round."""

    def get_node_ids(self) -> Any:
        return super().get_node_ids() if self._count < 3 else []


@pytest.mark.parametrize("jump_hours", [-1e5, -0.5, 1e5])
def test_a_run_resumes_after_the_clock_jumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, jump_hours: float
) -> None:
    """The clock jumps between two processes, and is then corrected."""
    options, wall = {"settings": {"timer_hours": 1.0}}, [time.time()]
    monkeypatch.setattr("time.time", lambda: wall[0])
    for jump in (0.0, jump_hours, -jump_hours):
        wall[0] += jump * 3600
        left = StoppedAfterOne(client_app(), range(100, 112))
        with pytest.raises(TooFewClients):
            strategy(tmp_path, plan(rounds=4, min_sep=1), **options).start(left, start_arrays())
    strategy(tmp_path, plan(rounds=4, min_sep=1), **options).start(grid(), start_arrays())
    assert len(ledger(tmp_path)) == 12
    assert verify_run(tmp_path / "run", tmp_path / "state").passed
    assert sum("hours behind" in line for line in caplog.messages) >= 1


def test_clock_jumps_during_a_run_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve nodes, three per round, a timer of one hour: no node may be contacted twice."""
    wall = [time.time()]

    class Jumping(InProcessGrid):
        def get_node_ids(self) -> Any:
            wall[0] += 10 * 3600.0 * (-1) ** self._count
            return super().get_node_ids()

    monkeypatch.setattr("time.time", lambda: wall[0])
    jumping = Jumping(client_app(), range(100, 112))
    with pytest.raises(TooFewClients, match="0 of the 12 available clients may be contacted"):
        strategy(tmp_path, plan(min_sep=1), settings={"timer_hours": 1.0}).start(
            jumping, start_arrays()
        )
    contacts = [who for _, who, _ in ledger(tmp_path)]
    assert len(contacts) == len(set(contacts)) == 12


def test_waiting_for_nodes_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("dpftrl.flower.strategy.POLL_SECONDS", 0.01)
    patient = Patience(replies=30, nodes=0.2, attempts=1)
    by_time = strategy(tmp_path, patience=patient, settings={"timer_hours": 1.0})
    with pytest.raises(TooFewClients):
        by_time.start(grid(nodes=2), start_arrays())
    lines = [line for line in caplog.messages if "Waiting for nodes, at most 0 s more" in line]
    assert len(lines) == 1
    assert "round 1 contacts 3 clients, and 2 of the 2 available clients may be" in lines[0]


def test_twenty_thousand_nodes(tmp_path: Path) -> None:
    planned = plan(rounds=2, min_sep=2, population=20_000, goal=400)
    strategy(tmp_path, planned).start(grid(nodes=20_000, workers=1), start_arrays())
    assert len({who for _, who, _ in ledger(tmp_path)}) == 800


def test_only_a_few_replies_are_in_memory(tmp_path: Path) -> None:
    held: list[int] = []

    class Counting(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            held.append(len(list(message_ids)))
            return super().pull_messages(message_ids)

    planned = plan(rounds=1, min_sep=1, population=200, goal=100, over_selection=2.0)
    strategy(tmp_path, planned).start(Counting(client_app(), range(200)), start_arrays())
    assert max(held) <= 16
    assert sum(held) < 120, "nobody is waited for after the report goal"


def test_patience_refuses_invalid_values() -> None:
    for wrong in ({"replies": 0.0}, {"nodes": -1.0}, {"lock": float("nan")}, {"attempts": 0}):
        with pytest.raises(InvalidInput):
            Patience(**wrong)  # pyright: ignore[reportArgumentType]
    assert [QUICK.before_attempt(1), Patience().before_attempt(30)] == [0.0, 60.0]
