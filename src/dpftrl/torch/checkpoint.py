"""Model, optimizer and scheduler as one safetensors file, without pickle."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dpftrl.errors import InvalidInput, UnsafeState

# The key of the JSON text in the metadata of the file.
STATE = "state"
# Keys of JSON objects that stand for what JSON does not have.
TENSOR, TUPLE, DICT = "tensor:", "tuple:", "dict:"


def write_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, extra: Mapping[str, Any]
) -> bytes:
    """The content of a checkpoint.

    It holds what training changes: trainable parameters and buffers of the model, and the state of
    the optimizer and of the scheduler. Frozen parameters are recorded by their digest only.

    Args:
        model: The model.
        optimizer: The optimizer.
        scheduler: The learning-rate scheduler, or None.
        extra: Further values that JSON can hold.

    Raises:
        InvalidInput: A state holds something that cannot be written without pickle.
    """
    return write_state(model, optimizer, scheduler, extra, lambda _, tensor: tensor, dict)


def write_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    extra: Mapping[str, Any],
    local: Callable[[str, Tensor], Tensor],
    described: Callable[[], dict[str, Any]],
) -> bytes:
    """The content of a checkpoint, or of the part of one rank.

    Args:
        model: The model.
        optimizer: The optimizer.
        scheduler: The learning-rate scheduler, or None.
        extra: Further values that JSON can hold.
        local: What this process holds of a tensor; called with its name and the tensor.
        described: Called after that; returns what is to be known of these parts.
    """
    tensors = dict(_changing(model))
    state = {
        "scheduler_kind": _kind(scheduler),
        "frozen_sha256": _frozen_sha256(model),
        "optimizer": _plain("optimizer", optimizer.state_dict(), tensors),
        "scheduler": None
        if scheduler is None
        else _plain("scheduler", scheduler.state_dict(), tensors),
        "extra": dict(extra),
    }
    copies = {name: _copy(local(name, tensor)) for name, tensor in tensors.items()}
    return save_tensors(copies, {STATE: json.dumps({**state, **described()})})


def read_checkpoint(
    content: bytes, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> dict[str, Any]:
    """Put the content of a checkpoint into model, optimizer and scheduler.

    Returns:
        The further values that `write_checkpoint` was given.

    Raises:
        InvalidInput: Model, optimizer or scheduler are not those of the checkpoint.
    """
    tensors, state = parsed(content)
    return restored(state, tensors, model, optimizer, scheduler)


def restored(
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
) -> dict[str, Any]:
    """Put the state and the tensors of a checkpoint into model, optimizer and scheduler."""
    if state["frozen_sha256"] != _frozen_sha256(model):
        raise InvalidInput(
            "the frozen parameters of the model are not those of the run; load the same ones"
        )
    if state["scheduler_kind"] != _kind(scheduler):
        raise InvalidInput(
            f"the run began with {state['scheduler_kind']}, got {_kind(scheduler)}; resume it the "
            "same way"
        )
    changing = dict(_changing(model))
    for name, tensor in changing.items():
        saved = tensors.get(name)
        if saved is None or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise InvalidInput(
                f"the model of the run has no {name.partition(':')[2]} of this shape and type; "
                "resume with the same model"
            )
    settings = cast("dict[str, Any]", _restored(state["optimizer"], tensors))
    _check_optimizer(settings, optimizer)
    with torch.no_grad():
        for name, tensor in changing.items():
            tensor.copy_(tensors[name])
    optimizer.load_state_dict(settings)
    if scheduler is not None:
        scheduler.load_state_dict(_restored(state["scheduler"], tensors))
    return state["extra"]


def parsed(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, and its JSON object."""
    try:
        tensors = load_tensors(content)
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        return tensors, json.loads(header["__metadata__"][STATE])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UnsafeState(f"the checkpoint cannot be read: {error}") from None


def _check_optimizer(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of another kind, as far as its settings tell."""
    given = optimizer.state_dict()["param_groups"]
    kept = saved["param_groups"]
    names = [sorted(group) for group in given]
    if names != [sorted(group) for group in kept] or [len(g["params"]) for g in given] != [
        len(g["params"]) for g in kept
    ]:
        raise InvalidInput(
            "the optimizer is not that of the run: it has other settings or other parameters"
        )


def _kind(scheduler: Any) -> str:
    return "no scheduler" if scheduler is None else f"a scheduler {type(scheduler).__name__}"


def _changing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The trainable parameters and the buffers of a model, each once."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield f"parameter:{name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer:{name}", buffer


def _frozen_sha256(model: nn.Module) -> str:
    """SHA-256 of the names and values of all frozen parameters."""
    hasher = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            hasher.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
            whole = getattr(parameter.detach(), "full_tensor", parameter.detach)()
            flat = whole.cpu().contiguous().view(-1)
            hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _plain(place: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; tensors go to `tensors`, and their names take their place."""
    if isinstance(value, Tensor):
        tensors[place] = value
        return {TENSOR: place}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {DICT: [[key, _plain(f"{place}/{key}", one, tensors)] for key, one in items]}
    if isinstance(value, list | tuple):
        parts = [
            _plain(f"{place}/{i}", one, tensors)
            for i, one in enumerate(cast("list[Any] | tuple[Any, ...]", value))
        ]
        return {TUPLE: parts} if isinstance(value, tuple) else parts
    raise InvalidInput(
        f"{place} holds a {type(value).__name__}, which cannot be written to a checkpoint without "
        "pickle; use an optimizer or scheduler whose state consists of tensors and numbers"
    )


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, list):
        return [_restored(one, tensors) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        ((kind, content),) = cast("dict[str, Any]", value).items()
        if kind == TENSOR:
            return tensors[content]
        if kind == TUPLE:
            return tuple(_restored(one, tensors) for one in content)
        return {key: _restored(one, tensors) for key, one in content}
    return value
