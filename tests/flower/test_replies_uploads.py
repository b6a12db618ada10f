"""Uploads to a SuperLink: slow or malformed ones never delay a round."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from tiny_apps import client_app, plan, start_arrays, strategy

from dpftrl.errors import TooFewClients
from dpftrl.flower import InProcessGrid, Patience
from dpftrl.flower import replies as module
from dpftrl.flower.messages import to_numpy

Change = Callable[[int, Message], Message]


class SuperLink:
    """A fake SuperLink; some nodes announce a reply but do not upload all of it.

    Args:
        held_back: Which of a reply's objects are not there, from 0 to 1, by the number of the node.
        change: What nodes send instead of their reply.
    """

    def __init__(self, held_back: dict[int, float] | None = None, change: Change | None = None):
        self.nodes = InProcessGrid(client_app(), range(100, 112))
        self.held_back = held_back or {}
        self.change = change
        self.objects: dict[str, bytes] = {}
        self.pulled: Counter[str] = Counter()
        self.confirmed = 0
        self.missing: list[str] = []
        self.gone: set[str] = set()

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802  # Flower's name
        replies = list(self.nodes.pull_messages(request.message_ids))
        return PullAppMessagesResponse(
            messages_list=[self.announced_reply(one) for one in replies],
            message_object_trees=[get_object_tree(one) for one in replies],
        )

    def announced_reply(self, reply: Message) -> Any:
        node = reply.metadata.src_node_id
        if self.change is not None:
            reply.__dict__.update(self.change(node, reply).__dict__)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        kept = list(objects)[: round(self.held_back.get(node, 0.0) * len(objects))]
        self.objects |= {object_id: content.deflate() for object_id, content in objects.items()}
        self.missing += kept
        return message_to_proto(remove_content_from_message(reply))

    def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802  # Flower's name
        self.pulled[request.object_id] += 1
        if request.object_id in self.gone:
            return PullObjectResponse(object_found=False)
        is_there = request.object_id not in self.missing
        content = self.objects[request.object_id] if is_there else b""
        return PullObjectResponse(
            object_found=True, object_available=is_there, object_content=content
        )

    def ConfirmMessageReceived(self, _: Any) -> ConfirmMessageReceivedResponse:  # noqa: N802  # Flower's name
        self.confirmed += 1
        return ConfirmMessageReceivedResponse()


class Deployed(HttpGrid):
    """Flower's HttpGrid with a fake SuperLink in this process."""

    def __init__(self, link: SuperLink):
        super().__init__(insecure=True, token="x")
        self.link = link
        self._client: Any = link
        self.set_run(Run.create_empty(1))

    def get_node_ids(self) -> Any:
        return self.link.nodes.get_node_ids()

    def push_messages(self, messages: Any) -> Any:
        return self.link.nodes.push_messages(messages)


def test_the_model_is_the_same_as_in_process(tmp_path: Path) -> None:
    link = SuperLink()
    there = strategy(tmp_path / "there").start(Deployed(link), start_arrays())
    in_process = strategy(tmp_path / "here").start(link.nodes, start_arrays())
    assert there.arrays["w"].numpy().tolist() == in_process.arrays["w"].numpy().tolist()
    assert link.confirmed == 18
    assert max(link.pulled.values()) == 1


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_reply_that_is_never_uploaded_does_not_delay_others(tmp_path: Path, share: float) -> None:
    """Most of a cohort announce replies but never finish uploading; the others close the round."""
    planned = plan(rounds=2, min_sep=1, goal=3, over_selection=4.0)
    link = SuperLink(dict.fromkeys(range(100, 109), share))
    patient = Patience(replies=60, nodes=0, attempts=1)
    start = time.monotonic()
    strategy(tmp_path, planned, patience=patient).start(Deployed(link), start_arrays())
    assert time.monotonic() - start < 30
    assert link.confirmed == 6


def test_missing_uploads_are_drop_outs_at_the_deadline(tmp_path: Path) -> None:
    link = SuperLink(dict.fromkeys(range(100, 112), 1.0))
    patient = Patience(replies=0.5, nodes=0, attempts=1)
    start = time.monotonic()
    with pytest.raises(TooFewClients, match="attempts in a row"):
        strategy(tmp_path, patience=patient).start(Deployed(link), start_arrays())
    assert time.monotonic() - start < 20


