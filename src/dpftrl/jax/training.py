"""`make_private` for JAX: one object that owns batches, clipping, noise, files and guarantee."""

# JAX's types are only partly known to a type checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from dpftrl._internal.progress import Progress
from dpftrl.adaptive_clipping import AdaptiveClipping, ClipNorm
from dpftrl.auditing.canaries import attach_canaries, files_with_canaries
from dpftrl.centralized import Batch, Settings, TrainingRun, Units
from dpftrl.centralized.owner import (
    Metrics,
    PathLike,
    StepsOfArrays,
    Target,
    TrainingOwner,
    length_of,
    open_run,
)
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.jax.gradients import (
    ClippedSum,
    JointSum,
    LossFunction,
    PyTree,
    clipped_sum,
    joint_bits,
    joint_sum,
    scale_of,
)
from dpftrl.plan import DatasetPlan, SamplingChoice

# The key of the JSON text in the metadata of a checkpoint.
STATE = "state"
# Batches are padded to multiples of this share of the planned batch size, so that few sizes have to
# be compiled.
SHARE = 8


def make_private(
    loss_fn: LossFunction,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    dataset: Any,
    *,
    folder: PathLike | None,
    clip_norm: ClipNorm,
    epsilon: float | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    plan: DatasetPlan | None = None,
    sampling: SamplingChoice | None = "auto",
    mechanism: str | None = None,
    max_batch_size: int | None = None,
    units: Sequence[Any] | None = None,
    examples_per_unit: int = 1,
    micro_batch: int | None = None,
    commit_every: int = 100,
    canaries: int = 0,
    state_folder: PathLike | None = None,
    trust_folder: bool = False,
    insecure_test_key: int | None = None,
    on_progress: Progress | None = None,
) -> "PrivateTraining":
    """Make a training with JAX private. Create the run in `folder`, or resume it.

    Args:
        loss_fn: Called as `loss_fn(params, batch)` with a batch of one example; returns its loss.
        params: The parameters to train, a pytree of arrays that does not depend on the data set.
        optimizer: An optax optimizer. Optimizers that add up gradients (SGD, with momentum too)
            profit most from correlated noise.
        dataset: A tuple or dict of arrays with one row per example, or a sequence of examples.
        folder: Folder for the files of the run. If it holds a run, that run is resumed: call
            `make_private` with the same arguments after a crash. None keeps nothing on the disk.
        clip_norm: The gradient of every unit is clipped to this L2 norm. `"adaptive"`, or an
            `AdaptiveClipping` with its options: the norm follows a quantile of the norms.
        epsilon: The target epsilon.
        delta: The target delta; it should be far below 1 / number of units.
        epochs: How often every unit takes part.
        batch_size: Expected number of units per batch. Sums are divided by this number.
        plan: A plan, in place of epsilon, delta, epochs, batch_size, sampling and mechanism.
        sampling: `auto` (the default; None is the same) takes the one that needs the least noise.
            `none` is no sampling: a fixed order, the same shuffled one in all epochs. Or `poisson`,
            `cyclic-poisson` or `balls-in-bins`.
        mechanism: The name of a mechanism; it needs `sampling`. By default the best one.
        max_batch_size: Largest number of units in a sampled batch.
        units: The user of each example, for user-level privacy: a unit is then a user, and its
            gradient is that of its mean loss. By default every example is a unit.
        examples_per_unit: Largest number of a user's examples in one step; by default 1.
        micro_batch: Number of units whose gradients are computed at a time.
        commit_every: Number of steps between two checkpoints; by default 100. After an
            interruption, at most so many steps are repeated.
        canaries: Number of canaries to add, for `dpftrl audit run`; see docs/auditing.md. They
            need `sampling="none"`.
        state_folder: Folder for the witness of the run, outside `folder`; by default $DPFTRL_STATE,
            or the user's state folder.
        trust_folder: Resume even if the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
        on_progress: Called during long planning, with what was planned, and with the step at which
            a run is resumed; by default there are messages on stderr.

    Raises:
        InvalidInput: The arguments do not fit together, or not to the run in the folder.
        UnsafeState: The run must not be resumed: it was rolled back, edited or is in use.
    """
    rows = _Rows(dataset)
    data_units = Units(len(rows), units, examples_per_unit)
    names, size = _trainable(params)
    settings = Settings.of(data_units, clip_norm, names, size, commit_every, "jax", mechanism)
    params = jax.tree.map(jnp.array, params)  # a copy, in the types that JAX has
    state = TrainState(params, optimizer.init(params))
    if isinstance(settings.clip_norm, AdaptiveClipping):
        options = settings.clip_norm
        for bound in (options.minimum, options.maximum):
            scale_of(bound)  # refuses what float32 cannot hold
        kind = data_units.kind
        gradient_sum: Any = joint_sum(loss_fn, options.beta, unit=kind, micro_batch=micro_batch)
    else:
        gradient_sum = clipped_sum(
            loss_fn, settings.clip_norm, unit=data_units.kind, micro_batch=micro_batch
        )
    run = open_run(
        folder,
        Target(epsilon, delta, epochs, batch_size, sampling, mechanism, max_batch_size),
        plan,
        settings,
        data_units,
        lambda: _write_checkpoint(state),
        files=files_with_canaries(canaries, settings),
        state_folder=state_folder,
        trust_folder=trust_folder,
        insecure_test_key=insecure_test_key,
        on_progress=on_progress,
    )
    try:
        attach_canaries(run, canaries)
        if run.store is not None:
            state = _read_checkpoint(run.saved_checkpoint(), state)
        return PrivateTraining(run, gradient_sum, optimizer, state, rows)
    except BaseException:
        run.close()
        raise


