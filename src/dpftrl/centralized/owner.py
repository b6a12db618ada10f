"""What the owner objects of `dpftrl.torch` and `dpftrl.jax` share: opening a run, and metrics."""

import os
import sys
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import whole_number
from dpftrl._internal.progress import Progress
from dpftrl.accounting import Guarantee, SampledGuarantee
from dpftrl.centralized.batches import Units
from dpftrl.centralized.run import TrainingRun
from dpftrl.centralized.settings import Settings
from dpftrl.centralized.store import RunFolder
from dpftrl.errors import InvalidInput
from dpftrl.plan import Dataset, DatasetPlan, SamplingChoice, make_dataset_plan
from dpftrl.plan.dataset import check_target, has_dp_accounting, large_delta

PathLike = str | os.PathLike[str]
# Seconds of planning before the first message, and between two messages.
PATIENCE: Final = 2.0


class PrivacyWarning(UserWarning):
    """Something that the guarantee does not cover was given to the caller."""


class Target(NamedTuple):
    """The target of a training and its data: the arguments from which a plan is made."""

    epsilon: float | None
    delta: float | None
    epochs: int | None
    batch_size: int | None
    sampling: SamplingChoice | None
    mechanism: str | None
    max_batch_size: int | None

    @property
    def is_auto(self) -> bool:
        """Whether the sampling is to be chosen."""
        return self.sampling in ("auto", None)

    def check(self) -> None:
        """Refuse numbers that no training can have."""
        check_target(self.epsilon, self.delta)
        for name in ("epochs", "batch_size", "max_batch_size"):
            if (value := getattr(self, name)) is not None:
                whole_number(name, value)

    def plan(self, units: Units, on_progress: Progress) -> DatasetPlan:
        """The plan for these units."""
        epsilon, delta, epochs, batch_size = self[:4]
        if epsilon is None or delta is None or epochs is None or batch_size is None:
            missing = [
                name
                for name in ("epsilon", "delta", "epochs", "batch_size")
                if getattr(self, name) is None
            ]
            raise InvalidInput(f"give {', '.join(missing)}, or a plan")
        if batch_size > units.count:
            raise InvalidInput(
                f"a batch of {batch_size:,} {units.kind}s is larger than the data set, which has "
                f"{units.count:,} {units.kind}s; give a smaller batch_size"
            )
        dataset = Dataset(units.count, batch_size, epochs, self.max_batch_size)
        return make_dataset_plan(
            dataset,
            epsilon,
            delta,
            sampling=self.sampling,
            mechanism_name=self.mechanism,
            on_progress=on_progress,
        )

    def differences(self, plan: DatasetPlan) -> Iterator[str]:
        """What differs from the plan of a run that is to be resumed."""
        for name, kept in (
            ("delta", plan.guarantee.delta),
            ("epochs", plan.dataset.epochs),
            ("batch_size", plan.dataset.batch_size),
            ("sampling", plan.sampling),
            ("max_batch_size", plan.dataset.max_batch_size),
        ):
            given = None if name == "sampling" and self.is_auto else getattr(self, name)
            if given is not None and given != kept:
                yield f"{name} {given} instead of {kept}"
        promised = plan.guarantee.epsilon
        if self.epsilon is not None and not abs(self.epsilon - promised) <= 1e-6 * promised:
            yield f"epsilon {self.epsilon:g} instead of {promised:g}"


def check_same(
    run: TrainingRun,
    settings: Settings,
    plan: DatasetPlan | None,
    target: Target,
    insecure_test_key: int | None,
) -> None:
    """Refuse to resume a run with other arguments than those it was created with."""
    differences = list(target.differences(run.plan))
    if plan is not None and not _same_plan(plan, run.plan):
        differences.append("another plan")
    for name in ("clip_norm", "size", "names", "examples_per_unit", "commit_every", "mechanism"):
        given, kept = getattr(settings, name), getattr(run.settings, name)
        if given != kept:
            what = "other parameters" if name == "names" else f"{name} {given} instead of {kept}"
            differences.append(what)
    if settings.is_sharded != run.settings.is_sharded:
        how = "ranks of torch.distributed" if run.settings.is_sharded else "a single process"
        differences.append(f"it was created by {how}")
    if not run.has_key(insecure_test_key):
        differences.append("another insecure_test_key")
    if differences:
        raise InvalidInput(
            f"the folder holds a run with other arguments: {'; '.join(differences)}; resume it "
            "with the same arguments, or choose another folder"
        )


