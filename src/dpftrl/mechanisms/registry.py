"""The registry of mechanism families: mechanisms by name, and mechanisms in files.

`CATALOGUE` lists every name that the command line and configuration files accept, together with the
family that it belongs to. A new family needs its own module and its entries here, nothing else:
`FAMILIES`, by which mechanism files are read, is derived from the catalogue.

A mechanism file is a JSON file, with large matrices in safetensors files beside it. It contains the
name and the version of its format, and the family and the parameters of the mechanism. The field
`about` is for notes on where the mechanism comes from; loading ignores it. Floats are restored to
the last bit.
"""

import difflib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dpftrl._internal.storage import read_file, read_json, replace_file
from dpftrl.errors import DpftrlError, InvalidInput, UnknownMechanism
from dpftrl.mechanisms.banded import Banded
from dpftrl.mechanisms.banded_inverse import BandedInverse
from dpftrl.mechanisms.base import Mechanism
from dpftrl.mechanisms.blt import BLT, PRESETS
from dpftrl.mechanisms.generalized_blt import GeneralBLT
from dpftrl.mechanisms.independent import Independent
from dpftrl.mechanisms.smooth_tree import SmoothTree
from dpftrl.mechanisms.square_root import SquareRoot
from dpftrl.mechanisms.toeplitz import Toeplitz
from dpftrl.mechanisms.tree import BinaryTree, FullTree
from dpftrl.participation import Participation

# Largest safetensors file that is read: 4 GiB, more than twice the largest matrix of `Banded`.
MOST_MATRIX_BYTES = 2**32


