"""`make_private`: one object that owns batches, clipping, noise, checkpoints and guarantee."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (the types of PyTorch are partial)

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, default_collate

from dpftrl._internal.progress import Progress
from dpftrl.adaptive_clipping import ClipNorm
from dpftrl.auditing.canaries import attach_canaries, files_with_canaries
from dpftrl.centralized import Settings, TrainingRun, Units
from dpftrl.centralized.owner import Metrics, PathLike, Target, TrainingOwner, length_of, open_run
from dpftrl.errors import InvalidInput
from dpftrl.plan import DatasetPlan, SamplingChoice
from dpftrl.torch._micro_batches import LossFn, check_step_arguments
from dpftrl.torch._modules import check_layers, modules_of
from dpftrl.torch.checkpoint import read_checkpoint, write_checkpoint
from dpftrl.torch.gradient_check import check_gradients
from dpftrl.torch.gradients import ClippedSums
from dpftrl.torch.loader import PrivateLoader, plain_batch, seeded

# Columns (inputs, labels, weights, ...) that somebody may pass as a tuple by mistake. A longer one
# is taken for a data set of examples.
MOST_COLUMNS = 4


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
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
    scheduler: Any = None,
    micro_batch: int | None = None,
    commit_every: int = 100,
    canaries: int = 0,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    num_workers: int = 0,
    state_folder: PathLike | None = None,
    trust_folder: bool = False,
    insecure_test_key: int | None = None,
    on_progress: Progress | None = None,
) -> "PrivateTraining":
    """Make the training of a model private. Create the run in `folder`, or resume it.

    The model stays what it is: nothing is wrapped, and there are no hooks. Frozen parameters
    (`requires_grad` is False) get no noise.

    Args:
        model: The model. It must not depend on the data set before the first step.
        optimizer: Its optimizer. Optimizers that add up gradients (SGD, with momentum too) profit
            most from correlated noise; see docs/centralised.md about Adam.
        dataset: A data set with a length and numbered examples.
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
        scheduler: A learning-rate scheduler of the optimizer. It is stepped after every step, and
            saved with the model.
        micro_batch: Number of units whose gradients are computed at a time; by default as many as
            fit into the memory.
        commit_every: Number of steps between two checkpoints; by default 100. After an
            interruption, at most so many steps are repeated.
        canaries: Number of canaries to add, for `dpftrl audit run`; see docs/auditing.md. They
            need `sampling="none"`.
        collate_fn: Makes a batch of a list of examples.
        num_workers: Number of processes that load examples.
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
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidInput(
            f"this is one of {dist.get_world_size()} processes of torch.distributed, which would "
            "train apart from each other; use dpftrl.torch.distributed.make_private, with the same "
            "arguments"
        )
    check_layers(model)
    check_optimizer(model, optimizer, scheduler)
    check_dataset(dataset)
    data_units = Units(length_of(dataset), units, examples_per_unit)
    names, size = trainable(model)
    settings = Settings.of(data_units, clip_norm, names, size, commit_every, "torch", mechanism)
    run = open_run(
        folder,
        Target(epsilon, delta, epochs, batch_size, sampling, mechanism, max_batch_size),
        plan,
        settings,
        data_units,
        lambda: write_checkpoint(model, optimizer, scheduler, {"micro_batch": micro_batch}),
        files=files_with_canaries(canaries, settings),
        state_folder=state_folder,
        trust_folder=trust_folder,
        insecure_test_key=insecure_test_key,
        on_progress=on_progress,
    )
    try:
        attach_canaries(run, canaries)
        if run.store is not None:
            extra = read_checkpoint(run.saved_checkpoint(), model, optimizer, scheduler)
            micro_batch = extra["micro_batch"]
        loader = PrivateLoader(run, dataset, collate_fn, num_workers)
        return PrivateTraining(run, model, optimizer, scheduler, loader, micro_batch)
    except BaseException:
        run.close()
        raise


