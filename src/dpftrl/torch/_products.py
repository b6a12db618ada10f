"""Gradients of weight matrices as products that are never written out: their norms and sums.

The gradient of a linear layer's weight is a product of the layer's input and of the gradient at its
output. Norms of such products, and their sums over units, are computed from the factors.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpftrl._internal.threads import parallel_map
from dpftrl.torch import _kernels as kernels
from dpftrl.torch._taps import Use, positions, unpadded

FloatVector = NDArray[np.float64]
ROUNDING: Final = 2.0**-53  # the largest relative rounding error of a float64 operation
# Added to every norm. It exceeds what is lost if squares of tiny numbers underflow to zero.
TINY: Final = 2.0**-480
# Memory for copies in float64 when products are summed.
PIECE_BYTES: Final = 64 * 2**20
# Coordinates times units that a thread should at least have to work on.
WORK_PER_THREAD: Final = 1_000_000


@dataclass(frozen=True, repr=False)
class Pass:
    """The forward and backward pass of a micro-batch. The examples of a unit are neighbours."""

    losses: Tensor
    records: Sequence[Tensor]
    signals: Sequence[Tensor]
    explicit: Sequence[Tensor]


@dataclass(frozen=True, repr=False)
class Products:
    """Gradients of a weight matrix, each a sum of products that is never written out.

    The gradient of unit u is the sum over positions t of the outer products of `left[u, t]` and
    `right[u, t]`, plus `rows[u, s]` at row `tokens[u, s]` for each s.
    """

    shape: tuple[int, ...]
    left: Tensor
    right: Tensor
    tokens: Tensor
    rows: Tensor

    @classmethod
    def of(cls, uses: Sequence[Use], parameter: Tensor, result: Pass, units: int) -> "Products":
        shape = tuple(parameter.shape)
        left: list[Tensor] = []
        right: list[Tensor] = []
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        for use in uses:
            record, signal = result.records[use.record], result.signals[use.tap]
            if use.kind == "embedding":
                tokens.append(record.reshape(units, -1).long())
                rows.append(positions(unpadded(use, record, signal), units, shape[1]))
            else:
                first, second = (signal, record) if use.kind == "linear" else (record, signal)
                left.append(positions(first, units, shape[0]))
                right.append(positions(second, units, shape[1]))
        none = right[0][:, :0]
        return cls(
            shape,
            _joined(left),
            _joined(right),
            _joined(tokens) if tokens else none[..., 0].long(),
            _joined(rows) if rows else none,
        )

    def pieces(self) -> Iterator[slice]:
        """Slices of units whose copies in float64 have a limited size."""
        per_unit = 8 * (self.left[0].numel() + self.right[0].numel() + self.rows[0].numel())
        length = max(1, PIECE_BYTES // per_unit)
        for start in range(0, self.left.shape[0], length):
            yield slice(start, start + length)

    def add_squares(self, squares: FloatVector, products: FloatVector) -> None:
        """Add upper bounds of the squared norms, and the squared sums of the products' norms."""
        length = self.left.shape[1] + self.rows.shape[1]
        if length == 1:
            left, right = np.zeros_like(squares), np.zeros_like(squares)
            add_squares([rows_of(self.left, left.size)], left)
            add_squares([rows_of(self.right, right.size)], right)
            squares += (left + TINY**2) * (right + TINY**2)
            return
        for piece in self.pieces():
            left, right = self.left[piece].double(), self.right[piece].double()
            rows, tokens = self.rows[piece].double(), self.tokens[piece]
            left_gram = torch.bmm(left, left.transpose(1, 2))
            square = (left_gram.mul_(torch.bmm(right, right.transpose(1, 2)))).sum((1, 2))
            norms = (_squares(left) * _squares(right)).sqrt().sum(1)
            if rows.shape[1]:
                equal = tokens[:, :, None] == tokens[:, None, :]
                gram = torch.bmm(rows, rows.transpose(1, 2))
                square += (gram * equal).sum((1, 2))
                places = tokens[:, None, :].expand(-1, left.shape[1], -1)
                crossing = left.gather(2, places)
                square += 2 * (crossing * torch.bmm(right, rows.transpose(1, 2))).sum((1, 2))
                norms += _squares(rows).sqrt().sum(1)
            # The rounding errors of scalar products of vectors, and of their sum.
            error = 4 * (sum(self.shape) + length**2) * ROUNDING
            spread = norms.square_()
            squares[piece] += (square.clamp_(min=0) + error * spread).numpy()
            products[piece] += spread.numpy()

    def weighted_sum(self, factors: FloatVector, memory: "Memory") -> FloatVector:
        """The sum of the gradients times their factors, raveled; factor 0 leaves a unit out."""
        total = memory.get("total", self.shape, torch.float64)
        kept = (factors != 0).astype(np.float64)
        for piece in self.pieces():
            left = _widened(self.left[piece], factors[piece], memory, "left")
            right = _widened(self.right[piece], kept[piece], memory, "right")
            if piece.start == 0:
                torch.mm(left.T, right, out=total)
            else:
                total.addmm_(left.T, right)
            if self.rows.shape[1]:
                rows = _widened(self.rows[piece], factors[piece], memory, "rows")
                total.index_add_(0, self.tokens[piece].reshape(-1), rows)
        return total.view(-1).numpy()


