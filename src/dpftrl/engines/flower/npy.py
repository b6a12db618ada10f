"""Flower's arrays to numpy and back, without the copies that take most of the time."""

import math
from io import BytesIO
from typing import Any, Final, final

import numpy as np
from flwr.app import Array
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput

# What Flower calls the .npy format.
KIND: Final = "numpy.ndarray"


@final
class Draft:
    """An array that is written to where it will travel from.

    Attributes:
        values: Zeros, to be written to.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]):
        header = BytesIO()
        described = npy.dtype_to_descr(dtype)
        npy.write_array_header_1_0(
            header, {"descr": described, "fortran_order": False, "shape": shape}
        )
        start = header.tell()
        self._file = BytesIO(bytes(start + math.prod(shape) * dtype.itemsize))
        self._file.write(header.getvalue())
        self.values: NDArray[Any] = np.frombuffer(
            self._file.getbuffer(), dtype, math.prod(shape), start
        ).reshape(shape)

    def finished(self) -> Array:
        """The array as it travels; there are no values to write to any more."""
        dtype, shape = str(self.values.dtype), self.values.shape
        del self.values  # or Python would hand out a copy of the bytes that it shares
        return Array(dtype, shape, KIND, self._file.getvalue())


def to_numpy(array: Array) -> NDArray[Any]:
    """The numbers of an array, as a view into its bytes that cannot be written to."""
    if array.stype != KIND:
        raise InvalidInput(f"an array must come in numpy's format, got {array.stype!r:.40}")
    source = BytesIO(array.data)
    if npy.read_magic(source) != (1, 0):
        return array.numpy()
    shape, by_column, dtype = npy.read_array_header_1_0(source)
    if dtype.hasobject:
        raise InvalidInput("an array must hold numbers, and this one holds objects")
    flat = np.frombuffer(array.data, dtype, int(np.prod(shape)), source.tell())
    return flat.reshape(shape, order="F" if by_column else "C")


def from_numpy(values: NDArray[Any]) -> Array:
    """An array as it travels."""
    draft = Draft(values.shape, values.dtype)
    draft.values[...] = values
    return draft.finished()
