"""What training changed, no longer than the clip norm."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput

BLOCK: Final = 65_536

Arrays = Mapping[str, NDArray[Any]]


def clipped_update(handed: Arrays, trained: Arrays, clip_norm: float) -> dict[str, NDArray[Any]]:
    """The difference, scaled down to the clip norm; the norm is computed in float64.

    The server clips again: this keeps more than that from leaving the device. A model that
    diverged is passed on, and the server counts it as zeros.
    """
    if {name: array.shape for name, array in handed.items()} != {
        name: array.shape for name, array in trained.items()
    }:
        raise InvalidInput("the arrays of the trained model are not those of the model handed out")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # The difference of two float32, rounded once; only its norm needs more digits.
        changes = {name: np.asarray(trained[name] - handed[name]) for name in handed}
        norm = math.sqrt(sum(_squares(change.reshape(-1)) for change in changes.values()))
        if not norm <= clip_norm:  # NaN stays NaN
            factor = _rounded_down(clip_norm / norm)
            for change in changes.values():
                np.multiply(change, factor, out=change)
        return {name: change.astype(np.float32, copy=False) for name, change in changes.items()}


def _rounded_down(factor: float) -> np.float32:
    """In float32, so that scaling takes no copy; never larger, so that no norm is."""
    near = np.float32(factor)
    return np.nextafter(near, np.float32(0)) if near > factor else near


def _squares(flat: NDArray[Any]) -> float:
    """Their sum in float64, a block at a time, so that no copy of the whole is made."""
    blocks = (flat[i : i + BLOCK].astype(np.float64) for i in range(0, flat.size, BLOCK))
    return sum(float(np.dot(block, block)) for block in blocks)
