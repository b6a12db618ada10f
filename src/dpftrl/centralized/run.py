"""A centralized run without a framework: it draws batches, adds noise and keeps the files."""

import os
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.accounting import Guarantee, SampledGuarantee
from dpftrl.accounting.guarantee import Hypothesis
from dpftrl.adaptive_clipping import ClippedRound, MovingClipNorm
from dpftrl.centralized.batches import Batch, Batches, Units
from dpftrl.centralized.guarantee import epsilon_after, hypotheses
from dpftrl.centralized.settings import RunFile, Settings
from dpftrl.centralized.store import RunFolder, RunStore
from dpftrl.clipping import ExactSum, Grid, Steps
from dpftrl.errors import InvalidInput, RoundsExceeded, UnsafeState
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.noise.key import Secret
from dpftrl.plan import DatasetPlan

PathLike = str | os.PathLike[str]
# Below this number of coordinates, one thread adds the noise. Libraries such as PyTorch let their
# own threads wait actively for more work, and a further thread would compete with them.
SMALL: Final = 2_000_000
# The norm of the sum of a large model is checked in every so many steps.
CHECK_EVERY: Final = 32


class Canaries(Protocol):
    """The canaries of an audit; `dpftrl.auditing.canaries` implements it."""

    def updates(self, number: int, grid: Grid) -> ExactSum | None:
        """The sum of the updates of all included canaries in a step; None if it has none."""
        ...

    def observe(self, number: int, others: NDArray[Any], mean: NDArray[Any]) -> None:
        """Note the noisy mean of a step, and the mean of the others without noise."""
        ...

    def save(self) -> None:
        """Write what was observed."""
        ...