def _same_plan(one: DatasetPlan, other: DatasetPlan) -> bool:
    """Whether two plans give the same noise, batches and guarantee."""
    return (one.dataset, one.sampling, one.mechanism, one.noise_multiplier) == (
        other.dataset,
        other.sampling,
        other.mechanism,
        other.noise_multiplier,
    ) and one.guarantee.delta == other.guarantee.delta


def open_run(
    folder: PathLike | None,
    target: Target,
    plan: DatasetPlan | None,
    settings: Settings,
    units: Units,
    checkpoint: Callable[[], bytes],
    *,
    files: Callable[[DatasetPlan], Mapping[str, bytes]],
    state_folder: PathLike | None,
    trust_folder: bool,
    insecure_test_key: int | None,
    on_progress: Progress | None,
) -> TrainingRun:
    """Create a run in a folder, or resume the run that is there.

    Args:
        folder: Folder for the files of the run; None keeps nothing.
        target: Epsilon, delta, epochs and batch size, from which the plan is made.
        plan: The plan, in place of the target.
        settings: All settings that are not in the plan.
        units: The privacy units of the data set.
        checkpoint: Returns the content of the checkpoint before the first step.
        files: Returns further files of a new run, by name, given its plan. They are sealed.
        state_folder: Folder for the witness.
        trust_folder: Resume even if the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
        on_progress: Called during long planning; by default there are messages on stderr.

    Raises:
        InvalidInput: The run in the folder was created with other arguments.
    """
    target.check()
    if folder is None or not RunFolder(Path(folder)).exists:
        chosen = planned(target, plan, units, on_progress)
        return TrainingRun.create(
            folder,
            chosen,
            settings,
            units,
            checkpoint,
            files=files(chosen),
            state_folder=state_folder,
            insecure_test_key=insecure_test_key,
        )
    run = TrainingRun.resume(folder, units, state_folder=state_folder, trust_folder=trust_folder)
    try:
        check_same(run, settings, plan, target, insecure_test_key)
    except BaseException:
        run.close()
        raise
    say(on_progress, resumed(run))
    return run


def resumed(run: TrainingRun) -> str:
    """Where a run was resumed, in one line."""
    steps = run.plan.dataset.steps
    if run.steps == steps:
        return f"resumed a run whose {steps:,} steps are all done"
    text = f"resumed at step {run.steps:,} of {steps:,}"
    if not run.repeating:
        return text
    last = run.released - 1
    which = f"step {last:,} is" if run.repeating == 1 else f"steps {run.steps:,} to {last:,} are"
    return f"{text}; {which} repeated, with the same batches and the same noise"


def planned(
    target: Target, plan: DatasetPlan | None, units: Units, on_progress: Progress | None
) -> DatasetPlan:
    """The given plan, if the target does not contradict it; or a plan for the target."""
    if plan is None:
        if target.is_auto and not has_dp_accounting():
            say(
                on_progress,
                "poisson sampling is not compared: it needs the package dp-accounting "
                "(pip install 'dpftrl[dp-accounting]')",
            )
        chosen = target.plan(units, on_progress or _Messages())
        say(on_progress, _described(chosen))
        _warn_about_delta(chosen, units)
        return chosen
    _warn_about_delta(plan, units)
    if differences := list(target.differences(plan)):
        raise InvalidInput(
            f"the arguments contradict the plan: {'; '.join(differences)}; leave them out"
        )
    return plan


def _described(plan: DatasetPlan) -> str:
    """What was planned, in one line."""
    order = "no sampling (fixed order)" if plan.sampling == "none" else f"{plan.sampling} sampling"
    return (
        f"planned: {plan.mechanism.name}, {order}, noise multiplier {plan.noise_multiplier:.4g}, "
        f"{plan.dataset.steps:,} steps"
    )


def _warn_about_delta(plan: DatasetPlan, units: Units) -> None:
    if warning := large_delta(plan.guarantee.delta, units.count, units.kind):
        warnings.warn(warning, stacklevel=5)  # of the caller of make_private


def say(on_progress: Progress | None, message: str) -> None:
    """Say something once, where the progress of planning is said."""
    if on_progress is None:
        sys.stderr.write(f"dpftrl: {message}\n")
    else:
        on_progress(None, message)


