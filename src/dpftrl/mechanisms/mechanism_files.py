"""Save and load mechanisms: JSON files, with large matrices in safetensors files beside them.

A JSON file contains the name and the version of its format, and the family and the parameters of
the mechanism. The field `about` is for notes on where the mechanism comes from; loading ignores it.
Floats are restored to the last bit.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from dpftrl._internal.storage import read_file, read_json, replace_file
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.mechanisms.base import Mechanism
from dpftrl.mechanisms.registry import FAMILIES

# Largest safetensors file that is read: 4 GiB, more than twice the largest matrix of `Banded`.
MOST_MATRIX_BYTES = 2**32


class MechanismFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Content of a mechanism's JSON file."""

    format: Literal["dpftrl mechanism"]
    version: Literal[1]
    family: str
    parameters: dict[str, Any]
    about: dict[str, Any] = {}


class MatrixBeside(msgspec.Struct, forbid_unknown_fields=True):
    """A parameter in the JSON that refers to a safetensors file in the same folder."""

    file: str
    sha256: str


def save_mechanism(
    mechanism: Mechanism, path: str | os.PathLike[str], about: dict[str, Any] | None = None
) -> None:
    """Write a mechanism to a .json file; an existing file is replaced.

    Args:
        mechanism: The mechanism.
        path: The file, which must end in .json. Large matrices are written beside it.
        about: Notes on where the mechanism comes from, as JSON values.
    """
    target = _json_path(path)
    content = mechanism_content(mechanism, target)
    content.about = about or {}
    replace_file(target, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def load_mechanism(path: str | os.PathLike[str]) -> Mechanism:
    """Read a mechanism from a .json file.

    Raises:
        InvalidInput: The file cannot be read, or does not describe a valid mechanism.
    """
    target = _json_path(path)
    return mechanism_from(read_json(target, MechanismFile, "mechanism"), target)


def mechanism_content(mechanism: Mechanism, beside: Path) -> MechanismFile:
    """Convert a mechanism to the content of the JSON file at `beside`.

    Matrices among the parameters are written to files in the folder of `beside`.
    """
    parameters = {
        name: _save_matrix(name, value, beside) for name, value in mechanism.parameters().items()
    }
    return MechanismFile("dpftrl mechanism", 1, mechanism.family, parameters)


def mechanism_from(content: MechanismFile, target: Path) -> Mechanism:
    """Build the mechanism that the JSON file at `target` describes."""
    family = FAMILIES.get(content.family)
    if family is None:
        known = ", ".join(FAMILIES)
        raise InvalidInput(f"{target}: no family {content.family!r:.60}; there are {known}")
    parameters = {
        name: _load_matrix(name, value, target) for name, value in content.parameters.items()
    }
    try:
        return family.from_parameters(parameters)
    except DpftrlError as error:
        raise InvalidInput(f"{target}: {error}") from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{target}: wrong parameters for {content.family} ({error})") from None


def _json_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        raise InvalidInput(f"a mechanism file must end in .json, got {str(target)!r}")
    return target


def _save_matrix(name: str, value: Any, beside: Path) -> Any:
    """Write a matrix beside the JSON and return a reference; return other values unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    from safetensors.numpy import save

    content = save({name: np.array(value, dtype=np.float64, order="C")})
    digest = hashlib.sha256(content).hexdigest()
    # The name contains the digest, so that an older JSON file keeps its own matrix until the JSON
    # file is replaced.
    target = beside.with_name(f"{beside.stem}-{digest[:16]}.safetensors")
    replace_file(target, content)
    return {"file": target.name, "sha256": digest}


def _load_matrix(name: str, value: Any, beside: Path) -> Any:
    """Read the matrix of a reference; return other values unchanged."""
    if not isinstance(value, dict):
        return value
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        reference = msgspec.convert(value, MatrixBeside)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{beside}: {name} is not a reference to a matrix: {error}") from None
    if Path(reference.file).name != reference.file or not reference.file.endswith(".safetensors"):
        raise InvalidInput(
            f"{beside}: the file of {name} must be in the same folder and end in .safetensors, "
            f"got {reference.file!r:.80}"
        )
    target = beside.parent / reference.file
    content = read_file(target, limit=MOST_MATRIX_BYTES)
    if hashlib.sha256(content).hexdigest() != reference.sha256:
        raise InvalidInput(f"{target} is not the matrix that {beside.name} was saved with")
    try:
        return load(content)[name]
    except (SafetensorError, KeyError) as error:
        raise InvalidInput(f"{target} does not contain a matrix {name!r}: {error}") from None