class Memory:
    """Memory that is used again and again: getting new memory often takes longer than its use."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for one tensor. Its content is that of the last tensor with this name."""
        size = math.prod(shape)
        tensor = self._tensors.get((name, dtype))
        if tensor is None or tensor.numel() < size:
            tensor = self._tensors[name, dtype] = torch.empty(size, dtype=dtype)
        return tensor[:size].view(*shape)


def _widened(values: Tensor, factors: FloatVector, memory: Memory, name: str) -> Tensor:
    """The values of each unit times its factor in float64, as one vector per position."""
    rows = rows_of(values, factors.size)
    scaled = memory.get(name, rows.shape, torch.float64)
    split(factors.size, rows.size, kernels.widen, (rows, factors), (scaled.numpy(),))
    return scaled.view(-1, values.shape[-1])


def _squares(vectors: Tensor) -> Tensor:
    """Squared norms of float64 vectors, from above if squares underflow."""
    return vectors.square().sum(-1) + TINY**2


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def rows_of(values: Tensor, units: int) -> NDArray[Any]:
    """The values as a contiguous array with one row per unit."""
    return values.reshape(units, -1).contiguous().numpy()


def add_squares(gradients: Sequence[NDArray[Any]], squares: FloatVector) -> None:
    """Add the squared norms of written-out gradients, one per row."""

    def work(own: tuple[int, int]) -> None:
        for rows in gradients:
            kernels.add_squares(rows, *own, squares)

    size = sum(rows.size for rows in gradients)
    run_on_threads(work, ranges(squares.size, size))


def split(
    length: int,
    size: int,
    kernel: Callable[..., None],
    inputs: tuple[Any, ...],
    outputs: tuple[Any, ...],
) -> None:
    """Call a kernel with ranges of 0..length, on several threads if `size` is large."""
    run_on_threads(lambda own: kernel(*inputs, *own, *outputs), ranges(length, size))


def run_on_threads(work: Callable[[tuple[int, int]], None], ranges: list[tuple[int, int]]) -> None:
    """Work on ranges, each on a thread of its own."""
    if len(ranges) == 1:
        work(ranges[0])
    else:
        parallel_map(work, ranges, len(ranges))


def ranges(length: int, size: int) -> list[tuple[int, int]]:
    """0..length as one range, or as one range per thread if there is enough work."""
    threads = torch.get_num_threads() if size > WORK_PER_THREAD else 1
    width = max(1, -(-length // threads))
    return [(start, min(start + width, length)) for start in range(0, length, width)]
