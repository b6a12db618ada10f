"""What is fixed when a centralized run is created."""

from typing import Literal, final

import msgspec

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.centralized.batches import Units
from dpftrl.clipping import Grid
from dpftrl.plan import DatasetPlan

# Steps of the grid per standard deviation of the noise. Sums of many coordinates are rounded to the
# grid, so it is finer than that of `dpftrl.federated`, where every update is cut off to it.
FINENESS = 2**34


@final
class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a centralized run that are not part of its plan.

    Attributes:
        clip_norm: Every unit's gradient is clipped to this L2 norm.
        unit: Whose data is protected: one example, or all examples of one user.
        examples: Number of examples in the data set.
        examples_per_unit: Largest number of examples of a unit in one step.
        units_sha256: SHA-256 of which example belongs to which user; empty for example-level runs.
        size: Number of trainable coordinates of the model.
        names: Names of the trainable arrays of the model.
        commit_every: Number of steps between two checkpoints.
        clipping: How gradients are clipped and summed, in words.
        framework: The library that computes the gradients.
        mechanism: The name of the mechanism that was asked for; None for the best one.
    """

    clip_norm: float
    unit: Literal["example", "user"]
    examples: int
    examples_per_unit: int
    units_sha256: str
    size: int
    names: tuple[str, ...]
    commit_every: int
    clipping: str
    framework: str
    mechanism: str | None = None

    @classmethod
    def of(
        cls,
        units: Units,
        clip_norm: float,
        names: tuple[str, ...],
        size: int,
        commit_every: int,
        framework: str,
        mechanism: str | None,
    ) -> "Settings":
        """The settings of a run whose gradients dpftrl clips and sums exactly."""
        return cls(
            clip_norm=float(clip_norm),
            unit=units.kind,
            examples=units.examples,
            examples_per_unit=units.examples_per_unit,
            units_sha256=units.fingerprint(),
            size=size,
            names=names,
            commit_every=commit_every,
            clipping=(
                f"The gradient of every {units.kind} is clipped to the clip norm, in L2, with room "
                "for all rounding errors, and added on a grid of whole numbers; one that is not "
                "finite counts as zero."
            ),
            framework=framework,
            mechanism=mechanism,
        )

    def check(self) -> None:
        """Refuse settings that make no sense."""
        positive_number("clip_norm", self.clip_norm)
        whole_number("commit_every", self.commit_every)
        whole_number("the number of trainable coordinates", self.size)

    def grid(self, plan: DatasetPlan) -> Grid:
        """The grid on which gradients are summed exactly."""
        return Grid.for_noise(plan.noise_multiplier, self.clip_norm, FINENESS)


class RunFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `run.json`.

    Attributes:
        run: The identity of the run.
        settings: The settings of the run.
        test_key: Whether the noise key is a test key, which anybody can guess.
    """

    format: Literal["dpftrl centralized run"] = "dpftrl centralized run"
    version: Literal[1] = 1
    run: str
    settings: Settings
    test_key: bool