@jax.tree_util.register_dataclass
@final
@dataclass(frozen=True)
class TrainState:
    """What training changes.

    Attributes:
        params: The parameters.
        optimizer: The state of the optimizer.
    """

    params: PyTree
    optimizer: Any


@dataclass(frozen=True)
class _Stats:
    """What the gradients of a batch tell; see `dpftrl.centralized.owner.Stats`."""

    losses: NDArray[np.float64]
    clipped: int
    not_finite: int


@final
class PrivateTraining(TrainingOwner):
    """A private training with JAX; `make_private` creates it.

    Guarantees:
        See `dpftrl.centralized.TrainingRun` for batches, noise and files, and `clipped_sum` for
        clipping.

    Attributes:
        loader: The batches of all remaining steps, of all epochs. Pass each batch to `step`.
    """

    def __init__(
        self,
        run: TrainingRun,
        gradient_sum: ClippedSum | JointSum,
        optimizer: optax.GradientTransformation,
        state: TrainState,
        rows: "_Rows",
    ):
        """Call `make_private` instead."""
        super().__init__(run)
        self._state = state
        self._sum: Any = jax.jit(gradient_sum)
        self._update = jax.jit(_stepped(optimizer))
        self.loader = PrivateLoader(run, rows)

    @property
    def params(self) -> PyTree:
        """The parameters after the last step, which may be published."""
        return self._state.params

    def step(self, batch: PyTree) -> Metrics:
        """Do one step: clip and sum gradients, add correlated noise, and step the optimizer.

        Args:
            batch: The batch that `loader` has just yielded. It may have been transformed, but its
                rows must be the same examples.

        Returns:
            What happened in this step. The guarantee does not cover it, so do not publish it.

        Raises:
            InvalidInput: The batch is not that of this step.
            RoundsExceeded: All planned steps are done.
        """
        run = self._run
        run.check_usable()
        drawn = self.loader.check(batch)
        padded, mask = _padded(batch, drawn, run)
        joint = None if run.moving is None else run.moving.joint
        scale = () if joint is None else (scale_of(joint.clip_norm),)
        total, info = self._sum(self._state.params, padded, mask, *scale)
        steps = np.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(total.steps())])
        if joint is not None:
            steps = np.append(steps, np.int64(joint_bits(info, drawn.units, joint)))
        run.step(steps, drawn.units, self._apply, total.grid)
        run.save_if_due(self._checkpoint)
        norms = np.asarray(info.norms, np.float64)[: drawn.units]
        stats = _Stats(
            np.asarray(info.losses, np.float64)[: drawn.units],
            int(np.sum(norms > (total.grid.clip_norm if joint is None else joint.clip_norm))),
            int(info.non_finite),
        )
        return Metrics(stats, self._warned)

    def statement(self, path: PathLike) -> Any:
        """Write the privacy statement of all steps so far.

        Args:
            path: Path of the files to write, without suffix.
        """
        from dpftrl.statement.centralized import save_centralized_statement

        return save_centralized_statement(self._run, path)

    def _checkpoint(self) -> bytes:
        return _write_checkpoint(self._state)

    def _apply(self, mean: NDArray[np.float64]) -> None:
        """Change the parameters by one step of the optimizer."""
        leaves, structure = jax.tree.flatten(self._state.params)
        ends = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
        parts = [
            jnp.asarray(part.astype(np.float32)).astype(leaf.dtype).reshape(np.shape(leaf))
            for part, leaf in zip(np.split(mean, ends), leaves, strict=True)
        ]
        self._state = self._update(self._state, jax.tree.unflatten(structure, parts))


