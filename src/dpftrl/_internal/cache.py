"""A cache on disk for the results of long computations.

A file is named by a hash of the inputs of its computation. A file that cannot be read is treated as
missing, and a folder that cannot be written to is ignored: the cache never causes an error.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import replace_file
from dpftrl.errors import InvalidInput

Tensors = Mapping[str, NDArray[Any]]


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the cache.

    Args:
        given: The folder, if it is chosen by the caller. Otherwise it is $DPFTRL_CACHE, or else
            `dpftrl` in the user's cache folder.
    """
    if given is not None:
        return Path(given)
    if from_environment := os.environ.get("DPFTRL_CACHE"):
        return Path(from_environment)
    user_cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(user_cache) if user_cache else Path.home() / ".cache") / "dpftrl"


def content_key(kind: str, *parts: float | NDArray[np.float64]) -> str:
    """A file name for a computation: only equal inputs give equal names.

    Args:
        kind: The kind of computation; the start of the name.
        parts: Its inputs.

    >>> content_key("bandmf", 8, 2) == content_key("bandmf", 8.0, 2)
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        numbers = np.asarray(part, dtype=np.float64)
        digest.update(repr(numbers.shape).encode() + numbers.tobytes())
    return f"{kind}-{digest.hexdigest()[:32]}"


def load_tensors(folder: Path, key: str) -> dict[str, NDArray[Any]] | None:
    """The tensors stored under a key; None if there are none, or the file is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load((folder / f"{key}.safetensors").read_bytes()))
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


def store_tensors(folder: Path, key: str, tensors: Tensors) -> bool:
    """Store tensors under a key, completely or not at all.

    Returns:
        Whether it worked. It does not if the folder cannot be written to.
    """
    from safetensors.numpy import save

    content = save({name: np.ascontiguousarray(value) for name, value in tensors.items()})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{key}.safetensors", content)
    except (OSError, InvalidInput):
        return False
    return True
