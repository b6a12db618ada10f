"""Guarantees as JSON files: the runs they cover, and the numbers that follow from them."""

import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from dpftrl._internal.storage import read_json, replace_file
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
from dpftrl.mechanisms.files import MechanismFile, mechanism_content, mechanism_from
from dpftrl.participation import FixedEpochs, MinSep, Participation

KINDS: dict[str, type[Participation]] = {"min-sep": MinSep, "fixed-epochs": FixedEpochs}
# A file's numbers are recomputed when it is read; this much may differ between machines.
AGREEMENT = 1e-9


class ParticipationContent(msgspec.Struct, forbid_unknown_fields=True):
    """A participation in a file."""

    kind: Literal["min-sep", "fixed-epochs"]
    rounds: int
    min_sep: int
    max_participations: int

    @classmethod
    def of(cls, p: Participation) -> "ParticipationContent":
        """What a file says of it."""
        kind = "fixed-epochs" if isinstance(p, FixedEpochs) else "min-sep"
        return cls(kind, p.rounds, p.min_sep, p.max_participations)

    def participation(self) -> Participation:
        """What it says."""
        return KINDS[self.kind](self.rounds, self.min_sep, self.max_participations)


class RunContent(msgspec.Struct, forbid_unknown_fields=True):
    """A run in a file."""

    mechanism: MechanismFile
    participation: ParticipationContent
    noise_multiplier: float
    sensitivity: float
    sensitivity_kind: str
    buffers: BufferType = "float32"  # what version 1, which does not say so, kept them in
    rounding: float = 0.0


class HypothesisContent(msgspec.Struct, forbid_unknown_fields=True):
    """A hypothesis in a file."""

    name: str
    text: str
    basis: Basis


class GuaranteeFile(msgspec.Struct, forbid_unknown_fields=True):
    """What the JSON holds."""

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


def save_guarantee(guarantee: Guarantee, path: str | os.PathLike[str]) -> None:
    """Write a guarantee to a .json file, replacing one that is there."""
    target = _json_path(path)
    content = guarantee_content(guarantee, target)
    replace_file(target, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def load_guarantee(path: str | os.PathLike[str]) -> Guarantee:
    """Read a guarantee, recompute it from its runs, and refuse one that claims too much."""
    target = _json_path(path)
    return guarantee_from(read_json(target, GuaranteeFile, "guarantee"), target)


def guarantee_content(guarantee: Guarantee, beside: Path) -> GuaranteeFile:
    """What a JSON file at `beside` says of a guarantee."""
    return GuaranteeFile(
        "dpftrl guarantee",
        2,
        runs=[_run_content(run, beside) for run in guarantee.runs],
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
        hypotheses=[
            HypothesisContent(said.name, said.text, said.basis) for said in guarantee.hypotheses
        ],
    )


def guarantee_from(content: GuaranteeFile, target: Path) -> Guarantee:
    """The guarantee that a JSON file at `target` speaks of, recomputed."""
    try:
        alone = [guarantee_of([_run(run, target)], content.delta) for run in content.runs]
        found = compose(alone, content.delta, content.common_cap).for_devices(content.devices)
    except DpftrlError as error:
        raise InvalidInput(f"{target}: {error}") from None
    said = tuple(Hypothesis(one.name, one.text, one.basis) for one in content.hypotheses)
    if content.version == 1:  # which knew nothing of rounding
        said = (*said, ROUNDING_NOT_COVERED)
    named = Counter(one.name for one in said)
    for name, times in Counter(wanted.name for wanted in found.hypotheses).items():
        if named[name] < times:
            raise InvalidInput(f"{target} leaves out what it rests on: {name}")
    found = replace(found, hypotheses=said)
    _compare(content, guarantee_content(found, target), target)
    return found


def _compare(said: GuaranteeFile, true: GuaranteeFile, target: Path) -> None:
    """Refuse a file whose numbers and words do not follow from its runs."""
    pairs = [("", said, true, ("mu", "rho", "epsilon", "sampler_delta", "kind", "unit"))]
    pairs += [
        (f"run {i}: ", one, other, ("sensitivity", "sensitivity_kind", "rounding"))
        for i, (one, other) in enumerate(zip(said.runs, true.runs, strict=True))
    ]
    for where, one, other, names in pairs:
        for name in names:
            claimed, follows = getattr(one, name), getattr(other, name)
            if claimed != follows and not _close(claimed, follows):
                raise InvalidInput(
                    f"{target} claims {where}{name} {claimed}, but what it holds gives {follows}; "
                    "it was edited, or made by something else"
                )


def _close(claimed: object, follows: object) -> bool:
    if isinstance(claimed, float) and isinstance(follows, float):
        return math.isclose(claimed, follows, rel_tol=AGREEMENT)
    return False


def _run_content(run: Run, beside: Path) -> RunContent:
    return RunContent(
        mechanism_content(run.mechanism, beside),
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
