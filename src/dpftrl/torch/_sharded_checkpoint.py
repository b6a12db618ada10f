"""Checkpoints of models whose ranks hold shards: one file per rank, for any number of ranks later.

A file of a rank has the rows that the rank holds, and where they are in the whole tensor. Whoever
reads a checkpoint takes the rows that it needs from all files, or from the one file of a whole
model. So a run of DDP can be resumed with FSDP2, and the other way round.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (the types of PyTorch are partial)

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.torch._fsdp import like, rows_of
from dpftrl.torch.checkpoint import parsed, restored, write_state

# The key, in the state of a file, of the rows that its rank holds of each sharded tensor.
ROWS = "rows"


def write_shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, extra: Mapping[str, Any]
) -> bytes:
    """The content of the file of this rank. The arguments are those of `write_checkpoint`."""
    rows = dict[str, tuple[int, int]]()  # name: first row, and number of rows of the whole tensor

    def local(name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        rows[name] = (rows_of(tensor)[0], tensor.shape[0])
        return tensor.to_local()

    return write_state(model, optimizer, scheduler, extra, local, lambda: {ROWS: rows})


def read_shards(
    contents: Callable[[], Iterable[bytes]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
) -> dict[str, Any]:
    """Put a checkpoint into model, optimizer and scheduler; return its further values.

    Args:
        contents: Returns the contents of all files of the checkpoint, one after another. They are
            gone through once.
        model: The model; whole, or sharded by FSDP2.
        optimizer: The optimizer.
        scheduler: The scheduler, or None.

    Raises:
        InvalidInput: Model, optimizer or scheduler are not those of the checkpoint.
    """
    parameters = {f"parameter:{name}": one for name, one in model.named_parameters()}
    by_number = [one for group in optimizer.param_groups for one in group["params"]]
    wanted = _Wanted(parameters, by_number)
    state: dict[str, Any] | None = None
    for content in contents():
        tensors, one_state = parsed(content)
        state = one_state if state is None else state
        rows = one_state.get(ROWS, {})
        for name, tensor in tensors.items():
            wanted.take(name, tensor, *rows.get(name, (0, tensor.shape[0] if tensor.dim() else 0)))
        del tensors
    if state is None:
        raise UnsafeState("the checkpoint has no content")
    return restored(state, wanted.tensors(), model, optimizer, scheduler)


class _Wanted:
    """Collects the rows of tensors that this rank needs."""

    def __init__(self, parameters: Mapping[str, Tensor], by_number: list[Any]):
        self._parameters, self._by_number = parameters, by_number
        self._rows = dict[str, list[tuple[int, Tensor]]]()
        self._whole = dict[str, Tensor]()
        self._lengths = dict[str, int]()

    def take(self, name: str, tensor: Tensor, first: int, length: int) -> None:
        """Keep the rows that are needed of a tensor whose first row is number `first`."""
        parameter = self._parameter_of(name, tensor, length)
        if parameter is None:
            self._whole.setdefault(name, tensor.clone())
            return
        start, count = rows_of(parameter) if isinstance(parameter, DTensor) else (0, length)
        self._lengths[name] = length
        low, high = max(first, start), min(first + tensor.shape[0], start + count)
        kept = self._rows.setdefault(name, [])
        if low < high or not kept:
            kept.append((low, tensor[max(low - first, 0) : max(high - first, 0)].clone()))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors; those that are divided like a sharded parameter are DTensors."""
        tensors = dict(self._whole)
        for name, parts in self._rows.items():
            local = torch.cat([part for _, part in sorted(parts, key=lambda one: one[0])])
            parameter = self._parameter_of(name, local, self._lengths[name])
            if isinstance(parameter, DTensor):
                if local.shape[0] != rows_of(parameter)[1]:
                    raise UnsafeState(f"the shards of the checkpoint lack rows of {name}")
                tensors[name] = like(local, parameter)
            else:
                if local.shape[0] != self._lengths[name]:
                    raise UnsafeState(f"the shards of the checkpoint lack rows of {name}")
                tensors[name] = local
        return tensors

    def _parameter_of(self, name: str, tensor: Tensor, length: int) -> Tensor | None:
        """The parameter that a tensor is divided like; None if it is not divided."""
        parameter = self._parameters.get(name)
        if parameter is None and name.startswith("optimizer/state/"):
            number = int(name.split("/")[2])
            parameter = self._by_number[number] if number < len(self._by_number) else None
        if parameter is None or not tensor.dim() or not parameter.dim():
            return None
        shape = (length, *tensor.shape[1:])
        if shape != tuple(parameter.shape):
            if name in self._parameters:
                raise InvalidInput(
                    f"the model of the run has no {name.partition(':')[2]} of this shape and type; "
                    "resume with the same model"
                )
            return None
        return cast("Tensor", parameter)
