"""Messages out, replies in, few of them in memory at a time."""

import json
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from logging import WARNING
from typing import Final, Self, TypeVar, final

from flwr.app import Array, Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from dpftrl.errors import InvalidInput

# A reply is as large as the model that was sent; this leaves room for what surrounds it.
SPARE: Final = 2
SPARE_OBJECTS: Final = 32
SPARE_BYTES: Final = 1 << 20
# What describes an array and its pieces: a name, a shape, and some digests.
WORDS: Final = 1024


class Unusable(Exception):
    """This cannot become a reply any more."""


@final
@dataclass(frozen=True)
class ReplyLimits:
    """What no honest reply passes.

    Attributes:
        objects: Parts that it has.
        words: Bytes of what describes its numbers, which takes many times that when it is read.
        numbers: Bytes of its arrays, when they are put together.
    """

    objects: int
    words: int
    numbers: int

    @classmethod
    def to(cls, sent: Message) -> Self:
        """The limits of replies to a message, which holds the model."""
        records = sent.content.array_records.values()
        arrays = [len(array.data) for record in records for array in record.values()]
        chunks = sum(1 + size // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE for size in arrays)
        objects = SPARE * (len(arrays) + chunks) + SPARE_OBJECTS
        numbers = SPARE * sum(arrays) + SPARE_BYTES
        return cls(objects, SPARE_BYTES + WORDS * objects, numbers)

    def check_parts(self, count: int) -> None:
        """Refuse too many of them."""
        if count > self.objects:
            raise Unusable(f"it has {count:,} parts, more than any update")

    def check_size(self, fetched: int) -> None:
        """Refuse too many bytes."""
        if fetched > self.numbers + self.words:
            raise Unusable("it is larger than any update")

    def check_whole(self, contents: Mapping[str, bytes]) -> None:
        """Refuse what would be too large when put together: arrays may repeat their pieces."""
        words = sum(len(one) for one in contents.values() if not _is_piece(one))
        if words > self.words:
            raise Unusable("what describes its numbers is longer than in any update")
        if sum(_array_size(one, contents) for one in contents.values()) > self.numbers:
            raise Unusable("it would be larger than any update")


def _is_piece(content: bytes) -> bool:
    return get_object_type_from_object_content(content) == "ArrayChunk"


def _array_size(content: bytes, contents: Mapping[str, bytes]) -> int:
    """How many bytes a part puts together: none, unless it is an array."""
    if get_object_type_from_object_content(content) != "Array":
        return 0
    pieces = get_object_children_ids_from_object_content(content)
    if not all(_is_piece(contents[one]) for one in pieces):
        raise Unusable("its arrays are made of something else than numbers")
    named = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    return sum(len(contents[pieces[one]]) for one in named)


@final
class Uploads:
    """The replies to one cohort, while their nodes upload them.

    Guarantees:
        A node that uploads slowly, or never, takes no time of the others. Two replies are in memory
        at most, and their size is bounded. However a node spaces its upload, each piece of it is
        fetched twice at most.

    Args:
        grid: Of a deployment.
        sent: One of the messages: no reply may be much larger.
        deadline: When pulling ends, by the monotonic clock.
    """

    def __init__(self, grid: HttpGrid, sent: Message, deadline: float):
        self._grid = grid
        self._deadline = deadline
        self._limits = ReplyLimits.to(sent)
        self._announced: dict[str, _Upload] = {}

    def pull(self, message_ids: Sequence[str]) -> Generator[tuple[str, Message | None]]:
        """The replies that are there by now, each with the message it is for; None: a drop-out."""
        self._look([one for one in message_ids if one not in self._announced])
        for one in [one for one in message_ids if one in self._announced]:
            if time.monotonic() >= self._deadline:
                return
            try:
                reply = self._taken(self._announced[one])
            except _NotYet:
                continue
            self._confirm(self._announced.pop(one))
            yield one, reply

    def _look(self, message_ids: Sequence[str]) -> None:
        """Ask who has announced a reply; the SuperLink says so once."""
        if not message_ids:
            return
        answer = self._client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        for said, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            objects = dict.fromkeys(node.object_id for node in iterate_object_tree(tree))
            upload = _Upload(said.metadata.message_id, tuple(objects))
            self._announced[said.metadata.reply_to_message_id] = upload

    def _taken(self, upload: "_Upload") -> Message | None:
        try:
            return _inflated(upload.message_id, self._contents(upload), self._limits)
        except Unusable as why:
            log(WARNING, "A reply counts as a drop-out: %s", why)
            return None

    def _contents(self, upload: "_Upload") -> dict[str, bytes]:
        self._limits.check_parts(len(upload.objects))

        def fetch(object_id: str) -> bytes:
            content = self._object(object_id)
            upload.sizes[object_id] = len(content)
            self._limits.check_size(sum(list(upload.sizes.values())))
            return content

        seen = [one for one in upload.objects if one in upload.sizes]
        # The first that is missing comes first, so that little else is fetched in vain.
        unseen = [one for one in upload.objects if one not in upload.sizes]
        return pull_objects(unseen, fetch) | pull_objects(seen, fetch)

    def _object(self, object_id: str) -> bytes:
        asked = PullObjectRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, object_id=object_id
        )
        found = self._client.PullObject(asked)
        if not found.object_found:
            raise Unusable("its node did not upload all of it")
        if not found.object_available:
            raise _NotYet
        return found.object_content

    def _confirm(self, upload: "_Upload") -> None:
        """The SuperLink may forget it."""
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._grid.node,
                run_id=self._grid.run.run_id,
                message_object_id=upload.message_id,
            )
        )

    @property
    def _client(self) -> RuntimeHttpClient:
        return self._grid._runtime_client  # pyright: ignore[reportPrivateUsage]  # Flower offers no other way


