"""The batches of a plan as a PyTorch data loader, and the record of what it handed out."""

# PyTorch and Opacus are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast, final

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Sampler as TorchSampler

from dpftrl.centralized.batches import Batches
from dpftrl.errors import InvalidInput
from dpftrl.plan import DatasetPlan

# Arguments of DataLoader that the plan decides.
DECIDED_BY_THE_PLAN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
# Relative rounding error of a sample rate that was computed in float64.
RATE_SLACK = 1e-9


@final
class HandedOut:
    """What the data loader has handed out, for the optimizer to compare.

    Attributes:
        step: Number of steps that the optimizer has done.
        sizes: Number of examples in the batch of a step, for every batch that was drawn.
        delivered: The step whose batch the training loop got last; None if that is not known,
            because another loader uses our batch sampler, as `BatchMemoryManager` does.

    Args:
        on_restart: Called when batches are drawn again from the step that is due.
    """

    def __init__(self, on_restart: Callable[[], None]):
        self._on_restart = on_restart
        self.step = 0
        self.sizes: dict[int, int] = {}
        self.delivered: int | None = None

    def size(self) -> int:
        """Number of examples in the batch that is due."""
        if self.step not in self.sizes or self.delivered not in (None, self.step):
            raise InvalidInput(
                f"the gradients are not of the batch of step {self.step + 1:,}: take one batch per "
                "step from optimizer.loader(data), and no batch from another loader"
            )
        return self.sizes[self.step]

    def check(self, examples: int) -> None:
        """Raise unless the next step is due and has this number of examples."""
        if examples != self.size():
            raise InvalidInput(
                f"step {self.step + 1:,} has gradients of {examples:,} examples, but its batch has "
                f"{self.size():,}: run backward exactly once for every batch of "
                "optimizer.loader(data), with ghost clipping on a GhostClippingLoss; nothing was "
                "released"
            )

    def advance(self) -> None:
        """Note that a step is done."""
        self.sizes.pop(self.step)
        self.step += 1

    def restart(self, step: int) -> None:
        """Forget all batches; the next one is that of `step`."""
        self.step, self.delivered = step, None
        self.sizes.clear()
        self._on_restart()


