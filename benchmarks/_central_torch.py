"""Run in a fresh process: ENGINE MODEL BATCH STEPS; time private steps of a PyTorch model.

Engines: `dpftrl` and `dpftrl-durable` (ours, without and with a folder), `opacus-hooks`,
`opacus-ghost`, and `plain`, which is not private. Prints the seconds of every step, the peak memory
beyond what was in use before the first step, and for ours the share of the time that is noise, and
the seconds that the secure parts of the noise take alone.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import torch
from timed_steps import WARM_UP, timed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import TensorDataset

SEQUENCE, VOCABULARY, HEADS = 32, 1000, 4
CLIP_NORM, NOISE = 1.0, 1.0


class Block(nn.Module):
    """A layer of a causal transformer, from parts that all libraries support."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then a perceptron, each with a residual connection."""
        batch, length, width = x.shape
        parts = self.project(self.before(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(gelu(self.wide(self.between(x))))


class Transformer(nn.Module):
    """Some layers, for sequences of words."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next word at every place."""
        places = torch.arange(x.shape[1]).repeat(len(x), 1)
        return self.out(self.norm(self.blocks(self.words(x) + self.places(places))))


def mlp(*widths: int) -> nn.Module:
    """A perceptron for pictures of 28 x 28."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Two convolutions and two linear layers, as in Opacus' example for MNIST."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(784, 256, 256, 10),
    "mlp-10M": lambda: mlp(784, 2800, 2700, 10),
    "cnn": cnn,
    "transformer": lambda: Transformer(width=128, blocks=2),
    "transformer-10M": lambda: Transformer(width=384, blocks=5),
}


def data_for(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Random examples: the time does not depend on them."""
    if name.startswith("transformer"):
        words = torch.randint(0, VOCABULARY, (count, SEQUENCE + 1))
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()
    return torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,))


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy; of a sequence, over all places."""
    return cross_entropy(scores.flatten(0, -2), labels.flatten())


def plain(model: nn.Module, batch: tuple[Tensor, Tensor], steps: int) -> dict[str, Any]:
    """Without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return timed(step, repeat(batch), steps)


def opacus(model: nn.Module, batch: tuple[Tensor, Tensor], steps: int, ghost: bool) -> Any:
    """DP-SGD of Opacus, as its documentation has it."""
    from opacus.grad_sample import GradSampleModule
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {
        "noise_multiplier": NOISE,
        "max_grad_norm": CLIP_NORM,
        "expected_batch_size": len(batch[0]),
    }
    if not ghost:
        wrapped: Any = GradSampleModule(model)
        optimizer: Any = DPOptimizer(sgd, **options)

        def criterion(scores: Tensor, labels: Tensor) -> Tensor:
            return loss_of(scores, labels)

        loss: Any = criterion
    else:
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True, loss_reduction="mean"
        )
        optimizer = DPOptimizerFastGradientClipping(sgd, **options)
        loss = DPLossFastGradientClipping(
            wrapped, optimizer, _Criterion(len(batch[0])), loss_reduction="mean"
        )

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss(wrapped(batch[0]), batch[1]).backward()
        optimizer.step()

    return timed(step, repeat(batch), steps)


class _Criterion(nn.Module):
    """The loss of every example, which ghost clipping needs; the loss of a sequence is its mean."""

    def __init__(self, rows: int):
        super().__init__()
        self.reduction, self._rows = "mean", rows

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The mean, or with reduction `none` one loss per example."""
        losses = cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="none")
        each = losses.view(self._rows, -1).mean(1)
        return each if self.reduction == "none" else each.mean()


def ours(model: nn.Module, data: tuple[Tensor, Tensor], steps: int, durable: bool) -> Any:
    """Private steps of dpftrl, with correlated noise of a BLT."""
    import dpftrl.torch as dt
    from dpftrl import account, mechanism
    from dpftrl.noise import NoiseStream
    from dpftrl.plan import Dataset, DatasetPlan

    batch_size = len(data[0])
    dataset = Dataset(batch_size, batch_size, steps + WARM_UP)
    chosen = mechanism("blt", dataset.in_order)
    plan = DatasetPlan("none", account(chosen, dataset.in_order, NOISE, 1e-5), dataset)
    noise: list[float] = []
    add_to = NoiseStream.add_to

    def measured(*args: Any, **options: Any) -> None:
        start = time.perf_counter()
        add_to(*args, **options)
        noise.append(time.perf_counter() - start)

    NoiseStream.add_to = measured
    with tempfile.TemporaryDirectory() as folder:
        private = dt.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            TensorDataset(*data),
            folder=f"{folder}/run" if durable else None,
            state_folder=f"{folder}/state",
            clip_norm=CLIP_NORM,
            plan=plan,
        )

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return loss_of(model(batch[0]), batch[1])

        found = timed(partial(private.step, loss_fn), iter(private.loader), steps)
        private.close()
    return {
        **found,
        "noise_share": sum(noise[WARM_UP:]) / sum(found["seconds"]),
        "cipher_s": cipher_seconds(sum(p.numel() for p in model.parameters())),
    }


def cipher_seconds(size: int) -> float:
    """How long the digest of a sum and the keystream of a row of noise take, on all cores.

    No noise that is keyed by a digest takes less time: normals and buffers are left out.
    """
    import os

    import numpy as np

    from dpftrl._internal.threads import parallel_map
    from dpftrl.noise.key import Keystream, NoiseKey, Secret, digest_of_update
    from dpftrl.noise.round_noise import CHUNK, CHUNK_BLOCKS, CHUNK_TILES, Scratch

    key, total = NoiseKey.insecure_for_tests(0), np.zeros(size, np.int64)
    threads = len(os.sched_getaffinity(0))
    chunks = -(-size // CHUNK)

    def fill(thread: int) -> None:
        scratch = Scratch(1, CHUNK_TILES)
        own = range(chunks * thread // threads, chunks * (thread + 1) // threads)
        stream = Keystream(key, own.start * CHUNK_BLOCKS)
        for _ in own:
            stream.fill(scratch.zeros, scratch.raw)

    seconds: list[float] = []
    for _ in range(WARM_UP + 5):
        start = time.perf_counter()
        digest_of_update(key, [total.data], 1.0, Secret(b""), threads)
        parallel_map(fill, range(threads), threads)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Measure one engine."""
    engine, name, batch_size, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, data = MODELS[name](), data_for(name, batch_size)
    if engine == "plain":
        result = plain(model, data, steps)
    elif engine.startswith("opacus"):
        result = opacus(model, data, steps, ghost=engine.endswith("ghost"))
    else:
        result = ours(model, data, steps, durable=engine.endswith("durable"))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
