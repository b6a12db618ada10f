"""How parameters are used in a forward pass, and gradients from inputs and output gradients.

The gradient of a linear layer's weight is the product of two small arrays: the layer's input and
the loss's gradient at the layer's output. `Recorder` watches a forward pass, records such inputs,
and adds a zero, the tap, to each output: the gradient with respect to the tap is the gradient at
the output. Autograd never computes a gradient of such a weight.
"""

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dpftrl.errors import InvalidInput


class Use(NamedTuple):
    """One use of a parameter in a supported operation.

    Attributes:
        kind: How the gradient follows from the input and the gradient at the output:
            "linear" and "transposed" (weight of shape [out, in] and [in, out]), "embedding",
            "conv", "scale" (output = input * parameter) and "sum" (a bias).
        parameter: The index of the parameter.
        tap: The index of the tap at the output.
        record: The index of the recorded input; -1 if the gradient does not depend on it.
        options: "conv": the options of the convolution. "embedding": the padding index.
            "scale" and "sum": the number of dimensions behind that of the parameter.
    """

    kind: str
    parameter: int
    tap: int
    record: int
    options: tuple[Any, ...] = ()


class PlanMismatch(Exception):
    """The forward pass used parameters in another way than planned.

    Attributes:
        parameters: The parameters that were used in an operation that is not supported.
    """

    def __init__(self, message: str, parameters: Iterable[int] = ()):
        super().__init__(message)
        self.parameters = frozenset(parameters)


