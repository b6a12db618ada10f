"""Shared array types, and views of a model (nested lists and dicts of arrays) as flat arrays."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput

Array = NDArray[Any]
FloatArray = NDArray[np.float64]
Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Float32Vector = NDArray[np.float32]
# An array, or lists, tuples and dicts of `Arrays`.
Arrays = Any

# The number types that noise can be added to.
DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64))


def segments(update: Arrays) -> list[Array]:
    """All arrays in `update`, each as a flat view that shares its memory.

    Args:
        update: An array, or nested lists, tuples and dicts of arrays. The order is that of the
            lists; dicts are ordered by their sorted keys.

    Raises:
        InvalidInput: Something in it is not an array that can be changed in place.
    """
    return [_flat_view(name, leaf) for name, leaf in _leaves("update", update)]


def _leaves(name: str, update: Arrays) -> Iterator[tuple[str, Any]]:
    """All leaves of a nested structure, with their names for messages, such as update['w'][0]."""
    if isinstance(update, Mapping):
        mapping = cast("Mapping[Any, Any]", update)
        try:
            keys = sorted(mapping)
        except TypeError:
            raise InvalidInput(f"{name} has keys that cannot be sorted") from None
        for key in keys:
            yield from _leaves(f"{name}[{key!r}]", mapping[key])
    elif isinstance(update, Sequence) and not isinstance(update, str | bytes):
        for position, part in enumerate(cast("Sequence[Any]", update)):
            yield from _leaves(f"{name}[{position}]", part)
    else:
        yield name, update


def _flat_view(name: str, leaf: Any) -> Array:
    """A flat view of one array; `name` is its name in messages."""
    if not isinstance(leaf, np.ndarray):
        raise InvalidInput(
            f"{name} must be a numpy array, or lists and dicts of them, got {type(leaf).__name__}"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise InvalidInput(
            f"{name} is a masked array, but every coordinate needs noise; use a plain array"
        )
    array = cast("Array", leaf).view(np.ndarray)  # subclasses may override indexing
    if array.dtype not in DTYPES:
        raise InvalidInput(f"{name} must be of float32, float64 or int64, got {array.dtype}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise InvalidInput(
            f"{name} must be contiguous and writeable, since it is changed in place; "
            "np.array(..., order='C') makes such a copy"
        )
    return array.reshape(-1)
