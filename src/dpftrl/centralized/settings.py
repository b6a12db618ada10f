"""What is fixed when a centralized run is created."""

from typing import Literal, cast, final

import msgspec

from dpftrl._internal.checks import whole_number
from dpftrl.adaptive_clipping import (
    JOINT_NORM,
    AdaptiveClipping,
    ClipNorm,
    adaptive,
    check_clip_norm,
)
from dpftrl.centralized.batches import Units
from dpftrl.clipping import Grid
from dpftrl.plan import DatasetPlan

# Steps of the grid per standard deviation of the noise. Sums of many coordinates are rounded to the
# grid, so it is finer than that of `dpftrl.federated`, where every update is cut off to it.
FINENESS = 2**34
# The step of the grid in JAX, with adaptive clipping: float32 has as many bits.
JAX_STEP = 2.0**-24
# How gradients are clipped and summed.
FIXED = (
    "The gradient of every {unit} is clipped to the clip norm, in L2, with room for all rounding "
    "errors, and added on a grid of whole numbers; one that is not finite counts as zero."
)
MOVING = (
    "The gradient of every {unit} is clipped to the clip norm of its step, in L2, and divided by "
    "it. Together with the bit that says whether it was clipped, it has norm at most 1, with room "
    "for all rounding errors, and is added on a grid of whole numbers; one that is not finite "
    "counts as zero. The clip norm of a step depends on earlier releases only."
)


@final
class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a centralized run that are not part of its plan.

    Attributes:
        clip_norm: Every unit's gradient is clipped to this L2 norm; or the options of adaptive
            clipping, with which the norm follows a quantile of the norms of gradients.
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
        sharded: True if several processes (ranks) train together. The field is left out otherwise.
    """

    clip_norm: float | AdaptiveClipping
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
    sharded: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_sharded(self) -> bool:
        """Whether several processes (ranks) train together."""
        return self.sharded is True

    @classmethod
    def of(
        cls,
        units: Units,
        clip_norm: ClipNorm,
        names: tuple[str, ...],
        size: int,
        commit_every: int,
        framework: str,
        mechanism: str | None,
    ) -> "Settings":
        """The settings of a run whose gradients dpftrl clips and sums exactly."""
        check_clip_norm(clip_norm)
        options = adaptive(clip_norm)
        return cls(
            clip_norm=float(cast("float", clip_norm)) if options is None else options,
            unit=units.kind,
            examples=units.examples,
            examples_per_unit=units.examples_per_unit,
            units_sha256=units.fingerprint(),
            size=size,
            names=names,
            commit_every=commit_every,
            clipping=(FIXED if options is None else MOVING).format(unit=units.kind),
            framework=framework,
            mechanism=mechanism,
        )

    def check(self) -> None:
        """Refuse settings that make no sense."""
        check_clip_norm(self.clip_norm)
        whole_number("commit_every", self.commit_every)
        whole_number("the number of trainable coordinates", self.size)

    @property
    def adaptive(self) -> AdaptiveClipping | None:
        """The options of adaptive clipping, or None for a fixed clip norm."""
        return self.clip_norm if isinstance(self.clip_norm, AdaptiveClipping) else None

    def grid(self, plan: DatasetPlan) -> Grid:
        """The grid on which gradients are summed exactly."""
        if isinstance(self.clip_norm, AdaptiveClipping):
            if self.framework == "jax":
                return Grid(JAX_STEP, JOINT_NORM)
            return self.clip_norm.grid(plan.noise_multiplier, FINENESS)
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
