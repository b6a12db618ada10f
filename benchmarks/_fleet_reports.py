"""What a report costs the server: `Round.report` against a plain sum, and replies of Flower nodes.

The floor is numpy's `+=` of as many int64 numbers, each time from other memory, in the same run and
on as many threads. A report clips, converts and adds float32 numbers. Rates are CPU time per
report, so that other programs on the machine matter less; the ratio is the median over alternating
blocks of reports and floor. Elapsed time shows whether all cores worked.
"""

import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import peer

from dpftrl import make_plan
from dpftrl.federated import Round, Server, Settings

SIZE = 1_000_000
# Sources that take turns: together larger than the caches, as updates from a network are.
SOURCES = 8
# The parameters of a reply of a Flower node.
REPLY_SIZE = 6_400_000

Work = Callable[[int, int], None]  # (number of the call, thread)


def elapsed(work: Work, threads: int, calls: int) -> tuple[float, float]:
    """Elapsed seconds per call if threads share the calls, and the median CPU seconds of a call."""
    ready, cpu = threading.Barrier(threads + 1), list[float]()

    def share(thread: int) -> None:
        ready.wait()
        for call in range(thread, calls, threads):
            start = time.thread_time()
            work(call, thread)
            cpu.append(time.thread_time() - start)

    workers = [threading.Thread(target=share, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    return (time.perf_counter() - start) / calls, statistics.median(cpu)


def server_of(folder: str, shapes: dict[str, int], goal: int) -> Server:
    """A run whose rounds take many reports, with arrays of these sizes as its model."""
    plan = make_plan(
        population=2 * goal, report_goal=goal, rounds=2, noise_multiplier=1.0, delta=1e-6
    )
    model = {name: np.zeros(size, np.float32) for name, size in shapes.items()}
    return Server.create(
        f"{folder}/run", plan, Settings(clip_norm=1.0), model, state_folder=f"{folder}/state"
    )


def reports(blocks: int, calls: int) -> list[dict[str, Any]]:
    """Reports of one million float32 numbers, on one thread and on two."""
    random = np.random.default_rng(0)
    updates = [random.normal(size=SIZE).astype(np.float32) for _ in range(SOURCES)]
    numbers = [random.integers(-100, 100, SIZE) for _ in range(SOURCES)]
    sums = [np.zeros(SIZE, np.int64) for _ in range(2)]
    counts = (1, 2)
    goal = calls * (blocks + 1) * len(counts)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, server_of(folder, {"w": SIZE}, goal) as server:
        current = server.begin([f"client-{i}" for i in range(2 * goal)])
        names = iter(current.clients)

        def floor(call: int, thread: int) -> None:
            sums[thread] += numbers[call % SOURCES]

        for threads in counts:
            found: dict[str, list[tuple[float, float]]] = {"report": [], "floor": []}
            for _ in range(blocks):
                chosen = [next(names) for _ in range(calls)]
                report = reporting(current, chosen, updates)
                found["report"].append(elapsed(report, threads, calls))
                found["floor"].append(elapsed(floor, threads, calls))
            rows.append(row_of(threads, found))
    return rows


def reporting(current: Round, names: Sequence[str], updates: Sequence[Any]) -> Work:
    """Report for one client after the other."""

    def report(call: int, _: int) -> None:
        current.report(names[call], updates[call % SOURCES], current.attempt)

    return report


def row_of(threads: int, found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians of the ratios of neighbours in time; the least times are those of a quiet machine."""
    pairs = list(zip(found["report"], found["floor"], strict=True))
    return {
        "threads": threads,
        "report_CPU_ms": 1e3 * min(cpu for _, cpu in found["report"]),
        "floor_CPU_ms": 1e3 * min(cpu for _, cpu in found["floor"]),
        "CPU_ratio": statistics.median(a[1] / b[1] for a, b in pairs),
        "report_elapsed_ms": 1e3 * min(wall for wall, _ in found["report"]),
        "floor_elapsed_ms": 1e3 * min(wall for wall, _ in found["floor"]),
        "elapsed_ratio": statistics.median(a[0] / b[0] for a, b in pairs),
    }


class Link:
    """A SuperLink in this process that answers with bytes, which the client must parse.

    Args:
        arrays: Number of arrays that the parameters are in.
        replies: Number of replies.
    """

    def __init__(self, arrays: int, replies: int):
        from flwr.app import Message, RecordDict
        from flwr.proto.message_pb2 import PullObjectResponse
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
        from flwr.supercore.task_identity import TaskIdentity

        from dpftrl.flower.messages import record_of

        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        random = np.random.default_rng(0)
        self.shapes = {f"w{i}": REPLY_SIZE // arrays for i in range(arrays)}
        values = {
            name: random.normal(size=size).astype(np.float32) for name, size in self.shapes.items()
        }
        self.sent = Message(RecordDict({"arrays": record_of(values)}), 5, "train")
        self.sent.metadata.__dict__["_message_id"] = "sent"
        reply = Message(RecordDict({"arrays": record_of(values)}), reply_to=self.sent)
        objects = get_all_nested_objects(reply)
        self.object_ids = tuple(objects)
        self.reply_id = reply.object_id
        self.replies = replies
        self.answers = {
            object_id: PullObjectResponse(
                object_found=True, object_available=True, object_content=one.deflate()
            ).SerializeToString()
            for object_id, one in objects.items()
        }
        self.PullObject = lambda request: PullObjectResponse.FromString(
            self.answers[request.object_id]
        )

    def PullMessages(self, request: Any) -> Any:  # noqa: N802  # Flower's name
        """Announce the reply to every message."""
        from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse

        children = [ObjectTree(object_id=one) for one in self.object_ids if one != self.reply_id]
        tree = ObjectTree(object_id=self.reply_id, children=children)
        announced = [
            Message(metadata=Metadata(message_id=self.reply_id, reply_to_message_id=sent))
            for sent in request.message_ids
        ]
        return PullAppMessagesResponse(
            messages_list=announced, message_object_trees=[tree] * len(announced)
        )

    def ConfirmMessageReceived(self, _: Any) -> None:  # noqa: N802  # Flower's name
        """Forget nothing: the same reply comes again."""


def round_of_replies(link: Link, own_parser: bool, at_once: int) -> tuple[float, float]:
    """Elapsed and CPU seconds per reply: fetch, parse, clip and add all of them."""
    from flwr.supercore.run import Run
    from flwr.superlink.grid import HttpGrid

    from dpftrl.flower import replies as module
    from dpftrl.flower.messages import update_of

    class Deployed(HttpGrid):
        def __init__(self) -> None:
            super().__init__(insecure=True, token="x")
            self._client: Any = link
            self.set_run(Run.create_empty(1))

    def flowers_parser(message_id: str, contents: Any, limits: Any) -> Any:
        limits.check_contents(contents)
        return module.inflate_object_from_contents(message_id, contents)

    ours = module._inflated, module.FETCHED_AT_ONCE
    module._inflated = ours[0] if own_parser else flowers_parser
    module.FETCHED_AT_ONCE = at_once
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            server_of(folder, link.shapes, link.replies) as server,
        ):
            current = server.begin([f"client-{i}" for i in range(2 * link.replies)])
            names = iter(current.clients)
            uploads = module.Uploads(Deployed(), link.sent, time.monotonic() + 600)
            start, cpu = time.perf_counter(), time.process_time()
            for _, reply in uploads.pull([str(i) for i in range(link.replies)]):
                current.report(next(names), update_of(reply), current.attempt)
            seconds = time.perf_counter() - start, time.process_time() - cpu
            if current.reports.unfit or not current.enough:
                raise RuntimeError("not all replies were added")
            return seconds[0] / link.replies, seconds[1] / link.replies
    finally:
        module._inflated, module.FETCHED_AT_ONCE = ours


def flower_replies(replies: int, blocks: int) -> list[dict[str, Any]]:
    """Replies of Flower nodes: with Flower's parser, and with ours, one or several at a time."""
    from dpftrl.flower import replies as module

    logging.getLogger("flwr").setLevel(logging.ERROR)
    ways = {
        "Flower's parser, one at a time": (False, 1),
        "one at a time": (True, 1),
        f"{module.FETCHED_AT_ONCE} at a time": (True, module.FETCHED_AT_ONCE),
    }
    rows: list[dict[str, Any]] = []
    for arrays in (1, 10):
        link = Link(arrays, replies)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(blocks):
            for way, options in ways.items():
                found[way].append(round_of_replies(link, *options))
        (first, *_) = found.values()
        for way, times in found.items():
            ratios = [a[0] / b[0] for a, b in zip(first, times, strict=True)]
            rows.append(
                {
                    "arrays": arrays,
                    "replies": way,
                    "elapsed_ms": 1e3 * min(wall for wall, _ in times),
                    "CPU_ms": 1e3 * min(cpu for _, cpu in times),
                    "times_as_fast": statistics.median(ratios),
                }
            )
    return rows


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All of it."""
    return {
        f"reports of {SIZE:,} float32": reports(5 if quick else 25, 16),
        f"Flower replies of {REPLY_SIZE:,} float32": flower_replies(
            *((4, 2) if quick else (16, 5))
        ),
    }


if __name__ == "__main__":
    peer.main(__doc__ or "", "fewer repetitions, some seconds", measure)