class TrainingRun:
    """A training on a data set: the batch of each step, its noise, and the files of the run.

    The caller computes clipped sums and changes the model; see `dpftrl.torch` and `dpftrl.jax`.

    Guarantees:
        Step t gets row t of the noise, and its digest is in the journal on the disk before
        `noisy_mean` returns. Model, optimizer and noise are written together every `commit_every`
        steps. A run whose process was killed at any moment can be resumed: the steps after the
        last checkpoint are repeated, and a step whose sum differs from that of the first time is
        refused. No row of noise is used for two different sums. A step after the last planned one
        is refused, and so are files that are older than the last journal record, that were changed,
        or that another process uses.

    Without a folder nothing is written, and the run ends with the process.

    Attributes:
        plan: Mechanism, noise and data set of the run, and the guarantee that follows from them.
        settings: All settings that are not in the plan.
        steps: Number of steps done.
        moving: The clip norm of the next step, with adaptive clipping; else None.
        canaries: The canaries of an audit, which are added to the sums; usually None.
    """

    def __init__(
        self,
        plan: DatasetPlan,
        file: RunFile,
        units: Units,
        key: NoiseKey,
        store: RunStore | None,
    ):
        """Call `create` or `resume` instead."""
        self.plan, self.settings, self.store = plan, file.settings, store
        self.file = file
        self.grid = file.settings.grid(plan)
        self.batches = Batches(plan, units, key)
        self._key = key
        adaptive = file.settings.adaptive
        self._noise = self._open_noise()
        if store is not None:
            weakref.finalize(self, store.close)
        self.steps: int = self._noise.round
        self.moving: MovingClipNorm | None = None
        if adaptive is not None:
            last = None if store is None or not self.steps else store.clipping(self.steps - 1)
            goal = plan.dataset.batch_size
            self.moving = MovingClipNorm(adaptive, self.grid, goal, last)
        self.canaries: Canaries | None = None
        self._process = os.getpid()
        self._poisoned = False

    def _open_noise(self) -> NoiseStream:
        """The noise stream after the steps of the newest checkpoint."""
        size = self.settings.size
        stream = NoiseStream(
            self.plan,
            size + (self.settings.adaptive is not None),  # one coordinate for the bits
            key=self._key,
            clip_norm=self.grid.clip_norm,
            threads=1 if size < SMALL else None,
        )
        return stream if self.store is None else self.store.noise_at_checkpoint(stream)

    @classmethod
    def create(
        cls,
        folder: PathLike | None,
        plan: DatasetPlan,
        settings: Settings,
        units: Units,
        checkpoint: Callable[[], bytes],
        *,
        files: Mapping[str, bytes] | None = None,
        state_folder: PathLike | None = None,
        insecure_test_key: int | None = None,
    ) -> Self:
        """Create a run.

        Args:
            folder: Folder for the files of the run; None keeps nothing.
            plan: The plan.
            settings: All settings that are not in the plan.
            units: The privacy units of the data set.
            checkpoint: Returns the content of the checkpoint before the first step.
            files: Further files of the run that may be published, by name. They are sealed.
            state_folder: Folder for the witness, outside the folder of the run; by default
                $DPFTRL_STATE, or the user's state folder.
            insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
        """
        settings.check()
        check_units(plan, settings, units)
        # What cannot be built is refused before there are any files.
        cls(plan, RunFile(run="", settings=settings, test_key=True), units, _throwaway_key(), None)
        if folder is None:
            is_test = insecure_test_key is not None
            key = NoiseKey.insecure_for_tests(insecure_test_key) if is_test else NoiseKey.generate()
            file = RunFile(run=os.urandom(16).hex(), settings=settings, test_key=is_test)
            return cls(plan, file, units, key, None)
        store = RunStore.create(
            RunFolder(Path(folder)),
            plan,
            settings,
            checkpoint(),
            None if state_folder is None else Path(state_folder),
            insecure_test_key,
            files,
        )
        return cls(plan, store.file, units, store.key, store)

    @classmethod
    def resume(
        cls,
        folder: PathLike,
        units: Units,
        *,
        state_folder: PathLike | None = None,
        trust_folder: bool = False,
    ) -> Self:
        """Resume a run from its files, after its last checkpoint.

        Args:
            folder: Folder with the files of the run.
            units: The privacy units of the data set, which must be those of the first time.
            state_folder: Folder with the witness of the run; the default is that of `create`.
            trust_folder: Resume even if the witness is missing. Use this only if you know that the
                folder is the newest state of the run, and that no copy of it was resumed.
        """
        path = RunFolder(Path(folder))
        place = None if state_folder is None else Path(state_folder)
        store = RunStore.resume(path, place, trust_folder)
        try:
            check_units(store.plan, store.file.settings, units)
            return cls(store.plan, store.file, units, store.key, store)
        except BaseException:
            store.close()
            raise

    def __repr__(self) -> str:
        return f"TrainingRun({self.steps:,} of {self.plan.dataset.steps:,} steps)"

    def close(self) -> None:
        """Close the run, so that another process can resume it."""
        self._poisoned = True
        if self.store is not None:
            self.store.close()

    def has_key(self, insecure_test_key: int | None) -> bool:
        """Whether the noise key is the test key of this seed, or for None a secret key."""
        if insecure_test_key is None:
            return not self.file.test_key
        return NoiseKey.insecure_for_tests(insecure_test_key) == self._key

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        dataset = self.plan.dataset
        return min(self.steps, dataset.steps - 1) // dataset.steps_per_epoch

    @property
    def repeating(self) -> int:
        """How many of the next steps were done before, and are repeated after a crash."""
        return 0 if self.store is None else max(0, len(self.store.state.digests) - self.steps)

    @property
    def released(self) -> int:
        """Number of steps whose noise was fixed, including those that must be repeated."""
        return self.steps + self.repeating

    @property
    def epsilon(self) -> float:
        """Epsilon of all steps so far, or an upper bound; see `GuaranteeFile.epsilon`."""
        return epsilon_after(self.plan, self.released)

    def guarantee(self) -> Guarantee | SampledGuarantee:
        """The guarantee of all steps so far. With sampling, this can take seconds."""
        if not self.released:
            raise InvalidInput("no step was done yet, so there is nothing to guarantee")
        return self.plan.after(self.released)

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The conditions that the guarantee needs."""
        return hypotheses(self.plan, self.file)

    def batch(self, step: int) -> Batch:
        """The units and examples of a step, counted from 0."""
        return self.batches.batch(step)

    def seed(self, step: int, purpose: Literal["data", "model"]) -> int:
        """A random seed for what else is random in a step: loading examples, and dropout."""
        place = purpose.encode() + step.to_bytes(8, "big")
        return int.from_bytes(self._key.derive(b"step seed", place).secret_bytes()[:7], "big")

    def check_open(self) -> None:
        """Raise an error in a forked copy, after `close`, or after a step that failed."""
        if os.getpid() != self._process:  # forked copies would use the same noise
            raise UnsafeState(
                f"this is a copy, by fork, of the training of process {self._process}; train there"
            )
        if self._poisoned:
            raise UnsafeState(
                "this training was closed, or stopped within a step; resume it from its folder"
            )

    def check_usable(self) -> None:
        """Raise an error if the run cannot go on, or if there is no further step."""
        self.check_open()
        if self.steps >= self.plan.dataset.steps:
            raise RoundsExceeded(
                f"all {self.plan.dataset.steps:,} planned steps are done, and no guarantee covers "
                "a further one; plan a new run with more epochs"
            )

    def step(
        self,
        total: Steps,
        units: int,
        apply: Callable[[NDArray[Any]], None],
        grid: Grid | None = None,
        dtype: type[np.floating[Any]] = np.float64,
    ) -> None:
        """Do one step: add the noise, journal the step, and let the caller change the model.

        Args:
            total: The sum of clipped gradients in steps of the grid; the noise is added in place.
                With adaptive clipping, the sum of the bits is its last coordinate.
            units: Number of units in the sum.
            apply: Changes the model, given the noisy mean, in memory that nobody else uses.
            grid: The grid of the sum; by default that of the run.
            dtype: The type of the noisy mean, float64 or float32.

        Raises:
            UnsafeState: The step is repeated after a crash, and its sum differs.
        """
        self.check_usable()
        with self._all_or_nothing():
            on = grid or self.grid
            recorded = Recorded(self.store, self.steps)
            others: NDArray[Any] | None = None
            if self.canaries is not None:
                others = on.values(total, self.plan.dataset.batch_size)
                units += self._add_canaries(self.canaries, total, on)
            if self.moving is not None:
                apply(self._joint_step(self.moving, total, on, units, recorded))
                self.steps += 1
                return
            try:
                self._add_noise(total, on, units, recorded.start)
            finally:
                recorded.wait()
            mean = on.values(total, self.plan.dataset.batch_size, np.empty(total.size, dtype))
            if self.canaries is not None and others is not None:
                self.canaries.observe(self.steps, others, mean)
            apply(mean)
            self.steps += 1

    def _add_canaries(self, canaries: Canaries, total: Steps, grid: Grid) -> int:
        """Add the canaries of this step to its sum, and return how many these are."""
        updates = canaries.updates(self.steps, grid)
        if updates is None:
            return 0
        total += updates.steps
        return updates.updates

    def _joint_step(
        self,
        moving: MovingClipNorm,
        total: Steps,
        grid: Grid,
        units: int,
        recorded: "Recorded",
    ) -> NDArray[np.float64]:
        """Add the noise of a step with adaptive clipping, journal it, and return its noisy mean.

        The record has the noisy bits, so it is written after the noise is added.
        """
        joint_sum = ExactSum.of(grid, total, units, moving.joint)
        self._noise.add_to(joint_sum)
        mean, clipping = moving.release(joint_sum)
        recorded.start(self._noise.last_digest(), clipping)
        recorded.wait()
        moving.follow(clipping)
        return mean

    def _add_noise(
        self, total: Steps, grid: Grid, units: int, on_digest: Callable[[Secret], None]
    ) -> None:
        """Add the noise of the next step.

        The caller clips. That the norm of the sum is possible for so many clipped gradients is
        checked as a safeguard against mistakes; for large models, where it takes time, only now and
        then.
        """
        if self.settings.size < SMALL or self.steps % CHECK_EVERY == 0:
            self._noise.add_to(total, grid, updates=units, on_digest=on_digest)
            return
        exact = ExactSum.of(grid, total, units)
        self._noise.add_to(exact, on_digest=on_digest)

    @contextmanager
    def _all_or_nothing(self) -> Generator[None]:
        """Run a block of code; if it raises, the run refuses every further step."""
        self._poisoned = True
        yield
        self._poisoned = False

    def save_if_due(self, checkpoint: Callable[[], bytes]) -> None:
        """Write a checkpoint after every `commit_every` steps, and after the last step."""
        is_due = self.steps % self.settings.commit_every == 0
        if is_due or self.steps == self.plan.dataset.steps:
            self.save(checkpoint)

    def save(self, checkpoint: Callable[[], bytes]) -> None:
        """Write a checkpoint now."""
        if self.store is None:
            return
        if self.repeating:
            return  # the state on the disk is newer
        self.check_open()
        with self._all_or_nothing():
            if self.canaries is not None:
                self.canaries.save()  # first: steps that are repeated are not observed twice
            self.store.save(self.steps, checkpoint(), self._noise, self.epsilon)

    def saved_checkpoint(self) -> bytes:
        """The content of the newest checkpoint."""
        if self.store is None:
            raise UnsafeState("a run without a folder has no checkpoint")
        return self.store.checkpoint()


@final
class Recorded:
    """The journal record of one step, which is written while the noise is computed."""

    def __init__(self, store: RunStore | None, step: int):
        self._store, self._step = store, step
        self._written: Future[None] | None = None

    def start(self, digest: Secret, clipping: ClippedRound | None = None) -> None:
        """Begin to write the record, or check that a repeated step has the same digest."""
        if self._store is not None:
            self._written = self._store.start_recording_step(self._step, digest, clipping)

    def wait(self) -> None:
        """Wait until the record is on the disk; raise if it could not be written."""
        if self._written is not None:
            self._written.result()


def check_units(plan: DatasetPlan, settings: Settings, units: Units) -> None:
    """Refuse units that are not those of the settings and of the plan."""
    given = (units.examples, units.examples_per_unit, units.kind, units.fingerprint())
    kept = (settings.examples, settings.examples_per_unit, settings.unit, settings.units_sha256)
    if given != kept:
        raise InvalidInput(
            f"the run is for another data set: {settings.examples:,} examples with "
            f"examples_per_unit {settings.examples_per_unit:,}, got {units.examples:,} with "
            f"{units.examples_per_unit:,}, or other users"
        )
    if plan.dataset.size != units.count:
        raise InvalidInput(
            f"the plan is for {plan.dataset.size:,} units, and the data set has {units.count:,} "
            f"{units.kind}s"
        )


def _throwaway_key() -> NoiseKey:
    return NoiseKey.insecure_for_tests(0)