class Recorder(TorchFunctionMode):
    """Records the uses of parameters in a forward pass and taps the outputs.

    Args:
        tapped: For the `id` of each tensor to watch, its parameter's index and the tensor to
            compute with.
        taps: The taps, in the order of the outputs. None in a dry run: then nothing is added.

    Attributes:
        uses: The uses so far.
        records: The recorded inputs.
        outputs: The shape and dtype of each tapped output.
    """

    def __init__(
        self, tapped: Mapping[int, tuple[int, Tensor]], taps: Sequence[Tensor] | None = None
    ):
        super().__init__()
        self._tapped: Mapping[int, tuple[int, Tensor]] = tapped
        self._taps = taps
        self._low: torch.dtype | None = None  # the type of autocast, in operations that use it
        self.uses: list[Use] = []
        self.records: list[Tensor] = []
        self.outputs: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation; tap its output if it uses a watched tensor in a supported way."""
        named = kwargs or {}
        self._low = None
        if self._taps is not None and torch.is_autocast_enabled("cpu") and func in LOWERED:
            self._low = torch.get_autocast_dtype("cpu")
            args = [self._lowered(value) for value in args]
            named = {name: self._lowered(value) for name, value in named.items()}
        watched = self._watched(args) | self._watched(named.values())
        if not watched:
            return REPLACED.get(func, func)(*args, **named)
        handler = HANDLERS.get(func)
        if handler is not None:
            output = handler(self, *args, **named)
            if output is not NotImplemented:
                return output
        if self._taps is not None and func not in METADATA:
            raise PlanMismatch(getattr(func, "__name__", repr(func)), watched)
        return func(*args, **named)

    def disable(self) -> None:
        """Watch nothing any more. An interrupt can leave a mode active after its block."""
        self._tapped = {}

    def _watched(self, values: Iterable[Any]) -> set[int]:
        """The parameters whose tensors are among the values."""
        found: set[int] = set()
        for value in values:
            if isinstance(value, Tensor):
                if id(value) in self._tapped:
                    found.add(self._tapped[id(value)][0])
            elif isinstance(value, list | tuple):
                found |= self._watched(cast("Iterable[Any]", value))
        return found

    def watched(self, *tensors: Any) -> bool:
        """Whether one of the tensors is watched."""
        return any(id(tensor) in self._tapped for tensor in tensors)

    def raw(self, tensor: Any) -> Any:
        """The tensor to compute with: without a gradient of its own if it is watched."""
        entry = self._tapped.get(id(tensor))
        if entry is None:
            return tensor
        return entry[1] if self._low is None else entry[1].to(self._low)

    def _lowered(self, value: Any) -> Any:
        """The value as autocast would convert it; a watched tensor stays, to be recognized."""
        if not isinstance(value, Tensor) or id(value) in self._tapped:
            return value
        return value.to(self._low) if value.dtype == torch.float32 else value

    def tap(self, output: Tensor) -> Tensor:
        """The output plus the next tap."""
        position = len(self.outputs)
        self.outputs.append((tuple(output.shape), output.dtype))
        if self._taps is None:
            return output
        if position >= len(self._taps) or self._taps[position].shape != output.shape:
            raise PlanMismatch("another number or shape of outputs")
        tap = self._taps[position]
        if tap.dtype == output.dtype:
            return output + tap
        # In vmap, autocast may give another type than in the dry run. A tap may be more precise.
        if torch.promote_types(tap.dtype, output.dtype) != tap.dtype:
            raise PlanMismatch("an output of another type")
        return output + tap.to(output.dtype)

    def use(self, kind: str, parameter: Any, value: Tensor | None, *options: Any) -> None:
        """Note a use of `parameter`, if it is watched, whose output was tapped last."""
        entry = self._tapped.get(id(parameter))
        if entry is None:
            return
        record = -1
        tap = len(self.outputs) - 1
        if value is not None:
            record = len(self.records)
            if value.is_floating_point():  # autocast computes in the type of the output
                value = value.to(self.outputs[tap][1])
            self.records.append(value.detach())
        self.uses.append(Use(kind, entry[0], tap, record, options))

    def tap_linear(self, value: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> Any:
        """Tap the output of `value @ weight.T + bias`."""
        output = self.tap(output)
        self.use("linear", weight, value)
        self.use("sum", bias, None, 0)
        return output


Handler = Callable[..., Any]


def _linear(recorder: Recorder, input: Tensor, weight: Tensor, bias: Any = None) -> Any:  # noqa: A002
    if recorder.watched(input):
        return NotImplemented
    output = functional.linear(input, recorder.raw(weight), recorder.raw(bias))
    return recorder.tap_linear(input, weight, bias, output)


def _matmul(recorder: Recorder, input: Tensor, other: Tensor) -> Any:  # noqa: A002
    if recorder.watched(input) or other.dim() != 2:
        return NotImplemented
    output = recorder.tap(torch.matmul(input, recorder.raw(other)))
    recorder.use("transposed", other, input)
    return output


def _addmm(recorder: Recorder, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: Any) -> Any:  # noqa: A002
    if recorder.watched(mat1) or scales or input.dim() != 1:
        return NotImplemented
    output = recorder.tap(torch.addmm(recorder.raw(input), mat1, recorder.raw(mat2)))
    recorder.use("transposed", mat2, mat1)
    recorder.use("sum", input, None, 0)
    return output


def _embedding(
    recorder: Recorder,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    del norm_type, sparse
    if max_norm is not None:
        raise InvalidInput(
            "an embedding with max_norm changes its weight in the forward pass; use max_norm=None"
        )
    if scale_grad_by_freq:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    output = recorder.tap(functional.embedding(input, recorder.raw(weight)))
    recorder.use("embedding", weight, input, padding_idx)
    return output


def _convolution(dimensions: int, operation: Callable[..., Tensor]) -> Handler:
    def pair(value: Any, of_first: int) -> tuple[int, int]:
        """The option for two dimensions; that of an added first dimension is `of_first`."""
        values = (value,) * dimensions if isinstance(value, int) else tuple(value)
        values = values * dimensions if len(values) == 1 else values
        return cast("tuple[int, int]", (of_first, *values) if dimensions == 1 else values)

    def handler(
        recorder: Recorder,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if recorder.watched(input):
            return NotImplemented
        symmetric = padding
        if padding == "valid":
            symmetric = 0
        elif padding == "same":
            spread = pair(dilation, 1)[-dimensions:]
            both = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
            if any(total % 2 for total in both):
                return NotImplemented
            symmetric = [total // 2 for total in both]
        raw = recorder.raw(weight), recorder.raw(bias)
        output = recorder.tap(operation(input, *raw, stride, padding, dilation, groups))
        kernel = (1, *weight.shape[2:]) if dimensions == 1 else tuple(weight.shape[2:])
        options = kernel, pair(dilation, 1), pair(symmetric, 0), pair(stride, 1), groups
        recorder.use("conv", weight, input, *options, dimensions)
        recorder.use("sum", bias, None, dimensions)
        return output

    return handler


def _layer_norm(
    recorder: Recorder,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    if recorder.watched(input):
        return NotImplemented
    shape = list(normalized_shape)
    output = functional.layer_norm(input, shape, recorder.raw(weight), recorder.raw(bias), eps)
    output = recorder.tap(output)
    if recorder.watched(weight):
        recorder.use(
            "scale", weight, functional.layer_norm(input.detach(), shape, None, None, eps), 0
        )
    recorder.use("sum", bias, None, 0)
    return output


def _rms_norm(
    recorder: Recorder,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    if recorder.watched(input):
        return NotImplemented
    shape = list(normalized_shape)
    output = recorder.tap(functional.rms_norm(input, shape, recorder.raw(weight), eps))
    recorder.use("scale", weight, functional.rms_norm(input.detach(), shape, None, eps), 0)
    return output


def _group_norm(
    recorder: Recorder,
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    if recorder.watched(input):
        return NotImplemented
    output = functional.group_norm(input, num_groups, recorder.raw(weight), recorder.raw(bias), eps)
    output = recorder.tap(output)
    behind = input.dim() - 2
    if recorder.watched(weight):
        normalized = functional.group_norm(input.detach(), num_groups, None, None, eps)
        recorder.use("scale", weight, normalized, behind)
    recorder.use("sum", bias, None, behind)
    return output


def _never(_: Any) -> bool:
    return False


# The same code as in torch, but without the test for a mode such as Recorder: the operations inside
# go through the mode instead.
_open_attention = types.FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": _never},
    "multi_head_attention_forward",
    functional.multi_head_attention_forward.__defaults__,
)


def _attention(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    with recorder:
        return _open_attention(*args, **kwargs)


_plain_attention: Any = functional.scaled_dot_product_attention


class _FoldedAttention(torch.autograd.Function):
    """Scaled dot-product attention that vmap runs as one operation on a larger batch.

    Without this, vmap would run the fast operation for one example at a time.
    """

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Any) -> Any:
        """Compute attention, outside of vmap."""
        return _plain_attention(query, key, value, mask, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: only `vmap` is used with gradients."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Compute attention for all examples."""
        *tensors, mask, options = args
        batched = [
            _in_front(tensor, dim, info.batch_size)
            for tensor, dim in zip(tensors, in_dims[:3], strict=True)
        ]
        shape = batched[0].shape
        if mask is not None and (in_dims[3] is not None or mask.dim() > 2):
            mask = _in_front(mask, in_dims[3], info.batch_size)
            missing = len(shape) - mask.dim()
            mask = mask.reshape(shape[0], *[1] * missing, *mask.shape[1:])
            mask = mask.expand(*shape[:-3], *mask.shape[-3:]).flatten(0, -4)
        folded = [tensor.flatten(0, -4) for tensor in batched]
        output = _plain_attention(*folded, mask, **options)
        return output.reshape(*shape[:-1], output.shape[-1]), 0


