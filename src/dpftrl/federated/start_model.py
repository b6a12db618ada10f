"""The model that a run starts from, and the private runs that trained it.

A model that a private run released depends on the data of that run's people. If a later run on the
same people starts from this model, its guarantee must cover both runs, so the guarantees are
composed. For this, the metadata of an exported model lists all private runs that trained it. A run
that starts from the model composes its guarantee with theirs, except for runs that were on other
people, as the operator states.
"""

import hashlib
import math
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, Self, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import read_file
from dpftrl.accounting import Guarantee, Hypothesis, Run, guarantee_of, mu_of
from dpftrl.accounting.guarantee import SECRECY
from dpftrl.accounting.guarantee_files import GuaranteeFile, guarantee_content, guarantee_from
from dpftrl.errors import DpftrlError, InvalidInput, TooLarge
from dpftrl.mechanisms import Independent
from dpftrl.participation import MinSep

# The metadata field of an exported model that lists the private runs that trained it.
PROVENANCE: Final = "dpftrl_provenance"
# The metadata field of an exported model that describes the model, and the sealed file of a run
# that it is copied from. See `dpftrl.models.description`.
DESCRIPTION: Final = "dpftrl_model"
DESCRIPTION_FILE: Final = "model.json"
# The only metadata fields that version 0.1 wrote.
UNRECORDED_KEYS: Final = {"rounds", "epsilon", "delta"}
# The name of an earlier run of version 0.1, which did not record the identity of the run.
UNRECORDED: Final = "not recorded"
MOST_MODEL_BYTES: Final = 2**40
# Types of numbers in safetensors files that numpy has, with their byte order.
FLOATS: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
# The header of a safetensors file, which contains the metadata, must be smaller than 100 MB.
MOST_PROVENANCE_BYTES: Final = 48 * 2**20
LONGEST_LABEL: Final = 200  # characters: a label is a name, not a description
RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
PADDING: Final = 1e-9  # exceeds the relative rounding error of converting between epsilon and mu

People = Literal["same", "others"]

TEST_KEY: Final = Hypothesis(
    SECRECY.name,
    "NOTHING IS PRIVATE HERE: the noise key is a fixed one for tests, which anybody can guess.",
)
EARLIER_RUNS: Final = Hypothesis(
    "earlier runs",
    "The run starts from a private model, and the earlier runs behind it are composed with this "
    "one. What the model's file states about them is true, and they kept to their own hypotheses.",
)
OTHER_PEOPLE: Final = Hypothesis(
    "other people",
    "The run starts from a private model. The operator states that nobody took part both in this "
    "run and in the earlier runs that are not composed with it.",
)
UNKNOWN_START: Final = Hypothesis(
    "start model",
    "The run starts from a model file whose origin is not known to dpftrl. It holds nothing about "
    "the people of this run: it is public, or was made from the data of others.",
)


@final
@dataclass(frozen=True)
class EarlierRun:
    """A private run that trained a model.

    Attributes:
        run: The identity of the run; None for a run of version 0.1, whose exports did not record
            it.
        population: The operator's label for the people of the run, if there is one.
        test_key: Whether the run used a test key, which anybody can guess.
        guarantee: The guarantee of the run alone, without the runs before it.
        people: "others" if the operator of the later run, which starts from the model, states that
            its people are others than those of this run; otherwise "same".
    """

    run: str | None
    population: str | None
    test_key: bool
    guarantee: Guarantee
    people: People = "same"

    def __post_init__(self) -> None:
        if self.run is not None and not RUN_ID.fullmatch(self.run):
            raise InvalidInput(f"a run is named by 32 hexadecimal digits, got {self.run!r:.60}")
        alone = self.guarantee
        if len(alone.runs) != 1 or alone.devices != 1 or alone.common_cap is not None:
            raise InvalidInput(
                f"an earlier run has one stream of noise and is stated for one client, got "
                f"{len(alone.runs)} streams and {alone.devices} clients"
            )

    @property
    def name(self) -> str:
        """The name of the run in messages and statements."""
        label = "" if self.population is None else f" ({self.population})"
        return f"{self.run or UNRECORDED}{label}"


class EarlierRunContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An earlier run as a file stores it."""

    run: str | None
    population: str | None
    test_key: bool
    people: People
    guarantee: GuaranteeFile

    @classmethod
    def of(cls, earlier: EarlierRun, beside: Path) -> Self:
        """Convert an earlier run to the content of a file; large matrices are written beside it.

        Args:
            earlier: The earlier run.
            beside: The path of the file.
        """
        return cls(
            run=earlier.run,
            population=earlier.population,
            test_key=earlier.test_key,
            people=earlier.people,
            guarantee=guarantee_content(earlier.guarantee, beside),
        )

    def earlier_run(self, beside: Path) -> EarlierRun:
        """Convert the content of the file at `beside` to an `EarlierRun`, all recomputed."""
        if self.population is not None:
            check_label(self.population)
        guarantee = guarantee_from(self.guarantee, beside)
        return EarlierRun(self.run, self.population, self.test_key, guarantee, self.people)


class StartContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The start model as `run.json` stores it."""

    sha256: str
    earlier: tuple[EarlierRunContent, ...]


class ProvenanceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The metadata of an exported model about the private runs that trained it.

    Attributes:
        runs: The runs, first to last. The field `people` of each run is the statement of the
            operator of the last run.
        matrices: The matrix files that the runs' mechanisms refer to, in base64, by file name.
    """

    format: Literal["dpftrl provenance"] = "dpftrl provenance"
    version: Literal[1] = 1
    runs: tuple[EarlierRunContent, ...]
    matrices: dict[str, str]


@final
@dataclass(frozen=True)
class Start:
    """The model file that a run started from.

    Attributes:
        sha256: SHA-256 of the file.
        earlier: The private runs that trained the model, first to last; empty if dpftrl does not
            know the origin of the file.
    """

    sha256: str
    earlier: tuple[EarlierRun, ...]

    @property
    def composed(self) -> tuple[EarlierRun, ...]:
        """The earlier runs on the same people."""
        return tuple(one for one in self.earlier if one.people == "same")

    @property
    def others(self) -> tuple[EarlierRun, ...]:
        """The earlier runs on other people, as the operator states."""
        return tuple(one for one in self.earlier if one.people == "others")

    @property
    def runs(self) -> tuple[Run, ...]:
        """The noise streams of the earlier runs on the same people."""
        return tuple(run for one in self.composed for run in one.guarantee.runs)

    def epsilon(self, delta: float) -> float:
        """Epsilon of the earlier runs on the same people together, at this delta."""
        return guarantee_of(self.runs, delta).epsilon if self.composed else 0.0

    def composed_with(self, alone: Guarantee) -> Guarantee:
        """The guarantee of a run that starts from this model, composed with the earlier runs.

        Args:
            alone: The guarantee of the run without the earlier runs.

        Guarantees:
            The composed mu is the root of the sum of the squared mu of all runs on the same people
            (Gaussian DP composes adaptively, Dong, Roth and Su 2022, Theorem 4). The composed
            guarantee lists what it assumes about the earlier runs and about their people.
        """
        stated = [
            *([EARLIER_RUNS] if self.composed else []),
            *([OTHER_PEOPLE] if self.others else []),
            *([UNKNOWN_START] if not self.earlier else []),
        ]
        if not self.composed:
            return replace(alone, hypotheses=(*alone.hypotheses, *stated))
        together = guarantee_of((*self.runs, *alone.runs), alone.delta)
        own_mu = max(alone.mu_of_one, math.hypot(*(run.mu for run in alone.runs)))
        mu = math.hypot(*(run.mu for run in self.runs), own_mu)
        if any(one.test_key for one in self.composed):
            alone = alone.resting_on(TEST_KEY)
        own_names = {one.name for one in alone.hypotheses}
        missing = (one for one in together.hypotheses if one.name not in own_names)
        limits = (run.hypothesis for run in self.runs)
        hypotheses = (*alone.hypotheses, *limits, *missing, *stated)
        return replace(together, mu_of_one=mu, devices=alone.devices, hypotheses=hypotheses)

    def content(self, beside: Path) -> StartContent:
        """Convert this to the content of the file at `beside`; large matrices go beside it."""
        earlier = tuple(EarlierRunContent.of(one, beside) for one in self.earlier)
        return StartContent(sha256=self.sha256, earlier=earlier)

    @classmethod
    def of_content(cls, content: StartContent, beside: Path) -> Self:
        """Convert the content of the file at `beside` to a `Start`; recompute every number."""
        return cls(content.sha256, tuple(one.earlier_run(beside) for one in content.earlier))


@final
@dataclass(frozen=True, eq=False)
class StartModel:
    """A model from a file, for a run to start from.

    Attributes:
        arrays: The arrays of the model, by name.
        start: The digest of the file, and the private runs that trained the model.
        metadata: The texts that the file has beside the arrays, by name.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    start: Start
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def load(cls, path: str | os.PathLike[str], other_people: Iterable[str] = ()) -> Self:
        """Read a model from a .safetensors file, written by `dpftrl export` or by another program.

        Args:
            path: The file.
            other_people: Earlier runs, by identity or population label, whose people are others
                than those of the new run. This is your statement: nobody can check it, and the
                privacy statement says so. All other earlier runs are composed.
        """
        source = Path(path)
        content = read_file(source, MOST_MODEL_BYTES)
        arrays, metadata = _parsed(content, source)
        earlier = _earlier_runs(metadata, source)
        sha256 = hashlib.sha256(content).hexdigest()
        start = Start(sha256, _with_others(earlier, tuple(other_people), source))
        return cls(arrays, start, metadata)


