"""Sums of clipped per-unit gradients equal those of a plain loop, and obey the clip norm."""

import copy
import math
import random
import warnings
from collections import UserDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from dpftrl.clipping import Grid  # noqa: E402
from dpftrl.errors import InvalidInput  # noqa: E402
from dpftrl.torch import _products  # noqa: E402
from dpftrl.torch import _taps as taps  # noqa: E402
from dpftrl.torch import gradients as gradients_module  # noqa: E402
from dpftrl.torch._modules import check_layers  # noqa: E402
from dpftrl.torch.gradient_check import check_gradients  # noqa: E402
from dpftrl.torch.gradients import ClippedSums  # noqa: E402

# A remark of vmap about operations that it runs one example at a time.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

FINE = Grid(step=2.0**-44, clip_norm=0.75)
# Float32 forward and backward passes differ by a few ulps between batched and single kernels.
FLOAT32_ERROR = 1e-6


@pytest.fixture(autouse=True)
def _one_seed_and_thread() -> Any:
    torch.manual_seed(1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _without_onednn() -> Any:
    """Some virtual CPUs announce AMX but do not allow it: there, oneDNN cannot do bfloat16."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def classify(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: Any) -> Tensor:
    tokens = batch["tokens"]
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def images(rows: int) -> Any:
    return torch.randn(rows, 1, 10, 10), torch.randint(0, 3, (rows,))


def sentences(rows: int, vocabulary: int = 30) -> Any:
    return {"tokens": torch.randint(0, vocabulary, (rows, 8))}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(100, 20), nn.Tanh(), nn.Linear(20, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, (3, 2), padding="same", groups=2, dilation=(1, 2)),
        nn.MaxPool2d(2),
        nn.Flatten(2),
        nn.Conv1d(6, 5, 2, padding=1, padding_mode="circular"),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


class LanguageModel(nn.Module):
    def __init__(self, body: nn.Module, tied: bool, vocabulary: int = 30):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16, padding_idx=-2)
        self.position = nn.Embedding(8, 16)
        self.body = body
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, vocabulary)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        if isinstance(self.body, nn.TransformerEncoderLayer):
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
            x = self.body(x, src_mask=mask)
        elif isinstance(self.body, nn.MultiheadAttention):
            x = self.body(x, x, x)[0]
        else:
            x = self.body(x)[0]
        return self.head(self.norm(x))


class Unusual(nn.Module):
    """Uses parameters in operations that are not supported, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(100, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.unused = nn.Parameter(torch.randn(3))
        self.layer = nn.Linear(8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1) @ self.matrix * self.scale.exp()
        h = self.layer(torch.tanh(h)) + 0.1 * torch.tanh(h) @ self.layer.weight.T
        return self.normed(torch.tanh(h))


class OwnFunction(torch.autograd.Function):
    """A use of a weight that only autograd sees."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class UsesOwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.flatten(1)))
        return self.second(h) + OwnFunction.apply(h, self.second.weight)


class Shared(nn.Module):
    """Uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(100, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.flatten(1)))
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(h)))))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)


MODELS: dict[str, Any] = {
    "mlp": (mlp, images, classify),
    "cnn": (cnn, images, classify),
    "unusual": (Unusual, images, classify),
    "shared": (Shared, images, classify),
    "transformer": (lambda: LanguageModel(encoder(), tied=False), sentences, next_token),
    "tied transformer": (lambda: LanguageModel(encoder(), tied=True), sentences, next_token),
    "attention": (
        lambda: LanguageModel(nn.MultiheadAttention(16, 2, batch_first=True), tied=True),
        sentences,
        next_token,
    ),
    "lstm": (
        lambda: LanguageModel(nn.LSTM(16, 16, 2, batch_first=True), tied=False),
        sentences,
        next_token,
    ),
    "gru": (
        lambda: LanguageModel(nn.GRU(16, 8, 1, batch_first=True, bidirectional=True), tied=True),
        sentences,
        next_token,
    ),
    "rnn": (
        lambda: LanguageModel(nn.RNN(16, 16, bias=False, batch_first=True), tied=False),
        sentences,
        next_token,
    ),
}