def _in_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor with vmap's dimension as the first one."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Any:
    options = {"dropout_p": dropout_p, "is_causal": is_causal, **more}
    if not torch._C._functorch.is_batchedtensor(query) or query.dim() < 3:  # pyright: ignore
        return _plain_attention(query, key, value, attn_mask, **options)
    return cast("Any", _FoldedAttention).apply(query, key, value, attn_mask, options)


def _recurrent(step: str, gates: int) -> Handler:
    """Recurrent layers as linear layers, step by step: vmap does not support the fused ones."""

    def handler(
        recorder: Recorder,
        input: Any,  # noqa: A002
        hidden: Any,
        weights: Any,
        *options: Any,
    ) -> Any:
        if len(options) != 6 or not isinstance(weights, list | tuple):
            return NotImplemented  # a packed sequence
        parameters = cast("Sequence[Tensor]", weights)
        has_biases, layers, dropout, training, bidirectional, batch_first = options
        per_layer = 4 if has_biases else 2
        directions = 2 if bidirectional else 1
        if len(parameters) != per_layer * layers * directions or recorder.watched(input):
            return NotImplemented  # projections
        states: tuple[Tensor, ...] = tuple(hidden) if step == "lstm" else (hidden,)
        if recorder.watched(*states):
            return NotImplemented
        x = input.transpose(0, 1) if batch_first else input
        last: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            outputs: list[Tensor] = []
            for direction in range(directions):
                k = layer * directions + direction
                own = parameters[k * per_layer : (k + 1) * per_layer]
                start = tuple(state[k] for state in states)
                sequence, end = _run_layer(recorder, step, gates, x, start, own, direction == 1)
                outputs.append(sequence)
                last.append(end)
            x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
            if dropout and training and layer < layers - 1:
                x = functional.dropout(x, dropout)
        output = x.transpose(0, 1) if batch_first else x
        return output, *(torch.stack(state) for state in zip(*last, strict=True))

    return handler