def test_objects_of_a_slow_upload_are_fetched_at_most_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = SuperLink(dict.fromkeys(range(100, 112), 1.0))
    monkeypatch.setattr("dpftrl.flower.replies.POLL_SECONDS", 0.0)
    answer = link.PullObject

    def one_more_each_time(request: Any) -> PullObjectResponse:
        answered = answer(request)
        if not answered.object_available:
            link.pulled[request.object_id] -= 1  # nothing was fetched
            link.missing.remove(request.object_id)
        return answered

    link.PullObject = one_more_each_time
    strategy(tmp_path, plan(rounds=1, min_sep=1)).start(Deployed(link), start_arrays())
    assert link.confirmed == 3
    assert max(link.pulled.values()) == 2


def _larger(_: int, reply: Message) -> Message:
    """Return a reply a hundred times as large as the model."""
    content = reply.content.copy()
    big = Array(np.zeros(2_000_000, np.float32))
    content["arrays"] = ArrayRecord({"w": big})
    return Message(content, reply_to=_sent_message(reply))


def _sent_message(reply: Message) -> Message:
    sent = Message(RecordDict(), reply.metadata.src_node_id, "train")
    sent.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return sent


def _scattered(_: int, reply: Message) -> Message:
    """Return a reply with too many objects, all of them tiny."""
    content = reply.content.copy()
    content["arrays"] = ArrayRecord({str(i): Array(np.full(1, i)) for i in range(100)})
    return Message(content, reply_to=_sent_message(reply))


@pytest.mark.parametrize("change", [_larger, _scattered])
def test_a_too_large_reply_is_refused(
    tmp_path: Path, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    inflate = module.inflate_object_from_contents

    def reading(message_id: str, contents: Any) -> Any:
        read.append(message_id)
        return inflate(message_id, contents)

    monkeypatch.setattr(module, "inflate_object_from_contents", reading)
    link = SuperLink(change=change)
    with pytest.raises(TooFewClients, match="attempts in a row"):
        strategy(tmp_path).start(Deployed(link), start_arrays())
    assert not read
    assert link.confirmed == 9, "the SuperLink may forget them"


def test_an_unreadable_or_lost_reply_is_a_drop_out_at_once(tmp_path: Path) -> None:
    planned = plan(rounds=1, min_sep=1, goal=3, over_selection=5 / 3)
    link = SuperLink()
    announced = link.announced_reply

    def spoiled(reply: Message) -> Any:
        announcement = announced(reply)
        if len(link.objects) and not link.gone:
            link.gone.add(reply.object_id)
        elif not any(content == b"?" for content in link.objects.values()):
            link.objects[reply.object_id] = b"?"
        return announcement

    link.announced_reply = spoiled
    strategy(tmp_path, planned).start(Deployed(link), start_arrays())
    assert link.gone
    assert link.confirmed == 5


@pytest.mark.parametrize(("named", "shape"), [([0] * 100_000, [6]), ([0], [1] * 600_000)])
def test_a_reply_that_repeats_chunks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[int], shape: list[int]
) -> None:
    """An array that repeats one chunk: a megabyte could become a terabyte."""
    description = {"dtype": "float32", "shape": shape, "stype": "numpy.ndarray"}
    body = json.dumps({**description, "arraychunk_ids": named}).encode()
    read: list[Any] = []
    monkeypatch.setattr(Array, "deflate", lambda array: add_header_to_object_body(body, array))
    monkeypatch.setattr(module, "inflate_object_from_contents", lambda *of: read.append(of))
    with pytest.raises(TooFewClients, match="attempts in a row"):
        strategy(tmp_path).start(Deployed(SuperLink()), start_arrays())
    assert not read


# --- Parsing without copies, several at a time ---------------------------------------------------


def _content_of(*arrays: np.ndarray) -> RecordDict:
    named = {f"w{i}": Array(array) for i, array in enumerate(arrays)}
    config = ConfigRecord({"attempt": 3, "nonce": "n" * 32})
    return RecordDict({"arrays": ArrayRecord(named), "ours": config})


