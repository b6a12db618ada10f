"""The model of a user, in any framework, as named arrays that a server can train.

A model is an array, a `torch.nn.Module`, a pytree that JAX knows (such as an Equinox module), or
dicts, lists and tuples of models. Arrays are those of NumPy, PyTorch and JAX. Neither PyTorch nor
JAX is imported here: an object of theirs can only exist if the user has imported them.
"""

# The types of PyTorch and JAX are only partly known to a type checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import copy
import fnmatch
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Layout
from dpftrl.errors import InvalidInput

Arrays = dict[str, NDArray[Any]]

# The endings of the running statistics of batch normalisation in PyTorch.
STATISTICS = (".running_mean", ".running_var")
COUNTER = ".num_batches_tracked"


@final
@dataclass(frozen=True, eq=False)
class Leaf:
    """A part of a model that has no parts.

    Attributes:
        name: Its place in the model, such as `layers.0.weight`.
        value: The array, or anything else.
        may_train: Whether its place allows training: not a buffer, not `requires_grad=False`.
    """

    name: str
    value: Any
    may_train: bool = True

    @property
    def array(self) -> NDArray[Any] | None:
        """The value as a NumPy array, if it is an array of real floating-point numbers."""
        value, torch, jax = self.value, sys.modules.get("torch"), sys.modules.get("jax")
        if torch is not None and isinstance(value, torch.Tensor):
            if not value.is_floating_point():
                return None
            plain = value.detach().cpu()
            wide = plain if plain.dtype == torch.float64 else plain.to(torch.float32)
            return wide.numpy()
        if isinstance(value, np.ndarray):
            typed = cast("NDArray[Any]", value)
            return typed.view(np.ndarray) if np.issubdtype(typed.dtype, np.floating) else None
        if jax is not None and isinstance(value, jax.Array):
            if not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
                return None
            array = np.asarray(value)
            return array if array.dtype == np.float64 else array.astype(np.float32)
        return None

    @property
    def kind(self) -> str:
        """The type of the value, for messages and for comparing two models."""
        dtype = getattr(self.value, "dtype", None)
        return type(self.value).__name__ if dtype is None else str(dtype).removeprefix("torch.")

    def digest(self) -> str:
        """SHA-256 of the value, if it is an array, a number or a text; else a digest of its type.

        Functions and other objects of a model have no content that could be compared.
        """
        value, torch, jax = self.value, sys.modules.get("torch"), sys.modules.get("jax")
        content = type(value).__name__.encode()
        if torch is not None and isinstance(value, torch.Tensor):
            tensor = value.detach().cpu().contiguous().reshape(-1)
            content = tensor.view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray) and value.dtype != object:
            content = cast("NDArray[Any]", value).tobytes()
        elif jax is not None and isinstance(value, jax.Array):
            is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
            content = np.asarray(jax.random.key_data(value) if is_key else value).tobytes()
        elif isinstance(value, bool | int | float | str):
            content = repr(value).encode()
        return hashlib.sha256(content).hexdigest()

    def with_numbers(self, numbers: NDArray[Any]) -> Any:
        """A new array of the same framework, type and device, with other numbers."""
        torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
        if torch is not None and isinstance(self.value, torch.Tensor):
            # `numpy` may be a view of the server's model, and PyTorch would write into it.
            tensor = torch.from_numpy(np.array(numbers)).to(self.value.device, self.value.dtype)
            if isinstance(self.value, torch.nn.Parameter):
                return torch.nn.Parameter(tensor, requires_grad=self.value.requires_grad)
            return tensor.requires_grad_(self.value.requires_grad)
        if isinstance(self.value, np.ndarray):
            return np.array(numbers, dtype=cast("NDArray[Any]", self.value).dtype)
        assert jax is not None
        return jax.numpy.array(numbers, dtype=self.value.dtype)

    def copied(self) -> Any:
        """The value, or a copy of it if a client could change it in place."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(self.value, torch.Tensor):
            return self.value.detach().clone().requires_grad_(self.value.requires_grad)
        return self.value.copy() if isinstance(self.value, np.ndarray) else self.value


@final
class ModelStructure:
    """How a model is taken apart into named arrays, and put together again.

    Arrays of floating-point numbers are trained. Everything else stays as it is: whole numbers,
    functions, `frozen` parts, and in a `torch.nn.Module` also buffers and parameters with
    `requires_grad=False`. So do the running statistics of batch normalisation.

    Attributes:
        layout: Names and shapes of the arrays that are trained.
        start: These arrays, in float32.
        kept: The other leaves.
    """

    def __init__(self, model: Any, trained: Sequence[Leaf], kept: Sequence[Leaf]):
        """Call `of` instead."""
        arrays = {leaf.name: leaf.array for leaf in trained}
        self._model = model
        self._trained = {leaf.name: leaf for leaf in trained}
        self.kept = tuple(kept)
        self.start = {
            name: array.astype(np.float32) for name, array in arrays.items() if array is not None
        }
        self.layout = Layout.of(self.start)

    @classmethod
    def of(cls, model: Any, frozen: Sequence[str] = ()) -> Self:
        """Take a model apart.

        Args:
            model: The model.
            frozen: Names of parts that are not trained, such as `embedding` or `layers.0.*`. A name
                without a pattern stands for the part of this name and everything in it.

        Raises:
            InvalidInput: Nothing can be trained, or a part cannot be named or trained safely.
        """
        leaves = list(_leaves("", model))
        names = [leaf.name for leaf in leaves]
        for name, times in Counter(names).items():
            if times > 1:
                raise InvalidInput(f"the model has two parts with the name {name!r:.60}")
        patterns = [frozen] if isinstance(frozen, str) else list(frozen)
        for pattern in patterns:
            if not any(_is_frozen(name, [pattern]) for name in names):
                raise InvalidInput(
                    f"frozen names {pattern!r:.60}, and the model has no such part; its parts are "
                    f"{', '.join(names)}"
                )
        statistics = _statistics(names)
        kept, trained = list[Leaf](), list[Leaf]()
        for leaf in leaves:
            fixed = not leaf.may_train or leaf.name in statistics or _is_frozen(leaf.name, patterns)
            (kept if fixed or leaf.array is None else trained).append(leaf)
            if not fixed:
                _check_type(leaf)
        if not trained:
            raise InvalidInput(
                "the model has nothing to train: no array of floating-point numbers that is not "
                f"frozen; its parts are {', '.join(names) or 'none'}"
            )
        _refuse_tied(trained)
        # A copy, because the user's functions may change the original.
        copied = _rebuilt("", model, {leaf.name: leaf.copied for leaf in leaves}.__getitem__)
        names_of_kept = {leaf.name for leaf in kept}
        leaves = list(_leaves("", copied))
        return cls(
            copied,
            [leaf for leaf in leaves if leaf.name not in names_of_kept],
            [leaf for leaf in leaves if leaf.name in names_of_kept],
        )

    @property
    def types(self) -> dict[str, str]:
        """The number types of the trained arrays, by name."""
        return {name: leaf.kind for name, leaf in self._trained.items()}

    @property
    def statistics(self) -> list[str]:
        """Names of running statistics of batch normalisation, which stay as they are."""
        return sorted(_statistics([*self._trained, *(leaf.name for leaf in self.kept)]))

    def build(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        """A new model of the user's structure with these arrays; it shares no memory with others.

        Numbers are rounded to the types of the user's arrays.
        """
        values: dict[str, Callable[[], Any]] = {leaf.name: leaf.copied for leaf in self.kept}
        for name, leaf in self._trained.items():
            values[name] = partial(leaf.with_numbers, arrays[name])
        return _rebuilt("", self._model, values.__getitem__)

    def arrays_of(self, model: Any, source: str) -> Arrays:
        """The trained arrays of a model that was built here, after a user's function changed it.

        Args:
            model: The model. Parts that are not trained may have changed or may be missing.
            source: Where the model comes from, for messages.

        Raises:
            InvalidInput: The model has other parts, shapes or types.
        """
        if model is None:
            raise InvalidInput(f"{source} returned None; return the trained model")
        leaves = {leaf.name: leaf for leaf in _leaves("", model)}
        known = self._trained.keys() | {leaf.name for leaf in self.kept}
        if missing := sorted(self._trained.keys() - leaves.keys()):
            raise InvalidInput(
                f"{source} returned {type(model).__name__} without {_listed(missing)}; return a "
                "model with the same parts as the one it was given"
            )
        if more := sorted(leaves.keys() - known):
            raise InvalidInput(
                f"{source} returned a model with {_listed(more)}, which the model that it was "
                "given does not have; return a model with the same parts"
            )
        return {name: self._fitting(leaves[name], source) for name in self.layout.names}

    def _fitting(self, leaf: Leaf, source: str) -> NDArray[Any]:
        array, wanted = leaf.array, self.start[leaf.name].shape
        if array is None:
            raise InvalidInput(
                f"{source} returned {leaf.name!r:.60} as {leaf.kind}; return an array of "
                "floating-point numbers"
            )
        if array.shape != wanted:
            raise InvalidInput(
                f"{source} returned {leaf.name!r:.60} with shape {array.shape}; return it with "
                f"shape {wanted}"
            )
        return array


def _leaves(name: str, node: Any) -> Iterator[Leaf]:
    """All leaves of a model, in order; `name` is the name of the node."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if node is None:
        return
    if isinstance(node, dict):
        for key, part in cast("dict[Any, Any]", node).items():
            yield from _leaves(_joined(name, key), part)
    elif isinstance(node, list | tuple):
        for key, part in _numbered(cast("Sequence[Any]", node)):
            yield from _leaves(_joined(name, key), part)
    elif torch is not None and isinstance(node, torch.nn.Module):
        for key, parameter in node.named_parameters():
            yield Leaf(_joined(name, key), parameter, parameter.requires_grad)
        for key, buffer in node.named_buffers():
            yield Leaf(_joined(name, key), buffer, may_train=False)
    elif jax is not None and _is_pytree(node):
        for path, leaf in jax.tree_util.tree_leaves_with_path(node):
            key = jax.tree_util.keystr(path, simple=True, separator=".")
            yield Leaf(_joined(name, key), leaf)
    else:
        yield Leaf(name or "model", node)


