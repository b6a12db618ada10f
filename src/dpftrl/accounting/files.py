"""Guarantees as JSON files: the runs they cover, and the numbers that follow from them."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from dpftrl.accounting.composition import compose
from dpftrl.accounting.guarantee import Guarantee, Hypothesis, Run, guarantee_of
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.mechanisms.files import MechanismFile, mechanism_content, mechanism_from
from dpftrl.participation import FixedEpochs, MinSep, Participation
from dpftrl.storage import read_json, replace_file

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


class GuaranteeFile(msgspec.Struct, forbid_unknown_fields=True):
    """What the JSON holds."""

    format: Literal["dpftrl guarantee"]
    version: Literal[1]
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
    hypotheses: list[Hypothesis]


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
        1,
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
        hypotheses=list(guarantee.hypotheses),
    )


def guarantee_from(content: GuaranteeFile, target: Path) -> Guarantee:
    """The guarantee that a JSON file at `target` speaks of, recomputed."""
    try:
        alone = [guarantee_of([_run(run, target)], content.delta) for run in content.runs]
        found = compose(alone, content.delta, content.common_cap).for_devices(content.devices)
    except DpftrlError as error:
        raise InvalidInput(f"{target}: {error}") from None
    for name in ("mu", "rho", "epsilon"):
        said, true = getattr(content, name), getattr(found, name)
        if not said >= true * (1 - AGREEMENT):
            raise InvalidInput(
                f"{target} claims {name} {said:g}, but its runs give {true:g}; "
                "it was edited, or made by something else"
            )
    return replace(found, hypotheses=tuple(content.hypotheses))


def _run_content(run: Run, beside: Path) -> RunContent:
    return RunContent(
        mechanism_content(run.mechanism, beside),
        ParticipationContent.of(run.participation),
        run.sigma,
        run.sensitivity.value,
        run.sensitivity.kind,
    )


def _run(content: RunContent, beside: Path) -> Run:
    mechanism = mechanism_from(content.mechanism, beside)
    return Run.of(mechanism, content.participation.participation(), content.noise_multiplier)


def _json_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        raise InvalidInput(f"a guarantee file ends in .json, got {str(target)!r}")
    return target