def rows_of(batch: Any, start: int, stop: int) -> Any:
    return pytree.tree_map(lambda tensor: tensor[start:stop], batch)


def loop(model: nn.Module, loss_fn: Any, batch: Any, counts: Sequence[int] | None = None) -> Any:
    """The gradient of each unit, by autograd alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = pytree.tree_leaves(batch)[0].shape[0]
    result, start = [], 0
    for count in counts or [1] * rows:
        losses = [loss_fn(model, rows_of(batch, k, k + 1)) for k in range(start, start + count)]
        loss = torch.stack([loss.mean() for loss in losses]).mean()
        parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        result.append(torch.cat([part.reshape(-1).double() for part in parts]).numpy())
        start += count
    return np.array(result)


def clipped_sum(rows: Any, clip_norm: float) -> Any:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows * np.minimum(1, clip_norm / norms)).sum(0)


def error(sums: ClippedSums, expected: Any) -> float:
    actual = sums.grid.values(sums.steps)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def make(model: nn.Module, grid: Grid = FINE, **options: Any) -> ClippedSums:
    return ClippedSums(model, grid, largest_batch=options.pop("largest_batch", 16), **options)


def to_float64(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return model.double(), pytree.tree_map(convert, batch)


@pytest.mark.parametrize("name", MODELS)
def test_sums_equal_those_of_a_loop_for_every_micro_batch_size(name: str) -> None:
    make_model, make_batch, loss_fn = MODELS[name]
    model, batch = make_model(), make_batch(5)
    loss_fn(model, batch)  # creates lazy layers
    expected = clipped_sum(loop(model, loss_fn, batch), FINE.clip_norm)
    for size in (None, 1, 2, 3, 4, 5, 7):
        sums = make(model, micro_batch=size)
        stats = sums.add(loss_fn, batch)
        assert error(sums, expected) < FLOAT32_ERROR, size
        assert stats.losses.shape == stats.norms.shape == (5,)
    check_gradients(sums, loss_fn, batch)
    model, batch = to_float64(model, batch)
    rows = loop(model, loss_fn, batch)
    sums = make(model, micro_batch=3)
    stats = sums.add(loss_fn, batch)
    assert error(sums, clipped_sum(rows, FINE.clip_norm)) < 1e-8  # the margin and the grid
    assert stats.norms == pytest.approx(np.linalg.norm(rows, axis=1), rel=1e-9)
    assert stats.clipped == (stats.norms > FINE.clip_norm).sum()


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied transformer", "lstm"])
@pytest.mark.parametrize("written_out_cost", [0, 10**6])
def test_units_with_several_examples(
    name: str, written_out_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients that are written out, and with sums of products, of the same layers."""
    monkeypatch.setattr(gradients_module, "WRITTEN_OUT_COST", written_out_cost)
    make_model, make_batch, loss_fn = MODELS[name]
    model, batch = make_model(), make_batch(10)
    loss_fn(model, batch)
    counts = [2, 1, 4, 3]
    for exact in (False, True):
        if exact:
            model, batch = to_float64(model, batch)
        expected = clipped_sum(loop(model, loss_fn, batch, counts), FINE.clip_norm)
        for size in (1, 3, 4):
            sums = make(model, examples_per_unit=4, micro_batch=size)
            stats = sums.add(loss_fn, batch, counts)
            assert error(sums, expected) < (1e-6 if exact else FLOAT32_ERROR), size
        assert stats.losses[1] == pytest.approx(
            loss_fn(model, rows_of(batch, 2, 3)).item(), rel=1e-5
        )
    plan = next(iter(sums._plans.values()))
    assert bool(plan.factored) == (written_out_cost > 0)


def test_gpt2_from_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    batch = torch.randint(0, 40, (5, 8))
    expected = clipped_sum(loop(model, loss_fn, batch), FINE.clip_norm)
    for size in (2, 5):
        sums = make(model, micro_batch=size)
        sums.add(loss_fn, batch)
        assert error(sums, expected) < FLOAT32_ERROR
    plan = next(iter(sums._plans.values()))
    assert not plan.explicit
    assert not plan.loop
    check_gradients(sums, loss_fn, batch)