def length_of(dataset: Any) -> int:
    """The number of examples of a data set that numbers them."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise InvalidInput(
            "the data set must have a length and numbered examples, which decide who is in a "
            f"batch; got {type(dataset).__name__}. Put a stream of examples into a list first"
        )
    return len(dataset)


@final
class StepsOfArrays:
    """For which step each array was handed out, as long as somebody holds the array."""

    def __init__(self) -> None:
        self._known = dict[int, tuple[weakref.ref[Any], int]]()  # by the id of the array

    def remember(self, arrays: Iterable[Any], step: int) -> None:
        """Note that these arrays are the batch of a step."""
        self._known = {key: one for key, one in self._known.items() if one[0]() is not None}
        self._known |= {id(array): (weakref.ref(array), step) for array in arrays}

    def check(self, array: Any, step: int) -> None:
        """Refuse an array that was handed out for another step."""
        reference, known = self._known.get(id(array), (None, step))
        if reference is not None and reference() is array and known != step:
            raise InvalidInput(f"this is the batch of step {known:,}; step {step:,} needs its own")


class WarnOnce:
    """Warns once about private metrics."""

    def __init__(self) -> None:
        self.done = False

    def warn(self) -> None:
        """Warn, unless this was done before."""
        if not self.done:
            self.done = True
            warnings.warn(
                "losses and clipped fractions are computed from private data, and epsilon does "
                "not cover them: look at them, but do not publish them or choose a model by them",
                PrivacyWarning,
                stacklevel=3,
            )


class Stats(Protocol):
    """What the gradients of a batch tell."""

    @property
    def losses(self) -> NDArray[np.float64]:
        """The loss of each unit."""
        ...

    @property
    def clipped(self) -> int:
        """Number of units whose gradient was scaled down."""
        ...

    @property
    def not_finite(self) -> int:
        """Number of units whose gradient was not finite, and counted as zero."""
        ...


@final
class Metrics:
    """What happened in a step. It is computed from private data, and the guarantee ignores it.

    The first look at a number gives a `PrivacyWarning`.
    """

    def __init__(self, stats: Stats, warned: WarnOnce):
        self._stats, self._warned = stats, warned

    def __repr__(self) -> str:
        return "Metrics(private)"

    @property
    def loss(self) -> float:
        """The mean loss of the units in the batch; NaN for an empty batch."""
        self._warned.warn()
        losses = self._stats.losses
        return float(losses.mean()) if len(losses) else float("nan")

    @property
    def clipped(self) -> float:
        """The share of units whose gradient was clipped; NaN for an empty batch."""
        self._warned.warn()
        losses = self._stats.losses
        return self._stats.clipped / len(losses) if len(losses) else float("nan")

    @property
    def not_finite(self) -> int:
        """Number of units whose gradient was not finite, and counted as zero."""
        self._warned.warn()
        return self._stats.not_finite


class TrainingOwner(ABC):
    """What the owner objects of all frameworks have in common: they own a `TrainingRun`."""

    def __init__(self, run: TrainingRun):
        self._run = run
        self._warned = WarnOnce()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._run})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the run, so that it can be resumed."""
        self._run.close()

    @property
    def run(self) -> TrainingRun:
        """Batches, noise and files of the run."""
        return self._run

    @property
    def plan(self) -> DatasetPlan:
        """Mechanism, noise, sampling and promised guarantee."""
        return self._run.plan

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return self._run.steps

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._run.epoch

    @property
    def epsilon(self) -> float:
        """Epsilon of all steps so far. With sampling it is the planned epsilon, an upper bound."""
        return self._run.epsilon

    @property
    def delta(self) -> float:
        """The delta at which epsilon is stated."""
        return self.plan.guarantee.delta

    def guarantee(self) -> Guarantee | SampledGuarantee:
        """The guarantee of all steps so far. With sampling, this can take seconds."""
        return self._run.guarantee()

    def save(self) -> None:
        """Write a checkpoint now; otherwise there is one every `commit_every` steps."""
        self._run.save(self._checkpoint)

    @abstractmethod
    def _checkpoint(self) -> bytes:
        """What training changes, as the content of a checkpoint."""


class _Messages:
    """Writes what planning is doing to stderr, if it takes long."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PATIENCE

    def __call__(self, fraction: float | None, message: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PATIENCE
            done = "" if fraction is None else f" ({fraction:.0%})"
            sys.stderr.write(f"dpftrl: planning: {message}{done}\n")
