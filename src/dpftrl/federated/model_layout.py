"""The layout of a model: how its named arrays are placed in one flat vector."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector
from dpftrl.clipping import DTYPES
from dpftrl.errors import InvalidInput


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
            if array.dtype not in DTYPES:
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
            if typed.dtype not in DTYPES:
                return f"{name!r} must be of float32 or float64"
        return None


def _writable(name: str) -> bool:
    return name == name.encode(errors="replace").decode()