def test_sums_of_products_of_tied_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "WRITTEN_OUT_COST", 10**6)
    model, batch = to_float64(LanguageModel(encoder(), tied=True), sentences(5))
    sums = make(model, micro_batch=2)
    sums.add(next_token, batch)
    plan = next(iter(sums._plans.values()))
    assert "embedding.weight" in [sums.names[k] for k in plan.factored]
    assert 0 < sums.margin < 1e-6
    assert error(sums, clipped_sum(loop(model, next_token, batch), FINE.clip_norm)) < 1e-6


def test_frozen_parameters_take_no_part() -> None:
    model = cnn()
    model(images(2)[0])
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    model[8].weight.requires_grad_(False)
    batch = images(5)
    sums = make(model)
    sums.add(classify, batch)
    assert "0.weight" not in sums.names
    assert sums.size == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert error(sums, clipped_sum(loop(model, classify, batch), FINE.clip_norm)) < FLOAT32_ERROR


def test_unusual_uses_are_explicit() -> None:
    model, batch = Unusual(), images(4)
    sums = make(model)
    sums.add(classify, batch)
    plan = next(iter(sums._plans.values()))
    explicit = {sums.names[k] for k in plan.explicit}
    assert {"scale", "layer.weight"} <= explicit
    assert "matrix" not in explicit


def test_a_use_that_only_autograd_sees_is_not_overlooked() -> None:
    model, batch = UsesOwnFunction(), images(4)
    sums = make(model)
    with pytest.warns(UserWarning, match="one example at a time"):
        sums.add(classify, batch)
    assert error(sums, clipped_sum(loop(model, classify, batch), FINE.clip_norm)) < FLOAT32_ERROR


def test_a_use_that_the_dry_run_did_not_see_is_planned_again() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(100, 3)
            self.late = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x.flatten(1))
            return y * self.layer.bias if self.late else y

    model, batch = Late(), images(4)
    sums = make(model)
    sums.add(classify, batch)
    model.late = True
    sums.add(classify, batch)
    assert error(sums, clipped_sum(loop(model, classify, batch), FINE.clip_norm)) < FLOAT32_ERROR


def test_models_that_vmap_cannot_run_are_differentiated_in_a_loop() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(100, 3), nn.Linear(100, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x.flatten(1)) if x.mean() > 0 else self.second(x.flatten(1))

    model, batch = Branches(), images(6)
    sums = make(model, micro_batch=4)
    with pytest.warns(UserWarning, match="one example at a time"):
        sums.add(classify, batch)
    sums.add(classify, batch)  # warns once
    assert error(sums, clipped_sum(loop(model, classify, batch), FINE.clip_norm)) < FLOAT32_ERROR


def exact_norm_squared(steps: Any) -> int:
    return sum(int(step) ** 2 for step in steps.tolist())


