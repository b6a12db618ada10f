"""Models whose parameters are sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Such parameters are DTensors: each rank holds some rows of each. Per-example gradients need whole
parameters, since `torch.func` does not work through the hooks of FSDP2. So the parameters are
gathered for the gradients of a step, and freed after them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (the types of PyTorch are partial)

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardedAlong

from dpftrl.errors import InvalidInput
from dpftrl.noise import Shard

FSDP: Final = "torch.distributed.fsdp"  # the package whose hooks gather parameters


def is_sharded(model: nn.Module) -> bool:
    """Whether some parameter of the model is a DTensor."""
    return any(isinstance(one, DTensor) for one in model.parameters())


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """The first row that this rank holds, and the number of its rows.

    Rows are divided like `torch.chunk` does: all ranks but the last ones hold the same number.
    """
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size())
    first = min(chunk * mesh.get_local_rank(), tensor.shape[0])
    return first, min(chunk, tensor.shape[0] - first)


def shard_of(model: nn.Module) -> Shard:
    """The coordinates of the trainable parameters that this rank holds.

    Raises:
        InvalidInput: A parameter is not sharded by rows over all ranks.
    """
    spans = list[tuple[int, int]]()
    start = 0
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise InvalidInput(
                f"parameter {name!r} is not sharded, but others are; apply fully_shard to the "
                "whole model"
            )
        placements = parameter.placements
        if len(placements) != 1 or placements[0] != ShardedAlong(0):
            raise InvalidInput(
                f"parameter {name!r} has the placements {placements}; only models that fully_shard "
                "has sharded by rows, over one dimension of ranks, are supported"
            )
        first, rows = rows_of(parameter)
        if parameter.to_local().shape[0] != rows:
            raise InvalidInput(f"the rows of parameter {name!r} are divided in an unknown way")
        if parameter.requires_grad:
            width = parameter.numel() // parameter.shape[0] if parameter.shape[0] else 0
            spans.append((start + first * width, start + (first + rows) * width))
            start += parameter.numel()
    return Shard(start, tuple(spans))


@final
class GatheredModel:
    """Gives a model whole parameters for some time, in place of its shards."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._slots = list[tuple[dict[str, Any], str, DTensor, nn.Parameter]]()
        whole = dict[int, nn.Parameter]()
        for module in model.modules():
            own = cast("dict[str, Any]", module._parameters)  # pyright: ignore[reportPrivateUsage]
            for key, parameter in own.items():
                if isinstance(parameter, DTensor):
                    empty = torch.empty(0, dtype=parameter.dtype)
                    grad = parameter.requires_grad
                    one = whole.setdefault(id(parameter), nn.Parameter(empty, requires_grad=grad))
                    self._slots.append((own, key, parameter, one))
        self._hooks = list(_hooks(model))

    def __repr__(self) -> str:
        return f"GatheredModel({len(self._slots)} parameters)"

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Gather all parameters; within the block, the model is one without FSDP2.

        All ranks must do this at the same time.
        """
        try:
            for own, key, shard, whole in self._slots:
                if whole.numel() != shard.numel():
                    whole.data = cast("DTensor", shard.detach()).full_tensor()
                own[key] = whole
            for hooks, key, _ in self._hooks:
                del hooks[key]
            yield
        finally:
            for own, key, shard, whole in self._slots:
                own[key] = shard
                whole.data = torch.empty(0, dtype=whole.dtype)
            for hooks, key, hook in self._hooks:
                hooks[key] = hook


def _hooks(model: nn.Module) -> list[tuple[dict[int, Any], int, Any]]:
    """The hooks by which FSDP2 gathers parameters in a forward pass."""
    found = list[tuple[dict[int, Any], int, Any]]()
    for module in model.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast("dict[int, Any]", getattr(module, name))
            for key, hook in hooks.items():
                owners = (type(getattr(hook, "__self__", None)), hook)
                if any(str(getattr(one, "__module__", "")).startswith(FSDP) for one in owners):
                    found.append((hooks, key, hook))
    return found


def like(local: Tensor, parameter: DTensor) -> DTensor:
    """A DTensor with the rows of this rank, divided like a parameter."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
