"""Replies out of a SuperLink, none of which can hold up the others.

Flower's `pull_messages` waits within for what a reply holds: for hours, if its sender announced it
and is slow to upload it. Here nothing waits: what is not there yet is looked for again later, and
what is larger than any update is not taken.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import final

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from dpftrl.engines.flower.reply_limits import ReplyLimits, Unusable


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
