"""Send messages to a cohort and receive the replies, with only a few replies in memory at a time.

`replies_to` works with any Grid. On a deployment's Grid it uses `Uploads`, which bounds the size of
each reply (`ReplyLimits`) and does not wait for slow uploads.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from logging import WARNING
from typing import Final, Self, TypeVar, final

import numpy as np
from flwr.app import Array, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput
from dpftrl.flower._flwr_internals import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
    HEAD_BODY_DIVIDER,
    ConfirmMessageReceivedRequest,
    HttpGrid,
    InflatableObject,
    PullAppMessagesRequest,
    PullObjectRequest,
    RuntimeHttpClient,
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
    inflate_object_from_contents,
    iterate_object_tree,
    log,
    pull_objects,
    runtime_client,
)

# Limits for an honest reply, which is about as large as the model that was sent: twice the model,
# plus a constant for the records around it.
SIZE_FACTOR: Final = 2
EXTRA_OBJECTS: Final = 32
EXTRA_BYTES: Final = 1 << 20
# Bytes of metadata per object: a name, a shape, and some digests take less.
METADATA_BYTES_PER_OBJECT: Final = 1024

# Messages per push, to bound the size of one request.
PUSHED_AT_ONCE: Final = 256
# Replies are as large as the model: only this many are pulled at a time, however large the cohort.
PULLED_AT_ONCE: Final = 16
# Replies that are fetched and parsed at the same time, while others are added up: one per core. A
# reply waits in memory until it is added, so their number is bounded on machines with many cores.
FETCHED_AT_ONCE: Final = min(os.cpu_count() or 1, 8)
# Seconds between two requests for new replies.
POLL_SECONDS: Final = 0.2
# Flower raises these for a reply that is not a message. Connection errors are of other types.
MALFORMED: Final = (IndexError, AttributeError, KeyError, TypeError, ValueError)

Item = TypeVar("Item")
# The id of a sent message, and the reply to it; None if no usable reply will come.
Answer = tuple[str, Message | None]


def replies_to(grid: Grid, messages: Sequence[Message], seconds: float) -> Generator[Message]:
    """Send messages and yield each reply as soon as it arrives, until the time is over.

    The caller may stop earlier by closing the generator; the missing replies are then dropped.

    Args:
        grid: Grid that sends the messages.
        messages: One message per contacted node.
        seconds: How long to wait for replies.

    Raises:
        InvalidInput: No message could be sent.
    """
    deadline = time.monotonic() + seconds
    waiting = dict.fromkeys(_pushed(grid, messages))
    if messages and not waiting:
        raise InvalidInput("no message could be sent: the model may be larger than Flower's limit")
    pull = _puller(grid, messages, deadline)
    while waiting:
        answered = 0
        for batch in _batches(list(waiting), PULLED_AT_ONCE):
            for message_id, reply in pull(batch):
                if message_id in waiting:
                    del waiting[message_id]
                    answered += 1
                    yield from filter(None, [reply])
        if time.monotonic() >= deadline:
            return
        if waiting and not answered:
            time.sleep(POLL_SECONDS)


def _puller(
    grid: Grid, messages: Sequence[Message], deadline: float
) -> Callable[[Sequence[str]], Iterable[Answer]]:
    """Return the function that pulls the replies to a batch of message ids from this grid."""
    if isinstance(grid, HttpGrid) and messages:
        return Uploads(grid, messages[0], deadline).pull
    return lambda batch: _pulled(grid, batch)


def _pulled(grid: Grid, batch: Sequence[str]) -> Generator[Answer]:
    """Yield replies from a grid on which a reply is complete as soon as it is visible."""
    try:
        for reply in grid.pull_messages(batch):
            yield reply.metadata.reply_to_message_id, reply
    except MALFORMED:
        # Flower drops the whole batch together with the reply that it could not read.
        log(WARNING, "A reply could not be read: its whole batch counts as drop-outs")
        yield from ((message_id, None) for message_id in batch)


def _pushed(grid: Grid, messages: Sequence[Message]) -> Generator[str]:
    """Send messages; yield the ids of those that were sent.

    For a message that was not sent, Flower returns no id, or None.
    """
    for batch in _batches(messages, PUSHED_AT_ONCE):
        sent = set(grid.push_messages(batch))
        ids = (message.metadata.message_id for message in batch)
        yield from (message_id for message_id in ids if message_id in sent)


def _batches(items: Iterable[Item], size: int) -> Generator[list[Item]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch


class Unusable(Exception):
    """An upload that cannot become a reply; its client counts as a drop-out."""


@final
@dataclass(frozen=True)
class ReplyLimits:
    """Upper limits on the size of a reply, which no honest reply exceeds.

    Attributes:
        objects: Number of Flower objects that the reply consists of.
        metadata: Bytes of everything but array contents. When parsed, it takes many times that.
        numbers: Bytes of all arrays, after their chunks are joined.
    """

    objects: int
    metadata: int
    numbers: int

    @classmethod
    def to(cls, sent: Message) -> Self:
        """Return the limits for replies to a message that holds the model."""
        records = sent.content.array_records.values()
        arrays = [len(array.data) for record in records for array in record.values()]
        chunks = sum(1 + size // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE for size in arrays)
        objects = SIZE_FACTOR * (len(arrays) + chunks) + EXTRA_OBJECTS
        numbers = SIZE_FACTOR * sum(arrays) + EXTRA_BYTES
        return cls(objects, EXTRA_BYTES + METADATA_BYTES_PER_OBJECT * objects, numbers)

    def check_count(self, count: int) -> None:
        """Refuse a reply of too many objects."""
        if count > self.objects:
            raise Unusable(f"it has {count:,} objects, the limit is {self.objects:,}")

    def check_size(self, fetched: int) -> None:
        """Refuse a reply of too many bytes."""
        limit = self.numbers + self.metadata
        if fetched > limit:
            raise Unusable(f"it has more than {limit:,} bytes")

    def check_contents(self, contents: Mapping[str, bytes]) -> None:
        """Refuse a reply that would be too large after parsing: an array may repeat its chunks."""
        metadata = sum(len(content) for content in contents.values() if not _is_chunk(content))
        if metadata > self.metadata:
            raise Unusable(f"it has more than {self.metadata:,} bytes of metadata")
        if sum(_array_size(content, contents) for content in contents.values()) > self.numbers:
            raise Unusable(f"its arrays would have more than {self.numbers:,} bytes")


def _is_chunk(content: bytes) -> bool:
    return get_object_type_from_object_content(content) == "ArrayChunk"


def _array_size(content: bytes, contents: Mapping[str, bytes]) -> int:
    """Return the bytes of an array after its chunks are joined; 0 if it is not an array."""
    if get_object_type_from_object_content(content) != "Array":
        return 0
    chunk_ids = get_object_children_ids_from_object_content(content)
    if not all(_is_chunk(contents[chunk_id]) for chunk_id in chunk_ids):
        raise Unusable("its arrays consist of objects that are not array chunks")
    indices = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    return sum(len(contents[chunk_ids[index]]) for index in indices)


@final
class Uploads:
    """The replies of one cohort, pulled from the SuperLink while the nodes upload them.

    Guarantees:
        A node that uploads slowly, or never finishes, does not delay the others. At most
        FETCHED_AT_ONCE replies are in memory, and one that was given out; their size is bounded.
        However a node spaces its upload, each object of it is fetched at most twice.

    Args:
        grid: Grid of a deployment.
        sent: One of the messages that were sent. It sets the size limits for replies.
        deadline: When pulling ends, by the monotonic clock.
    """

    def __init__(self, grid: HttpGrid, sent: Message, deadline: float):
        self._grid = grid
        self._deadline = deadline
        self._limits = ReplyLimits.to(sent)
        self._announced: dict[str, _Upload] = {}

    def pull(self, message_ids: Sequence[str]) -> Generator[Answer]:
        """Yield the replies that are complete by now, each with the id of the message it answers.

        A reply of None is a drop-out: its upload is unusable.
        """
        self._find_announced([sent for sent in message_ids if sent not in self._announced])
        announced = iter([sent for sent in message_ids if sent in self._announced])
        under_way = deque[tuple[str, Future[Message | None]]]()
        # Threads wait for the network, and parse without copies, while the caller adds up replies.
        with ThreadPoolExecutor(FETCHED_AT_ONCE, "replies") as threads:
            while time.monotonic() < self._deadline:
                for sent in islice(announced, FETCHED_AT_ONCE - len(under_way)):
                    fetched = threads.submit(self._reply, self._announced[sent])
                    under_way.append((sent, fetched))
                if not under_way:
                    return
                message_id, fetched = under_way.popleft()
                try:
                    reply = fetched.result()
                except _NotYet:
                    continue
                del fetched  # holds the reply
                self._confirm(self._announced.pop(message_id))
                yield message_id, reply
                del reply

    def _find_announced(self, message_ids: Sequence[str]) -> None:
        """Note which replies have been announced; the SuperLink reports each of them once."""
        if not message_ids:
            return
        answer = self._client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        for reply, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            objects = dict.fromkeys(node.object_id for node in iterate_object_tree(tree))
            upload = _Upload(reply.metadata.message_id, tuple(objects))
            self._announced[reply.metadata.reply_to_message_id] = upload

    def _reply(self, upload: "_Upload") -> Message | None:
        """Fetch and parse a reply; None if it is unusable."""
        try:
            return _inflated(upload.message_id, self._contents(upload), self._limits)
        except Unusable as reason:
            log(WARNING, "A reply counts as a drop-out: %s", reason)
            return None

    def _contents(self, upload: "_Upload") -> dict[str, bytes]:
        """Fetch all objects of a reply; stop at the first that is missing or passes a limit."""
        self._limits.check_count(len(upload.objects))

        def fetch(object_id: str) -> bytes:
            content = self._object(object_id)
            upload.sizes[object_id] = len(content)
            self._limits.check_size(sum(list(upload.sizes.values())))
            return content

        seen = [object_id for object_id in upload.objects if object_id in upload.sizes]
        # Objects that were missing before come first: if one is still missing, little is wasted.
        unseen = [object_id for object_id in upload.objects if object_id not in upload.sizes]
        return pull_objects(unseen, fetch) | pull_objects(seen, fetch)

    def _object(self, object_id: str) -> bytes:
        """Fetch one object."""
        request = PullObjectRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, object_id=object_id
        )
        response = self._client.PullObject(request)
        if not response.object_found:
            raise Unusable("its node did not upload all of it")
        if not response.object_available:
            raise _NotYet
        return response.object_content

    def _confirm(self, upload: "_Upload") -> None:
        """Tell the SuperLink that it may delete an upload."""
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._grid.node,
                run_id=self._grid.run.run_id,
                message_object_id=upload.message_id,
            )
        )

    @property
    def _client(self) -> RuntimeHttpClient:
        return runtime_client(self._grid)


@final
@dataclass(frozen=True)
class _Upload:
    """A reply that is being uploaded: its objects, and the sizes of those fetched so far."""

    message_id: str
    objects: tuple[str, ...]
    sizes: dict[str, int] = field(default_factory=dict[str, int])


class _NotYet(Exception):
    """An object of a reply is not uploaded yet."""


def _inflated(message_id: str, contents: dict[str, bytes], limits: ReplyLimits) -> Message:
    """Parse a reply from the contents of its objects.

    Flower copies the bytes of an array three times to join its chunks, which takes longer than
    adding them up. So Flower gets arrays without data here. The data of an array of one chunk is a
    view of the bytes that were received; several chunks are joined, in one copy.
    """
    try:
        limits.check_contents(contents)
        data = {
            object_id: _array_data(content, contents)
            for object_id, content in contents.items()
            if get_object_type_from_object_content(content) == "Array"
        }
        empty = {object_id: _without_data(object_id, contents[object_id]) for object_id in data}
        reply = inflate_object_from_contents(message_id, contents, objects=empty)
        if isinstance(reply, Message) and reply.has_content():
            for record in reply.content.array_records.values():
                for array in record.values():
                    array.data = data[array.data.decode()]  # pyright: ignore[reportAttributeAccessIssue]  # a view of bytes
    except Unusable:
        raise
    except Exception as error:  # no upload, however malformed, may stop the round
        raise Unusable(f"it cannot be read ({type(error).__name__})") from None
    if not isinstance(reply, Message):
        raise Unusable("it is not a message")
    return reply


def _without_data(object_id: str, content: bytes) -> InflatableObject:
    """Return an array that has its object id in place of its data."""
    array = json.loads(get_object_body(content, Array))
    return Array(array["dtype"], tuple(array["shape"]), array["stype"], object_id.encode())


def _array_data(content: bytes, contents: Mapping[str, bytes]) -> memoryview:
    """Return the data of an array."""
    chunk_ids = get_object_children_ids_from_object_content(content)
    indices: list[int] = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    used = [chunk_ids[index] for index in indices]
    if set(used) != set(chunk_ids):
        raise Unusable("its arrays do not consist of their chunks")
    chunks = [_body(contents[chunk_id]) for chunk_id in used]
    # NumPy asks for large pages of memory, which makes this several times as fast as b"".join.
    return chunks[0] if len(chunks) == 1 else np.concatenate(list(map(_bytes, chunks))).data


def _bytes(chunk: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(chunk, np.uint8)


def _body(content: bytes) -> memoryview:
    """Return what follows the head of an object, as a view."""
    return memoryview(content)[content.find(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :]
