"""Save and load guarantees as JSON files, with the runs that they cover."""

import math
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from dpftrl._internal.storage import read_file, read_json, replace_file
from dpftrl.accounting.composition import compose
from dpftrl.accounting.guarantee import (
    ROUNDING_NOT_COVERED,
    Basis,
    BufferType,
    Guarantee,
    Hypothesis,
    Run,
    guarantee_of,
)
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms.registry import MechanismFile, mechanism_content, mechanism_from
from dpftrl.participation import FixedEpochs, MinSep, Participation

KINDS: dict[str, type[Participation]] = {"min-sep": MinSep, "fixed-epochs": FixedEpochs}
# The numbers in a file are recomputed when it is read. They may differ by this relative amount,
# since machines round differently.
AGREEMENT = 1e-9
# Older files call a client a device, in the unit and in the texts of these hypotheses.
NAMED_DEVICES = (
    "participation",
    "participation over all runs",
    "zero-out",
    "identity",
    "repeated rows",
)


class ParticipationContent(msgspec.Struct, forbid_unknown_fields=True):
    """A participation as a file stores it."""

    kind: Literal["min-sep", "fixed-epochs"]
    rounds: int
    min_sep: int
    max_participations: int

    @classmethod
    def of(cls, p: Participation) -> "ParticipationContent":
        """Convert a participation to what a file stores."""
        kind = "fixed-epochs" if isinstance(p, FixedEpochs) else "min-sep"
        return cls(kind, p.rounds, p.min_sep, p.max_participations)

    def participation(self) -> Participation:
        """Convert back to a participation."""
        return KINDS[self.kind](self.rounds, self.min_sep, self.max_participations)


class RunContent(msgspec.Struct, forbid_unknown_fields=True):
    """A run as a file stores it."""

    mechanism: MechanismFile
    participation: ParticipationContent
    noise_multiplier: float
    sensitivity: float
    sensitivity_kind: str
    buffers: BufferType = (
        "float32"  # the only type of version 1, whose files do not have this field
    )
    rounding: float = 0.0


class HypothesisContent(msgspec.Struct, forbid_unknown_fields=True):
    """A hypothesis as a file stores it."""

    name: str
    text: str
    basis: Basis


class GuaranteeFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a guarantee file."""

    format: Literal["dpftrl guarantee"]
    version: Literal[1, 2]
    runs: list[RunContent]
    mu: float
    rho: float
    epsilon: float
    delta: float
    sampler_delta: float
    kind: str
    unit: str
    devices: int
    common_cap: int | None
    adjacency: Literal["zero-out"]
    hypotheses: list[HypothesisContent]


def save_guarantee(
    guarantee: Guarantee,
    path: str | os.PathLike[str],
    mechanisms: dict[Mechanism, MechanismFile] | None = None,
    *,
    keep_same: bool = False,
) -> None:
    """Write a guarantee to a .json file; an existing file is replaced.

    Args:
        guarantee: The guarantee.
        path: The file.
        mechanisms: Mechanisms that were written to this file before, with their content. New
            mechanisms are added to the dict, so that a second call does not write large matrices
            again.
        keep_same: Whether a file that has the same content already is left as it is. That saves the
            time to flush it to the disk.
    """
    target = _json_path(path)
    content = guarantee_content(guarantee, target, mechanisms)
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    if not (keep_same and _has_content(target, encoded)):
        replace_file(target, encoded)


def _has_content(path: Path, content: bytes) -> bool:
    """Whether a path is a file of this user, not a link, with exactly this content."""
    try:
        return read_file(path, own=True) == content
    except DpftrlError:
        return False


def load_guarantee(path: str | os.PathLike[str]) -> Guarantee:
    """Read a guarantee from a .json file and recompute it from its runs.

    Raises:
        InvalidInput: The file is not a guarantee, or its numbers do not follow from its runs.
    """
    target = _json_path(path)
    return guarantee_from(read_json(target, GuaranteeFile, "guarantee"), target)


def guarantee_content(
    guarantee: Guarantee, beside: Path, mechanisms: dict[Mechanism, MechanismFile] | None = None
) -> GuaranteeFile:
    """Convert a guarantee to the content of a file.

    Args:
        guarantee: The guarantee.
        beside: The path of the file. Large mechanisms are stored in files next to it.
        mechanisms: As for `save_guarantee`.
    """
    known = {} if mechanisms is None else mechanisms
    for run in guarantee.runs:
        if run.mechanism not in known:
            known[run.mechanism] = mechanism_content(run.mechanism, beside)
    hypotheses = [
        HypothesisContent(hypothesis.name, hypothesis.text, hypothesis.basis)
        for hypothesis in guarantee.hypotheses
    ]
    return GuaranteeFile(
        "dpftrl guarantee",
        2,
        runs=[_run_content(run, known[run.mechanism]) for run in guarantee.runs],
        mu=guarantee.mu,
        rho=guarantee.rho,
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        sampler_delta=guarantee.sampler_delta,
        kind=guarantee.kind,
        unit=guarantee.unit,
        devices=guarantee.devices,
        common_cap=guarantee.common_cap,
        adjacency=guarantee.adjacency,
        hypotheses=hypotheses,
    )


def guarantee_from(content: GuaranteeFile, target: Path) -> Guarantee:
    """Recompute the guarantee of a file and check that the file agrees with it.

    Args:
        content: The content of the file.
        target: The path of the file.

    Raises:
        InvalidInput: The file leaves out a hypothesis, or its numbers do not follow from its runs.
    """
    try:
        parts = [guarantee_of([_run(run, target)], content.delta) for run in content.runs]
        guarantee = compose(parts, content.delta, content.common_cap).for_devices(content.devices)
    except DpftrlError as error:
        raise InvalidInput(f"{target}: {error}") from None
    hypotheses = tuple(map(_hypothesis, content.hypotheses))
    if content.version == 1:  # these files do not mention rounding
        hypotheses = (*hypotheses, ROUNDING_NOT_COVERED)
    stated = Counter(hypothesis.name for hypothesis in hypotheses)
    needed = Counter(hypothesis.name for hypothesis in guarantee.hypotheses)
    for name, times in needed.items():
        if stated[name] < times:
            raise InvalidInput(f"{target} leaves out a hypothesis of its guarantee: {name}")
    guarantee = replace(guarantee, hypotheses=hypotheses)
    # The matrices of the file are there already: reading must not write them again.
    known = {
        part.runs[0].mechanism: run.mechanism for part, run in zip(parts, content.runs, strict=True)
    }
    _refuse_differences(content, guarantee_content(guarantee, target, known), target)
    return guarantee


def _refuse_differences(claimed: GuaranteeFile, computed: GuaranteeFile, target: Path) -> None:
    """Refuse a file whose fields do not follow from its runs."""
    claimed = msgspec.structs.replace(claimed, unit=_unit(claimed.unit))
    names = ("mu", "rho", "epsilon", "sampler_delta", "kind", "unit")
    _refuse_different_fields("", claimed, computed, names, target)
    names = ("sensitivity", "sensitivity_kind", "rounding")
    for index, (run, computed_run) in enumerate(zip(claimed.runs, computed.runs, strict=True)):
        _refuse_different_fields(f"run {index}: ", run, computed_run, names, target)


def _refuse_different_fields(
    prefix: str,
    claimed: msgspec.Struct,
    computed: msgspec.Struct,
    names: tuple[str, ...],
    target: Path,
) -> None:
    for name in names:
        claim, value = getattr(claimed, name), getattr(computed, name)
        if claim != value and not _is_close(claim, value):
            raise InvalidInput(
                f"{target} claims {prefix}{name} {claim}, but its runs give {value}; "
                "it was edited, or written by another program"
            )


def _is_close(claim: object, value: object) -> bool:
    if isinstance(claim, float) and isinstance(value, float):
        return math.isclose(claim, value, rel_tol=AGREEMENT)
    return False


def _hypothesis(content: HypothesisContent) -> Hypothesis:
    """A hypothesis of a file, in the words of this version."""
    text = content.text
    if content.name in NAMED_DEVICES:
        text = re.sub(r"\bdevice(s?)\b", r"client\1", text)
    return Hypothesis(content.name, text, content.basis)


def _unit(claimed: str) -> str:
    """The unit that a file states, in the words of this version."""
    if claimed == "device":
        return "client"
    return re.sub(
        r"^([0-9]+) devices of one person$", r"\1 clients (devices) of one person", claimed
    )


def _run_content(run: Run, mechanism: MechanismFile) -> RunContent:
    return RunContent(
        mechanism,
        ParticipationContent.of(run.participation),
        run.noise_multiplier,
        run.sensitivity.value,
        run.sensitivity.kind,
        run.buffers,
        run.rounding,
    )


def _run(content: RunContent, beside: Path) -> Run:
    mechanism = mechanism_from(content.mechanism, beside)
    participation = content.participation.participation()
    return Run.of(mechanism, participation, content.noise_multiplier, content.buffers)


def _json_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        raise InvalidInput(f"a guarantee file ends in .json, got {str(target)!r}")
    return target