def provenance_metadata(runs: Iterable[EarlierRun]) -> str:
    """The metadata of an exported model about its private runs, as JSON with all matrices inside.

    Raises:
        TooLarge: The matrices of the runs' mechanisms do not fit into the metadata.
    """
    with TemporaryDirectory() as folder:
        beside = Path(folder) / "provenance.json"
        contents = tuple(EarlierRunContent.of(one, beside) for one in runs)
        matrices = {
            path.name: b64encode(path.read_bytes()).decode()
            for path in sorted(Path(folder).glob("*.safetensors"))
        }
    encoded = msgspec.json.encode(ProvenanceFile(runs=contents, matrices=matrices))
    if len(encoded) > MOST_PROVENANCE_BYTES:
        raise TooLarge(
            f"the matrices of this model's mechanisms take {len(encoded) / 2**20:.0f} MiB, and the "
            f"metadata of a model holds {MOST_PROVENANCE_BYTES / 2**20:.0f}; save "
            "Server.arrays() yourself, and publish guarantee.json with it"
        )
    return encoded.decode()


def check_label(label: str) -> str:
    """Return a population label; refuse a value that is not one short line of text."""
    if not isinstance(label, str) or not label.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInput(
            f"population must be a text such as 'es-ES keyboards', got {label!r:.60}"
        )
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise InvalidInput(
            f"population must be one line of at most {LONGEST_LABEL} printable characters, got "
            f"{label!r:.60}"
        )
    return label