def _run_layer(
    recorder: Recorder,
    step: str,
    gates: int,
    x: Tensor,
    state: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one direction of a recurrent layer over a sequence [time, batch, features]."""
    w_input, w_hidden, *biases = weights
    b_input, b_hidden = biases or (None, None)
    raw_hidden = recorder.raw(w_hidden), recorder.raw(b_hidden)
    projected = functional.linear(x, recorder.raw(w_input), recorder.raw(b_input))
    projected = recorder.tap_linear(x, w_input, b_input, projected)
    # In a GRU, the projection of the hidden state has a gradient of its own. In the others, it is
    # added to that of the input and so has the same gradient, at the same tap.
    own_tap = recorder.tap(projected.new_zeros(projected.shape)) if step == "gru" else None
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    h = state[0]
    c = state[-1]
    size = h.shape[-1]
    times = range(x.shape[0])
    for t in reversed(times) if reverse else times:
        inputs.append(h)
        recurrent = functional.linear(h, *raw_hidden)
        if own_tap is not None:
            recurrent = recurrent + own_tap[t]
            r, z = torch.sigmoid(projected[t][..., : 2 * size] + recurrent[..., : 2 * size]).chunk(
                2, -1
            )
            n = torch.tanh(projected[t][..., 2 * size :] + r * recurrent[..., 2 * size :])
            h = n + z * (h - n)
        elif step == "lstm":
            i, f, g, o = (projected[t] + recurrent).chunk(gates, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        else:
            h = getattr(torch, step)(projected[t] + recurrent)
        outputs.append(h)
    if reverse:
        inputs.reverse()
        outputs.reverse()
    if recorder.watched(w_hidden):
        recorder.use("linear", w_hidden, torch.stack(inputs))
    recorder.use("sum", b_hidden, None, 0)
    return torch.stack(outputs), (h, c) if step == "lstm" else (h,)


_plain_cross_entropy: Any = functional.cross_entropy


def _cross_entropy(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The cross-entropy of class numbers; vmap would run slow Python code for torch's own."""
    options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    is_usual = weight is size_average is reduce is None and label_smoothing == 0
    if not is_usual or input.dim() < 2 or target.is_floating_point():
        return _plain_cross_entropy(input, target, *options)
    counts = target != ignore_index
    places = torch.where(counts, target, 0).unsqueeze(1)
    losses = -functional.log_softmax(input, 1).gather(1, places).squeeze(1)
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


_torch: Any = torch  # these functions have no complete types
HANDLERS: dict[Any, Handler] = {
    functional.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    functional.embedding: _embedding,
    _torch.conv1d: _convolution(1, _torch.conv1d),
    _torch.conv2d: _convolution(2, _torch.conv2d),
    functional.layer_norm: _layer_norm,
    functional.rms_norm: _rms_norm,
    functional.group_norm: _group_norm,
    functional.multi_head_attention_forward: _attention,
    _torch.lstm: _recurrent("lstm", 4),
    _torch.gru: _recurrent("gru", 3),
    _torch.rnn_tanh: _recurrent("tanh", 1),
    _torch.rnn_relu: _recurrent("relu", 1),
}
# Operations that are computed in another way, since vmap does not support them well.
REPLACED: dict[Any, Handler] = {
    functional.cross_entropy: _cross_entropy,
    functional.scaled_dot_product_attention: _scaled_dot_product_attention,
}
# Operations that autocast computes in low precision. In vmap on CPUs, autocast has no effect, so
# the recorder does it.
LOWERED: frozenset[Any] = frozenset(
    [key for key in HANDLERS if key in {functional.linear, torch.addmm}]
    + [key for key, handler in HANDLERS.items() if handler is _matmul]
    + [_torch.conv1d, _torch.conv2d, _torch.conv3d, torch.bmm, Tensor.bmm, torch.baddbmm]
    + [functional.scaled_dot_product_attention]
)
# What reads a tensor's description, but not its values.
METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad",
        "is_cuda", "is_cpu", "is_meta", "is_mps", "is_quantized", "is_sparse", "is_nested",
    )]
    + [getattr(Tensor, name) for name in (
        "size", "dim", "numel", "nelement", "ndimension", "stride", "is_floating_point",
        "is_complex", "get_device", "is_contiguous", "element_size", "__len__", "type",
    )]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)  # fmt: skip


