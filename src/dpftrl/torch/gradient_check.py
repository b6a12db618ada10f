"""A check before training: gradients per unit are those of autograd, and rows do not mix."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpftrl.clipping import Grid
from dpftrl.errors import InvalidInput
from dpftrl.torch._micro_batches import LossFn, check_loss, leaves_of
from dpftrl.torch._modules import RandomState
from dpftrl.torch._products import FloatVector
from dpftrl.torch.gradients import ClippedSums


def check_gradients(sums: ClippedSums, loss_fn: LossFn, batch: Any) -> bool:
    """Compare the per-unit gradients of the first two rows of a batch with those of autograd.

    The model is in evaluation mode meanwhile, so that dropout does not disturb the comparison.

    Args:
        sums: Computes the gradients; its own sum stays as it is.
        loss_fn: The loss.
        batch: A batch of at least two rows that are not equal. If the gradient of one of the first
            two is not finite, nothing is compared: an error would reveal the row.

    Returns:
        Whether the gradients were compared.

    Raises:
        InvalidInput: The gradients differ, or the loss of both rows together is not a weighted mean
            of their losses, for example since the model or the loss mixes examples.
    """
    leaves, structure = leaves_of(batch)
    if leaves[0].shape[0] < 2:
        raise InvalidInput("the check needs a batch of at least two rows")
    modes = [(module, module.training) for module in sums.model.modules()]
    state = RandomState()
    try:
        sums.model.eval()
        return _check_gradients(sums, loss_fn, leaves, structure)
    finally:
        state.restore()
        for module, training in modes:
            module.training = training


def _check_gradients(
    sums: ClippedSums, loss_fn: LossFn, leaves: Sequence[Tensor], structure: Any
) -> bool:
    parameters = dict(sums.model.named_parameters())
    trainable = [parameters[name] for name in sums.names]

    def batch_of(start: int, stop: int) -> Any:
        return pytree.tree_unflatten([leaf[start:stop] for leaf in leaves], structure)

    def autograd(start: int, stop: int) -> FloatVector:
        with torch.enable_grad():
            loss = check_loss(loss_fn(sums.model, batch_of(start, stop))).mean()
            if not loss.requires_grad:
                raise InvalidInput(
                    "the loss has no gradient: loss_fn(model, batch) must compute it with the "
                    "model it is given, without detach() and torch.no_grad()"
                )
            found = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
        return torch.cat([value.reshape(-1).double() for value in found]).numpy()

    single = [autograd(0, 1), autograd(1, 2)]
    tolerance = 0.0
    for row, expected in enumerate(single):
        norm = float(np.linalg.norm(expected))
        if not math.isfinite(norm):
            return False  # no error: it would reveal the row
        clip_norm = 2.0 ** math.ceil(math.log2(max(norm, 2.0**-100)) + 1)
        own = ClippedSums(
            sums.model,
            Grid(clip_norm * 2.0**-45, clip_norm),
            largest_batch=2,
            examples_per_unit=sums.examples_per_unit,
            micro_batch=2,
        )
        own.add(loss_fn, batch_of(row, row + 1))
        actual = own.grid.values(own.steps)
        tolerance = max(tolerance, own.tolerance)
        for name, (start, stop) in zip(sums.names, sums.spans, strict=True):
            difference = float(np.linalg.norm(actual[start:stop] - expected[start:stop]))
            size = float(np.linalg.norm(expected[start:stop]))
            if not difference <= tolerance * size + 0.01 * tolerance * norm:
                raise InvalidInput(
                    f"the gradient of {name!r} for one row differs from that of autograd by "
                    f"{difference:.3g}, where its norm is {size:.3g}; the model or the loss must "
                    "give the same result each time"
                )
    together = autograd(0, 2)
    first, second = single
    # The loss may weight rows, such as a mean over all tokens; so find the weights.
    apart = first - second
    share = float(apart @ (together - second) / max(apart @ apart, 1e-300))
    share = min(max(share, 0.0), 1.0)
    difference = float(np.linalg.norm(together - share * first - (1 - share) * second))
    size = max(float(np.linalg.norm(first)), float(np.linalg.norm(second)))
    if not difference <= 10 * tolerance * size:
        raise InvalidInput(
            "the gradient for two rows together is not a mean of their gradients (it differs by "
            f"{difference:.3g}, where the larger one has norm {size:.3g}); the model or the loss "
            "mixes examples, or the loss is not a mean over rows (use reduction='mean')"
        )
    return True