@final
class PlannedBatchSampler(TorchSampler[list[int]]):
    """Hands out the batches of the remaining steps, from the step that is due.

    Args:
        draw: Returns the batches from a step on, counted from 0.
        handed_out: Where to note them.
        steps: Number of steps of the plan.
        epoch: Number of steps after which to stop, at the end of each epoch.
    """

    def __init__(
        self,
        draw: Callable[[int], Iterator[list[int]]],
        handed_out: HandedOut,
        steps: int,
        epoch: int,
    ):
        self._draw = draw
        self._handed_out = handed_out
        self._steps = steps
        self._epoch = epoch

    def _remaining(self) -> range:
        first = self._handed_out.step
        return range(first, min(self._steps, (first // self._epoch + 1) * self._epoch))

    def __iter__(self) -> Iterator[list[int]]:
        self._handed_out.restart(self._handed_out.step)
        remaining = self._remaining()
        for step, batch in zip(remaining, self._draw(remaining.start), strict=False):
            self._handed_out.sizes[step] = len(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._remaining())


class PlannedLoader(DataLoader[Any]):
    """A data loader that notes which batch the training loop got last."""

    def __init__(self, data: Any, handed_out: HandedOut, **options: Any):
        super().__init__(data, **options)
        self._handed_out = handed_out

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first = self._handed_out.step
        for step, batch in enumerate(super().__iter__(), first):
            self._handed_out.delivered = step
            yield batch


@final
class CollateWithEmpty:
    """Collates a batch; an empty batch becomes tensors of zero examples.

    Args:
        collate: The collate function of a batch that is not empty.
        data: The data set; the tensors of its first example have the right shapes.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], data: Any):
        self._collate = collate
        self._data = data

    def __call__(self, examples: list[Any]) -> Any:
        if examples:
            return self._collate(examples)
        return _without_examples(self._collate([self._data[0]]))


def _without_examples(batch: Any) -> Any:
    """A batch of the same structure, with zero examples."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _without_examples(value) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [_without_examples(value) for value in batch]
    raise InvalidInput(
        f"a batch has a {type(batch).__name__}, of which no empty batch can be made; give a "
        "collate_fn that returns tensors, or lists and dicts of tensors"
    )


def planned_loader(
    plan: DatasetPlan,
    batches: Batches,
    handed_out: HandedOut,
    data: Any,
    *,
    per_epoch: bool,
    options: dict[str, Any],
) -> DataLoader[Any]:
    """The loader of the batches of a plan; see `DPFTRLOptimizer.loader`."""
    given = [name for name in DECIDED_BY_THE_PLAN if name in options]
    if given:
        raise InvalidInput(
            f"leave out {', '.join(given)}: the plan decides which batches there are"
        )

    def from_plan(first: int) -> Iterator[list[int]]:
        return (batches.batch(step).examples.tolist() for step in range(first, plan.dataset.steps))

    draw = from_plan
    if isinstance(data, DataLoader):
        loader = cast("DataLoader[Any]", data)
        sampler = checked_opacus_sampler(plan, loader)
        draw = _without_end(sampler)
        inherited = ("num_workers", "pin_memory", "timeout", "worker_init_fn")
        options = {
            "collate_fn": loader.collate_fn,
            **{name: getattr(loader, name) for name in inherited},
            **options,
        }
        data = loader.dataset
    try:
        size = len(data)
    except TypeError:
        raise InvalidInput(
            f"data must be a data set with a length, got {type(data).__name__}"
        ) from None
    if size != plan.dataset.size:
        raise InvalidInput(
            f"the data set has {size:,} examples, and the plan is for {plan.dataset.size:,}; "
            "plan for this data set"
        )
    epoch = plan.dataset.steps_per_epoch if per_epoch else plan.dataset.steps
    collate = options.pop("collate_fn", None) or default_collate
    return PlannedLoader(
        data,
        handed_out,
        batch_sampler=PlannedBatchSampler(draw, handed_out, plan.dataset.steps, epoch),
        collate_fn=CollateWithEmpty(collate, data),
        **options,
    )


def _without_end(sampler: UniformWithReplacementSampler) -> Callable[[int], Iterator[list[int]]]:
    """Batches of an Opacus sampler; where its epoch ends, the next one starts."""

    def draw(_: int) -> Iterator[list[int]]:
        while True:
            yield from sampler

    return draw


def checked_opacus_sampler(
    plan: DatasetPlan, loader: DataLoader[Any]
) -> UniformWithReplacementSampler:
    """The Poisson sampler of an Opacus loader, if it draws the batches that the plan needs.

    Raises:
        InvalidInput: It draws other batches, or it is no such loader.
    """
    sampler = loader.batch_sampler
    advice = "give the data set itself to optimizer.loader(data), which draws the planned batches"
    if type(sampler) is not UniformWithReplacementSampler:
        raise InvalidInput(
            f"the batches of a {type(loader).__name__} with {type(sampler).__name__} are not those "
            f"of the plan; {advice}"
        )
    if plan.sampling != "poisson":
        raise InvalidInput(
            f"the loader draws Poisson samples, and the plan has sampling {plan.sampling!r}: its "
            f"epsilon would be wrong; {advice}"
        )
    dataset = plan.dataset
    rate = Fraction(dataset.batch_size, dataset.size)
    if sampler.num_samples != dataset.size or not (
        abs(sampler.sample_rate - rate) <= RATE_SLACK * rate
    ):
        raise InvalidInput(
            f"the loader takes each of {sampler.num_samples:,} examples with probability "
            f"{sampler.sample_rate!r}, the plan each of {dataset.size:,} with {float(rate)!r}; "
            f"{advice}"
        )
    if sampler.steps not in (dataset.steps, dataset.steps_per_epoch):
        raise InvalidInput(
            f"the loader draws {sampler.steps:,} batches, the plan has "
            f"{dataset.steps_per_epoch:,} per epoch and {dataset.steps:,} in all; {advice}"
        )
    if dataset.max_batch_size is not None:
        raise InvalidInput(
            f"the loader does not keep the plan's limit of {dataset.max_batch_size:,} examples "
            f"per batch; {advice}"
        )
    return sampler
