"""Reads one feature out of a serialised `tf.train.Example`, without TensorFlow.

An Example has a field 1, `features`; that has a field 1, a map, whose entries have a `key` 1 and a
`value` 2; a value has one of `bytes_list` 1, `float_list` 2 and `int64_list` 3; a list has its
values in field 1. All of it is in the wire format of Protocol Buffers.
"""

from collections.abc import Iterator

from dpftrl.errors import InvalidInput

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10


def bytes_feature(example: bytes, name: bytes) -> list[bytes]:
    """The values of a feature that holds bytes; none if there is no such feature."""
    values: list[bytes] = []
    for features in _contents(example, 1):
        for entry in _contents(features, 1):
            # Of a key that is there twice, the last entry counts. Few entries need a closer look.
            if name in entry and _contents(entry, 1)[-1:] == [name]:
                lists = [made for value in _contents(entry, 2) for made in _contents(value, 1)]
                values = [value for made in lists for value in _contents(made, 1)]
    return values


def _contents(message: bytes, wanted: int) -> list[bytes]:
    """What the fields of one number hold, if that is bytes."""
    return [content for number, content in _fields(message) if number == wanted]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the fields that hold bytes; those of other types are passed over."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(message, at)
            if size <= end - at:
                yield tag >> 3, message[at : at + size]
            at += size
        elif kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if kind == _EIGHT_BYTES else 4
        else:
            raise _damaged()
    if at > end:
        raise _damaged()


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and where the next thing begins."""
    number, shift = 0, 0
    for byte in message[at : at + _LONGEST_VARINT]:
        at += 1
        if byte < 0x80:
            return number | byte << shift, at
        number |= (byte & 0x7F) << shift
        shift += 7
    raise _damaged()


def _damaged() -> InvalidInput:
    return InvalidInput("this is not a serialised tf.train.Example")