def _stepped(optimizer: optax.GradientTransformation) -> Any:
    def stepped(state: TrainState, mean: PyTree) -> TrainState:
        updates, optimizer_state = optimizer.update(mean, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, updates), optimizer_state)

    return stepped


@final
class PrivateLoader:
    """The batches of all remaining steps, of all epochs. A new loop goes on at the current step.

    Sampled batches have random sizes, and some may be empty.
    """

    def __init__(self, run: TrainingRun, rows: "_Rows"):
        self._run, self._rows = run, rows
        self._handed_out: tuple[int, Batch] | None = None
        self._steps_of = StepsOfArrays()

    def __len__(self) -> int:
        return self._run.plan.dataset.steps - self._run.steps

    def __iter__(self) -> Iterator[PyTree]:
        for step in range(self._run.steps, self._run.plan.dataset.steps):
            if step != self._run.steps:
                raise InvalidInput(
                    f"step {self._run.steps:,} was not done: pass every batch of the loader to "
                    "`step`, in their order"
                )
            self._handed_out = (step, self._run.batch(step))
            batch = self._rows.batch(self._handed_out[1].examples)
            self._steps_of.remember(jax.tree.leaves(batch), step)
            yield batch
            del batch

    def check(self, batch: PyTree) -> Batch:
        """What was handed out for the current step, if the batch can be it.

        Raises:
            InvalidInput: Nothing was handed out for this step, or the batch has other rows.
        """
        step = self._run.steps
        if self._handed_out is None or self._handed_out[0] != step:
            raise InvalidInput(
                f"step {step:,} needs its own batch: take batches from the loader, and pass each "
                "of them to `step` once"
            )
        drawn = self._handed_out[1]
        for leaf in jax.tree.leaves(batch):
            self._steps_of.check(leaf, step)
            rows = np.shape(leaf)[0] if np.ndim(leaf) else 0
            if rows != len(drawn.examples):
                raise InvalidInput(
                    f"the batch of step {step:,} has {len(drawn.examples):,} examples, got an "
                    f"array with {rows:,} rows; pass the batch that the loader yielded"
                )
        return drawn


