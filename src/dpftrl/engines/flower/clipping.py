"""What training changed, no longer than the clip norm."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput

BLOCK: Final = 32_768

Arrays = Mapping[str, NDArray[Any]]


def write_update(update: Arrays, handed: Arrays, trained: Arrays, clip_norm: float) -> None:
    """Write the difference, scaled down to the clip norm; the norm is computed in float64.

    The server clips again: this keeps more than that from leaving the device. A model that
    diverged is passed on, and the server counts it as zeros.

    Args:
        update: Contiguous arrays of float32, which are written to.
        handed: The model that the device was handed.
        trained: What became of it.
        clip_norm: The L2 norm that the update may have.
    """
    if _shapes(handed) != _shapes(trained):
        raise InvalidInput("the arrays of the trained model are not those of the model handed out")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = (_write(update[name], trained[name], handed[name]) for name in update)
        norm = math.sqrt(sum(squares))
        if not norm <= clip_norm:  # NaN stays NaN
            factor = _rounded_down(clip_norm / norm)
            for change in update.values():
                np.multiply(change, factor, out=change)


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _rounded_down(factor: float) -> np.float32:
    """In float32, so that scaling takes no copy; never larger, so that no norm is.

    Compared in float64: numpy would compare a float32 with a number of Python's in float32.
    """
    near = np.float32(factor)
    return np.nextafter(near, np.float32(0)) if float(near) > factor else near


def _write(change: NDArray[Any], trained: NDArray[Any], handed: NDArray[Any]) -> float:
    """Write a difference, rounded once to float32; return its sum of squares, in float64.

    A block at a time, so that a number is still in the cache when it is squared.
    """
    to, minuend, subtrahend = change.reshape(-1), trained.reshape(-1), handed.reshape(-1)
    room, total = np.empty(min(to.size, BLOCK)), 0.0
    for start in range(0, to.size, BLOCK):
        here = slice(start, start + BLOCK)
        part = to[here]
        np.subtract(minuend[here], subtrahend[here], out=part, casting="same_kind")
        block = room[: part.size]
        block[:] = part
        total += float(np.dot(block, block))
    return total
