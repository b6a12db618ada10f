"""A Grid that runs its nodes as function calls: simulation without Ray or extra processes."""

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
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.flower._flwr_internals import (
    ErrorCode,
    Run,
    TaskIdentity,
    UserConfig,
    message_with_content,
    set_message_id,
)
from dpftrl.flower.client import IN_PROCESS

RUN_ID: Final = 1
# The ids that a ServerApp gets in Flower's own simulation.
SERVER_NODE_ID: Final = 1
TASK_ID: Final = 1


@final
class InProcessGrid(Grid):
    """A Flower Grid that runs a ClientApp in threads of this process, for up to 10,000s of nodes.

    A node trains shortly before its reply is pulled. So only a few replies are in memory, however
    many nodes are contacted, and few nodes train for a round that is already closed.

    Args:
        client_app: The ClientApp that every node runs.
        node_ids: Ids of the nodes. The i-th node has partition-id i, as in Flower's simulation.
        run_config: Run configuration, which a deployment reads from the app's pyproject.toml.
        workers: Number of nodes that train at the same time; by default one per core.

    Raises:
        InvalidInput: A node id occurs twice, or `workers` is not a positive whole number.
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
            raise InvalidInput("node_ids must be unique, got at least one id twice")
        self._config: UserConfig = dict(run_config or {})
        self._workers = whole_number("workers", workers or os.cpu_count() or 1)
        self._sent: dict[str, Message] = {}
        self._count = 0
        self._states: dict[int, RecordDict] = {}
        self._group = ""
        self._pool = ThreadPoolExecutor(self._workers, "node")
        self._training: dict[str, Future[Message]] = {}
        self._run = Run.create_empty(RUN_ID)
        # Messages carry these ids. In a deployment Flower sets them before the ServerApp runs.
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
        """Return a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes: simulated nodes are always online."""
        return list(self._partitions)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep messages until their replies are pulled, or a message of another group is pushed."""
        pushed: list[str] = []
        for message in messages:
            self._forget_other_groups(message.metadata.group_id)
            self._count += 1
            set_message_id(message, str(self._count))
            self._sent[str(self._count)] = message
            pushed.append(str(self._count))
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the nodes train; yield their replies in the order of the message ids."""
        for message_id in dict.fromkeys(message_ids):
            if message_id not in self._sent and message_id not in self._training:
                continue
            self._start_training(message_id)
            # Twice as many nodes as workers are started ahead: one per worker trains while the
            # caller handles this reply, and one more is queued so that no worker becomes idle.
            free_places = max(0, 2 * self._workers - len(self._training))
            for next_id in list(islice(self._sent, free_places)):
                self._start_training(next_id)
            yield self._training.pop(message_id).result()

    def _start_training(self, message_id: str) -> None:
        if message_id not in self._training:
            message = self._sent.pop(message_id)
            self._training[message_id] = self._pool.submit(self._reply, message)

    def _forget_other_groups(self, group: str) -> None:
        if group != self._group:
            self._sent.clear()
            # Nodes that are training finish first, so that no node trains for two rounds at once.
            wait([future for future in self._training.values() if not future.cancel()])
            self._training.clear()
            self._group = group

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push messages and pull all replies; no `timeout`, nodes always finish training."""
        del timeout
        return list(self.pull_messages(self.push_messages(messages)))

    def _reply(self, message: Message) -> Message:
        """Run the ClientApp on a message; return its reply, or an error if it fails."""
        node = message.metadata.dst_node_id
        if node not in self._partitions:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "no such node"), reply_to=message)
        IN_PROCESS.set(True)  # in this thread of the pool, which runs nodes only
        try:
            reply = self._app(_own_copy(message), self._context(node))
        except Exception as error:  # an app may raise any exception
            kind = type(error).__name__
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, kind), reply_to=message)
        set_message_id(reply, f"reply to {message.metadata.message_id}")
        return reply

    def _context(self, node: int) -> Context:
        config: UserConfig = {
            "partition-id": self._partitions[node],
            "num-partitions": len(self._partitions),
        }
        state = self._states.setdefault(node, RecordDict())
        return Context(self._run.run_id, node, config, state, dict(self._config))


def _own_copy(message: Message) -> Message:
    """Copy the records, which a node may change; the arrays are shared, they are immutable."""
    records = {name: _copied(record) for name, record in message.content.items()}
    return message_with_content(message, RecordDict(records))


def _copied(record: ArrayRecord | ConfigRecord | MetricRecord) -> Any:
    if isinstance(record, ArrayRecord):
        return ArrayRecord(dict(record))
    if isinstance(record, ConfigRecord):
        return ConfigRecord(dict(record))
    return MetricRecord(dict(record))
