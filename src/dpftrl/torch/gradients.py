"""The sum of clipped per-unit gradients of a PyTorch model, with a proven sensitivity.

A unit is what the privacy guarantee protects: an example, or all examples of a user. `ClippedSums`
computes the gradient of each unit's loss, scales it down to the clip norm, and adds up the results
on a grid of whole numbers.

Most gradients are never written out. The gradient of a linear layer's weight is a product of the
layer's input and of the gradient at its output, and so are its norm and the sum over units.
"""

import math
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, Final, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpftrl._internal.checks import whole_number
from dpftrl._internal.threads import parallel_map
from dpftrl.clipping import SLACK, Grid, JointClip, Steps
from dpftrl.errors import InvalidInput
from dpftrl.torch import _kernels as kernels
from dpftrl.torch._micro_batches import LossFn, MicroBatch, UnitRows, check_loss, leaves_of
from dpftrl.torch._modules import RandomState, check_layers, modules_of, slots_of
from dpftrl.torch._products import (
    ROUNDING,
    TINY,
    WORK_PER_THREAD,
    FloatVector,
    Memory,
    Pass,
    Products,
    add_squares,
    rows_of,
    split,
)
from dpftrl.torch._taps import (
    PlanMismatch,
    Recorder,
    Use,
    gradient,
    positions,
)

# The clipped gradient of a unit is a sum of products whose norms add up to at most this many clip
# norms. Only a unit whose products cancel almost completely is scaled down further by this.
MOST_CANCELLATION: Final = 1000.0
# If rounding errors would take more than this part of the clip norm, all gradients are written out.
LARGEST_MARGIN: Final = 0.01
# Memory for the activations and written-out gradients of a micro-batch.
MICRO_BATCH_BYTES: Final = 256 * 2**20
# Memory for the large written-out gradients of a few units: they should stay in the CPU's cache.
CHUNK_BYTES: Final = 16 * 2**20
# Parameters up to this size are small: their gradients are written out for a whole micro-batch.
SMALL: Final = 4096
# The time to take the norm of a written-out coordinate and to add it, in float32 multiply-adds.
WRITTEN_OUT_COST: Final = 30
# Plans that are kept; there is one for each shape of the batches and each loss function.
MOST_PLANS: Final = 256


@final
@dataclass(frozen=True)
class BatchStats:
    """What happened to the units of a batch. These numbers are private: they have no noise.

    Attributes:
        losses: The loss of each unit.
        norms: The norm of each unit's gradient before clipping.
        clipped: How many gradients were scaled down.
        not_finite: How many units had a gradient that is not finite. They contributed zero.
    """

    losses: FloatVector
    norms: FloatVector
    clipped: int
    not_finite: int


@dataclass(frozen=True)
class _Plan:
    """How the gradient of each parameter is computed, for batches of one shape.

    Attributes:
        explicit: Parameters whose per-unit gradients are computed by autograd.
        uses: The uses of the other parameters, in the order of the forward pass.
        outputs: The shape and dtype of each tapped output.
        small: Parameters whose gradients are written out for a whole micro-batch.
        large: Parameters whose gradients are written out for a few units at a time.
        sparse: Parameters of which a unit uses a few rows (embeddings).
        factored: Parameters whose gradients are never written out.
        chunk: The number of units whose large gradients are written out at a time.
        margin: The part of the clip norm that is kept free for rounding errors.
        loop: Whether units are differentiated one by one, because vmap does not support the model.
    """

    explicit: tuple[int, ...]
    uses: tuple[Use, ...] = ()
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    small: tuple[int, ...] = ()
    large: tuple[int, ...] = ()
    sparse: tuple[int, ...] = ()
    factored: tuple[int, ...] = ()
    chunk: int = 1
    margin: float = 0.0
    loop: bool = False

    def uses_of(self, parameter: int) -> list[Use]:
        """The uses of one parameter."""
        return [use for use in self.uses if use.parameter == parameter]


