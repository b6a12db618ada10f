"""Which privacy units, and which of their examples, are in the batch of each step."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import whole_number
from dpftrl.accounting import SampledGuarantee
from dpftrl.errors import InvalidInput
from dpftrl.noise import NoiseKey
from dpftrl.plan import DatasetPlan
from dpftrl.sampler import Sampler, shuffled

Indices = NDArray[np.int64]


class Batch(NamedTuple):
    """The examples of a step. They are secret if the batches are sampled.

    Attributes:
        examples: Positions of the examples in the data set, ordered by unit.
        counts: How many of them belong to each unit; None if every example is a unit.
    """

    examples: Indices
    counts: Indices | None

    @property
    def units(self) -> int:
        """Number of units in the batch."""
        return len(self.examples if self.counts is None else self.counts)


@final
class Units:
    """The privacy units of a data set: every example, or the examples of every user.

    Args:
        examples: Number of examples in the data set.
        owners: The user of each example, as a number or a string; None if every example is a unit.
        examples_per_unit: How many examples of a user take part in one step. If the user has more,
            every step draws some at random.

    >>> users = Units(5, ["ann", "bo", "ann", "bo", "cy"], examples_per_unit=2)
    >>> users.count, users.examples_of(0).tolist()
    (3, [0, 2])
    """

    def __init__(
        self, examples: int, owners: Sequence[Any] | None = None, examples_per_unit: int = 1
    ):
        self.examples = whole_number("the number of examples", examples)
        self.examples_per_unit = whole_number("examples_per_unit", examples_per_unit)
        self.is_example_level = owners is None
        if owners is None:
            if self.examples_per_unit != 1:
                raise InvalidInput("examples_per_unit needs units: the user of each example")
            self.count = self.examples
            return
        names = _names(owners, self.examples)
        numbers = {name: number for number, name in enumerate(sorted(set(names)))}
        labels = np.array([numbers[name] for name in names])
        self.count = len(numbers)
        self._order = np.argsort(labels, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(labels))])

    def __repr__(self) -> str:
        return f"Units({self.count:,} {self.kind}s, {self.examples:,} examples)"

    @property
    def kind(self) -> Literal["example", "user"]:
        """Whose data is protected, `example` or `user`."""
        return "example" if self.is_example_level else "user"

    def examples_of(self, unit: int) -> Indices:
        """The positions of all examples of a unit."""
        if self.is_example_level:
            return np.array([unit])
        return self._order[self._starts[unit] : self._starts[unit + 1]]

    def fingerprint(self) -> str:
        """SHA-256 of which example belongs to which unit."""
        if self.is_example_level:
            return ""
        parts = self._order.astype("<i8").tobytes() + self._starts.astype("<i8").tobytes()
        return hashlib.sha256(parts).hexdigest()


def _names(owners: Any, examples: int) -> list[Any]:
    """The users as whole numbers or strings, one per example."""
    if hasattr(owners, "numpy"):  # a tensor
        owners = owners.numpy()
    values = cast("list[Any]", owners.tolist() if isinstance(owners, np.ndarray) else list(owners))
    for position, value in enumerate(values):
        if isinstance(value, list | tuple | set | frozenset | np.ndarray):
            raise InvalidInput(
                f"example {position:,} has several owners; every example must belong to one user: "
                "split it, or give it to one of them"
            )
        if not isinstance(value, int | str | np.integer) or isinstance(value, bool):
            raise InvalidInput(
                "units must be whole numbers or strings, one per example, got "
                f"{type(cast('object', value)).__name__} for example {position:,}"
            )
    if len(values) != examples:
        raise InvalidInput(
            f"units must name the user of each example: got {len(values):,} for {examples:,} "
            "examples"
        )
    if len({isinstance(value, str) for value in values}) > 1:
        raise InvalidInput("units must be all whole numbers or all strings, got both")
    return values


@final
class Batches:
    """The batch of every step, from the noise key.

    Without sampling, the units are shuffled once, and every epoch goes through them in the same
    order: a new order would let a unit take part twice within fewer steps than the guarantee
    assumes. The last batch of an epoch may be smaller. With sampling, see `dpftrl.sampler`.

    Guarantees:
        A batch is a function of the key and the step. So a run that was interrupted gets the same
        batches again.
    """

    def __init__(self, plan: DatasetPlan, units: Units, key: NoiseKey):
        self._plan, self._units = plan, units
        self._key = key.derive(b"examples of units")
        guarantee = plan.guarantee
        if isinstance(guarantee, SampledGuarantee):
            self._sampler, self._order = Sampler(guarantee.sampling, key), None
        else:
            self._sampler = None
            self._order = shuffled(units.count, key.derive(b"order of units"))

    def __repr__(self) -> str:
        return f"Batches({self._units}, {self._plan.sampling})"

    @property
    def largest(self) -> int:
        """An upper bound on the number of units in a batch."""
        if self._sampler is None:
            return min(self._plan.dataset.batch_size, self._units.count)
        return self._sampler.sampling.max_batch_size or self._units.count

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        if self._units.is_example_level:
            return Batch(self._units_of(step), None)
        drawn = [self._drawn(step, unit) for unit in self._units_of(step).tolist()]
        counts = np.array([len(examples) for examples in drawn], np.int64)
        return Batch(np.concatenate([*drawn, np.empty(0, np.int64)]).astype(np.int64), counts)

    def _units_of(self, step: int) -> Indices:
        if self._sampler is not None:
            return self._sampler.batch(step)
        assert self._order is not None
        size, dataset = self._plan.dataset.batch_size, self._plan.dataset
        start = step % dataset.steps_per_epoch * size
        return self._order[start : start + size]

    def _drawn(self, step: int, unit: int) -> Indices:
        """The examples of a unit that take part in a step."""
        examples, most = self._units.examples_of(unit), self._units.examples_per_unit
        if len(examples) <= most:
            return examples
        place = step.to_bytes(8, "big") + unit.to_bytes(8, "big")
        chosen = shuffled(len(examples), self._key.derive(b"step and unit", place))[:most]
        return examples[np.sort(chosen)]
