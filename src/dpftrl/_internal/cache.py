"""Where long computations keep what they have reached, so that nothing is computed twice.

Files are named by a hash of what was asked for. One that cannot be read is as good as none: a
cache may slow nobody down, and never stops anybody.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[Any]]


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder given, or DPFTRL_CACHE, or `dpftrl` in the user's cache folder."""
    if given is not None:
        return Path(given)
    if named := os.environ.get("DPFTRL_CACHE"):
        return Path(named)
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "dpftrl"


def content_key(kind: str, *parts: float | NDArray[np.float64]) -> str:
    """A name for a request: equal requests, and only those, get the same.

    >>> content_key("bandmf", 8, 2) == content_key("bandmf", 8.0, 2)
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        numbers = np.asarray(part, dtype=np.float64)
        digest.update(repr(numbers.shape).encode() + numbers.tobytes())
    return f"{kind}-{digest.hexdigest()[:32]}"


def load_tensors(folder: Path, key: str) -> dict[str, NDArray[Any]] | None:
    """What was stored under a key; None if that is nothing, or damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load((folder / f"{key}.safetensors").read_bytes()))
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


def store_tensors(folder: Path, key: str, tensors: Tensors) -> bool:
    """Store under a key, whole or not at all; False where the folder cannot be written to."""
    from safetensors.numpy import save

    target = folder / f"{key}.safetensors"
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    content = save({name: np.ascontiguousarray(value) for name, value in tensors.items()})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        os.replace(draft, target)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        return False
    return True
