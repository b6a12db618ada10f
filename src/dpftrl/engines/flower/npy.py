"""Flower's arrays to numpy and back, without the copies that take most of the time."""

from io import BytesIO
from typing import Any, Final

import numpy as np
from flwr.app import Array
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput

# What Flower calls the .npy format.
KIND: Final = "numpy.ndarray"


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
    values = np.asarray(values, order="C")
    header = BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values))
    data = b"".join((header.getvalue(), values.reshape(-1).view(np.uint8).data))
    return Array(str(values.dtype), values.shape, KIND, data)