@final
class _Rows:
    """The examples of a data set: rows of arrays, or the items of a sequence."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._is_arrays = isinstance(dataset, tuple | Mapping) or hasattr(dataset, "shape")
        if not self._is_arrays:
            self._length = length_of(dataset)
            return
        lengths = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(dataset)}
        if len(lengths) != 1:
            raise InvalidInput(
                "the arrays of the data set must have one row per example, and the same number of "
                f"rows, got {sorted(lengths)}"
            )
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def batch(self, examples: NDArray[np.int64]) -> PyTree:
        """The examples at some places, with one row each in every array."""
        if self._is_arrays:
            return jax.tree.map(lambda leaf: np.asarray(leaf)[examples], self._dataset)
        items = [self._dataset[i] for i in (examples.tolist() or [0])]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *items)
        return jax.tree.map(lambda leaf: leaf[: len(examples)], stacked)


def _padded(batch: PyTree, drawn: Batch, run: TrainingRun) -> tuple[PyTree, jax.Array]:
    """The batch with rows up to one of a few sizes, and a mask of the rows that count.

    For users, the arrays become [users, examples, ...].
    """
    unit = max(1, run.plan.dataset.batch_size // SHARE)
    size = max(unit, -(-drawn.units // unit) * unit)
    if drawn.counts is None:
        places = np.arange(size)
        mask = places < drawn.units
    else:
        starts = np.concatenate([[0], np.cumsum(drawn.counts)])[:-1]
        counts = np.zeros(size, np.int64)
        counts[: drawn.units] = drawn.counts
        first = np.zeros(size, np.int64)
        first[: drawn.units] = starts
        within = np.arange(run.settings.examples_per_unit)
        mask = within[None, :] < counts[:, None]
        places = first[:, None] + within[None, :]
    places = np.where(mask, places, 0)

    def taken(leaf: Any) -> NDArray[Any]:
        array = np.asarray(leaf)
        if not len(array):  # an empty batch: rows of zeros, which do not count
            return np.zeros((*places.shape, *array.shape[1:]), array.dtype)
        return array[places]

    return jax.tree.map(taken, batch), jnp.asarray(mask)


def _trainable(params: PyTree) -> tuple[tuple[str, ...], int]:
    """Names and total size of the arrays of the parameters."""
    named = jax.tree_util.tree_leaves_with_path(params)
    if not named:
        raise InvalidInput("the parameters have no array")
    for path, leaf in named:
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            raise InvalidInput(
                f"params{jax.tree_util.keystr(path)} must be an array of floats, got "
                f"{type(leaf).__name__} of {kind}; give only the arrays that are trained"
            )
    return tuple(jax.tree_util.keystr(path) for path, _ in named), sum(
        int(np.size(leaf)) for _, leaf in named
    )


def _write_checkpoint(state: TrainState) -> bytes:
    """Parameters and optimizer as a safetensors file. Arrays are written as bytes."""
    leaves, structure = jax.tree.flatten(state)
    arrays = list(map(_as_array, leaves))
    kinds = [[str(array.dtype), list(array.shape)] for array in arrays]
    tensors = {
        f"{i:06d}": np.frombuffer(array.tobytes(), np.uint8) for i, array in enumerate(arrays)
    }
    return save_tensors(tensors, {STATE: json.dumps({"arrays": kinds, "tree": str(structure)})})


def _as_array(leaf: Any) -> NDArray[Any]:
    """A leaf as a NumPy array of the same shape."""
    try:
        return np.asarray(leaf)
    except TypeError as error:
        raise InvalidInput(
            f"the optimizer keeps a value that cannot be written to a checkpoint: {error}"
        ) from None


def _read_checkpoint(content: bytes, like: TrainState) -> TrainState:
    """The parameters and the optimizer of a checkpoint.

    Raises:
        InvalidInput: They are not those of this training.
    """
    try:
        tensors = load_tensors(content)
        length = int.from_bytes(content[:8], "little")
        saved = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][STATE])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UnsafeState(f"the checkpoint cannot be read: {error}") from None
    leaves, structure = jax.tree.flatten(like)
    kinds = [[str(np.asarray(leaf).dtype), list(np.shape(leaf))] for leaf in leaves]
    if saved != {"arrays": kinds, "tree": str(structure)}:
        raise InvalidInput(
            "the parameters or the optimizer are not those of the run: they have other arrays; "
            "resume with the same ones"
        )
    restored = [
        jnp.asarray(
            np.frombuffer(tensors[f"{i:06d}"].tobytes(), np.asarray(leaf).dtype).reshape(
                np.shape(leaf)
            )
        )
        for i, leaf in enumerate(leaves)
    ]
    return cast("TrainState", jax.tree.unflatten(structure, restored))
