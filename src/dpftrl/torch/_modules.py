"""Modules of a model: which are refused, where parameters are, and the random state they use."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from dpftrl.errors import InvalidInput

BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_layers(model: nn.Module) -> None:
    """Refuse layers that mix the examples of a batch or keep statistics of them.

    Raises:
        InvalidInput: There is such a layer. The message says where, and what to use instead.
    """
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    for path, module in modules:
        running = [key for key, _ in module.named_buffers(recurse=False) if "running_" in key]
        batch_norm = isinstance(module, BATCH_NORMS)
        if batch_norm or running:
            what = "mixes the examples of a batch" if batch_norm else f"keeps {running[0]!r}"
            raise InvalidInput(
                f"layer {path or type(module).__name__!r} ({type(module).__name__}) {what}, so one "
                "example changes the gradients of others; use nn.GroupNorm or nn.LayerNorm"
            )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once: the same as `model.modules()`, in less time."""
    found = {id(model): model}
    waiting = [model]
    while waiting:
        children = waiting.pop()._modules  # pyright: ignore[reportPrivateUsage]
        for child in children.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def slots_of(
    model: nn.Module, parameters: Sequence[Tensor]
) -> Iterator[tuple[dict[str, Any], str, int]]:
    """The places of parameters in a model; a shared parameter has several."""
    numbers = {id(parameter): k for k, parameter in enumerate(parameters)}
    for module in model.modules():
        own = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
        for key, parameter in own.items():
            if id(parameter) in numbers:
                yield own, key, numbers[id(parameter)]


class RandomState:
    """The states of the generators that a model or a loss may use, to draw the same again."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002

    def restore(self) -> None:
        """Put all generators back to these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
