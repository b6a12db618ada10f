"""Our conversion between Flower arrays and numpy arrays equals Flower's, bit by bit."""

import numpy as np
import pytest
from flwr.app import Array

from dpftrl.errors import InvalidInput
from dpftrl.flower.messages import Draft, _parsed_header, from_numpy, to_numpy


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.float64).reshape(2, 3).T,
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5, np.float32),
        np.zeros((0, 4)),
        np.arange(8, dtype=np.int64)[::2],
        np.arange(3, dtype=">f4"),
        np.arange(1000, dtype=np.float32).reshape(10, 100),
    ],
)
def test_arrays_survive_a_round_trip(values: np.ndarray) -> None:
    for array in (Array(values), from_numpy(values)):
        for numbers in (array.numpy(), to_numpy(array)):
            assert numbers.dtype == values.dtype
            assert numbers.shape == values.shape
            assert (numbers == values).all()
    assert from_numpy(values).shape == Array(values).shape
    assert from_numpy(values).dtype == Array(values).dtype


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an array",
        Array(np.zeros(9)).data[:-1],
        Array(np.zeros(9)).data.replace(b"(9,)", b"(10)"),
        Array(np.zeros(9)).data.replace(b"<f8", b"|O8"),
        Array(np.zeros(9)).data.replace(b"(9,)", b"-9, "),
    ],
)
def test_invalid_arrays_raise_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # numpy raises several kinds
        to_numpy(Array("float64", (9,), "numpy.ndarray", data))


def test_a_draft_is_sent_without_a_copy() -> None:
    draft = Draft((2, 3), np.dtype(np.float32))
    assert not draft.values.any()
    draft.values[...] = wanted = np.arange(6).reshape(2, 3)
    place = draft.values.ctypes.data
    received = to_numpy(draft.finished())
    assert (received == wanted).all()
    assert received.ctypes.data == place
    assert not hasattr(draft, "values")


def test_writing_to_a_finished_draft_does_not_change_the_sent_array() -> None:
    draft = Draft((3,), np.dtype(np.float64))
    held = draft.values
    array = draft.finished()
    held[...] = 1.0
    assert not to_numpy(array).any()


def test_too_long_headers_are_not_cached() -> None:
    """A dtype of thousands of fields takes a megabyte, and a device may send any number of them."""
    before = _parsed_header.cache_info().currsize
    for i in range(3):
        text = "{'descr':'" + "b," * 4000 + f"b','fortran_order':False,'shape':({i},)}}"
        data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(9000)
        with pytest.raises(ValueError):  # noqa: PT011
            to_numpy(Array("float32", (0,), "numpy.ndarray", data))
    assert _parsed_header.cache_info().currsize == before


def test_an_array_in_another_format_is_refused() -> None:
    data = Array(np.zeros(9)).data
    with pytest.raises(InvalidInput, match="numpy's format"):
        to_numpy(Array("float64", (9,), "torch.Tensor", data))


def test_a_long_header_is_read_to_its_end() -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }" + b" " * 300
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    data = start + np.array([1, 2], np.float32).tobytes()
    assert to_numpy(Array("float32", (2,), "numpy.ndarray", data)).tolist() == [1, 2]


@pytest.mark.parametrize("version", [(2, 0), (3, 0), (9, 9)])
def test_other_versions_of_the_format_are_refused(version: tuple[int, int]) -> None:
    values = np.arange(6, dtype=np.float32)
    data = Array(values).data.replace(b"NUMPY\x01\x00", b"NUMPY" + bytes(version))
    with pytest.raises(InvalidInput, match=r"version 1\.0"):
        to_numpy(Array("float32", (6,), "numpy.ndarray", data))