def mechanism(name: str, participation: Participation | None = None) -> Mechanism:
    """Build the mechanism with this name.

    Args:
        name: A name of the catalogue, with a parameter after a colon where the form has one.
        participation: The planned participation. Some names need it: `tree-full`, `smooth-tree`
            and `banded:P` are built for its rounds, and a name without a number of bands gets as
            many bands as its min-sep. An observed participation (read from a log) is refused,
            because it would describe a mechanism that was not run.

    Raises:
        UnknownMechanism: No entry has this name.
        InvalidInput: The parameter does not fit, or the participation is missing or observed.

    >>> mechanism("band-sqrt:342")
    SquareRoot(bands=342)
    >>> mechanism("trea")
    Traceback (most recent call last):
    dpftrl.errors.UnknownMechanism: there is no mechanism 'trea'; did you mean tree or tree-vanilla?
    """
    entry_name, colon, parameter = name.partition(":")
    for entry in CATALOGUE:
        if entry.name == entry_name:
            if colon and ":" not in entry.form:
                raise InvalidInput(f"{entry_name} takes no parameter, got {name!r}")
            return entry.build(Request(entry_name, parameter, participation))
    names = [entry.name for entry in CATALOGUE]
    similar = difflib.get_close_matches(entry_name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "`dpftrl mechanisms` lists them"
    raise UnknownMechanism(f"there is no mechanism {name!r}; {hint}")


class Request(NamedTuple):
    """A mechanism name, split at its colon, and the participation that it is requested for.

    Attributes:
        name: The part before the colon.
        parameter: The part after the colon; empty if there is none.
        requested_for: The participation, if the caller gave one.
    """

    name: str
    parameter: str
    requested_for: Participation | None

    def participation(self) -> Participation:
        """Return the planned participation, or raise an error that asks for it."""
        if self.requested_for is None or self.requested_for.observed:
            from_log = ", not the one that a log shows" if self.requested_for is not None else ""
            raise InvalidInput(
                f"{self.name} is built for the planned participation{from_log}: state the rounds "
                "and the min-sep of the plan, or give the plan or the mechanism itself as a .json "
                "file"
            )
        return self.requested_for

    def bands(self) -> int:
        """Parse the parameter as a number of bands; without a parameter, return the min-sep."""
        if not self.parameter:
            return min(self.participation().min_sep, self.participation().rounds)
        try:
            return int(self.parameter)
        except ValueError:
            raise InvalidInput(
                f"{self.name} takes a whole number of bands, as in {self.name}:16, "
                f"got {self.parameter!r}"
            ) from None

    def numbers(self) -> list[float]:
        """Parse the parameter as numbers separated by commas."""
        try:
            return [float(part) for part in self.parameter.split(",")]
        except ValueError:
            raise InvalidInput(
                f"{self.name} takes numbers, as in {self.name}:1,0.5, or comes from a .json file, "
                f"got {self.parameter!r}"
            ) from None


@dataclass(frozen=True)
class Entry:
    """One entry of the catalogue.

    Attributes:
        form: The name, with its parameter after a colon, as users write it.
        family: The class of the mechanism.
        summary: One line that describes the mechanism.
        build: Builds the mechanism for a request.
    """

    form: str
    family: type[Mechanism]
    summary: str
    build: Callable[[Request], Mechanism]

    @property
    def name(self) -> str:
        """The form without its parameter."""
        return self.form.partition(":")[0]


def _lambda(request: Request) -> Mechanism:
    numbers = request.numbers()
    if len(numbers) != 1:
        raise InvalidInput(f"lambda takes one number, got {request.parameter!r}")
    return BandedInverse.one_parameter(numbers[0])


def _gblt(request: Request) -> Mechanism:
    try:
        pairs = [part.split("@") for part in request.parameter.split(",")]
        return GeneralBLT([complex(a) for a, _ in pairs], [complex(b) for _, b in pairs])
    except (ValueError, TypeError) as error:
        if isinstance(error, DpftrlError):
            raise
        raise InvalidInput(
            "gblt takes decays and scales, as in gblt:0.9@0.2,0.5+0.1j@0.05, or comes from a "
            f".json file, got {request.parameter!r}"
        ) from None


def _optimized(request: Request) -> Mechanism:
    raise InvalidInput(
        f"{request.name} is optimized for a participation, which `dpftrl.mechanism` does; here "
        "only presets such as blt-b400 are known"
    )


CATALOGUE: tuple[Entry, ...] = (
    Entry(
        "independent",
        Independent,
        "fresh noise every round: DP-SGD, DP-FedAvg",
        lambda _: Independent(),
    ),
    Entry("blt", BLT, "BLT optimized for the planned participation", _optimized),
    *(
        Entry(
            name,
            BLT,
            f"BLT of the paper's appendix for min-sep {name.removeprefix('blt-b')}",
            lambda request: PRESETS[request.name],
        )
        for name in PRESETS
    ),
    Entry(
        "gblt:THETA@OMEGA,...",
        GeneralBLT,
        "BLT with scales of any sign and pairs of decays",
        _gblt,
    ),
    Entry("sqrt", SquareRoot, "square-root factorization, full Toeplitz", lambda _: SquareRoot()),
    Entry(
        "band-sqrt:P",
        SquareRoot,
        "the first P coefficients of sqrt (BandFHU)",
        lambda request: SquareRoot(request.bands()),
    ),
    Entry(
        "toeplitz:C0,C1,...",
        Toeplitz,
        "any coefficients (BandToep when optimized)",
        lambda request: Toeplitz(request.numbers()),
    ),
    Entry(
        "banded:P",
        Banded,
        "P general bands, columns of norm 1 (BandMF when optimized)",
        lambda request: Banded.square_root(request.bands(), request.participation().rounds),
    ),
    Entry(
        "inv-sqrt:P",
        BandedInverse,
        "inverse square root cut to P bands (BISR)",
        lambda request: BandedInverse.square_root(request.bands()),
    ),
    Entry(
        "banded-inverse:C0,C1,...",
        BandedInverse,
        "any banded inverse (BandInvMF when optimized)",
        lambda request: BandedInverse(request.numbers()),
    ),
    Entry("lambda:L", BandedInverse, "noise z(t) - L z(t-1)", _lambda),
    Entry(
        "tree",
        BinaryTree,
        "TreeAgg, refined online (Honaker online)",
        lambda _: BinaryTree(),
    ),
    Entry(
        "tree-vanilla",
        BinaryTree,
        "TreeAgg, plain sums of nodes",
        lambda _: BinaryTree(refine=False),
    ),
    Entry(
        "tree-full",
        FullTree,
        "TreeAgg-Full, the best decoder of the tree",
        lambda request: FullTree(request.participation().rounds),
    ),
    Entry(
        "smooth-tree",
        SmoothTree,
        "smooth binary mechanism (Andersson and Pagh)",
        lambda request: SmoothTree.for_rounds(request.participation().rounds),
    ),
)

# The class of each family, by the family's name in mechanism files.
FAMILIES: dict[str, type[Mechanism]] = {entry.family.family: entry.family for entry in CATALOGUE}


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