def _parsed(
    content: bytes, source: Path
) -> tuple[dict[str, NDArray[np.float32]], Mapping[str, str]]:
    """The arrays of a safetensors file, and its metadata."""
    import safetensors
    from safetensors import SafetensorError

    library: Any = safetensors  # whose `deserialize` has no types
    try:
        tensors: list[tuple[str, dict[str, Any]]] = library.deserialize(content)
    except SafetensorError as error:
        raise InvalidInput(f"{source} is not a model: {error}") from None
    arrays = {name: _as_array(name, tensor, source) for name, tensor in tensors}
    header: Any = msgspec.json.decode(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return arrays, header.get("__metadata__") or {}


def _as_array(name: str, tensor: dict[str, Any], source: Path) -> NDArray[Any]:
    """A tensor of a safetensors file as an array; BF16, which numpy lacks, becomes float32."""
    kind, data = tensor["dtype"], tensor["data"]
    if kind == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif kind in FLOATS:
        values = np.frombuffer(data, FLOATS[kind]).astype(FLOATS[kind][1:])
    else:
        raise InvalidInput(
            f"{source} is not a model that can be trained: {name!r:.60} has the type {kind}; save "
            f"it as one of {', '.join(('BF16', *FLOATS))}"
        )
    return values.reshape(tensor["shape"])


def _earlier_runs(metadata: Mapping[str, str], source: Path) -> tuple[EarlierRun, ...]:
    if PROVENANCE in metadata:
        return _read_provenance(metadata[PROVENANCE], source)
    if metadata.keys() >= UNRECORDED_KEYS:
        return (_unrecorded(metadata, source),)
    return ()


def _read_provenance(text: str, source: Path) -> tuple[EarlierRun, ...]:
    where = f"{source}: its provenance"
    if len(text) > MOST_PROVENANCE_BYTES:
        raise InvalidInput(f"{where} has {len(text):,} characters, more than dpftrl writes")
    try:
        content = msgspec.json.decode(text, type=ProvenanceFile)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInput(f"{where} cannot be read: {error}") from None
    if not content.runs:
        raise InvalidInput(f"{where} names no run")
    with TemporaryDirectory() as folder:
        beside = Path(folder) / "provenance.json"
        for name, matrix in content.matrices.items():
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise InvalidInput(f"{where} has a matrix with a name that is none: {name!r:.60}")
            try:
                (Path(folder) / name).write_bytes(b64decode(matrix, validate=True))
            except ValueError:
                raise InvalidInput(f"{where} has a matrix that is not base64: {name}") from None
        try:
            runs = tuple(one.earlier_run(beside) for one in content.runs)
        except DpftrlError as error:
            why = str(error).replace(str(beside), where).replace(folder, where)
            raise InvalidInput(why if where in why else f"{where}: {why}") from None
    return tuple(replace(run, people="same") for run in runs)


def _unrecorded(metadata: Mapping[str, str], source: Path) -> EarlierRun:
    """The earlier run behind an export of version 0.1, which states only epsilon and delta.

    All runs of version 0.1 were Gaussian mechanisms, so epsilon at delta determines mu. The earlier
    run is represented by one round of independent noise with the same mu.
    """
    try:
        epsilon, delta = float(metadata["epsilon"]), float(metadata["delta"])
        mu = mu_of(epsilon, delta) * (1 + PADDING)
        run = Run.of(Independent(), MinSep(1, 1), 1 / mu, "float32")
        return EarlierRun(None, None, False, guarantee_of([run], delta))
    except (ValueError, ZeroDivisionError):
        raise InvalidInput(
            f"{source} is a model that dpftrl 0.1 exported, and its epsilon or delta is none; "
            "export it again from its run"
        ) from None


def _with_others(
    earlier: tuple[EarlierRun, ...], other_people: tuple[str, ...], source: Path
) -> tuple[EarlierRun, ...]:
    """Mark the earlier runs that are on other people, as the operator states."""
    names = [{one.run or UNRECORDED, one.population} for one in earlier]
    for wanted in other_people:
        if not any(wanted in known for known in names):
            there_are = ", ".join(one.name for one in earlier) or "none that dpftrl knows of"
            raise InvalidInput(
                f"other_people names {wanted!r:.80}, which is no earlier run of {source}; there "
                f"are: {there_are}"
            )
    return tuple(
        replace(one, people="others") if known & set(other_people) else one
        for one, known in zip(earlier, names, strict=True)
    )
