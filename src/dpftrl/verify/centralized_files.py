"""The files of a centralized run that say what was planned: `run.json` and `plan.json`."""

import math
from pathlib import Path
from typing import Final, Literal, final

import msgspec

from dpftrl._internal.storage import read_json
from dpftrl.errors import DpftrlError, InvalidInput, UnsafeState
from dpftrl.mechanisms.registry import MechanismFile, mechanism_from
from dpftrl.verify.run_files import (
    AdaptiveContent,
    HypothesisContent,
)

FORMAT: Final = "dpftrl centralized run"
PLAN_FORMAT: Final = "dpftrl dataset plan"
Sampling = Literal["none", "poisson", "cyclic-poisson", "balls-in-bins"]


def is_centralized(root: Path) -> bool:
    """Return whether a folder holds a centralized run, by `run.json` or else by `plan.json`."""
    for name, known in (("run.json", FORMAT), ("plan.json", PLAN_FORMAT)):
        try:
            return read_json(root / name, _Header, "run").format == known
        except DpftrlError:
            continue
    return False


class _Header(msgspec.Struct):
    """The field that all JSON files of dpftrl have."""

    format: str


class SettingsContent(msgspec.Struct, frozen=True):
    """The settings of a run, in `run.json`."""

    clip_norm: float | AdaptiveContent
    unit: Literal["example", "user"]
    examples: int
    examples_per_unit: int
    units_sha256: str
    size: int
    commit_every: int
    clipping: str
    framework: str
    sharded: bool = False


class RunFile(msgspec.Struct, frozen=True):
    """The content of `run.json`."""

    format: Literal["dpftrl centralized run"]
    version: Literal[1]
    run: str
    settings: SettingsContent
    test_key: bool


class DatasetContent(msgspec.Struct, frozen=True):
    """The data set: the number of units, the planned batch size and the epochs."""

    size: int
    batch_size: int
    epochs: int
    max_batch_size: int | None

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches that hold every unit about once."""
        return -(-self.size // self.batch_size)

    @property
    def steps(self) -> int:
        """The planned number of steps."""
        return self.epochs * self.steps_per_epoch


class PlanFile(msgspec.Struct, frozen=True):
    """The content of `plan.json`."""

    format: Literal["dpftrl dataset plan"]
    version: Literal[1]
    dataset: DatasetContent
    sampling: Sampling
    groups: int | None
    mechanism: MechanismFile
    noise_multiplier: float
    epsilon: float
    delta: float
    failure: float

    def check(self) -> None:
        """Check that the numbers are possible.

        Raises:
            InvalidInput: One of them is not.
        """
        data, groups, is_cyclic = self.dataset, self.groups, self.sampling == "cyclic-poisson"
        largest = data.max_batch_size
        for what, is_possible in (
            ("the batch size", 1 <= data.batch_size <= data.size),
            ("the number of epochs", data.epochs >= 1),
            ("the largest batch", largest is None or largest >= data.batch_size),
            ("the number of groups", is_cyclic == (groups is not None)),
            ("the number of groups", 1 <= (groups or 1) <= data.size // data.batch_size),
            ("the noise multiplier", 0 < self.noise_multiplier < math.inf),
            ("epsilon", 0 <= self.epsilon < math.inf),
            ("delta", 0 < self.delta < 1),
            ("the failure probability", 0 <= self.failure < 1),
        ):
            if not is_possible:
                raise InvalidInput(f"{what} in plan.json is impossible")


class GuaranteeFile(msgspec.Struct, frozen=True):
    """The content of `guarantee.json`."""

    format: Literal["dpftrl centralized guarantee"]
    version: Literal[1]
    run: str
    unit: str
    adjacency: str
    dataset: DatasetContent
    sampling: str
    groups: int | None
    mechanism: MechanismFile
    noise_multiplier: float
    clip_norm: float | AdaptiveContent
    steps: int
    epsilon: float
    delta: float
    failure: float
    hypotheses: tuple[HypothesisContent, ...]


@final
class CentralizedFiles:
    """What `run.json` and `plan.json` of a centralized run say.

    Attributes:
        run: The content of `run.json`.
        plan: The content of `plan.json`.
        mechanism: The mechanism that correlates the noise.

    Raises:
        InvalidInput: A file cannot be read, or holds impossible numbers.
    """

    def __init__(self, folder: Path):
        self.run = read_json(folder / "run.json", RunFile, "centralized run")
        self.plan = read_json(folder / "plan.json", PlanFile, "dataset plan")
        self.plan.check()
        self.mechanism = mechanism_from(self.plan.mechanism, folder / "plan.json")

    def __repr__(self) -> str:
        return f"CentralizedFiles({self.run.run}, {self.plan.sampling})"

    def check_units(self) -> None:
        """Check that the units of `run.json` are those that the plan counts.

        Raises:
            UnsafeState: They are not.
        """
        settings, units = self.run.settings, self.plan.dataset.size
        if settings.unit == "example":
            fits = settings.examples == units and settings.examples_per_unit == 1
            fits = fits and settings.units_sha256 == ""
        else:
            fits = settings.examples >= units and settings.examples_per_unit >= 1
            fits = fits and settings.units_sha256 != ""
        if not fits:
            raise UnsafeState(
                f"run.json describes {settings.examples:,} examples, of which up to "
                f"{settings.examples_per_unit:,} per {settings.unit} take part in a step; the plan "
                f"is for {units:,} {settings.unit}s, and an owner of each example is recorded for "
                "users only"
            )
        norm = settings.clip_norm
        first = norm.start if isinstance(norm, AdaptiveContent) else norm
        if not (0 < first < math.inf and settings.commit_every >= 1):
            raise UnsafeState(
                "the clip norm must be positive and finite, and there must be at least 1 step "
                f"between checkpoints, got {first} and {settings.commit_every}"
            )
        if isinstance(norm, AdaptiveContent) != ("clip norm of its step" in settings.clipping):
            raise UnsafeState("the text about clipping in run.json does not fit the clip norm")

    def next_checkpoint(self, steps: int) -> int:
        """Return the number of steps at the first planned checkpoint after `steps`."""
        every = self.run.settings.commit_every
        return min((steps // every + 1) * every, self.plan.dataset.steps)
