"""The batches of a run as PyTorch batches."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (the types of PyTorch are partial)

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from dpftrl.centralized import TrainingRun
from dpftrl.centralized.owner import StepsOfArrays
from dpftrl.errors import InvalidInput

_numpy_random: Any = np.random  # its types are not complete
# The global generator of NumPy within a step.
_GENERATOR = np.random.MT19937(0)


class Request(NamedTuple):
    """A batch that is to be loaded."""

    step: int
    seed: int
    examples: list[int]
    counts: list[int] | None


class Rows(TorchDataset[Any]):
    """Batches of a data set, by request."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]):
        self._dataset, self._collate = dataset, collate_fn

    def __getitem__(self, request: Request) -> Any:
        # Random transformations of examples depend on the step only, so that a step can be
        # repeated after a crash.
        with seeded(request.seed):
            if type(self._dataset) is TensorDataset and self._collate is default_collate:
                # The same as below, without a Python loop over the examples.
                return [tensor[request.examples] for tensor in self._dataset.tensors]
            if request.examples:
                return self._collate([self._dataset[i] for i in request.examples])
            return _map_tensors(self._collate([self._dataset[0]]), lambda rows: rows[:0])


class HandedOut(NamedTuple):
    """A batch that the loader has yielded.

    Attributes:
        step: The step it is for.
        examples: Its number of examples.
        counts: Number of examples of each unit; None if every example is a unit.
    """

    step: int
    examples: int
    counts: list[int] | None

    @property
    def units(self) -> int:
        """Number of units in the batch."""
        return self.examples if self.counts is None else len(self.counts)


@final
class PrivateLoader:
    """The batches of all remaining steps, of all epochs. A new loop goes on at the current step.

    Sampled batches have random sizes, and some may be empty.
    """

    def __init__(
        self,
        run: TrainingRun,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        num_workers: int,
    ):
        self._run, self._num_workers = run, num_workers
        self._rows = Rows(dataset, collate_fn)
        self._handed_out: HandedOut | None = None
        self._steps_of = StepsOfArrays()

    def __len__(self) -> int:
        return self._run.plan.dataset.steps - self._run.steps

    def __iter__(self) -> Iterator[Any]:
        requests = list[Request]()
        loaded: Any = DataLoader(
            self._rows,
            batch_size=None,
            sampler=self._requests(requests),  # pyright: ignore[reportArgumentType]
            num_workers=self._num_workers,
        )
        for batch in loaded:
            step, _, examples, counts = requests.pop(0)
            if step != self._run.steps:
                raise InvalidInput(
                    f"step {self._run.steps:,} was not done: pass every batch of the loader to "
                    "`step`, in their order"
                )
            self._handed_out = HandedOut(step, len(examples), counts)
            self._steps_of.remember(tensors_of(batch), step)
            yield batch

    def _requests(self, requests: list[Request]) -> Iterator[Request]:
        """Yield what is to be loaded, and keep it in `requests` until it was loaded."""
        for step in range(self._run.steps, self._run.plan.dataset.steps):
            batch = self._run.batch(step)
            counts = None if batch.counts is None else batch.counts.tolist()
            request = Request(step, self._run.seed(step, "data"), batch.examples.tolist(), counts)
            requests.append(request)
            yield request

    def check(self, batch: Any) -> HandedOut:
        """What was handed out for the current step, if the batch can be it.

        Raises:
            InvalidInput: Nothing was handed out for this step, or the batch has other rows.
        """
        handed_out, step = self._handed_out, self._run.steps
        if handed_out is None or handed_out.step != step:
            raise InvalidInput(
                f"step {step:,} needs its own batch: take batches from the loader, and pass each "
                "of them to `step` once"
            )
        for tensor in tensors_of(batch):
            self._steps_of.check(tensor, step)
            rows = len(tensor) if tensor.ndim else 0
            if rows != handed_out.examples:
                raise InvalidInput(
                    f"the batch of step {step:,} has {handed_out.examples:,} examples, got a "
                    f"tensor with {rows:,} rows; pass the batch that the loader yielded"
                )
        return handed_out


class seeded:  # noqa: N801 - used like a function
    """Within the block, all global random generators start from a seed."""

    def __init__(self, seed: int):
        self._seed = seed

    def __enter__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = _numpy_random.get_bit_generator()
        _numpy_random.set_bit_generator(_GENERATOR)  # faster than to save and restore the state
        # That of the CPU alone: torch.manual_seed formats a stack trace for every other device.
        torch.default_generator.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)  # noqa: NPY002 - code of users uses this generator

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        _numpy_random.set_bit_generator(self._numpy)


def _map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of tuples, lists and dicts, with its tensors changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        mapping = cast("Mapping[Any, Any]", batch)
        return {key: _map_tensors(value, change) for key, value in mapping.items()}
    if isinstance(batch, list | tuple):
        parts = [_map_tensors(one, change) for one in cast("list[Any]", batch)]
        return tuple(parts) if isinstance(batch, tuple) else parts
    raise InvalidInput(
        f"a batch consists of tensors in tuples, lists and dicts, got {type(batch).__name__}"
    )


def plain_batch(batch: Any) -> Any:
    """The batch with plain dicts in place of other mappings, as `torch.func` needs it."""
    return _map_tensors(batch, lambda tensor: tensor)


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch."""
    found = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(batch, keep)
    return found