@final
class ClippedSums:
    """Computes the sum of clipped per-unit gradients of a batch.

    The gradient of a unit is the gradient of the mean loss of its examples, with respect to all
    parameters that require a gradient. The model is not changed: there are no hooks and no
    wrappers, and `.grad`, buffers and modes stay as they are.

    Guarantees:
        If the data of one unit are replaced by nothing, so that it contributes zero and the other
        units keep their places, then `steps` changes by at most `grid.clip_norm / grid.step` in L2
        norm; with adaptive clipping, `steps` and `bits` together do. This holds for every input and
        whatever is rounded:

        - All micro-batches have the same shape, and vmap computes each unit on its own. So the
          bits of a unit's gradient do not depend on the other units.
        - A gradient that is written out is scaled by a factor that uses an upper bound of its
          norm, and is cut off toward zero to the grid. The sum of such gradients is exact.
        - The gradients of other parameters are products of recorded inputs and gradients at
          outputs. Their norm is bounded from above in float64. The sums over a micro-batch are
          float64 matrix products, whose rounding errors are at most (number of terms) * 2^-53 *
          (sum of the norms of the products), and are then rounded to the grid. The clip norm is
          lowered by `margin`, which exceeds these errors for both batches that are compared, for
          all micro-batches of a largest batch.
        - A unit with a gradient that is not finite contributes zero, and no error reveals it.

        It is assumed that the values of one unit do not change how torch computes another row of
        the same operation: its operations are deterministic functions of the row and the shapes.

    Attributes:
        names: The names of the trainable parameters, in the order of `named_parameters()`. A
            shared parameter has one name.
        size: The number of coordinates of these parameters.
        micro_batch: The number of units that are differentiated at a time. It is chosen at the
            first batch if it is not given. Results may differ in their last bits between sizes.
        steps: The sum of the last batch, in steps of the grid. The parameters are raveled and
            concatenated in the order of `names`. The next batch overwrites it.
        joint: For adaptive clipping, the clip norm of the next batch; the clip norm of the grid is
            then 1. None for a fixed clip norm.
        bits: With adaptive clipping, the sum of the bits of the last batch, in steps of the grid.
        margin: The part of the clip norm that the last batch kept free for rounding errors.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        *,
        largest_batch: int,
        usual_batch: int | None = None,
        examples_per_unit: int = 1,
        micro_batch: int | None = None,
    ):
        """Prepare for a model.

        Args:
            model: The model.
            grid: The grid of the sum, which also has the clip norm.
            largest_batch: The largest number of units of a batch.
            usual_batch: The expected number of units of a batch, from which the micro-batch is
                chosen; by default the number of units of the first batch.
            examples_per_unit: The largest number of examples of a unit.
            micro_batch: The number of units to differentiate at a time.
        """
        check_layers(model)
        self.grid = grid
        self.largest_batch = whole_number("largest_batch", largest_batch)
        self.usual_batch = usual_batch
        self.examples_per_unit = whole_number("examples_per_unit", examples_per_unit)
        self.micro_batch = None if micro_batch is None else whole_number("micro_batch", micro_batch)
        if self.largest_batch > grid.most_updates:
            raise InvalidInput(
                f"a sum on this grid holds {grid.most_updates:,} units, and largest_batch is "
                f"{self.largest_batch:,}; use a larger step"
            )
        self.model = model
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise InvalidInput("the model has no parameter that requires a gradient")
        for name, parameter in trainable.items():
            if not parameter.is_floating_point():
                raise InvalidInput(f"parameter {name!r} must be real, got {parameter.dtype}")
            if parameter.device.type != "cpu":
                raise InvalidInput(
                    f"parameter {name!r} is on {parameter.device}; gradients are clipped and "
                    "summed on CPUs only: move the model there with model.cpu()"
                )
        self.names = tuple(trainable)
        self._parameters: list[Tensor] = list(trainable.values())
        ends = np.cumsum([p.numel() for p in self._parameters]).tolist()
        self.spans = [(end - p.numel(), end) for end, p in zip(ends, self._parameters, strict=True)]
        self.size = int(ends[-1])
        self.steps: Steps = np.zeros(self.size, dtype=np.int64)
        self.joint: JointClip | None = None
        self.bits = 0
        self.margin = 0.0
        self._slots = list(slots_of(model, self._parameters))
        self._longest = max(max(p.shape, default=1) for p in self._parameters)
        self._plans: dict[Any, _Plan] = {}
        self._worked = set[Any]()  # the keys of plans that could be run
        self._recorder: Recorder | None = None
        self._memory = Memory()
        self._sums_of_threads = list[tuple[Memory, Steps]]()  # those that no thread uses now
        self._warned = False

    def __repr__(self) -> str:
        return f"ClippedSums({len(self.names)} parameters of {self.size:,} coordinates)"

    @property
    def tolerance(self) -> float:
        """The relative error of a gradient that rounding explains, for `check_gradients`."""
        dtypes = {parameter.dtype for parameter in self._parameters}
        dtypes |= {dtype for plan in self._plans.values() for _, dtype in plan.outputs}
        return 0.05 if any(dtype.itemsize < 4 for dtype in dtypes) else 1e-3

    def add(self, loss_fn: LossFn, batch: Any, counts: Sequence[int] | None = None) -> BatchStats:
        """Compute the sum of the clipped gradients of a batch and leave it in `steps`.

        Args:
            loss_fn: Called with the model and a batch of one row; returns its loss.
            batch: A tensor, or nested tuples, lists and dicts of tensors, all with the same first
                dimension: the rows. Other mappings are passed on as dicts.
            counts: The number of rows of each unit, if units have several. The rows of a unit
                are next to each other. By default, each row is a unit.

        Returns:
            Losses, norms and counts. They are private.

        Raises:
            InvalidInput: The batch is not valid, or the model changes its buffers.
        """
        leaves, structure = leaves_of(batch)
        rows = UnitRows.of(leaves[0].shape[0], counts, self.examples_per_unit)
        if rows.units > self.largest_batch:
            raise InvalidInput(
                f"the batch has {rows.units:,} units, and largest_batch is {self.largest_batch:,}"
            )
        if not rows.units:
            self.steps[:] = 0
        self.bits = 0
        losses, norms = np.zeros(rows.units), np.zeros(rows.units)
        clipped = not_finite = start = 0
        try:
            with self._swapped() as modes:
                while start < rows.units:
                    task = MicroBatch(loss_fn, leaves, structure, rows, start, modes)
                    plan, result, size = self._differentiate(task)
                    real = min(size, rows.units - start)
                    own = slice(start, start + real)
                    squares, factors = self._sum(plan, result, size, real, is_first=start == 0)
                    squares, factors = squares[:real], factors[:real]
                    self.bits += self._bits(squares, factors)
                    losses[own] = _unit_losses(result.losses, size)[:real]
                    norms[own] = np.sqrt(squares)
                    clipped += self._clipped(squares, factors)
                    not_finite += real - int(np.count_nonzero(factors))
                    start += size
        except BaseException:
            self.steps[:] = 0  # nobody should use a part of a sum
            raise
        return BatchStats(losses, norms, clipped, not_finite)

    # ------------------------------------------------------------------ forward and backward

    @contextmanager
    def _swapped(self) -> Generator[tuple[bool, ...]]:
        """Give the model detached parameters and copies of its buffers; put all back at the end.

        Yields:
            Whether each module of the model is in training mode.
        """
        for values, key, parameter in self._slots:
            if values[key] is not self._parameters[parameter]:
                raise InvalidInput(
                    f"parameter {self.names[parameter]!r} of the model was replaced; "
                    "create a new ClippedSums"
                )
        modules = modules_of(self.model)
        own = [
            (module, key, buffer)
            for module in modules
            for key, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
            if buffer is not None
        ]
        copies = [buffer.clone() for _, _, buffer in own]
        versions = [copy._version for copy in copies]  # pyright: ignore[reportPrivateUsage]
        try:
            self._place([parameter.detach() for parameter in self._parameters])
            for (module, key, _), copy in zip(own, copies, strict=True):
                module._buffers[key] = copy  # pyright: ignore[reportPrivateUsage]
            yield tuple(module.training for module in modules)
            for (module, key, _), copy, version in zip(own, copies, versions, strict=True):
                now = module._buffers[key]  # pyright: ignore[reportPrivateUsage]
                if now is not copy or copy._version != version:  # pyright: ignore[reportPrivateUsage]
                    raise InvalidInput(
                        f"the forward pass changes buffer {key!r} of a {type(module).__name__}, "
                        "which carries data from one example to others; use a layer without it"
                    )
        finally:
            if self._recorder is not None:
                self._recorder.disable()
            self._place(self._parameters)
            for module, key, buffer in own:
                module._buffers[key] = buffer  # pyright: ignore[reportPrivateUsage]
            for module in modules:
                if isinstance(module, nn.RNNBase):
                    module._init_flat_weights()  # pyright: ignore[reportPrivateUsage]

    def _place(self, tensors: Sequence[Tensor]) -> None:
        """Put tensors in the places of the model's trainable parameters."""
        for values, key, parameter in self._slots:
            values[key] = tensors[parameter]

    def _current(self) -> list[Tensor]:
        """The tensors that are in the places of the trainable parameters."""
        tensors: dict[int, Tensor] = {
            parameter: values[key] for values, key, parameter in self._slots
        }
        return [tensors[parameter] for parameter in range(len(self.names))]

    def _differentiate(self, task: MicroBatch) -> tuple[_Plan, Pass, int]:
        """Differentiate a micro-batch: the plan, the results, and the number of units."""
        key = task.key()
        detached = self._current()
        forced: frozenset[int] = frozenset()  # parameters that must be explicit
        failures = 0
        for _ in range(len(self.names) + 4):
            plan = self._plan(key, task, forced) if failures < 2 else self._loop_plan()
            self.margin = plan.margin
            size = cast("int", self.micro_batch)
            leaves, weights = task.examples(size)
            state = RandomState()
            try:
                if plan.loop:
                    return plan, self._loop(task, leaves, weights), size
                result = self._vmap(plan, task, leaves, weights)
                self._worked.add(key)
            except InvalidInput:
                raise
            except PlanMismatch as mismatch:
                forced |= mismatch.parameters
                self._plans.pop(key, None)
                state.restore()
            except Exception as error:
                if plan.loop:
                    raise
                state.restore()
                failures += 1  # it is tried again, in case the error goes away
                if failures == 2:
                    self._fall_back(key, error)
            else:
                return plan, result, size
            finally:
                self._place(detached)
        raise InvalidInput(
            "the model uses its parameters in another way each time it is called; "
            "its gradients cannot be planned"
        )

    def _plan(self, key: Any, task: MicroBatch, forced: frozenset[int]) -> _Plan:
        """The plan for batches of a shape; one with forced parameters is for one batch only.

        So a plan does not depend on earlier batches, and a repeated step has the same bits.
        """
        if forced:
            return self._make_plan(task, forced)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(task, forced)
        return plan

    def _fall_back(self, key: Any, error: Exception) -> None:
        """Use the loop from now on, unless batches of this shape worked before."""
        if key not in self._worked:
            self._plans[key] = self._loop_plan()
        if not self._warned:
            warnings.warn(
                "gradients are computed one example at a time, which is slow, since "
                f"torch.func.vmap cannot run this model: {error!s:.300}",
                stacklevel=5,
            )
            self._warned = True

    def _loss(self, task: MicroBatch, leaves: Sequence[Tensor]) -> Tensor:
        """The loss of one row, as a number."""
        row = pytree.tree_unflatten([leaf.unsqueeze(0) for leaf in leaves], task.structure)
        loss = task.loss_fn(self.model, row)
        if check_loss(loss).numel() != 1:
            raise InvalidInput(
                "loss_fn(model, batch) must return the mean loss as a scalar tensor, or one loss "
                f"per row; for one row, got a tensor of shape {tuple(loss.shape)}"
            )
        return loss.reshape(())

    def _vmap(
        self, plan: _Plan, task: MicroBatch, leaves: list[Tensor], weights: list[Tensor]
    ) -> Pass:
        """Differentiate all examples of a micro-batch at once."""
        examples = leaves[0].shape[0]
        tensors = self._current()
        tapped = {id(t): (k, t) for k, t in enumerate(tensors) if k not in plan.explicit}
        taps = [
            torch.zeros((), dtype=torch.promote_types(dtype, torch.float32))
            .expand(examples, *shape)
            .requires_grad_()
            for shape, dtype in plan.outputs
        ]
        explicit = [
            tensors[k].expand(examples, *tensors[k].shape).requires_grad_() for k in plan.explicit
        ]

        def one_example(
            leaves: list[Tensor], weights: list[Tensor], taps: list[Tensor], explicit: list[Tensor]
        ) -> tuple[Tensor, list[Tensor]]:
            own = list(tensors)
            for k, tensor in zip(plan.explicit, explicit, strict=True):
                own[k] = tensor
            self._place(own)
            recorder = self._recorder = Recorder(tapped, taps)
            with recorder:
                loss = self._loss(task, leaves)
            if tuple(recorder.uses) != plan.uses or len(recorder.outputs) != len(taps):
                raise PlanMismatch("another number of operations")
            return loss * weights[0] if weights else loss, recorder.records

        with torch.enable_grad():
            over_examples = torch.func.vmap(one_example, randomness="different")
            losses, records = over_examples(leaves, weights, taps, explicit)
            inputs = [*taps, *explicit]
            if losses.requires_grad:
                gradients = torch.autograd.grad(
                    losses.sum(), inputs, allow_unused=True, materialize_grads=True
                )
            else:
                gradients = [torch.zeros_like(value) for value in inputs]
        wide = [_at_least_float32(value) for value in gradients]
        records = [_at_least_float32(value) for value in records]
        return Pass(losses.detach(), records, wide[: len(taps)], wide[len(taps) :])

    def _loop(self, task: MicroBatch, leaves: list[Tensor], weights: list[Tensor]) -> Pass:
        """Differentiate the examples of a micro-batch one by one, by autograd alone."""
        detached = self._current()
        losses: list[Tensor] = []
        rows: list[Sequence[Tensor]] = []
        for example in range(leaves[0].shape[0]):
            own = [tensor.detach().requires_grad_() for tensor in detached]
            self._place(own)
            with torch.enable_grad():
                loss = self._loss(task, [leaf[example] for leaf in leaves])
                loss = loss * weights[0][example] if weights else loss
                if loss.requires_grad:
                    rows.append(
                        torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
                    )
                else:
                    rows.append([torch.zeros_like(tensor) for tensor in own])
            losses.append(loss.detach())
        explicit = [_at_least_float32(torch.stack(column)) for column in zip(*rows, strict=True)]
        return Pass(torch.stack(losses), [], [], explicit)

    # ------------------------------------------------------------------ planning

    def _loop_plan(self) -> _Plan:
        return _Plan(explicit=tuple(range(len(self.names))), loop=True)

    def _make_plan(self, task: MicroBatch, forced: frozenset[int]) -> _Plan:
        """Run the model on one example, and decide how to compute the gradient of each parameter.

        A parameter is explicit if the loss still depends on it when all supported uses are taken
        out of the graph of autograd. So no use is overlooked, wherever it is.
        """
        explicit = forced | self._dry_run(task, forced)[0]
        _, recorder = self._dry_run(task, explicit)
        bytes_per_example = sum(
            4 * math.prod(shape) * dtype.itemsize  # output, tapped output, gradient, and one more
            for shape, dtype in recorder.outputs
        ) + sum(record.nbytes for record in recorder.records)
        sizes = [p.numel() for p in self._parameters]
        written = sum(sizes[k] for k in explicit)
        plan = _Plan(tuple(sorted(explicit)), tuple(recorder.uses), tuple(recorder.outputs))
        small: list[int] = []
        large: list[int] = []
        sparse: list[int] = []
        factored: list[int] = []
        patches = 0
        for k, parameter in enumerate(self._parameters):
            uses = plan.uses_of(k)
            kinds = {use.kind for use in uses}
            if not uses:
                continue
            if kinds == {"embedding"}:
                sparse.append(k)
            elif self._cheaper_factored(parameter, plan, uses):
                factored.append(k)
            elif "conv" in kinds or (parameter.numel() > SMALL and not kinds <= {"sum", "scale"}):
                large.append(k)
                for use in uses:
                    if use.kind == "conv":
                        length = math.prod(plan.outputs[use.tap][0][-use.options[-1] :])
                        patches += parameter[0].numel() * use.options[-2] * length
            else:
                small.append(k)
                written += parameter.numel()
        micro_batch = self.micro_batch
        if micro_batch is None:
            per_unit = self.examples_per_unit * bytes_per_example + 4 * written
            usual = self.usual_batch or task.rows.units
            micro_batch = self.micro_batch = self._choose_micro_batch(usual, per_unit)
        margin = self._margin(plan, factored, micro_batch)
        if not margin <= LARGEST_MARGIN:
            large, factored, margin = sorted([*large, *factored]), [], 0.0
        chunk_bytes = 4 * (sum(sizes[k] for k in large) + self.examples_per_unit * patches)
        chunk = min(micro_batch, max(1, CHUNK_BYTES // max(1, chunk_bytes)))
        return replace(
            plan,
            small=tuple(small),
            large=tuple(large),
            sparse=tuple(sparse),
            factored=tuple(factored),
            chunk=chunk,
            margin=margin,
        )

    def _choose_micro_batch(self, units: int, bytes_per_unit: int) -> int:
        """The number of units per micro-batch: few micro-batches, of a limited size.

        All micro-batches are filled up to the same size. Sizes of random batches differ by a few
        square roots, so there is room for this; else many batches would need one more micro-batch.
        """
        expected = min(self.largest_batch, units + 4 * math.isqrt(units))
        if self.largest_batch <= 1.25 * units:
            expected = self.largest_batch
        most = max(1, MICRO_BATCH_BYTES // max(1, bytes_per_unit))
        return -(-expected // -(-expected // most))

    def _dry_run(
        self, task: MicroBatch, explicit: frozenset[int]
    ) -> tuple[frozenset[int], Recorder]:
        """Run the model on one example.

        Returns:
            The parameters on which the loss depends other than by supported uses, and the uses.
        """
        state = RandomState()
        detached = self._current()
        own = [tensor.detach().requires_grad_() for tensor in detached]
        tapped = {
            id(leaf): (k, raw)
            for k, (leaf, raw) in enumerate(zip(own, detached, strict=True))
            if k not in explicit
        }
        recorder = self._recorder = Recorder(tapped)
        try:
            self._place(own)
            leaves, _ = task.examples(1)
            with torch.enable_grad(), recorder:
                loss = self._loss(task, [leaf[0] for leaf in leaves])
            gradients: Sequence[Tensor | None] = [None] * len(own)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, own, allow_unused=True)
        finally:
            self._place(detached)
            state.restore()
        return frozenset(k for k, value in enumerate(gradients) if value is not None), recorder

    def _positions(self, plan: _Plan, uses: Sequence[Use]) -> int:
        """The number of outer products that add up to a unit's gradient."""
        outputs = [plan.outputs[use.tap][0] for use in uses]
        return self.examples_per_unit * sum(math.prod(shape[:-1]) for shape in outputs)

    def _cheaper_factored(self, parameter: Tensor, plan: _Plan, uses: Sequence[Use]) -> bool:
        """Whether norms and sums from products take less time than written-out gradients."""
        kinds = {use.kind for use in uses}
        if not (kinds <= {"linear", "embedding"} or kinds == {"transposed"}):
            return False
        length, size = self._positions(plan, uses), parameter.numel()
        written_out = size * (length + WRITTEN_OUT_COST)
        # Float64 takes twice the time.
        products = 2 * length * (length * sum(parameter.shape) + size)
        return length == 1 or products < written_out

    def _margin(self, plan: _Plan, factored: Sequence[int], micro_batch: int) -> float:
        """The part of the clip norm that covers rounding errors of sums of products."""
        if not factored:
            return 0.0
        length = max(self._positions(plan, plan.uses_of(k)) for k in factored)
        cancellation = 1.0 if length == 1 else MOST_CANCELLATION
        # Each of the two compared batches has these errors. 1.01 covers terms of second order.
        terms = micro_batch * length + 8
        products = 2 * 1.01 * terms * ROUNDING * self.largest_batch * cancellation
        size = sum(self._parameters[k].numel() for k in factored)
        micro_batches = -(-self.largest_batch // micro_batch)
        rounding = micro_batches * math.sqrt(size) * (self.grid.step / self.grid.clip_norm)
        return products + rounding

    # ------------------------------------------------------------------ clipping and summing

    def _sum(
        self, plan: _Plan, result: Pass, units: int, real: int, is_first: bool
    ) -> tuple[FloatVector, FloatVector]:
        """Add the clipped gradients of a micro-batch to `steps`.

        Args:
            plan: How the gradients are computed.
            result: The results of the forward and backward pass.
            units: The number of units of the micro-batch.
            real: How many of them are real; the rest only fills up the micro-batch.
            is_first: Whether it is the first one of a batch, so that `steps` is overwritten.

        Returns:
            The squared norm and the factor of each unit.
        """
        if is_first:
            for k in range(len(self.names)):
                if k not in plan.factored:  # these are overwritten below
                    self._steps(k)[:] = 0
        squares, products = np.zeros(units), np.zeros(units)
        small = [
            (k, rows_of(_per_unit(value, units), units))
            for k, value in zip(plan.explicit, result.explicit, strict=True)
        ]
        every = slice(0, units)
        small += [
            (k, self._gradient(plan, result, k, units, every, self._memory)) for k in plan.small
        ]
        add_squares([rows for _, rows in small], squares)
        embeddings = [(k, *_embedding_rows(plan, result, k, units)) for k in plan.sparse]
        for _, tokens, rows in embeddings:
            split(units, rows.size, kernels.merge_rows, (tokens, rows), (squares,))
        pairs = [
            (k, Products.of(plan.uses_of(k), self._parameters[k], result, units))
            for k in plan.factored
        ]
        for _, pair in pairs:
            pair.add_squares(squares, products)
        factors = self._add_large(plan, result, squares, products, real)
        self._add_rows(small, factors)
        scale = 1 / self.grid.step
        for k, tokens, rows in embeddings:
            steps = self._steps(k).reshape(self._parameters[k].shape)
            work = (tokens, rows, factors, scale)
            split(rows.shape[2], rows.size, kernels.add_rows, work, (steps,))
        for k, pair in pairs:
            total = pair.weighted_sum(factors, self._memory)
            most = 2 * units * self.grid.clip_norm * scale  # with room for rounding
            work = (total, scale, most, is_first)
            split(total.size, total.size, kernels.add_rounded, work, (self._steps(k),))
        return squares, factors

    def _add_large(
        self,
        plan: _Plan,
        result: Pass,
        squares: FloatVector,
        products: FloatVector,
        real: int,
    ) -> FloatVector:
        """Write out the large gradients of a few units at a time, clip and add them.

        Each thread works on other units and adds to a sum of its own. Sums of whole numbers do not
        depend on their order. The threads of torch would get in the way: they stay active for a
        while after each operation.

        Returns:
            The factor of each unit.
        """
        units = squares.size
        if not plan.large:
            factors = self._factors(squares, products, plan.margin)
            factors[real:] = 0
            return factors
        factors = np.zeros(units)
        threads = torch.get_num_threads()
        chunk = min(plan.chunk, -(-units // threads))
        own_sums = dict[int, tuple[Memory, Steps]]()  # by thread

        def work(start: int) -> None:
            if get_ident() not in own_sums:
                own_sums[get_ident()] = self._sums_of_threads.pop()
            memory, steps = own_sums[get_ident()]
            own = slice(start, min(start + chunk, units))
            large = [(k, self._gradient(plan, result, k, units, own, memory)) for k in plan.large]
            add_squares([rows for _, rows in large], squares[own])
            factors[own] = self._factors(squares[own], products[own], plan.margin)
            if own.stop > real:
                factors[max(start, real) : own.stop] = 0
            self._add_rows(large, factors[own], steps)

        while len(self._sums_of_threads) < threads:
            is_first = not self._sums_of_threads
            steps = self.steps if is_first else np.zeros(self.size, dtype=np.int64)
            self._sums_of_threads.append((Memory(), steps))
        starts = range(0, units, chunk)
        if threads == 1:
            parallel_map(work, starts, 1)
        else:
            torch.set_num_threads(1)
            try:
                parallel_map(work, starts, threads)
            finally:
                torch.set_num_threads(threads)
        for memory, steps in own_sums.values():
            if steps is not self.steps:
                for k in plan.large:
                    start, stop = self.spans[k]
                    self.steps[start:stop] += steps[start:stop]
                    steps[start:stop] = 0
            self._sums_of_threads.append((memory, steps))
        return factors

    def _factors(self, squares: FloatVector, products: FloatVector, margin: float) -> FloatVector:
        """The factors that clip the gradients; 0 for those that are not finite."""
        norms = self._norms(squares)
        with np.errstate(invalid="ignore", divide="ignore"):
            if self.joint is None:
                limit = self.grid.clip_norm * (1 - margin)
                factors = np.minimum(1.0, limit / norms)
            else:
                # The errors are those of a sum with clip norm 1, and all in the update.
                limit = math.sqrt(1 - self.joint.beta**2) - margin
                factors = limit / (1 + SLACK) / np.maximum(norms, self.joint.clip_norm)
            most = MOST_CANCELLATION * self.grid.clip_norm
            factors = np.minimum(factors, most / np.sqrt(products))
        return np.where(np.isfinite(norms) & np.isfinite(products), factors, 0.0)

    def _norms(self, squares: FloatVector) -> FloatVector:
        """Upper bounds of norms, from sums of squares."""
        # Sums of squares have at most size / LANES + LANES terms in a row, or as many as the
        # largest dimension of a parameter; the rest is for a few single operations.
        terms = self.size / kernels.LANES + kernels.LANES + self._longest + 100
        return np.sqrt(squares) * (1 + terms * ROUNDING) + TINY

    def _bits(self, squares: FloatVector, factors: FloatVector) -> int:
        """The sum of the bits of units, in steps; a gradient that is not finite adds nothing."""
        if self.joint is None:
            return 0
        finite = self._norms(squares)[factors > 0].tolist()
        return sum(self.joint.bit(norm, self.grid.step) for norm in finite)

    def _clipped(self, squares: FloatVector, factors: FloatVector) -> int:
        """How many gradients were scaled down."""
        if self.joint is None:
            return int(np.count_nonzero((factors > 0) & (factors < 1)))
        is_longer = self._norms(squares) > self.joint.clip_norm
        return int(np.count_nonzero((factors > 0) & is_longer))

    def joint_steps(self) -> Steps:
        """The sum of the last batch; with adaptive clipping, the sum of its bits is the last."""
        return self.steps if self.joint is None else np.append(self.steps, np.int64(self.bits))

    def _steps(self, parameter: int, steps: Steps | None = None) -> Steps:
        start, stop = self.spans[parameter]
        return (self.steps if steps is None else steps)[start:stop]

    def _gradient(
        self,
        plan: _Plan,
        result: Pass,
        parameter: int,
        units: int,
        own: slice,
        reused: "Memory",
    ) -> NDArray[Any]:
        """The written-out gradients of some units, one per row."""
        shape = tuple(self._parameters[parameter].shape)
        count = own.stop - own.start
        total: Tensor | None = None
        for use in plan.uses_of(parameter):
            signal = _of_units(result.signals[use.tap], units, own)
            record = None if use.record < 0 else _of_units(result.records[use.record], units, own)
            memory = None
            if total is None and use.kind in {"linear", "transposed"}:
                memory = reused.get(str(parameter), (count, *shape), signal.dtype)
            value = gradient(use, shape, record, signal, count, memory)
            total = value if total is None else total + value  # not in place: it may be a view
        return rows_of(cast("Tensor", total), count)

    def _add_rows(
        self,
        gradients: Sequence[tuple[int, NDArray[Any]]],
        factors: FloatVector,
        steps: Steps | None = None,
    ) -> None:
        """Add written-out gradients to the sum, exactly."""
        threads = torch.get_num_threads()
        most = self.grid.clip_norm / self.grid.step
        pieces = [
            (k, rows, start, min(start + width, rows.shape[1]))
            for k, rows in gradients
            for width in [max(kernels.TILE, -(-rows.shape[1] // threads))]
            for start in range(0, rows.shape[1], width)
        ]

        def work(piece: tuple[int, NDArray[Any], int, int]) -> None:
            k, rows, start, stop = piece
            total = self._steps(k, steps)
            kernels.add_units(rows, factors, 1 / self.grid.step, most, start, stop, total)

        size = sum(rows.size for _, rows in gradients)
        parallel_map(work, pieces, threads if size > WORK_PER_THREAD else 1)


def _at_least_float32(values: Tensor) -> Tensor:
    low = values.is_floating_point() and values.dtype.itemsize < 4
    return values.float() if low else values


def _per_unit(values: Tensor, units: int) -> Tensor:
    """The sum over the examples of each unit."""
    examples = values.shape[0] // units
    return values if examples == 1 else values.view(units, examples, *values.shape[1:]).sum(1)


def _of_units(values: Tensor, units: int, own: slice) -> Tensor:
    """The values of the examples of some units."""
    examples = values.shape[0] // units
    return values[own.start * examples : own.stop * examples]


def _unit_losses(losses: Tensor, units: int) -> FloatVector:
    values = _at_least_float32(losses).numpy().astype(np.float64)
    return values if values.size == units else values.reshape(units, -1).sum(1)


def _embedding_rows(
    plan: _Plan, result: Pass, parameter: int, units: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The tokens of each unit, -1 for padding, and the gradients of their rows; both are copies."""
    tokens: list[Tensor] = []
    rows: list[Tensor] = []
    for use in plan.uses_of(parameter):
        record, signal = result.records[use.record], result.signals[use.tap]
        ids = record.reshape(units, -1).long()
        if use.options[0] is not None:
            ids = ids.masked_fill(ids == use.options[0], -1)
        tokens.append(ids)
        rows.append(positions(signal, units, signal.shape[-1]))
    return torch.cat(tokens, 1).numpy(), torch.cat(rows, 1).contiguous().numpy()
