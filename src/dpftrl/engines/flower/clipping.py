"""What training changed, no longer than the clip norm."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput

BLOCK: Final = 65_536

Arrays = Mapping[str, NDArray[Any]]


def write_update(update: Arrays, handed: Arrays, trained: Arrays, clip_norm: float) -> None:
    """Write the difference, scaled down to the clip norm; the norm is computed in float64.

    The server clips again: this keeps more than that from leaving the device. A model that
    diverged is passed on, and the server counts it as zeros.

    Args:
        update: Arrays of float32, which are written to.
        handed: The model that the device was handed.
        trained: What became of it.
        clip_norm: The L2 norm that the update may have.
    """
    if _shapes(handed) != _shapes(trained):
        raise InvalidInput("the arrays of the trained model are not those of the model handed out")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for name, change in update.items():
            # Rounded once to float32; only the norm needs more digits.
            np.subtract(trained[name], handed[name], out=change, casting="same_kind")
        norm = math.sqrt(sum(_squares(change.reshape(-1)) for change in update.values()))
        if not norm <= clip_norm:  # NaN stays NaN
            factor = _rounded_down(clip_norm / norm)
            for change in update.values():
                np.multiply(change, factor, out=change)


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _rounded_down(factor: float) -> np.float32:
    """In float32, so that scaling takes no copy; never larger, so that no norm is."""
    near = np.float32(factor)
    return np.nextafter(near, np.float32(0)) if near > factor else near


def _squares(flat: NDArray[Any]) -> float:
    """Their sum in float64, a block at a time, so that no copy of the whole is made."""
    room, total = np.empty(min(flat.size, BLOCK)), 0.0
    for start in range(0, flat.size, BLOCK):
        part = flat[start : start + BLOCK]
        block = room[: part.size]
        block[:] = part
        total += float(np.dot(block, block))
    return total