@final
class PrivateTraining(TrainingOwner):
    """A private training of a PyTorch model; `make_private` creates it.

    Guarantees:
        See `dpftrl.centralized.TrainingRun` for batches, noise and files, and
        `dpftrl.torch.gradients.ClippedSums` for clipping.

    Attributes:
        loader: The batches of all remaining steps, of all epochs. Pass each batch to `step`.
    """

    def __init__(
        self,
        run: TrainingRun,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        loader: PrivateLoader,
        micro_batch: int | None,
    ):
        """Call `make_private` instead."""
        super().__init__(run)
        self._model = model
        self._optimizer, self._scheduler = optimizer, scheduler
        self._sums = ClippedSums(
            model,
            run.grid,
            largest_batch=run.batches.largest,
            usual_batch=run.plan.dataset.batch_size,
            examples_per_unit=run.settings.examples_per_unit,
            micro_batch=micro_batch,
        )
        self.loader = loader
        self._checked = False
        self._parameters = [dict(model.named_parameters())[name] for name in self._sums.names]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        is_float32 = all(parameter.dtype == torch.float32 for parameter in self._parameters)
        self._mean_dtype = np.float32 if is_float32 else np.float64

    def step(self, loss_fn: LossFn, batch: Any) -> "Metrics":
        """Do one step: clip and sum gradients, add correlated noise, and step the optimizer.

        Args:
            loss_fn: Called as `loss_fn(model, batch)`; returns the mean loss of a batch of any
                size as a scalar tensor, or the loss of every example.
            batch: The batch that `loader` has just yielded. It may have been moved or transformed,
                but its rows must be the same examples.

        Returns:
            What happened in this step. The guarantee does not cover it, so do not publish it.

        Raises:
            InvalidInput: The batch is not that of this step, or its examples are mixed.
            RoundsExceeded: All planned steps are done.
        """
        run = self._run
        run.check_usable()
        check_step_arguments(loss_fn, batch)
        handed_out = self.loader.check(batch)
        self._check_no_gradients()
        batch = plain_batch(batch)
        if not self._checked and handed_out.examples > 1:
            with seeded(run.seed(run.steps, "model")):
                self._checked = check_gradients(self._sums, loss_fn, batch)
        self._sums.joint = None if run.moving is None else run.moving.joint
        with seeded(run.seed(run.steps, "model")):
            stats = self._sums.add(loss_fn, batch, handed_out.counts)
        steps = self._sums.joint_steps()
        run.step(steps, handed_out.units, self._apply, dtype=self._mean_dtype)
        run.save_if_due(self._checkpoint)
        return Metrics(stats, self._warned)

    def statement(self, path: PathLike) -> Any:
        """Write the privacy statement of all steps so far.

        Args:
            path: Path of the files to write, without suffix.
        """
        from dpftrl.statement.centralized import save_centralized_statement

        return save_centralized_statement(self._run, path)

    def _checkpoint(self) -> bytes:
        extra = {"micro_batch": self._sums.micro_batch}
        return write_checkpoint(self._model, self._optimizer, self._scheduler, extra)

    def _apply(self, mean: NDArray[Any]) -> None:
        """Change the model by one step of the optimizer."""
        parts = cast("tuple[torch.Tensor, ...]", torch.from_numpy(mean).split(self._sizes))
        # `ClippedSums` refuses a model with other parameters.
        for parameter, values in zip(self._parameters, parts, strict=True):
            parameter.grad = values.view(parameter.shape).to(parameter.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()

    def _check_no_gradients(self) -> None:
        found = (
            parameter
            for module in modules_of(self._model)
            for parameter in module._parameters.values()  # pyright: ignore[reportPrivateUsage]
        )
        if all(parameter is None or parameter.grad is None for parameter in found):
            return
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                raise InvalidInput(
                    f"{name} has a gradient already: something else called backward(), and this "
                    "gradient is not private; `step` computes all gradients itself"
                )


def check_dataset(dataset: Any) -> None:
    """Refuse what has a length, but whose items are not examples."""
    if isinstance(dataset, DataLoader):
        raise InvalidInput("give the data set itself, not a DataLoader: make_private makes batches")
    if not isinstance(dataset, tuple | list):
        return
    parts = cast("Sequence[Any]", dataset)
    if not 2 <= len(parts) <= MOST_COLUMNS or any(np.ndim(part) == 0 for part in parts):
        return
    if not all(isinstance(part, torch.Tensor | np.ndarray) for part in parts):
        return
    if len({len(part) for part in parts}) == 1 and len(parts[0]) > len(parts):
        raise InvalidInput(
            f"the data set is a {type(parts).__name__} of {len(parts)} arrays with "
            f"{len(parts[0]):,} rows each, not of examples; give "
            "torch.utils.data.TensorDataset(X, Y), made of tensors with one row per example"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Refuse an optimizer that cannot be used, or that does not belong to the model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput("LBFGS evaluates the loss several times per step; use another optimizer")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InvalidInput(
            "ReduceLROnPlateau depends on a loss, which the guarantee does not cover; use a "
            "scheduler that counts steps"
        )
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise InvalidInput("the scheduler belongs to another optimizer")
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    known = dict[int, str]()
    for name, parameter in model.named_parameters():
        known[id(parameter)] = name
        if parameter.requires_grad and id(parameter) not in held:
            raise InvalidInput(
                f"{name} is trainable, but the optimizer does not have it; freeze it with "
                "requires_grad_(False), or give it to the optimizer"
            )
    if held - set(known):
        raise InvalidInput("the optimizer has parameters that are not of this model")


def trainable(model: nn.Module) -> tuple[tuple[str, ...], int]:
    """Names and total size of the trainable parameters."""
    found = [(name, one.numel()) for name, one in model.named_parameters() if one.requires_grad]
    if not found:
        raise InvalidInput("the model has no trainable parameter")
    return tuple(name for name, _ in found), sum(size for _, size in found)
