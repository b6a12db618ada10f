"""How large a reply may be, counted before it is put together."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self, final

from flwr.app import Array, Message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
)

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