def gradient(
    use: Use,
    shape: tuple[int, ...],
    record: Tensor | None,
    signal: Tensor,
    units: int,
    out: Tensor | None = None,
) -> Tensor:
    """The gradients of a parameter in one use, one per unit: [units, *shape].

    Args:
        use: The use.
        shape: The shape of the parameter.
        record: The recorded inputs of the operation; those of a unit are next to each other.
        signal: The gradients at the output of the operation, in the same order.
        units: The number of units.
        out: Memory for the result, if it is a matrix product.
    """
    if use.kind == "sum":
        if not use.options[0]:
            return _sum_of_positions(signal.reshape(units, -1, *shape))
        return _by_channel(signal, units, shape[0], use.options[0]).sum((1, 3))
    assert record is not None
    if use.kind == "scale":
        product = signal * record
        if not use.options[0]:
            return _sum_of_positions(product.reshape(units, -1, *shape))
        return _by_channel(product, units, shape[0], use.options[0]).sum((1, 3))
    if use.kind == "linear":
        left, right = positions(signal, units, shape[0]), positions(record, units, shape[1])
        return torch.bmm(left.transpose(1, 2), right, **({} if out is None else {"out": out}))
    if use.kind == "transposed":
        left, right = positions(record, units, shape[0]), positions(signal, units, shape[1])
        return torch.bmm(left.transpose(1, 2), right, **({} if out is None else {"out": out}))
    if use.kind == "embedding":
        tokens = positions(record, units, 1)[..., 0]
        rows = positions(unpadded(use, record, signal), units, shape[1])
        result = rows.new_zeros(units * shape[0], shape[1])
        places = tokens + torch.arange(units)[:, None] * shape[0]
        return result.index_add_(0, places.reshape(-1), rows.reshape(-1, shape[1])).view(
            units, *shape
        )
    return _convolution_gradient(use, shape, record, signal, units)


def positions(values: Tensor, units: int, width: int) -> Tensor:
    """The values as [units, positions, width]."""
    return values.reshape(units, -1, width)


def _sum_of_positions(values: Tensor) -> Tensor:
    return values[:, 0] if values.shape[1] == 1 else values.sum(1)


def unpadded(use: Use, tokens: Tensor, signal: Tensor) -> Tensor:
    """The gradients at an embedding's output, with zeros where the token is padding."""
    padding = use.options[0]
    return signal if padding is None else signal.masked_fill((tokens == padding)[..., None], 0)


def _by_channel(values: Tensor, units: int, channels: int, behind: int) -> Tensor:
    """The values as [units, examples, channels, positions]."""
    size = values.shape[-behind:].numel()
    return values.reshape(units, -1, channels, size)


def _convolution_gradient(
    use: Use, shape: tuple[int, ...], record: Tensor, signal: Tensor, units: int
) -> Tensor:
    kernel, dilation, padding, stride, groups, dimensions = use.options
    image = record.shape[-dimensions:] if dimensions == 2 else (1, record.shape[-1])
    images = record.reshape(-1, shape[1] * groups, *image)
    patches = _patches(images, kernel, dilation, padding, stride)
    examples, length = patches.shape[0], patches.shape[-1]
    patches = patches.view(examples * groups, -1, length)
    signal = signal.reshape(examples * groups, shape[0] // groups, length)
    result = torch.bmm(signal, patches.transpose(1, 2)).view(units, examples // units, *shape)
    return result[:, 0] if examples == units else result.sum(1)


def _patches(
    images: Tensor,
    kernel: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    stride: tuple[int, int],
) -> Tensor:
    """The same as `torch.nn.functional.unfold`, but as one copy, which is much faster."""
    vertical, horizontal = padding
    images = functional.pad(images, (horizontal, horizontal, vertical, vertical)).contiguous()
    counts = [
        (size - spread * (width - 1) - 1) // step + 1
        for size, spread, width, step in zip(
            images.shape[2:], dilation, kernel, stride, strict=True
        )
    ]
    example, channel, row, column = images.stride()
    view = images.as_strided(
        (*images.shape[:2], *kernel, *counts),
        (
            example,
            channel,
            dilation[0] * row,
            dilation[1] * column,
            stride[0] * row,
            stride[1] * column,
        ),
    )
    return view.reshape(images.shape[0], -1, math.prod(counts))