@pytest.mark.parametrize("written_out_cost", [0, 10**6])
@pytest.mark.parametrize("seed", range(6))
def test_no_unit_contributes_more_than_the_clip_norm(
    seed: int, written_out_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For inputs of extreme scales, and inputs that cancel, in exact integer arithmetic."""
    monkeypatch.setattr(gradients_module, "WRITTEN_OUT_COST", written_out_cost)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(9, 6)
            self.first = nn.Linear(6, 9)
            self.once = nn.Linear(9, 2)
            self.first.weight = nn.Parameter(self.rows.weight * 1)
            self.rows.weight = self.first.weight

        def forward(self, batch: Any) -> Tensor:
            x, tokens, signs = batch
            h = self.first(x + self.rows(tokens))
            return (h * signs[..., None]).sum((1, 2)) + self.once(h.sum(1)).square().sum(1)

    model = Sequences()
    scale = 10.0 ** rng.uniform(-20, 12)
    x = torch.randn(4, 5, 6) * scale
    x[:, 1] = x[:, 0] * (1 + 1e-7)  # two positions that cancel up to rounding
    signs = torch.tensor(rng.choice([-1.0, 1.0], (4, 5)), dtype=torch.float32)
    signs[:, 1] = -signs[:, 0]
    batch = x, torch.randint(0, 9, (4, 5)), signs * 10.0 ** float(rng.uniform(-3, 3))
    grid = Grid.for_noise(1.0, 0.1, fineness=2**34)
    sums = make(model, grid, micro_batch=2)
    limit = (grid.clip_norm / grid.step) ** 2
    for row in range(4):
        stats = sums.add(lambda model, batch: model(batch), rows_of(batch, row, row + 1))
        assert exact_norm_squared(sums.steps) <= limit
        if stats.clipped:  # and not much less: the bound is not slack
            assert exact_norm_squared(sums.steps) > 0.99 * limit or sums.margin > 0


def test_removing_a_unit_changes_the_sum_by_at_most_the_clip_norm() -> None:
    model, batch = mlp(), images(6)
    grid = Grid.for_noise(1.0, 1e-3, fineness=2**34)
    with_unit = make(model, grid, micro_batch=6)
    with_unit.add(classify, batch)
    without = make(model, grid, micro_batch=6)
    batch[0][2] = math.nan  # contributes zero, and the others keep their places
    assert without.add(classify, batch).not_finite == 1
    change = exact_norm_squared(with_unit.steps - without.steps)
    assert change <= (grid.clip_norm / grid.step) ** 2
    assert change > 0.999 * (grid.clip_norm / grid.step) ** 2


@pytest.mark.parametrize("name", MODELS)
def test_a_unit_that_is_not_finite_contributes_zero(name: str) -> None:
    make_model, make_batch, loss_fn = MODELS[name]
    model, batch = make_model(), make_batch(4)
    loss_fn(model, batch)

    def weighted(model: nn.Module, batch: Any) -> Tensor:
        return loss_fn(model, batch[0]) * batch[1].sum()

    weights = torch.ones(4)
    sums = make(model, micro_batch=4)
    sums.add(weighted, (rows_of(batch, 0, 1), weights[:1]))
    first = sums.steps.copy()
    for bad in (math.nan, math.inf):
        weights[1:] = bad
        stats = sums.add(weighted, (batch, weights))
        assert stats.not_finite == 3
        assert np.array_equal(sums.steps, first)  # bit for bit


def test_an_empty_batch_has_a_zero_sum() -> None:
    model = mlp()
    sums = make(model)
    sums.add(classify, images(3))
    assert sums.steps.any()
    stats = sums.add(classify, images(0))
    assert not sums.steps.any()
    assert stats.losses.size == stats.clipped == stats.not_finite == 0
    assert make(model, examples_per_unit=2).add(classify, images(0), []).norms.size == 0


def test_dropout_is_determined_by_the_seed() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(100, 3))
    batch = images(1)
    batch = batch[0].repeat(6, 1, 1, 1), batch[1].repeat(6)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        sums = make(model, micro_batch=4)
        stats = sums.add(classify, batch)
        assert len(set(stats.losses.tolist())) == 6  # each example has its own mask
        results.append(sums.steps.copy())
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])
    check_gradients(sums, classify, images(2))
    assert model.training


@pytest.mark.usefixtures("_without_onednn")
def test_low_precision() -> None:
    def autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return classify(model, batch)

    for name in ("mlp", "cnn"):
        make_model, make_batch, _ = MODELS[name]
        model, batch = make_model(), make_batch(4)
        model(batch[0])
        sums = make(model)
        sums.add(autocast, batch)
        expected = clipped_sum(loop(model, autocast, batch), FINE.clip_norm)
        assert error(sums, expected) < 0.02  # bfloat16 has 8 bits
        check_gradients(sums, autocast, batch)
    model = mlp().bfloat16()
    batch = images(4)
    batch = batch[0].bfloat16(), batch[1]
    sums = make(model)
    sums.add(classify, batch)
    assert error(sums, clipped_sum(loop(model, classify, batch), FINE.clip_norm)) < 0.02
    assert exact_norm_squared(sums.steps) <= (4 * FINE.clip_norm / FINE.step) ** 2


@pytest.mark.usefixtures("_without_onednn")
@pytest.mark.parametrize("name", ["cnn", "lstm", "tied transformer"])
def test_the_model_stays_as_it_is(name: str) -> None:
    make_model, make_batch, loss_fn = MODELS[name]
    model, batch = make_model(), make_batch(4)
    loss_fn(model, batch).backward()
    model.register_buffer("mask", torch.ones(2))
    model.eval()
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    grads = {key: p.grad.clone() for key, p in parameters.items() if p.grad is not None}
    sums = make(model, micro_batch=3)
    sums.add(loss_fn, batch)
    check_gradients(sums, loss_fn, batch)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[key] is value for key, value in parameters.items())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(after[key].grad, value) for key, value in grads.items())
    assert not model.training
    assert all(
        not module._forward_hooks and not module._backward_hooks for module in model.modules()
    )
    model.zero_grad()
    loss_fn(model, batch).backward()
    assert all(torch.allclose(after[key].grad, value, atol=1e-5) for key, value in grads.items())


def test_an_error_in_the_model_leaves_it_as_it_is() -> None:
    model, batch = mlp(), images(4)
    weight = model[1].weight
    sums = make(model)

    def fails(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sums.add(fails, batch)
    assert model[1].weight is weight
    assert not sums.steps.any()


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(1), nn.BatchNorm2d(1, track_running_stats=False), nn.SyncBatchNorm(1),
     nn.InstanceNorm2d(1, track_running_stats=True)],
)  # fmt: skip
def test_layers_that_mix_examples_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Sequential(layer), nn.Flatten(), nn.Linear(100, 3))
    with pytest.raises(InvalidInput, match=r"'?0\.0'?.*GroupNorm"):
        check_layers(model)
    with pytest.raises(InvalidInput, match="GroupNorm"):
        make(model)
    check_layers(nn.Sequential(nn.InstanceNorm2d(1), nn.GroupNorm(1, 1)))


def test_models_that_change_their_buffers_are_refused() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(100, 3)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(x.mean().detach())
            return self.layer(x.flatten(1) - self.mean)

    model = Running()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InvalidInput, match="'mean'"):
            make(model).add(classify, images(3))
    assert not model.mean.any()


def test_code_that_mixes_examples_is_refused() -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(100, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            return self.layer(x - x.mean(0))

    def total(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def per_row(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.raises(InvalidInput, match="mixes examples"):
        check_gradients(make(Centered()), classify, images(4))
    with pytest.raises(InvalidInput, match="not a mean"):
        check_gradients(make(mlp()), total, images(4))
    check_gradients(make(mlp()), per_row, images(4))


def test_a_mean_over_tokens_is_not_mixing() -> None:
    model = LanguageModel(encoder(), tied=True)

    def masked(model: nn.Module, tokens: Tensor) -> Tensor:
        targets = tokens[:, 1:].flatten()
        return functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), targets, ignore_index=0
        )

    tokens = torch.randint(1, 30, (2, 8))
    tokens[0, 5:] = 0
    check_gradients(make(model), masked, tokens)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])
def test_a_dropped_use_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the check finds a gradient that lacks a part."""
    make_model, make_batch, loss_fn = MODELS[name]
    model, batch = make_model(), make_batch(4)
    loss_fn(model, batch)
    use = taps.Recorder.use

    def drop_biases(self: Any, kind: str, *rest: Any) -> None:
        if kind != "sum":
            use(self, kind, *rest)

    check_gradients(make(model), loss_fn, batch)
    monkeypatch.setattr(taps.Recorder, "use", drop_biases)
    with pytest.raises(InvalidInput, match=r"bias.* differs from that of autograd"):
        check_gradients(make(model), loss_fn, batch)


def test_a_tap_that_is_not_added_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tap = taps.Recorder.tap

    def forget(self: Any, output: Tensor) -> Tensor:
        tap(self, output)
        return output

    monkeypatch.setattr(taps.Recorder, "tap", forget)
    with pytest.raises(InvalidInput, match="differs from that of autograd"):
        check_gradients(make(mlp()), classify, images(4))


def test_a_coarse_grid_writes_all_gradients_out() -> None:
    model, batch = mlp(), images(4)
    grid = Grid(step=2.0**-8, clip_norm=1.0)
    sums = make(model, grid)
    sums.add(classify, batch)
    assert sums.margin == 0
    expected = np.zeros(sums.size)
    for row in loop(model, classify, batch):
        expected += np.trunc(row * min(1, 1 / np.linalg.norm(row)) / grid.step)
    assert np.abs(sums.steps - expected).max() <= 1  # a value next to a whole number of steps


def test_chunks_and_pieces_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model, make_batch, loss_fn = MODELS["tied transformer"]
    model, batch = make_model(), make_batch(7)
    results = []
    for size in (2**24, 1):
        monkeypatch.setattr(gradients_module, "CHUNK_BYTES", size)
        monkeypatch.setattr(_products, "PIECE_BYTES", size)
        monkeypatch.setattr(gradients_module, "SMALL", min(size, 4096))
        sums = make(model, micro_batch=4)
        sums.add(loss_fn, batch)
        results.append(sums.grid.values(sums.steps))
    difference = np.linalg.norm(results[0] - results[1])
    assert difference <= 1e-7 * np.linalg.norm(results[0])


def test_threads_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients_module, _products):
        monkeypatch.setattr(module, "WORK_PER_THREAD", 1)
    make_model, make_batch, loss_fn = MODELS["tied transformer"]
    for cost in (0, 10**6):
        monkeypatch.setattr(gradients_module, "WRITTEN_OUT_COST", cost)
        model, batch = make_model(), make_batch(7)
        expected = clipped_sum(loop(model, loss_fn, batch), FINE.clip_norm)
        torch.set_num_threads(3)
        sums = make(model, micro_batch=4)
        sums.add(loss_fn, batch)
        torch.set_num_threads(1)
        assert error(sums, expected) < FLOAT32_ERROR