@final
@dataclass(frozen=True)
class _Upload:
    """A reply on its way: its parts, and the size of those that were there."""

    message_id: str
    objects: tuple[str, ...]
    sizes: dict[str, int] = field(default_factory=dict[str, int])


class _NotYet(Exception):
    """Something is not uploaded yet."""


def _inflated(message_id: str, contents: dict[str, bytes], limits: ReplyLimits) -> Message:
    try:
        limits.check_whole(contents)
        reply = inflate_object_from_contents(message_id, contents)
    except Unusable:
        raise
    except Exception as error:  # whatever a node uploads, it must not stop the round
        raise Unusable(f"it cannot be read ({type(error).__name__})") from None
    if not isinstance(reply, Message):
        raise Unusable("it is no message")
    return reply


PUSHED_AT_ONCE: Final = 256
# Replies are as large as the model: only so many are held at a time, however large the cohort.
PULLED_AT_ONCE: Final = 16
POLL_SECONDS: Final = 0.2
# What Flower raises on a reply that is no message; when it cannot reach the SuperLink is another
# matter.
MALFORMED: Final = (IndexError, AttributeError, KeyError, TypeError, ValueError)

Item = TypeVar("Item")


def replies_to(grid: Grid, messages: Sequence[Message], seconds: float) -> Generator[Message]:
    """Send messages, and give each reply as soon as it is there; stop when the time is over.

    The caller may stop before: then nobody waits for the rest.
    """
    deadline = time.monotonic() + seconds
    waiting = dict.fromkeys(_pushed(grid, messages))
    if messages and not waiting:
        raise InvalidInput("no message could be sent: is the model larger than Flower takes?")
    pull = _pulling(grid, messages, deadline)
    while waiting:
        came = 0
        for batch in _batches(list(waiting), PULLED_AT_ONCE):
            for one, reply in pull(batch):
                if one in waiting:
                    del waiting[one]
                    came += 1
                    yield from filter(None, [reply])
        if time.monotonic() >= deadline:
            return
        if waiting and not came:
            time.sleep(POLL_SECONDS)


Answer = tuple[str, Message | None]


def _pulling(
    grid: Grid, messages: Sequence[Message], deadline: float
) -> Callable[[Sequence[str]], Iterable[Answer]]:
    """What gives the replies to some messages; None is one that will never come."""
    if isinstance(grid, HttpGrid) and messages:
        return Uploads(grid, messages[0], deadline).pull
    return lambda batch: _pulled(grid, batch)


def _pulled(grid: Grid, batch: Sequence[str]) -> Generator[Answer]:
    """From a grid whose replies are whole as soon as they are there."""
    try:
        for reply in grid.pull_messages(batch):
            yield reply.metadata.reply_to_message_id, reply
    except MALFORMED:
        # Flower has thrown the batch away with the reply that it could not read.
        log(WARNING, "A reply could not be read: it and those beside it are drop-outs")
        yield from ((one, None) for one in batch)


def _pushed(grid: Grid, messages: Sequence[Message]) -> Generator[str]:
    """Ids of the messages that went out; Flower leaves out those that did not, or says None."""
    for batch in _batches(messages, PUSHED_AT_ONCE):
        sent = set(grid.push_messages(batch))
        yield from (one.metadata.message_id for one in batch if one.metadata.message_id in sent)


def _batches(items: Iterable[Item], size: int) -> Generator[list[Item]]:
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
