"""Models as people keep them, lists and dicts of arrays, seen as one vector without copying."""

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
# An array, or lists, tuples and dicts of such.
Arrays = Any

KINDS = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64))


def segments(update: Arrays) -> list[Array]:
    """The arrays, each as a flat view into the original, in order (dicts by their sorted keys)."""
    return [_flat_view(where, leaf) for where, leaf in _leaves("update", update)]


def _leaves(where: str, update: Arrays) -> Iterator[tuple[str, Any]]:
    if isinstance(update, Mapping):
        named = cast("Mapping[Any, Any]", update)
        try:
            names = sorted(named)
        except TypeError:
            raise InvalidInput(f"{where} has keys that cannot be sorted") from None
        for name in names:
            yield from _leaves(f"{where}[{name!r}]", named[name])
    elif isinstance(update, Sequence) and not isinstance(update, str | bytes):
        for place, part in enumerate(cast("Sequence[Any]", update)):
            yield from _leaves(f"{where}[{place}]", part)
    else:
        yield where, update


def _flat_view(where: str, leaf: Any) -> Array:
    if not isinstance(leaf, np.ndarray):
        raise InvalidInput(
            f"{where} must be a numpy array, or lists and dicts of them, got {type(leaf).__name__}"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise InvalidInput(f"{where} is a masked array: noise goes everywhere, or nowhere")
    array = cast("Array", leaf).view(np.ndarray)  # subclasses may index in ways of their own
    if array.dtype not in KINDS:
        raise InvalidInput(f"{where} must be of float32, float64 or int64, got {array.dtype}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise InvalidInput(
            f"{where} must be contiguous and writeable, to be changed in place; "
            "np.array(..., order='C') makes such a copy"
        )
    return array.reshape(-1)
