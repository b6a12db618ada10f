"""Mechanisms as files: JSON, with large matrices beside it in safetensors.

A file says its format, its version, the family and the parameters. `about` is free for notes on
where the mechanism comes from and is not read back. Floats read back to the last bit.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from dpftrl._internal.storage import read_file, read_json, replace_file
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.mechanisms.banded import Banded
from dpftrl.mechanisms.banded_inverse import BandedInverse
from dpftrl.mechanisms.base import Mechanism
from dpftrl.mechanisms.blt import BLT
from dpftrl.mechanisms.generalized_blt import GeneralBLT
from dpftrl.mechanisms.independent import Independent
from dpftrl.mechanisms.smooth_tree import SmoothTree
from dpftrl.mechanisms.square_root import SquareRoot
from dpftrl.mechanisms.toeplitz import Toeplitz
from dpftrl.mechanisms.tree import BinaryTree, FullTree

FAMILIES: dict[str, type[Mechanism]] = {
    kind.family: kind
    for kind in (
        Independent,
        BLT,
        GeneralBLT,
        SquareRoot,
        Toeplitz,
        Banded,
        BandedInverse,
        BinaryTree,
        FullTree,
        SmoothTree,
    )
}


class MechanismFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the JSON holds."""

    format: Literal["dpftrl mechanism"]
    version: Literal[1]
    family: str
    parameters: dict[str, Any]
    about: dict[str, Any] = {}


class MatrixBeside(msgspec.Struct, forbid_unknown_fields=True):
    """Stands in the parameters for a matrix in a safetensors file in the same folder."""

    file: str
    sha256: str


def save_mechanism(
    mechanism: Mechanism, path: str | os.PathLike[str], about: dict[str, Any] | None = None
) -> None:
    """Write a mechanism to a .json file, replacing one that is there."""
    target = _json_path(path)
    content = mechanism_content(mechanism, target)
    content.about = about or {}
    replace_file(target, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def load_mechanism(path: str | os.PathLike[str]) -> Mechanism:
    """Read a mechanism from a .json file, or say what is wrong with it."""
    target = _json_path(path)
    return mechanism_from(read_json(target, MechanismFile, "mechanism"), target)


def mechanism_content(mechanism: Mechanism, beside: Path) -> MechanismFile:
    """What a JSON file at `beside` says of a mechanism; large matrices are written next to it."""
    parameters = {
        name: _matrix_out(name, value, beside) for name, value in mechanism.parameters().items()
    }
    return MechanismFile("dpftrl mechanism", 1, mechanism.family, parameters)


def mechanism_from(content: MechanismFile, target: Path) -> Mechanism:
    """The mechanism that a JSON file at `target` speaks of."""
    family = FAMILIES.get(content.family)
    if family is None:
        known = ", ".join(FAMILIES)
        raise InvalidInput(f"{target}: no family {content.family!r:.60}; there are {known}")
    parameters = {
        name: _matrix_in(name, value, target) for name, value in content.parameters.items()
    }
    try:
        return family.from_parameters(parameters)
    except DpftrlError as error:
        raise InvalidInput(f"{target}: {error}") from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{target}: unfit parameters for {content.family} ({error})") from None


def _json_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        raise InvalidInput(f"a mechanism file ends in .json, got {str(target)!r}")
    return target


def _matrix_out(name: str, value: Any, beside: Path) -> Any:
    """Write a matrix beside the JSON and return the reference to it; leave the rest as it is."""
    if not isinstance(value, np.ndarray):
        return value
    from safetensors.numpy import save

    content = save({name: np.array(value, dtype=np.float64, order="C")})
    digest = hashlib.sha256(content).hexdigest()
    # A name of its own, so that the JSON that is there keeps its matrix until it is replaced.
    target = beside.with_name(f"{beside.stem}-{digest[:16]}.safetensors")
    replace_file(target, content)
    return {"file": target.name, "sha256": digest}


def _matrix_in(name: str, value: Any, beside: Path) -> Any:
    """Read the matrix that a reference stands for; leave the rest as it is."""
    if not isinstance(value, dict):
        return value
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        where = msgspec.convert(value, MatrixBeside)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{beside}: {name} is no reference to a matrix: {error}") from None
    if Path(where.file).name != where.file or not where.file.endswith(".safetensors"):
        raise InvalidInput(
            f"{beside}: {name} must lie in the same folder and end in .safetensors, "
            f"got {where.file!r:.80}"
        )
    target = beside.parent / where.file
    content = read_file(target, limit=2**32)
    if hashlib.sha256(content).hexdigest() != where.sha256:
        raise InvalidInput(f"{target} is not the matrix that {beside.name} was saved with")
    try:
        return load(content)[name]
    except (SafetensorError, KeyError) as error:
        raise InvalidInput(f"{target} holds no matrix {name!r}: {error}") from None