def test_other_generators_are_not_used_up_by_planning() -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * random.random() * np.random.random()  # noqa: NPY002

    model, batch = mlp(), images(3)
    results = []
    sums = make(model)
    for _ in range(2):  # the first one makes a plan
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        sums.add(noisy, batch)
        results.append((sums.steps.copy(), random.random()))
    assert np.array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_the_check_does_not_reveal_a_row_that_is_not_finite() -> None:
    x, y = images(3)
    x[0] = math.nan
    check_gradients(make(mlp()), classify, (x, y))


def test_other_mappings_are_passed_on_as_dicts() -> None:
    model, batch = LanguageModel(encoder(), tied=True), sentences(3)
    results = []
    for mapping in (batch, UserDict(batch)):
        sums = make(model)
        sums.add(next_token, mapping)
        results.append(sums.steps)
    assert np.array_equal(*results)


def test_patches_equal_those_of_unfold() -> None:
    images = torch.randn(2, 3, 9, 11)
    for kernel, dilation, padding, stride in [
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        ((2, 4), (3, 1), (0, 2), (1, 3)),
        ((1, 5), (1, 2), (4, 0), (2, 2)),
    ]:
        expected = functional.unfold(images, kernel, dilation, padding, stride)
        assert torch.equal(taps._patches(images, kernel, dilation, padding, stride), expected)


def test_invalid_batches_are_refused() -> None:
    model = mlp()
    sums = make(model, examples_per_unit=2)
    x, y = images(4)
    for batch, counts, why in [
        ((x, y[:3]), None, "same first dimension"),
        ((x, "text"), None, "got str"),
        ((), None, "no tensor"),
        ((x, y), [1, 3], "examples_per_unit is 2"),
        ((x, y), [1, 1], "add up to 2"),
        ((x, y), [0, 2, 2], "at least 1"),
        (images(17), None, "largest_batch is 16"),
    ]:
        with pytest.raises(InvalidInput, match=why):
            sums.add(classify, batch, counts)
    with pytest.raises(InvalidInput, match="one loss per row"):
        sums.add(lambda model, batch: model(batch[0]), (x, y))
    with pytest.raises(InvalidInput, match="a larger step"):
        ClippedSums(model, Grid(2.0**-55, 1.0), largest_batch=100)
    with pytest.raises(InvalidInput, match="no parameter"):
        make(nn.Sequential(nn.ReLU()))
    model[1].weight = nn.Parameter(model[1].weight.detach())
    with pytest.raises(InvalidInput, match="was replaced"):
        sums.add(classify, (x, y))
