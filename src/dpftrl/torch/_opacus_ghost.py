r"""Ghost clipping with proven bounds on norms and on rounding.

Ghost clipping never forms the gradients of single examples. The gradient of a linear layer for
example i is a sum over its positions t (the words of a text, say) of b_t a_t^T, with the inputs a_t
of the layer and the derivatives b_t of the loss by its outputs. Its norm follows from inner
products of the a_t and of the b_t, and the clipped sum over a batch is one product of matrices.

The derivatives b_t are float32 numbers, whatever they are: the gradients that are clipped are
defined by them. What must be bounded is the rounding of everything that is computed from them.
Opacus runs a second backward pass, whose derivatives are rounded anew, and nothing bounds how far
they are from the first. Here the a_t and b_t of the first pass are kept instead, and the sum is
computed from them in float64 ("book-keeping", Bu et al. 2023, arXiv 2210.00038).

With E_i = sum_t |a_t| |b_t| and the unit roundoff u = 2^-53, standard error analysis (Higham 2002,
sections 3.1 and 3.5; any order of summation) gives

- |computed squared norm - squared norm| <= 4 (inputs + outputs + T^2) u E_i^2, and
- |computed sum - sum| <= 2 (T n + 8) u sum_i c_i E_i in L2, over all layers,

for n examples with T positions and clipping factors c_i. There can be cancellation, so that E_i
is much larger than the norm. The clipping factors bound both: they use the upper bound of the
norm, and c_i E_i is limited too (`GhostSums.factors`).
"""

# PyTorch and Opacus are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, final
from weakref import ref

import numpy as np
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from torch import Tensor, nn

from dpftrl.clipping import SLACK, ExactSum
from dpftrl.errors import InvalidInput

# The unit roundoff of float64.
ROUNDOFF = 2.0**-53
# Numbers in float64 that a piece of work holds at a time: 64 MB.
PIECE = 2**23
# Number types whose products and squares neither overflow nor vanish in float64.
SMALL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Smallest limit of c_i E_i, in clip norms. With a lower limit, clipping would distort training.
LEAST_LIMIT = 4.0


class Bounds(NamedTuple):
    """Bounds for the gradient of one layer, per example, in float64.

    Attributes:
        squared_norm: An upper bound of the squared norm of the gradient.
        squared_size: An upper bound of E_i^2.
    """

    squared_norm: Tensor
    squared_size: Tensor


