"""Batches as tensors, the rows of each unit, and the micro-batches that are computed at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput

# The loss of a batch of any size: the mean over the rows, or one loss per row.
LossFn = Callable[[nn.Module, Any], Tensor]


def check_step_arguments(loss_fn: Any, batch: Any) -> None:
    """Refuse a loss in place of a function, and arguments in the wrong order."""
    is_criterion = isinstance(loss_fn, _Loss)  # it is called with outputs and labels
    if callable(loss_fn) and not is_criterion and not isinstance(loss_fn, Tensor):
        return
    given = type(loss_fn).__name__
    got = f"{given} and a function: swap them" if callable(batch) else f"{given} as loss_fn"
    raise InvalidInput(
        "call step(loss_fn, batch), where loss_fn(model, batch) returns the mean loss as a scalar "
        f"tensor; got {got}"
    )


def check_loss(loss: Any) -> Tensor:
    """Refuse a loss that is no tensor of floating-point numbers."""
    if isinstance(loss, Tensor) and loss.is_floating_point():
        return loss
    given = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InvalidInput(
        "loss_fn(model, batch) must return the mean loss as a scalar tensor, or one loss per row, "
        f"got {given}; step(loss_fn, batch) differentiates it, so leave out .item() and float()"
    )


@dataclass(frozen=True, repr=False)
class UnitRows:
    """Which rows of a batch belong to which unit.

    Attributes:
        units: The number of units.
        index: For each unit, `examples_per_unit` rows; rows are repeated to fill up.
        weights: The weight of each of these rows: 1 / (rows of the unit), and 0 for repetitions.
    """

    units: int
    index: NDArray[np.int64]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, rows: int, counts: Sequence[int] | None, most: int) -> "UnitRows":
        if counts is None and most == 1:
            return cls(rows, np.arange(rows)[:, None], np.ones((rows, 1)))
        if counts is None:
            sizes = np.ones(rows, dtype=np.int64)
        else:
            sizes = np.array([whole_number("counts", count) for count in counts], dtype=np.int64)
            if sizes.size and sizes.max() > most:
                raise InvalidInput(
                    f"a unit has {sizes.max():,} examples, and examples_per_unit is {most:,}"
                )
            if sizes.sum() != rows:
                raise InvalidInput(
                    f"counts add up to {sizes.sum():,}, and the batch has {rows:,} rows"
                )
        place = np.arange(most)
        first = np.cumsum(sizes) - sizes
        index = first[:, None] + np.minimum(place, sizes[:, None] - 1)
        weights = (place < sizes[:, None]) / sizes[:, None]
        return cls(sizes.size, index, weights)


@dataclass(frozen=True, repr=False)
class MicroBatch:
    """A micro-batch: the units of a batch from `start` on.

    `modes` says of each module of the model whether it is in training mode.
    """

    loss_fn: LossFn
    leaves: Sequence[Tensor]
    structure: Any
    rows: UnitRows
    start: int
    modes: tuple[bool, ...]

    def key(self) -> Any:
        """What a plan depends on. The forward pass is compared with the plan each time."""
        code = getattr(self.loss_fn, "__code__", self.loss_fn)
        shapes = tuple((leaf.shape[1:], leaf.dtype) for leaf in self.leaves)
        return code, shapes, self.modes

    def examples(self, units: int) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of the next `units` units, filled up with copies, and their weights, if any."""
        index = self.rows.index[self.start : self.start + units]
        weights = self.rows.weights[self.start : self.start + units]
        missing = units - len(index)
        if index.shape[1] == 1 and not missing:
            return [leaf[self.start : self.start + units] for leaf in self.leaves], []
        if missing:
            index = np.concatenate([index, np.repeat(index[:1], missing, axis=0)])
            weights = np.concatenate([weights, np.zeros((missing, weights.shape[1]))])
        places = torch.as_tensor(np.ascontiguousarray(index.reshape(-1)))
        chosen = [leaf.index_select(0, places) for leaf in self.leaves]
        if index.shape[1] == 1:
            return chosen, []
        return chosen, [torch.as_tensor(weights.reshape(-1)).to(torch.float32)]


def _with_dicts(batch: Any) -> Any:
    """The batch with dicts in place of other mappings, such as those of `transformers`."""
    if isinstance(batch, Mapping):
        items = cast("Mapping[Any, Any]", batch).items()
        return {key: _with_dicts(value) for key, value in items}
    if type(batch) in {list, tuple}:
        return type(batch)(_with_dicts(value) for value in batch)
    return batch


def leaves_of(batch: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a batch and their structure."""
    values, structure = pytree.tree_flatten(_with_dicts(batch))
    for value in values:
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise InvalidInput(
                "a batch consists of tuples, lists and dicts of tensors with a first dimension, "
                f"got {type(value).__name__}"
            )
    rows = {value.shape[0] for value in values}
    if len(rows) != 1:
        raise InvalidInput(
            "all tensors of a batch must have the same first dimension, "
            f"got {sorted(rows) if rows else 'no tensor'}"
        )
    return [value.detach() for value in values], structure
