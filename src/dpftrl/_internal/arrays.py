"""Shared array types, and models (named or nested arrays) as flat arrays.

`segments` gives flat views of nested lists and dicts of arrays. `Layout` places the named arrays of
a model in one flat vector.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

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

# The number types of models and updates, and those that noise can be added to.
FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
DTYPES = (*FLOAT_DTYPES, np.dtype(np.int64))


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


@final
@dataclass(frozen=True)
class Layout:
    """The names and shapes of the arrays of a model, sorted by name.

    >>> layout = Layout.of({"b": np.zeros(2), "a": np.ones((2, 2))})
    >>> layout.size, layout.flat({"b": np.zeros(2), "a": np.ones((2, 2))}).tolist()
    (6, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: Mapping[str, NDArray[Any]]) -> "Layout":
        """The layout of a model; its arrays must be float32 or float64, and finite."""
        if not model:
            raise InvalidInput("a model has at least one array, got none")
        for name, array in model.items():
            if not isinstance(name, str) or not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidInput(f"a model is a dict of names and numpy arrays, got {name!r:.60}")
            if array.dtype not in FLOAT_DTYPES:
                raise InvalidInput(f"{name!r} must be of float32 or float64, got {array.dtype}")
            with np.errstate(over="ignore"):
                if not np.isfinite(array.astype(np.float32)).all():
                    raise InvalidInput(f"{name!r} must be finite in float32, and is not")
        names = tuple(sorted(model))
        if not all(map(_writable, names)):
            raise InvalidInput("names of a model's arrays must be valid Unicode")
        return cls(names, tuple(model[name].shape for name in names))

    @cached_property
    def size(self) -> int:
        """The number of coordinates of the model."""
        return sum(math.prod(shape) for shape in self.shapes)

    def flat(self, model: Mapping[str, NDArray[Any]]) -> Float32Vector:
        """The model as one vector of float32."""
        why = self.misfit(model)
        if why:
            raise InvalidInput(f"the model does not fit: {why}")
        return np.concatenate([model[name].reshape(-1).astype(np.float32) for name in self.names])

    def arrays(self, vector: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The named arrays of a flat vector, as views into it."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = np.split(vector, ends)
        named = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.reshape(shape) for name, shape, part in named}

    def misfit(self, model: Any) -> str | None:
        """Why these arrays do not fit the layout, or None if they do."""
        if not isinstance(model, Mapping):
            return f"got {type(model).__name__}, not a dict of arrays"
        given = cast("Mapping[Any, Any]", model)
        if set(given) != set(self.names):
            return f"got {len(given)} arrays, and not the {len(self.names)} of this model by name"
        for name, shape in zip(self.names, self.shapes, strict=True):
            array = given[name]
            if not isinstance(array, np.ndarray):
                return f"{name!r} must be a numpy array"
            typed = cast("NDArray[Any]", array)
            if typed.shape != shape:
                return f"{name!r} must have shape {shape}"
            if typed.dtype not in FLOAT_DTYPES:
                return f"{name!r} must be of float32 or float64"
        return None


def _writable(name: str) -> bool:
    return name == name.encode(errors="replace").decode()