LARGE = np.random.default_rng(0).normal(size=1_500_000)  # 12 MB, three chunks
PARSED = {
    "small": _content_of(np.arange(6.0), np.ones((2, 3), np.float32)),
    "several chunks": _content_of(LARGE, LARGE[:10].astype(np.float32)),
    "equal chunks": _content_of(np.zeros(2_000_000, np.float32)),
    "equal arrays": _content_of(np.ones(5), np.ones(5)),
    "no coordinate": _content_of(np.ones(0)),
    "no array": RecordDict({"ours": ConfigRecord({"attempt": 3})}),
    "nothing": RecordDict(),
}


def _uploaded(content: RecordDict) -> tuple[Message, str, dict[str, bytes]]:
    """A reply with this content, its id, and its objects as they are uploaded."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    sent = Message(content, 5, "train")
    sent.metadata.__dict__["_message_id"] = "sent"
    reply = Message(content, reply_to=sent)
    objects = get_all_nested_objects(reply)
    return sent, reply.object_id, {key: one.deflate() for key, one in objects.items()}


@pytest.mark.parametrize("kind", PARSED)
def test_a_reply_is_parsed_as_flower_parses_it(kind: str) -> None:
    sent, reply_id, contents = _uploaded(PARSED[kind])
    limits = module.ReplyLimits.to(sent)
    expected = module.inflate_object_from_contents(reply_id, dict(contents))
    parsed = module._inflated(reply_id, dict(contents), limits)
    assert isinstance(expected, Message)
    assert parsed.metadata.__dict__ == expected.metadata.__dict__
    assert dict(parsed.content.config_records) == dict(expected.content.config_records)
    assert list(parsed.content.array_records) == list(expected.content.array_records)
    for name, record in expected.content.array_records.items():
        ours = parsed.content.array_records[name]
        assert list(ours) == list(record)
        for key, array in record.items():
            assert bytes(ours[key].data) == array.data
            assert (ours[key].dtype, ours[key].shape, ours[key].stype) == (
                array.dtype,
                array.shape,
                array.stype,
            )
            assert np.array_equal(to_numpy(ours[key]), array.numpy())


def test_an_array_of_one_chunk_is_not_copied() -> None:
    sent, reply_id, contents = _uploaded(PARSED["small"])
    parsed = module._inflated(reply_id, dict(contents), module.ReplyLimits.to(sent))
    data = parsed.content.array_records["arrays"]["w0"].data
    assert isinstance(data, memoryview)
    assert any(data.obj is content for content in contents.values())


def test_an_array_that_leaves_out_a_chunk_is_refused() -> None:
    sent, reply_id, contents = _uploaded(PARSED["several chunks"])
    limits = module.ReplyLimits.to(sent)
    for object_id, content in contents.items():
        if b'"arraychunk_ids": [0, 1, 2]' in content:
            body = content[content.index(b"{") :].replace(b"[0, 1, 2]", b"[0, 1, 1]")
            head = content[: content.index(b"{")]
            contents[object_id] = head + body
    with pytest.raises(module.Unusable, match="do not consist of their chunks"):
        module._inflated(reply_id, contents, limits)


def test_few_replies_are_in_memory_and_no_thread_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FETCHED_AT_ONCE", 3)
    link = SuperLink()
    grid = Deployed(link)
    started: list[str] = []
    parse = module._inflated

    def counted(message_id: str, *of: Any) -> Message:
        started.append(message_id)
        return parse(message_id, *of)

    monkeypatch.setattr(module, "_inflated", counted)
    most = 0
    real = module.replies_to

    def watched(*of: Any) -> Any:
        nonlocal most
        for given, reply in enumerate(real(*of), start=1):
            time.sleep(0.05)  # as long as the threads need to fetch everything they may
            most = max(most, len(started) - given)
            yield reply
        started.clear()

    monkeypatch.setattr("dpftrl.flower.strategy.replies_to", watched)
    planned = plan(rounds=1, min_sep=1, goal=8)
    strategy(tmp_path, planned).start(grid, start_arrays())
    assert 1 <= most <= 3
    assert not [one for one in threading.enumerate() if one.name.startswith("replies")]