class LayerRecord(Protocol):
    """What the backward pass left of one layer, for all examples of a batch."""

    @property
    def examples(self) -> int:
        """Number of examples."""
        ...

    @property
    def positions(self) -> int:
        """Number of positions per example: the T of the bounds."""
        ...

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the layer that are trained."""
        ...

    def bounds(self) -> Bounds:
        """Bounds for every example."""
        ...

    def sums(self, factors: Tensor) -> list[Tensor]:
        """For each parameter, the sum of gradients times factors, in float64."""
        ...


@final
@dataclass(frozen=True)
class LinearRecord:
    """Inputs and derivatives of a linear layer.

    The bias belongs to an input that is always 1.

    Attributes:
        layer: The layer.
        inputs: Inputs, examples x positions x features.
        derivatives: Derivatives of the loss, examples x positions x outputs.
    """

    layer: nn.Linear
    inputs: Tensor
    derivatives: Tensor

    @property
    def examples(self) -> int:
        return len(self.derivatives)

    @property
    def positions(self) -> int:
        return self.derivatives.shape[1]

    @property
    def parameters(self) -> list[Tensor]:
        weight = [self.layer.weight] if self.layer.weight.requires_grad else []
        return [*weight, self.layer.bias] if self._has_bias else weight

    @property
    def _features(self) -> int:
        return self.layer.in_features * self.layer.weight.requires_grad + self._has_bias

    @property
    def _has_bias(self) -> bool:
        bias = cast("Tensor | None", self.layer.bias)
        return bias is not None and bias.requires_grad

    def _pieces(self, per_example: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Inputs (with the 1 of the bias) and derivatives in float64, some examples at a time."""
        for rows in _slices(self.examples, per_example):
            b = self.derivatives[rows].double()
            columns: list[Tensor] = []
            if self.layer.weight.requires_grad:
                columns.append(self.inputs[rows].double())
            if self._has_bias:
                columns.append(torch.ones(*b.shape[:2], 1, dtype=b.dtype, device=b.device))
            yield rows, torch.cat(columns, dim=2), b

    def bounds(self) -> Bounds:
        t, k, o = self.positions, self._features, self.layer.out_features
        by_inner_products = t * t <= k * o
        squares = _zeros(self.examples, self.derivatives)
        sizes = squares.clone()
        for rows, a, b in self._pieces(t * (k + o) + (2 * t * t if by_inner_products else k * o)):
            sizes[rows] = (a.square().sum(2).sqrt() * b.square().sum(2).sqrt()).sum(1).square()
            if t == 1:
                squares[rows] = sizes[rows]
            elif by_inner_products:
                squares[rows] = ((a @ a.mT) * (b @ b.mT)).sum((1, 2))
            else:
                squares[rows] = (b.mT @ a).square().sum((1, 2))
        terms = k + o + t * t if by_inner_products else k * o + 2 * t
        return _with_rounding(squares, sizes, terms)

    def sums(self, factors: Tensor) -> list[Tensor]:
        total = self.derivatives.new_zeros(
            (self.layer.out_features, self._features), dtype=torch.float64
        )
        for rows, a, b in self._pieces(self.positions * (self._features + total.shape[0])):
            scaled = _scaled(b, factors[rows])
            total += scaled.flatten(0, 1).mT @ _kept(a, factors[rows]).flatten(0, 1)
        weight = [total[:, : self.layer.in_features]] if self.layer.weight.requires_grad else []
        return [*weight, total[:, -1]] if self._has_bias else weight


@final
@dataclass(frozen=True)
class EmbeddingRecord:
    """Indices and derivatives of an embedding layer.

    It is a linear layer whose inputs are unit vectors; the input of the padding index is zero.

    Attributes:
        layer: The layer.
        indices: Indices, examples x positions.
        derivatives: Derivatives of the loss, examples x positions x features. They are zero where
            the index is the padding index.
    """

    layer: nn.Embedding
    indices: Tensor
    derivatives: Tensor

    @property
    def examples(self) -> int:
        return len(self.derivatives)

    @property
    def positions(self) -> int:
        return self.derivatives.shape[1]

    @property
    def parameters(self) -> list[Tensor]:
        return [self.layer.weight]

    def bounds(self) -> Bounds:
        t, o = self.positions, self.layer.embedding_dim
        squares = _zeros(self.examples, self.derivatives)
        sizes = squares.clone()
        for rows in _slices(self.examples, t * (o + 3 * t)):
            b, x = self.derivatives[rows].double(), self.indices[rows]
            sizes[rows] = b.square().sum(2).sqrt().sum(1).square()
            same = x[:, :, None] == x[:, None, :]
            squares[rows] = torch.where(same, b @ b.mT, 0).sum((1, 2))
        return _with_rounding(squares, sizes, o + t * t)

    def sums(self, factors: Tensor) -> list[Tensor]:
        total = self.derivatives.new_zeros(self.layer.weight.shape, dtype=torch.float64)
        for rows in _slices(self.examples, self.positions * self.layer.embedding_dim):
            scaled = _scaled(self.derivatives[rows].double(), factors[rows])
            total.index_add_(0, self.indices[rows].flatten(), scaled.flatten(0, 1))
        return [total]


@final
@dataclass(frozen=True)
class GradientRecord:
    """The gradients of a parameter of any other layer, one per example.

    Attributes:
        parameter: The parameter.
        gradients: Gradients, examples x the shape of the parameter.
    """

    parameter: nn.Parameter
    gradients: Tensor
    positions: int = 1

    @property
    def examples(self) -> int:
        return len(self.gradients)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.parameter]

    def bounds(self) -> Bounds:
        squares, size = _zeros(self.examples, self.gradients), self.parameter.numel()
        for rows in _slices(self.examples, size):
            squares[rows] = self.gradients[rows].double().flatten(1).square().sum(1)
        return _with_rounding(squares, squares, size)

    def sums(self, factors: Tensor) -> list[Tensor]:
        total = self.gradients.new_zeros(self.parameter.shape, dtype=torch.float64)
        for rows in _slices(self.examples, self.parameter.numel()):
            total += _scaled(self.gradients[rows].double(), factors[rows]).sum(0)
        return [total]


