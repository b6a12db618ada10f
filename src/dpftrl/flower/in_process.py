"""A Grid whose nodes are function calls: simulation without Ray, and without processes."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, Final, final

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput

RUN_ID: Final = 1
# The ids that a ServerApp has in Flower's own simulation.
SERVER_NODE_ID: Final = 1
TASK_ID: Final = 1


@final
class InProcessGrid(Grid):
    """Flower's Grid over a ClientApp in this process, for tens of thousands of nodes.

    Nodes train shortly before their replies are pulled: few replies wait in memory, however many
    nodes were asked, and hardly anybody trains for a round that was closed before.

    Args:
        client_app: What the nodes run.
        node_ids: Their ids; the i-th has partition-id i, as in Flower's simulation.
        run_config: What the app's pyproject.toml would say.
        workers: Nodes that train at the same time.
    """

    def __init__(
        self,
        client_app: ClientApp,
        node_ids: Sequence[int],
        *,
        run_config: UserConfig | None = None,
        workers: int | None = None,
    ):
        self._app = client_app
        self._partitions = {node: partition for partition, node in enumerate(node_ids)}
        if len(self._partitions) != len(node_ids):
            raise InvalidInput("node_ids must all be different")
        self._config: UserConfig = dict(run_config or {})
        self._workers = whole_number("workers", workers or os.cpu_count() or 1)
        self._sent: dict[str, Message] = {}
        self._count = 0
        self._states: dict[int, RecordDict] = {}
        self._group = ""
        self._pool = ThreadPoolExecutor(self._workers, "node")
        self._training: dict[str, Future[Message]] = {}
        self._run = Run.create_empty(RUN_ID)
        # What messages are stamped with; in a deployment Flower sets it before the ServerApp runs.
        TaskIdentity.run_id, TaskIdentity.task_id = RUN_ID, TASK_ID
        TaskIdentity.node_id = SERVER_NODE_ID

    def __repr__(self) -> str:
        return f"InProcessGrid({len(self._partitions):,} nodes, {self._workers} workers)"

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes: they are always online."""
        return list(self._partitions)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep messages until their replies are pulled, or until those of another group come."""
        pushed: list[str] = []
        for message in messages:
            self._forget_other_groups(message.metadata.group_id)
            self._count += 1
            message.metadata.__dict__["_message_id"] = str(self._count)
            self._sent[str(self._count)] = message
            pushed.append(str(self._count))
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the nodes train, and give their replies in the order of the ids."""
        for one in dict.fromkeys(message_ids):
            if one not in self._sent and one not in self._training:
                continue
            self._begin(one)
            # The next ones train while the caller works on this reply, and one more for each
            # worker waits for it: who is done before the others goes on at once.
            for ahead in list(islice(self._sent, max(0, 2 * self._workers - len(self._training)))):
                self._begin(ahead)
            yield self._training.pop(one).result()

    def _begin(self, message_id: str) -> None:
        if message_id not in self._training:
            message = self._sent.pop(message_id)
            self._training[message_id] = self._pool.submit(self._reply, message)

    def _forget_other_groups(self, group: str) -> None:
        if group != self._group:
            self._sent.clear()
            # Who has begun comes to an end first: no node trains for two rounds at a time.
            wait([future for future in self._training.values() if not future.cancel()])
            self._training.clear()
            self._group = group

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and pull all replies; a node is never cut off while it trains."""
        del timeout
        return list(self.pull_messages(self.push_messages(messages)))

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self._partitions:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "no such node"), reply_to=message)
        try:
            reply = self._app(_own_copy(message), self._context(node))
        except Exception as error:  # an app may raise anything; the node then failed
            kind = type(error).__name__
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, kind), reply_to=message)
        reply.metadata.__dict__["_message_id"] = f"reply to {message.metadata.message_id}"
        return reply

    def _context(self, node: int) -> Context:
        config: UserConfig = {
            "partition-id": self._partitions[node],
            "num-partitions": len(self._partitions),
        }
        state = self._states.setdefault(node, RecordDict())
        return Context(self._run.run_id, node, config, state, dict(self._config))


def _own_copy(message: Message) -> Message:
    """A node may change the records that it gets; the arrays' bytes cannot be changed."""
    records = {name: _copied(record) for name, record in message.content.items()}
    return Message(metadata=message.metadata, content=RecordDict(records))  # pyright: ignore[reportCallIssue]  # as Flower itself does


def _copied(record: ArrayRecord | ConfigRecord | MetricRecord) -> Any:
    if isinstance(record, ArrayRecord):
        return ArrayRecord(dict(record))
    if isinstance(record, ConfigRecord):
        return ConfigRecord(dict(record))
    return MetricRecord(dict(record))
