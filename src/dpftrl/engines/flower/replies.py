"""Messages out, replies in, few of them in memory at a time."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice
from logging import WARNING
from typing import Final, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.superlink.grid import HttpGrid

from dpftrl.engines.flower.uploads import Uploads
from dpftrl.errors import InvalidInput

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