def _by_position(values: Tensor, features: int) -> Tensor:
    """The same values as examples x positions, with `features` dimensions after them."""
    last = values.dim() - features  # the dimensions of examples and positions
    return values.unsqueeze(1) if last == 1 else values.flatten(1, last - 1)


def _zeros(examples: int, like: Tensor) -> Tensor:
    return torch.zeros(examples, dtype=torch.float64, device=like.device)


def _slices(examples: int, per_example: int) -> Iterator[slice]:
    """Slices of examples of which a piece of work fits into memory."""
    length = max(1, PIECE // max(1, per_example))
    return (slice(i, min(i + length, examples)) for i in range(0, examples, length))


def _with_rounding(squares: Tensor, squared_sizes: Tensor, terms: int) -> Bounds:
    """Bounds that cover the rounding of `terms` additions and products in float64."""
    slack = 4 * (terms + 16) * ROUNDOFF  # 16: roots, squares and the sums of a few terms
    return Bounds(squares.clamp(min=0) + slack * squared_sizes, squared_sizes * (1 + slack))


def _root_of_sum(squares: list[Tensor]) -> Tensor:
    """The root of a sum of few terms; `SLACK` exceeds its rounding."""
    return torch.stack([square.to(squares[0].device) for square in squares]).sum(0).sqrt()


def _kept(values: Tensor, factors: Tensor) -> Tensor:
    """The values of examples whose factor is above 0, and zeros for the others."""
    return torch.where(_per_example(factors, values) > 0, values, 0)


def _scaled(values: Tensor, factors: Tensor) -> Tensor:
    """Values times the factor of their example; 0 for factor 0, even times infinity."""
    return _kept(values, factors) * _per_example(factors, values)


def _per_example(factors: Tensor, values: Tensor) -> Tensor:
    """The factors on the device of the values, with as many dimensions."""
    return factors.to(values.device).view((-1,) + (1,) * (values.dim() - 1))


@final
class GhostSums:
    """Clips with ghost clipping, and adds to an exact sum.

    Attributes:
        total: The sum so far, on its grid.
        margin: The relative part of the clip norm that is kept for rounding.

    Args:
        parameters: The parameters, in the order of the coordinates of the sum.
        total: The sum.
        margin: See above.

    Guarantees:
        Replacing the gradient of one example by zero changes the sum by at most the clip norm C.
        Each example contributes at most (1 - margin) C in exact arithmetic. The products of
        matrices are off by at most margin C / 4 in each of the two sums, and putting them on the
        grid also.
    """

    def __init__(self, parameters: list[nn.Parameter], total: ExactSum, margin: float):
        self.total = total
        self.margin = margin
        sizes = [p.numel() for p in parameters]
        ends = np.cumsum(sizes).tolist()
        self._places = {
            id(p): slice(end - size, end)
            for p, size, end in zip(parameters, sizes, ends, strict=True)
        }

    def check_grid(self, examples: int) -> None:
        """Raise unless putting `examples` sums on the grid stays within the margin.

        Every backward pass, of one example or more, is put on the grid once, which moves it by at
        most half a step per coordinate.
        """
        grid, size = self.total.grid, self.total.steps.size
        moved = (examples + 1) * size**0.5 * grid.step  # in both sums together
        if not moved <= self.margin / 2 * grid.clip_norm or examples > grid.most_updates:
            raise InvalidInput(
                f"{examples:,} examples of {size:,} coordinates could be rounded by more than the "
                f"margin of {self.margin:g}; give a larger margin, up to 0.05, or use hooks"
            )

    def factors(self, records: list[LayerRecord], batch: int) -> tuple[Tensor, Tensor]:
        """The clipping factor of every example, and the upper bound of its norm.

        Args:
            records: What the backward pass left of every layer.
            batch: Number of examples in the whole batch of the step.
        """
        clip_norm = self.total.grid.clip_norm
        bounds = [record.bounds() for record in records]
        norms = _root_of_sum([bound.squared_norm for bound in bounds])
        sizes = _root_of_sum([bound.squared_size for bound in bounds])
        terms = max(record.examples * record.positions for record in records)
        roundoff = 2 * (terms + 8) * ROUNDOFF
        # All examples together may use half of the margin, and each an equal part of it.
        limit = self.margin / 2 / max(1, batch) / (2 * roundoff)
        if not limit >= LEAST_LIMIT:
            raise InvalidInput(
                f"a sum of {terms:,} terms for a batch of {batch:,} could be rounded by more than "
                f"the margin of {self.margin:g}; use smaller physical batches (BatchMemoryManager),"
                " give a larger margin, up to 0.05, or use hooks"
            )
        room = clip_norm * (1 - self.margin) / (1 + SLACK)
        factors = torch.minimum(room / norms, limit * clip_norm / (1 + SLACK) / sizes).clamp(max=1)
        finite = torch.isfinite(norms) & torch.isfinite(sizes)
        return torch.where(finite, factors, 0.0), norms

    def add(self, records: list[LayerRecord], factors: Tensor) -> None:
        """Add the clipped gradients of all examples to the sum."""
        for record in records:
            for parameter, values in zip(record.parameters, record.sums(factors), strict=True):
                place = self._places.get(id(parameter))
                if place is not None:
                    steps = (values.flatten() / self.total.grid.step).round().to(torch.int64)
                    self.total.steps[place] += steps.cpu().numpy()
        self.total.updates += len(factors)


class Clipper(Protocol):
    """The optimizer, as the module sees it."""

    def add_gradients(self, records: list[LayerRecord]) -> tuple[Tensor, Tensor]:
        """Clip and add what a backward pass left; return factors and bounds of norms."""
        ...


class GhostClippingModule(GradSampleModuleFastGradientClipping):
    """A module for ghost clipping whose norms and sums have proven bounds.

    Use it in place of Opacus' `GradSampleModuleFastGradientClipping`, with
    `DPFTRLOptimizerFastGradientClipping` and `GhostClippingLoss`. Linear and embedding layers use
    ghost clipping. Of other layers, the gradients of single examples are formed, and kept until
    the backward pass ends; Opacus forms them too.

    Args:
        m: The model.
        batch_first: Whether the first dimension of inputs is that of the examples.
        loss_reduction: "mean" or "sum": how the loss combines the examples.

    Raises:
        NotImplementedError: A trainable layer has buffers, as batch normalization, which mixes
            examples.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
    ):
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._records: list[LayerRecord] = []
        self._clipper: Callable[[], Clipper | None] = lambda: None
        for layer in m.modules():
            if isinstance(layer, nn.Embedding) and layer.weight.requires_grad:
                _check_embedding(layer)

    def attach(self, clipper: "Clipper") -> None:
        """Let an optimizer get the gradients of every backward pass."""
        self._clipper = ref(clipper)

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Any,
        forward_output: Any,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Keep the inputs and derivatives of a layer; Opacus computes norms here."""
        if not self.hooks_enabled:
            return
        layer: Any = module
        inputs, derivatives = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        self._keep(layer, inputs, derivatives)
        for parameter in layer.parameters(recurse=True):
            if parameter.requires_grad:
                parameter._forward_counter -= 1
        if not layer.activations and hasattr(layer, "max_batch_len"):
            del layer.max_batch_len

    def _keep(self, layer: Any, inputs: Any, derivatives: Tensor) -> None:
        """Keep what the sums need of one layer."""
        for tensor in (derivatives, *inputs):
            if tensor.is_floating_point() and tensor.dtype not in SMALL_FLOATS:
                raise InvalidInput(
                    f"ghost clipping needs a model in float32 or less, got {tensor.dtype}; use "
                    "hooks"
                )
        if type(layer) is nn.Linear:
            inputs, derivatives = _by_position(inputs[0], 1), _by_position(derivatives, 1)
            self._records.append(LinearRecord(layer, inputs, derivatives))
        elif type(layer) is nn.Embedding:
            indices, derivatives = _by_position(inputs[0], 0), _by_position(derivatives, 1)
            if layer.padding_idx is not None:
                padding = (indices == layer.padding_idx)[:, :, None]
                derivatives = torch.where(padding, 0, derivatives)
            self._records.append(EmbeddingRecord(layer, indices, derivatives))
        else:
            by_hooks = self.GRAD_SAMPLERS.get(type(layer), ft_compute_per_sample_gradient)
            for parameter, gradients in by_hooks(layer, inputs, derivatives).items():
                if parameter.requires_grad:
                    self._records.append(GradientRecord(parameter, gradients.detach()))

    def get_clipping_coef(self) -> Tensor:
        """Add the clipped gradients to the optimizer's sum, and return the clipping factors.

        The loss calls this after a backward pass. What Opacus' own loss does with the factors, a
        second backward pass, has no influence on the optimizer.
        """
        records, self._records = self._records, []
        clipper = self._clipper()
        if clipper is None:
            raise InvalidInput(
                "give this module to DPFTRLOptimizerFastGradientClipping(..., module=module) first"
            )
        factors, self.per_sample_gradient_norms = clipper.add_gradients(records)
        return factors.float()

    def get_norm_sample(self) -> Tensor:
        """Upper bounds of the norms in the last backward pass. They are not private."""
        return self.per_sample_gradient_norms


class GhostClippingTensor(DPTensorFastGradientClipping):
    """The losses of a batch, with a backward pass that clips."""

    def backward(self) -> None:
        """Run one backward pass, and add the clipped gradients to the sum of the optimizer."""
        losses: Tensor = self.loss_per_sample
        (losses.mean(0) if self.loss_reduction == "mean" else losses.sum(0)).backward()
        self.optimizer.zero_grad()
        cast("GhostClippingModule", self.module).get_clipping_coef()


class GhostClippingLoss(DPLossFastGradientClipping):
    """A loss for ghost clipping that needs one backward pass; that of Opacus needs two.

    Args:
        module: The model, a `GhostClippingModule`.
        optimizer: A `DPFTRLOptimizerFastGradientClipping`.
        criterion: The loss of a batch, such as `nn.CrossEntropyLoss()`.
        loss_reduction: "mean" or "sum", as for the module, the optimizer and the criterion.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> DPTensorFastGradientClipping:
        """The losses; see `DPLossFastGradientClipping`."""
        losses = super().__call__(*args, **kwargs)
        return GhostClippingTensor(
            losses.module, losses.optimizer, losses.loss_per_sample, losses.loss_reduction
        )


def _check_embedding(layer: nn.Embedding) -> None:
    """Raise for options under which the gradient of an example is another one, or is sparse."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(layer, option):
            raise InvalidInput(f"ghost clipping does not support Embedding({option}=...)")


def check_records(records: list[LayerRecord], parameters: list[nn.Parameter]) -> int:
    """The number of examples of a backward pass; raise if its records do not fit together."""
    counts = {record.examples for record in records}
    if len(counts) > 1:
        raise InvalidInput(
            f"layers have {sorted(counts)} examples; every layer must have the examples in the "
            "first dimension"
        )
    seen = [id(parameter) for record in records for parameter in record.parameters]
    if len(set(seen)) != len(seen):
        raise InvalidInput(
            "a parameter is used more than once in a forward pass, for which ghost clipping has "
            "no bound; use hooks (GradSampleModule and DPFTRLOptimizer)"
        )
    missing = [p for p in parameters if id(p) not in set(seen)]
    if records and missing:
        shapes = ", ".join(str(tuple(p.shape)) for p in missing[:3])
        raise InvalidInput(
            f"{len(missing)} parameters got no gradient (shapes {shapes}); freeze them with "
            "requires_grad_(False) before creating the optimizer"
        )
    return counts.pop() if counts else 0
