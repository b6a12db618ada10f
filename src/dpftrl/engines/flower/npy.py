"""Flower's arrays to numpy and back, without the copies that take most of the time."""

import math
from functools import lru_cache
from io import BytesIO
from typing import Any, Final, final

import numpy as np
from flwr.app import Array
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput

# What Flower calls the .npy format.
KIND: Final = "numpy.ndarray"
# Headers of numbers have some 120 bytes; longer ones may take long to read, and much memory.
LONGEST_HEADER: Final = 2048


@final
class Draft:
    """An array that is written to where it will travel from.

    Attributes:
        values: Zeros, to be written to.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]):
        header, size = _header(shape, dtype), math.prod(shape)
        self._file = BytesIO(bytes(len(header) + size * dtype.itemsize))
        self._file.write(header)
        flat = np.frombuffer(self._file.getbuffer(), dtype, size, len(header))
        self.values: NDArray[Any] = flat.reshape(shape)

    def finished(self) -> Array:
        """The array as it travels; there are no values to write to any more."""
        dtype, shape = str(self.values.dtype), self.values.shape
        del self.values  # or Python would hand out a copy of the bytes that it shares
        return Array(dtype, shape, KIND, self._file.getvalue())


def to_numpy(array: Array) -> NDArray[Any]:
    """The numbers of an array, as a view into its bytes that cannot be written to."""
    if array.stype != KIND:
        raise InvalidInput(f"an array must come in numpy's format, got {array.stype!r:.40}")
    data = array.data
    if npy.read_magic(BytesIO(data[: npy.MAGIC_LEN])) != (1, 0):
        raise InvalidInput("an array of numbers comes in version 1.0 of numpy's format")
    start = npy.MAGIC_LEN + 2
    start += int.from_bytes(data[npy.MAGIC_LEN : start], "little")
    if start > LONGEST_HEADER:
        raise InvalidInput("the header of an array is longer than any that describes numbers")
    shape, by_column, dtype = _described(data[:start])
    flat = np.frombuffer(data, dtype, offset=start)
    return flat.reshape(shape, order="F" if by_column else "C")


# Headers are kept: they take longer than all else, and are the same for each client.
@lru_cache(maxsize=1024)
def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    written = BytesIO()
    described = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(
        written, {"descr": described, "fortran_order": False, "shape": shape}
    )
    return written.getvalue()


@lru_cache(maxsize=1024)
def _described(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    source = BytesIO(header)
    npy.read_magic(source)
    shape, by_column, dtype = npy.read_array_header_1_0(source)
    if dtype.hasobject:
        raise InvalidInput("an array must hold numbers, and this one holds objects")
    return shape, by_column, dtype


def from_numpy(values: NDArray[Any]) -> Array:
    """An array as it travels."""
    draft = Draft(values.shape, values.dtype)
    draft.values[...] = values
    return draft.finished()