def _rebuilt(name: str, node: Any, new_value: Callable[[str], Callable[[], Any]]) -> Any:
    """A copy of a model; `new_value` returns, by name, a function that makes the new value."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if node is None:
        return None
    if isinstance(node, dict):
        copied: Any = copy.copy(node)  # keeps the class, and what PyTorch adds to a state_dict
        for key, part in cast("dict[Any, Any]", node).items():
            copied[key] = _rebuilt(_joined(name, key), part, new_value)
        return copied
    if isinstance(node, list | tuple):
        parts = [
            _rebuilt(_joined(name, key), part, new_value)
            for key, part in _numbered(cast("Sequence[Any]", node))
        ]
        kind: Any = type(cast("Any", node))
        return kind(*parts) if hasattr(node, "_fields") else kind(parts)  # a named tuple, or not
    if torch is not None and isinstance(node, torch.nn.Module):
        module = copy.deepcopy(node)
        with torch.no_grad():
            for key, parameter in module.named_parameters():
                parameter.copy_(new_value(_joined(name, key))())
                parameter.grad = None
        return module
    if jax is not None and _is_pytree(node):
        paths, structure = jax.tree_util.tree_flatten_with_path(node)
        keys = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
        values = [new_value(_joined(name, key))() for key in keys]
        return jax.tree_util.tree_unflatten(structure, values)
    return new_value(name or "model")()


def _numbered(node: Sequence[Any]) -> Iterator[tuple[object, Any]]:
    """The parts of a list or tuple with their positions, or their names in a named tuple."""
    return zip(getattr(node, "_fields", range(len(node))), node, strict=True)


def _is_pytree(node: Any) -> bool:
    """Whether JAX knows how to take this object apart."""
    jax: Any = sys.modules["jax"]
    return not jax.tree_util.all_leaves([node])


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _is_frozen(name: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns
    )


def _statistics(names: Sequence[str]) -> set[str]:
    """The running statistics of batch normalisation among the parts of a PyTorch model."""
    layers = {name.removesuffix(COUNTER) for name in names if name.endswith(COUNTER)}
    return {name for name in names for ending in STATISTICS if name.removesuffix(ending) in layers}


def _check_type(leaf: Leaf) -> None:
    """Refuse what looks like a parameter and could not be trained."""
    if leaf.kind.startswith("complex"):
        raise InvalidInput(
            f"{leaf.name!r:.60} has complex numbers, which cannot be clipped and summed here; give "
            "the real and the imaginary part as two arrays, or name it in frozen"
        )
    if isinstance(leaf.value, np.floating):  # np.float64 is a float, too
        raise InvalidInput(
            f"{leaf.name!r:.60} is a single number of type {leaf.kind}; give np.array(...) to "
            "train it, a plain Python number to keep it, or name it in frozen"
        )


def _refuse_tied(trained: Sequence[Leaf]) -> None:
    """Refuse two trained tensors of PyTorch that are one: each would get noise of its own."""
    torch = sys.modules.get("torch")
    names = dict[tuple[int, int], str]()
    for leaf in trained:
        if torch is None or not isinstance(leaf.value, torch.Tensor) or not leaf.value.numel():
            continue
        place = (leaf.value.untyped_storage().data_ptr(), leaf.value.storage_offset())
        if place in names:
            raise InvalidInput(
                f"{names[place]!r:.60} and {leaf.name!r:.60} are the same tensor (tied weights); "
                "give the torch.nn.Module itself, which knows that, instead of its state_dict"
            )
        names[place] = leaf.name


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more
