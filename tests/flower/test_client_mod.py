"""The client mod: which messages it answers, and with what."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from tiny_apps import instruction

from dpftrl.errors import InvalidInput
from dpftrl.flower import client_mod
from dpftrl.flower.messages import Instruction, attempt_of, refusal_of, update_of

MODEL = {"w": np.arange(4, dtype=np.float32)}


def message(sent: Instruction | None, kind: str = "train") -> Message:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    content = RecordDict({"arrays": ArrayRecord({"w": Array(MODEL["w"])})})
    if sent is not None:
        content["dpftrl"] = sent.record()
    return Message(content, 7, kind)


def app(shift: float = 0.1, **mod: Any) -> ClientApp:
    client_app = ClientApp(mods=[client_mod(**mod)])

    @client_app.train()
    def train(contact: Message, _: Context) -> Message:
        model = contact.content["arrays"]["w"].numpy()
        content = {
            "arrays": ArrayRecord({"w": Array(model + np.float32(shift))}),
            "metrics": MetricRecord({"num-examples": 3, "loss": 0.5}),
        }
        return Message(RecordDict(content), reply_to=contact)

    @client_app.evaluate()
    def evaluate(contact: Message, _: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"loss": 0.5})}), reply_to=contact)

    return client_app


def context(place: Path, node: int = 7) -> Context:
    return Context(1, node, {"dpftrl-state": str(place)}, RecordDict(), {})


def test_the_reply_is_a_clipped_update_and_the_attempt(tmp_path: Path) -> None:
    reply = app(5.0)(message(instruction(attempt=4)), context(tmp_path))
    assert set(reply.content) == {"arrays", "dpftrl"}
    assert attempt_of(reply) == 4
    update = update_of(reply)
    assert update is not None
    assert np.allclose(update["w"], 0.5)
    assert not reply.content.metric_records


def test_contacts_are_remembered_across_restarts(tmp_path: Path) -> None:
    def refusal_for(**changes: Any) -> str | None:
        """Start a new process each time: only the disk is kept."""
        return refusal_of(app()(message(instruction(**changes)), context(tmp_path)))

    too_early = "it is not this device's turn yet"
    assert refusal_for(row=5, attempt=6) is None
    assert refusal_for(row=5, attempt=6) is None, "an interrupted server repeats a contact"
    assert refusal_for(row=5, attempt=7) == too_early, "twice for one row"
    assert refusal_for(row=7, attempt=8) == too_early
    assert refusal_for(row=4, attempt=8) == too_early, "a server that was rolled back"
    assert refusal_for(row=8, attempt=9) is None
    assert refusal_for(row=8, attempt=9, run="cd34") is None, "another run has its own contacts"
    assert json.loads((tmp_path / "ab12.json").read_text())["row"] == 8


def test_a_device_that_cannot_record_a_contact_refuses_to_train(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    reply = app()(message(instruction()), context(tmp_path / "file"))
    assert refusal_of(reply) == "the device could not write down that it took part"
    (tmp_path / "ab12.json").write_text("{}")
    reply = app()(message(instruction()), context(tmp_path))
    assert refusal_of(reply) == "the device could not write down that it took part"


def test_only_training_messages_of_the_strategy_are_answered(tmp_path: Path) -> None:
    reply = app()(message(None), context(tmp_path))
    assert refusal_of(reply) == "the message is not one of dpftrl's strategy"
    reply = app()(message(instruction(), "evaluate"), context(tmp_path))
    assert "nothing but training" in (refusal_of(reply) or "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_norm": float("nan")},
        {"clip_norm": 0.0},
        {"row": -1},
        {"row": 100},
        {"rounds": 0},
        {"min_sep": 0},
        {"run": "../up"},
        {"attempt": 1.5},
        {"timer_hours": float("nan")},
        {"timer_hours": "soon"},
    ],
)
def test_an_invalid_instruction_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    reply = app()(message(instruction(**wrong)), context(tmp_path))
    assert refusal_of(reply) == "the message is not one of dpftrl's strategy"
    assert not list(tmp_path.iterdir())


def test_error_messages_of_failed_training_stay_on_the_device(tmp_path: Path) -> None:
    raising, replying = (ClientApp(mods=[client_mod()]) for _ in range(2))

    @raising.train()
    def fail(_: Message, __: Context) -> Message:
        raise RuntimeError("my salary is 3")

    @replying.train()
    def reply_error(contact: Message, _: Context) -> Message:
        return Message(Error(2, "my salary is 3"), reply_to=contact)

    for failing in (raising, replying):
        reply = failing(message(instruction()), context(tmp_path))
        assert "salary" not in str(reply)
        # Whether training fails may depend on the device's data; who is counted must not.
        assert not reply.has_error()
        assert not update_of(reply)["w"].any()


def test_a_server_with_another_clip_norm_than_promised_is_refused(tmp_path: Path) -> None:
    reply = app(clip_norm=0.5)(message(instruction()), context(tmp_path))
    assert "clip norm" in (refusal_of(reply) or "")
    assert refusal_of(app(clip_norm=1.0)(message(instruction()), context(tmp_path))) is None
    with pytest.raises(InvalidInput, match="clip_norm"):
        client_mod(clip_norm=float("nan"))


def test_a_server_with_a_weaker_contact_rule_than_promised_is_refused(tmp_path: Path) -> None:
    def refusal_for(sent: Instruction, **promised: Any) -> str:
        return refusal_of(app(**promised)(message(sent), context(tmp_path))) or ""

    assert "weaker" in refusal_for(instruction(), min_sep=4)
    assert "weaker" in refusal_for(instruction(timer_hours=99.0), min_sep=3), "hours are not rows"
    assert "weaker" in refusal_for(instruction(), timer_hours=1.0)
    assert "weaker" in refusal_for(instruction(timer_hours=0.5), timer_hours=1.0)
    assert not list(tmp_path.glob("*.json"))
    assert not refusal_for(instruction(), min_sep=2)
    for wrong in ({"min_sep": 0}, {"timer_hours": 0.0}, {"min_sep": 2, "timer_hours": 2.0}):
        with pytest.raises(InvalidInput):
            client_mod(**wrong)  # pyright: ignore[reportArgumentType]


def test_unknown_refusal_texts_are_ignored() -> None:
    contact = message(instruction())
    for text in ("dpftrl refuses: my salary is 3", "it is not this device's turn yet", None):
        assert refusal_of(Message(Error(6, text), reply_to=contact)) is None


def test_malformed_replies_do_not_raise() -> None:
    contact = message(instruction())
    broken = Array("float32", (3,), "numpy.ndarray", b"not an array")
    for content in (
        RecordDict(),
        RecordDict({"arrays": ArrayRecord({"w": broken})}),
        RecordDict({"a": ArrayRecord(), "b": ArrayRecord()}),
    ):
        assert update_of(Message(content, reply_to=contact)) is None
    stamped = RecordDict({"dpftrl": ConfigRecord({"attempt": "one"})})
    assert attempt_of(Message(stamped, reply_to=contact)) == "one"


def test_the_default_folder_is_named_after_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path))
    app()(message(instruction()), Context(1, 7, {}, RecordDict(), {}))
    assert (tmp_path / "devices" / "7" / "ab12.json").exists()


@pytest.mark.parametrize("trained", [np.zeros(4, complex), np.zeros(5), np.array(["1"] * 4)])
def test_an_app_that_returns_other_arrays_is_refused(tmp_path: Path, trained: Any) -> None:
    client_app = ClientApp(mods=[client_mod()])

    @client_app.train()
    def train(contact: Message, _: Context) -> Message:
        return Message(RecordDict({"a": ArrayRecord({"w": Array(trained)})}), reply_to=contact)

    reply = client_app(message(instruction()), context(tmp_path))
    assert "other arrays" in (refusal_of(reply) or "")


def test_updates_of_a_float64_model_are_sent_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODEL, "w", np.arange(4.0))
    update = update_of(app()(message(instruction()), context(tmp_path)))
    assert update is not None
    assert update["w"].dtype == np.float32
