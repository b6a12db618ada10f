"""DP-FTRL with Opacus: exact sums, our noise, our batches, and no other epsilon."""

import copy
import io
import math
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule, PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.grad_sample.linear import compute_linear_norm_sample
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpftrl.accounting import account
from dpftrl.clipping import ExactSum, Grid
from dpftrl.errors import InvalidInput, RoundsExceeded, UnsafeState
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.participation import FixedEpochs
from dpftrl.plan import Dataset, DatasetPlan, make_dataset_plan
from dpftrl.torch._opacus_ghost import EmbeddingRecord, GhostSums, GradientRecord, LinearRecord
from dpftrl.torch._opacus_sums import add_examples, add_examples_on_device
from dpftrl.torch.opacus import (
    DPFTRLOptimizer,
    DPFTRLOptimizerFastGradientClipping,
    GhostClippingLoss,
    GhostClippingModule,
)

# The first layer of a model has inputs without gradients, as Opacus always has it.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """These models are so small that starting threads takes most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


KEY = NoiseKey.insecure_for_tests(7)
CLIP = 0.5
SIZE, BATCH = 60, 16  # batches of 16, 16, 16 and 12
MODES = ("hooks", "ghost")


@cache
def plan_of(sampling="none", size=SIZE, batch=BATCH, epochs=2) -> DatasetPlan:
    return make_dataset_plan(Dataset(size, batch, epochs), 4.0, 1e-5, sampling=sampling)


def data_of(size=SIZE, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(
        3 * torch.randn(size, 5, generator=g), torch.randint(0, 3, (size,), generator=g)
    )


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


class Words(nn.Module):
    """A model with positions: embedding with padding, linear layers with and without bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.wide = nn.Linear(4, 7)
        self.narrow = nn.Linear(7, 2, bias=False)
        self.out = nn.Linear(2, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.narrow(torch.tanh(self.wide(self.embedding(x))))).sum(1))


class Training:
    """A model, its private optimizer, and its loss."""

    def __init__(
        self, mode="hooks", plan=None, model=None, reduction="mean", opacus_loss=False, **kw
    ):
        plan = plan or plan_of()
        model = perceptron() if model is None else model
        wrap = GradSampleModule if mode == "hooks" else GhostClippingModule
        self.model = wrap(model, loss_reduction=reduction)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        arguments = {"key": KEY, "clip_norm": CLIP, "loss_reduction": reduction, **kw}
        self.loss = nn.CrossEntropyLoss(reduction=reduction)
        if mode == "hooks":
            self.optimizer = DPFTRLOptimizer(sgd, plan, **arguments)
        else:
            self.optimizer = DPFTRLOptimizerFastGradientClipping(
                sgd, plan, module=self.model, **arguments
            )
            wrap = DPLossFastGradientClipping if opacus_loss else GhostClippingLoss
            self.loss = wrap(self.model, self.optimizer, self.loss, reduction)

    def backward(self, batch):
        x, y = batch
        self.loss(self.model(x), y).backward()

    def step(self, batch):
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.optimizer.params])

    def sum_so_far(self):
        """The sum of clipped gradients, before noise."""
        total = self.optimizer._total
        return total.grid.values(total.steps)


def sum_by_a_loop(model, batch, clip=CLIP):
    """The sum of clipped gradients, one example at a time, in float64."""
    model = copy.deepcopy(model).double()
    total = 0.0
    for x, y in zip(*batch, strict=True):
        model.zero_grad()
        inputs = x[None].double() if x.is_floating_point() else x[None]
        nn.functional.cross_entropy(model(inputs), y[None]).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        total = total + flat * min(1.0, clip / flat.norm().item())
    return total.numpy()


# --- Sums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
def test_the_sum_is_that_of_a_loop_over_examples(mode, reduction):
    run = Training(mode, reduction=reduction)
    batch = next(iter(run.optimizer.loader(data_of())))
    expected = sum_by_a_loop(perceptron(), batch, CLIP * (1 - run.optimizer.margin))
    run.backward(batch)
    run.optimizer.clip_and_accumulate()
    assert np.linalg.norm(expected) > CLIP  # most examples are clipped
    assert np.abs(run.sum_so_far() - expected).max() < 1e-6
    assert run.optimizer._total.updates == BATCH


@pytest.mark.parametrize("opacus_loss", [False, True])
def test_ghost_clipping_of_texts_is_that_of_a_loop(opacus_loss):
    torch.manual_seed(1)
    model, tokens = Words(), torch.randint(0, 9, (SIZE, 11))
    data = TensorDataset(tokens, torch.randint(0, 3, (SIZE,)))
    run = Training("ghost", model=copy.deepcopy(model), opacus_loss=opacus_loss)
    batch = next(iter(run.optimizer.loader(data)))
    run.backward(batch)
    expected = sum_by_a_loop(model, batch, CLIP * (1 - run.optimizer.margin))
    assert np.abs(run.sum_so_far() - expected).max() < 1e-6


def test_ghost_clipping_of_convolutions_is_that_of_a_loop():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    )
    data = TensorDataset(torch.randn(SIZE, 2, 6), torch.randint(0, 3, (SIZE,)))
    run = Training("ghost", model=copy.deepcopy(model))
    batch = next(iter(run.optimizer.loader(data)))
    run.backward(batch)
    expected = sum_by_a_loop(model, batch, CLIP * (1 - run.optimizer.margin))
    assert np.abs(run.sum_so_far() - expected).max() < 1e-6


def test_frozen_layers_and_frozen_biases_are_left_out():
    def model():
        layers = perceptron()
        layers[0].weight.requires_grad_(False)
        layers[3].bias.requires_grad_(False)
        return layers

    totals = []
    for mode in MODES:
        run = Training(mode, model=model())
        run.backward(next(iter(run.optimizer.loader(data_of()))))
        run.optimizer.clip_and_accumulate()
        totals.append(run.sum_so_far())
    assert len(totals[0]) == 6 + 6 + 6 + 18
    assert np.linalg.norm(totals[0] - totals[1]) < BATCH * CLIP * 1.1e-3


def test_hooks_and_ghost_clipping_differ_by_no_more_than_the_margin():
    data, totals = data_of(), []
    for mode in MODES:
        run = Training(mode)
        run.backward(next(iter(run.optimizer.loader(data))))
        run.optimizer.clip_and_accumulate()
        totals.append(run.sum_so_far())
    assert 0 < np.linalg.norm(totals[0] - totals[1]) < BATCH * CLIP * (1e-3 + 1e-5)


def test_a_sum_in_parts_is_exactly_the_sum_of_all():
    rows = np.random.default_rng(0).normal(size=(10, 5000)).astype(np.float32)
    parameters = [rows[:, :3000].copy(), rows[:, 3000:].copy()]
    grid = Grid(2.0**-30, 1.0)
    whole, parts, one_by_one = (ExactSum(grid, 5000) for _ in range(3))
    add_examples(whole, parameters, threads=2)
    for some in (slice(0, 3), slice(3, 3), slice(3, 10)):
        add_examples(parts, [p[some] for p in parameters])
    for row in rows:
        one_by_one.add(row)
    assert (whole.steps == parts.steps).all()
    assert np.abs(whole.steps - one_by_one.steps).max() <= 10  # the norm is rounded differently
    on_device = ExactSum(grid, 5000)
    add_examples_on_device(on_device, list(map(torch.from_numpy, parameters)))
    assert np.abs(whole.steps - on_device.steps).max() <= 10
    assert on_device.updates == 10
    assert whole.updates == parts.updates == 10


@given(
    scales=st.lists(st.integers(-140, 120), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    parts=st.integers(1, 3),
    on_device=st.booleans(),
)
def test_no_example_adds_more_than_the_clip_norm_to_an_exact_sum(on_device, scales, seed, parts):
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore"):
        rows = [
            (rng.normal(size=(1, 7)) * 2.0**scale).astype(np.float32)
            for scale in scales[:parts] * parts
        ]
    grid = Grid(2.0**-40, 0.7)
    total = ExactSum(grid, 7 * len(rows))
    if on_device:
        add_examples_on_device(total, list(map(torch.from_numpy, rows)))
    else:
        add_examples(total, rows)
    assert sum(int(s) ** 2 for s in total.steps) <= (Fraction(0.7) * 2**40) ** 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_an_example_that_is_not_finite_counts_as_zero(mode, bad):
    data = data_of()
    first = Training(mode).optimizer.loader(data).batch_sampler
    spoiled = next(iter(first))[3]
    data.tensors[0][spoiled] = bad
    run = Training(mode)
    x, y = next(iter(run.optimizer.loader(data)))
    run.backward((x, y))
    run.optimizer.clip_and_accumulate()
    kept = torch.arange(BATCH) != 3
    expected = sum_by_a_loop(perceptron(), (x[kept], y[kept]), CLIP * (1 - run.optimizer.margin))
    if bad != 3e38:  # with 3e38, whether the gradient is finite depends on the model
        assert np.abs(run.sum_so_far() - expected).max() < 1e-6
    assert np.linalg.norm(run.sum_so_far() - expected) < CLIP * (1 + 1e-5)
    assert run.optimizer._total.updates == BATCH


@pytest.mark.parametrize("mode", MODES)
def test_replacing_an_example_by_zero_changes_the_sum_by_at_most_the_clip_norm(mode):
    def total_without(position):
        """The sum in steps; an example that is not finite counts as zero."""
        run = Training(mode)
        x, y = next(iter(run.optimizer.loader(data_of())))
        if position is not None:
            x[position] = math.nan
        run.backward((x, y))
        run.optimizer.clip_and_accumulate()
        return run.optimizer._total

    whole = total_without(None)
    most = (Fraction(CLIP) / Fraction(whole.grid.step)) ** 2
    changes = []
    for position in range(BATCH):
        steps = (whole.steps - total_without(position).steps).tolist()
        changes.append(sum(step**2 for step in steps) / most)
    assert 0.99 < max(changes) <= 1


# --- The bound of ghost clipping ------------------------------------------------------------


def changes_by_one_example(record, without, example_count, clip=1.0, margin=1e-3, factors=None):
    """By how much the sum changes, exactly, if each example is replaced by zero; in clip norms."""
    grid = Grid(2.0**-40, clip)
    changes = []
    for position in [None, *range(example_count)]:
        this = record if position is None else without(position)
        sums = GhostSums(this.parameters, ExactSum(grid, size_of(this)), margin)
        sums.check_grid(example_count)
        computed, _ = sums.factors([this], example_count)
        sums.add([this], computed if factors is None else factors)
        changes.append([int(step) for step in sums.total.steps])
    return [
        float(Fraction(sum((a - b) ** 2 for a, b in zip(changes[0], change, strict=True)))) ** 0.5
        * grid.step
        / clip
        for change in changes[1:]
    ]


def size_of(record):
    return sum(p.numel() for p in record.parameters)


def without_example(record, position):
    kept = torch.arange(record.examples) != position
    derivatives = torch.where(kept[:, None, None], record.derivatives, 0)
    return replace(record, derivatives=derivatives)


def adversarial(rng, examples, positions, width, *, cancel, scale):
    """Rows of positions that nearly cancel: pairs of opposite signs with a small difference."""
    values = rng.normal(size=(examples, positions, width)) * 2.0**scale
    if cancel:
        half = positions // 2
        values[:, half : 2 * half] = -values[:, :half] * (1 + 2.0**-20 * cancel)
    return torch.tensor(values, dtype=torch.float32)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    positions=st.sampled_from([1, 2, 6, 9]),
    scales=st.tuples(st.integers(-60, 60), st.integers(-60, 60)),
    cancel=st.sampled_from([0, 0, 1, 3]),
    bias=st.booleans(),
)
def test_one_example_changes_a_ghost_sum_by_at_most_the_clip_norm(
    seed, positions, scales, cancel, bias
):
    rng = np.random.default_rng(seed)
    b = adversarial(rng, 4, positions, 2, cancel=cancel, scale=scales[0])
    a = adversarial(rng, 4, positions, 3, cancel=0, scale=scales[1])
    if cancel:
        half = positions // 2
        a[:, half : 2 * half] = a[:, :half]
    record = LinearRecord(nn.Linear(3, 2, bias=bias), a, b)
    changes = changes_by_one_example(record, partial(without_example, record), 4)
    assert max(changes) <= 1


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), scale=st.integers(-30, 60), cancel=st.sampled_from([0, 1, 5]))
def test_one_example_changes_a_ghost_sum_of_embeddings_by_at_most_the_clip_norm(
    seed, scale, cancel
):
    rng = np.random.default_rng(seed)
    b = adversarial(rng, 3, 8, 4, cancel=cancel, scale=scale)
    x = torch.tensor(rng.integers(0, 3, size=(3, 8)))
    record = EmbeddingRecord(nn.Embedding(3, 4), x, b)
    assert max(changes_by_one_example(record, partial(without_example, record), 3)) <= 1


def cancelling_record(seed=0):
    """The two positions of an example cancel to a gradient of norm 3, with E of about 2e4."""
    rng = np.random.default_rng(seed)
    a, b, difference = (rng.normal(size=(2, 1, width)) for width in (4, 2, 2))
    a *= 1e4 / np.linalg.norm(a, axis=2, keepdims=True)
    b /= np.linalg.norm(b, axis=2, keepdims=True)
    difference *= 3e-4 / np.linalg.norm(difference, axis=2, keepdims=True)
    derivatives = torch.tensor(np.concatenate([b, difference - b], 1), dtype=torch.float32)
    inputs = torch.tensor(np.concatenate([a, a], 1), dtype=torch.float32)
    return LinearRecord(nn.Linear(4, 2, bias=False), inputs, derivatives)


def test_the_bound_fails_without_clipping():
    record = cancelling_record()
    ones = torch.ones(2, dtype=torch.float64)
    changes = changes_by_one_example(record, partial(without_example, record), 2, factors=ones)
    assert max(changes) > 2


def test_the_bound_fails_with_norms_of_opacus_and_holds_with_ours():
    by_opacus, by_us = [], []
    for seed in range(20):
        record = cancelling_record(seed)
        norms = compute_linear_norm_sample(record.layer, [record.inputs], record.derivatives)
        factors = (1 / (norms[record.layer.weight] + 1e-6)).clamp(max=1).double()
        without = partial(without_example, record)
        by_opacus += changes_by_one_example(record, without, 2, factors=factors)
        by_us += changes_by_one_example(record, without, 2)
    assert max(by_opacus) > 1.5
    assert 0.99 < max(by_us) <= 1


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), positions=st.integers(1, 7), cancel=st.sampled_from([0, 1, 3]))
def test_norm_bounds_are_above_exact_norms_and_close(seed, positions, cancel):
    rng = np.random.default_rng(seed)
    b = adversarial(rng, 2, positions, 2, cancel=cancel, scale=0)
    a = adversarial(rng, 2, positions, 5, cancel=0, scale=3)
    if cancel:
        half = positions // 2
        a[:, half : 2 * half] = a[:, :half]
    layer = nn.Linear(5, 2)
    bounds = LinearRecord(layer, a, b).bounds()
    for i in range(2):
        entries = [
            sum(
                Fraction(b[i, t, j].item()) * (Fraction(a[i, t, k].item()) if k < 5 else 1)
                for t in range(positions)
            )
            for j in range(2)
            for k in range(6)
        ]
        exact = sum(entry**2 for entry in entries)
        bound = Fraction(bounds.squared_norm[i].item())
        assert exact <= bound <= exact + Fraction(bounds.squared_size[i].item()) / 10**12


def test_bounds_by_products_and_by_inner_products_agree():
    rng = np.random.default_rng(0)
    a, b = (adversarial(rng, 3, 20, width, cancel=0, scale=0) for width in (4, 3))
    long = LinearRecord(nn.Linear(4, 3), a, b)  # 400 pairs of positions, 15 coordinates
    gradients = torch.cat([b.double().mT @ a.double(), b.double().sum(1)[:, :, None]], 2)
    torch.testing.assert_close(long.bounds().squared_norm, gradients.square().sum((1, 2)))
    explicit = GradientRecord(nn.Parameter(torch.zeros(3, 5)), gradients.float())
    torch.testing.assert_close(explicit.bounds().squared_norm, long.bounds().squared_norm)


def test_batches_whose_rounding_exceeds_the_margin_are_refused():
    parameter = nn.Parameter(torch.zeros(4))
    coarse = GhostSums([parameter], ExactSum(Grid(2.0**-10, 1.0), 4), 1e-3)
    with pytest.raises(InvalidInput, match="larger margin"):
        coarse.check_grid(10)
    fine = GhostSums([parameter], ExactSum(Grid(2.0**-40, 1.0), 4), 1e-3)
    record = GradientRecord(parameter, torch.zeros(2, 4))
    fine.factors([record], 10**6)
    with pytest.raises(InvalidInput, match="smaller physical batches"):
        fine.factors([record], 10**11)
    with pytest.raises(InvalidInput, match="margin"):
        Training("ghost", margin=0.06)


def test_the_limit_of_cancellation_lowers_the_factor():
    record = cancelling_record()
    sums = GhostSums(record.parameters, ExactSum(Grid(2.0**-40, 1.0), 8), 1e-3)
    usual, _ = sums.factors([record], 2)
    lowered, _ = sums.factors([record], 10**9)
    assert (lowered < usual / 2).all()


def test_ghost_clipping_refuses_what_has_no_bound():
    with pytest.raises(InvalidInput, match="sparse"):
        GhostClippingModule(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(InvalidInput, match="GhostClippingModule"):
        DPFTRLOptimizerFastGradientClipping(
            torch.optim.SGD(perceptron().parameters()),
            plan_of(),
            module=GradSampleModule(perceptron()),
            key=KEY,
            clip_norm=1.0,
        )
    run = Training("ghost", model=perceptron().double())
    x, y = next(iter(run.optimizer.loader(data_of())))
    with pytest.raises(InvalidInput, match="float32"):
        run.backward((x.double(), y))
    norm = nn.LayerNorm(5)
    run = Training("ghost", model=nn.Sequential(norm, norm, nn.Linear(5, 3)))
    with pytest.raises(InvalidInput, match="more than once"):
        run.backward(next(iter(run.optimizer.loader(data_of()))))


# --- Noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_noise_is_that_of_the_stream_bit_for_bit(mode, reduction):
    run = Training(mode, reduction=reduction)
    size = len(run.weights())
    stream = NoiseStream(plan_of(), size, key=KEY, clip_norm=CLIP)
    for batch in run.optimizer.loader(data_of()):
        run.backward(batch)
        run.optimizer.clip_and_accumulate()
        total = ExactSum(run.optimizer._total.grid, size)
        total.steps += run.optimizer._total.steps
        stream.add_to(total)
        run.optimizer.step()  # clips nothing more
        released = torch.from_numpy(total.grid.values(total.steps)).float()
        expected = released / BATCH if reduction == "mean" else released
        assert torch.equal(run.gradient(), expected)  # also for the last batch, which has 12
        run.optimizer.zero_grad()
    assert run.optimizer.steps == 8


def test_gradients_of_float16_parameters_get_their_type():
    model = nn.Linear(5, 3).half()
    run = Training(model=model)
    x, y = next(iter(run.optimizer.loader(data_of())))
    run.step((x.half(), y))
    assert {p.grad.dtype for p in run.model.parameters()} == {torch.float16}


# --- Opacus' tools --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_virtual_steps_sum_the_parts_of_a_batch(mode):
    whole, parts = Training(mode), Training(mode)
    batch = next(iter(whole.optimizer.loader(data_of())))
    whole.backward(batch)
    whole.optimizer.clip_and_accumulate()
    sums = []
    parts.optimizer.attach_step_hook(lambda _: sums.append("released"))
    with BatchMemoryManager(
        data_loader=parts.optimizer.loader(data_of()),
        max_physical_batch_size=5,
        optimizer=parts.optimizer,
    ) as loader:
        for number, part in enumerate(loader):
            assert len(part[0]) <= 5
            if number == 3:  # the last part of the first batch
                assert parts.optimizer.steps == 0
                parts.backward(part)
                parts.optimizer.clip_and_accumulate()
                assert np.abs(parts.sum_so_far() - whole.sum_so_far()).max() < 1e-6
                parts.optimizer.step()
                parts.optimizer.zero_grad()
            else:
                parts.step(part)
    assert parts.optimizer.steps == 8
    assert sums == ["released"] * 8


def test_a_batch_that_was_left_in_the_middle_starts_again():
    run = Training()
    planned = run.optimizer.loader(data_of())
    manager = BatchMemoryManager(
        data_loader=planned, max_physical_batch_size=5, optimizer=run.optimizer
    )
    with manager as loader:
        for number, part in enumerate(loader):
            if number == 6:
                break
            run.step(part)
    assert run.optimizer.steps == 1
    with manager as loader:
        for part in loader:
            run.step(part)
    assert run.optimizer.steps == 8


def test_learning_rate_schedulers_and_step_hooks_work():
    run, seen = Training(), []
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    run.optimizer.attach_step_hook(lambda optimizer: seen.append(optimizer.steps))
    for batch in run.optimizer.loader(data_of(), per_epoch=True):
        run.step(batch)
        scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert seen == [1, 2, 3, 4]


def test_they_are_optimizers_of_opacus():
    assert issubclass(DPFTRLOptimizer, DPOptimizer)
    assert issubclass(DPFTRLOptimizerFastGradientClipping, DPOptimizerFastGradientClipping)


def test_training_lowers_the_loss():
    data = data_of(2000)
    data = TensorDataset(data.tensors[0], (data.tensors[0][:, 0] > 0).long())
    plan = plan_of(size=2000, batch=200, epochs=5)
    for mode in MODES:
        run = Training(mode, plan=plan)
        for batch in run.optimizer.loader(data):
            run.step(batch)
        accuracy = (run.model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
        assert accuracy > 0.8


# --- Batches --------------------------------------------------------------------------------


def test_every_epoch_has_the_same_batches_in_the_same_order():
    sampler = Training().optimizer.loader(data_of()).batch_sampler
    batches = list(sampler)
    assert batches[:4] == batches[4:]
    epoch = list(chain.from_iterable(batches[:4]))
    assert sorted(epoch) == list(range(SIZE))
    assert epoch != sorted(epoch)
    assert list(Training().optimizer.loader(data_of(), per_epoch=True).batch_sampler) == batches[:4]


def test_a_loader_starts_at_the_step_that_is_due():
    run = Training()
    loader = run.optimizer.loader(data_of())
    batches = list(Training().optimizer.loader(data_of()))
    for _ in range(2):
        for _, batch in zip(range(2), loader, strict=False):
            run.step(batch)
    assert run.optimizer.steps == 4
    assert len(loader) == 4
    x, y = next(iter(loader))
    assert torch.equal(x, batches[4][0])
    assert torch.equal(y, batches[4][1])


@pytest.mark.parametrize("mode", MODES)
def test_a_step_after_the_last_is_refused(mode):
    run = Training(mode)
    for batch in run.optimizer.loader(data_of()):
        run.step(batch)
    assert list(run.optimizer.loader(data_of())) == []
    weights = run.weights()
    with pytest.raises(RoundsExceeded):
        run.optimizer.step()
    assert torch.equal(run.weights(), weights)


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_another_loader_are_refused(mode):
    run = Training(mode)
    shuffled = DataLoader(data_of(), batch_size=BATCH, shuffle=True)
    with pytest.raises(InvalidInput, match="no batch from another loader"):
        run.step(next(iter(shuffled)))


def test_other_numbers_of_examples_are_refused():
    run = Training()
    loader = run.optimizer.loader(data_of())
    x, y = next(iter(loader))
    with pytest.raises(InvalidInput, match="7 examples, but its batch has 16"):
        run.step((x[:7], y[:7]))
    run.optimizer.zero_grad()
    run.backward((x, y))
    with pytest.raises(InvalidInput, match="32 examples"):
        run.step((x, y))  # a second backward pass on the same batch
    for batch in loader:  # what was refused did no harm
        run.step(batch)
    assert run.optimizer.steps == 8


def test_a_second_step_with_one_batch_and_a_left_out_batch_are_refused():
    run = Training()
    iterator = iter(run.optimizer.loader(data_of()))
    batch = next(iterator)
    run.step(batch)
    with pytest.raises(InvalidInput, match="one batch per step"):
        run.step(batch)
    run.optimizer.zero_grad()
    next(iterator)
    with pytest.raises(InvalidInput, match="one batch per step"):
        run.step(next(iterator))


def test_step_without_gradients_is_refused():
    run = Training()
    next(iter(run.optimizer.loader(data_of())))
    with pytest.raises(InvalidInput, match="0 examples, but its batch has 16"):
        run.optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_poisson_batches_may_be_empty(mode):
    plan = plan_of("poisson", size=8, batch=2, epochs=6)
    run, sizes = Training(mode, plan=plan), []
    for batch in run.optimizer.loader(data_of(8)):
        sizes.append(len(batch[0]))
        run.step(batch)
    assert 0 in sizes
    assert len(set(sizes)) > 2
    assert run.optimizer.steps == len(sizes) == 24
    assert torch.isfinite(run.weights()).all()


def test_loaders_that_the_plan_does_not_cover_are_refused():
    optimizer, data = Training().optimizer, data_of()
    with pytest.raises(InvalidInput, match="give the data set itself"):
        optimizer.loader(DataLoader(data, batch_size=BATCH, shuffle=True))
    with pytest.raises(InvalidInput, match="epsilon would be wrong"):
        optimizer.loader(DPDataLoader(data, sample_rate=BATCH / SIZE))
    with pytest.raises(InvalidInput, match="shuffle"):
        optimizer.loader(data, shuffle=True)
    with pytest.raises(InvalidInput, match="59 examples"):
        optimizer.loader(data_of(59))
    with pytest.raises(InvalidInput, match="with a length"):
        optimizer.loader(iter([1, 2]))


def test_poisson_loaders_of_opacus_are_accepted_only_with_the_planned_rate_and_steps():
    data = data_of()
    plan = plan_of("poisson", batch=15)
    run = Training(plan=plan)

    def sampled(rate=0.25, steps=None, size=SIZE):
        sampler = UniformWithReplacementSampler(num_samples=size, sample_rate=rate, steps=steps)
        return DataLoader(data, batch_sampler=sampler)

    with pytest.raises(InvalidInput, match=r"probability 0\.26"):
        run.optimizer.loader(sampled(0.26))
    with pytest.raises(InvalidInput, match="5 batches"):
        run.optimizer.loader(sampled(steps=5))
    with pytest.raises(InvalidInput, match="each of 59"):
        run.optimizer.loader(sampled(size=59))
    secret = [one for one in run.optimizer.hypotheses if one.name == "sampling"]
    assert "secret key" in secret[0].text
    loader = run.optimizer.loader(DPDataLoader.from_data_loader(DataLoader(data, batch_size=15)))
    for batch in loader:
        run.step(batch)
    assert run.optimizer.steps == 8
    sampling = [one for one in run.optimizer.hypotheses if one.name == "sampling"]
    assert len(sampling) == 1
    assert "drawn by Opacus" in sampling[0].text


# --- Guarantee ------------------------------------------------------------------------------


def test_epsilon_is_that_of_the_steps_done():
    run, plan = Training(), plan_of()
    assert run.optimizer.get_epsilon() == 0
    for steps, batch in enumerate(run.optimizer.loader(data_of()), 1):
        run.step(batch)
        taken = FixedEpochs(steps, 4, -(-steps // 4))
        expected = account(plan.mechanism, taken, plan.noise_multiplier, 1e-5).epsilon
        assert run.optimizer.get_epsilon() == run.optimizer.get_epsilon(1e-5) == expected
    assert expected == plan.guarantee.epsilon
    with pytest.raises(InvalidInput, match="delta"):
        run.optimizer.get_epsilon(1e-6)


def test_the_hypotheses_name_the_margin():
    hooks, ghost = Training().optimizer, Training("ghost", margin=0.01).optimizer
    assert hooks.margin == 0
    assert ghost.margin == 0.01
    assert "gradients" in {one.name for one in hooks.hypotheses}
    assert "ghost clipping" not in {one.name for one in hooks.hypotheses}
    assert any("0.99 times the clip norm" in one.text for one in ghost.hypotheses)
    assert hooks.guarantee() is None
    run = Training("ghost")
    for batch in run.optimizer.loader(data_of()):
        run.step(batch)
    assert run.optimizer.guarantee().hypotheses == run.optimizer.hypotheses
    assert run.optimizer.guarantee().epsilon == run.optimizer.get_epsilon()


def test_accountants_and_schedulers_of_opacus_are_refused():
    optimizer = Training().optimizer
    with pytest.raises(InvalidInput, match="get_epsilon"):
        optimizer.attach_step_hook(RDPAccountant().get_optimizer_hook_fn(0.1))
    with pytest.raises(InvalidInput, match="get_epsilon"):
        optimizer.attach_step_hook(partial(RDPAccountant().get_optimizer_hook_fn(0.1)))
    with pytest.raises(InvalidInput, match="get_epsilon"):
        _ = optimizer.noise_multiplier
    with pytest.raises(InvalidInput, match="noise schedulers"):
        ExponentialNoise(optimizer, gamma=0.9)
    with pytest.raises(InvalidInput, match="max_grad_norm"):
        ExponentialGradClip(optimizer, gamma=0.9).step()


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
def test_the_privacy_engine_is_refused():
    engine = PrivacyEngine(accountant="rdp")
    loader = DataLoader(data_of(), batch_size=BATCH)
    run = Training()
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": loader}
    with pytest.raises(InvalidInput, match="PrivacyEngine"):
        engine.make_private(module=run.model, optimizer=run.optimizer, **arguments)
    model = perceptron()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, private, _ = engine.make_private(module=model, optimizer=sgd, **arguments)
    for optimizer in (private, sgd):
        with pytest.raises(InvalidInput, match=r"PrivacyEngine|plain optimizer"):
            DPFTRLOptimizer(optimizer, plan_of(), key=KEY, clip_norm=1.0)


def test_wrong_arguments_are_refused():
    model = GradSampleModule(perceptron())
    sgd = torch.optim.SGD(model.parameters())
    make = partial(DPFTRLOptimizer, sgd, plan_of(), key=KEY, clip_norm=1.0)
    make()
    make()  # a second one is no error: a run may be resumed in the same process
    with pytest.raises(InvalidInput, match="NoiseKey"):
        make(key=b"0" * 32)
    with pytest.raises(InvalidInput, match="clip_norm"):
        make(clip_norm=math.nan)
    with pytest.raises(InvalidInput, match="loss_reduction"):
        make(loss_reduction="none")
    with pytest.raises(InvalidInput, match="DatasetPlan"):
        DPFTRLOptimizer(sgd, 1.0, key=KEY, clip_norm=1.0)
    with pytest.raises(InvalidInput, match="GradSampleModule"):
        DPFTRLOptimizer(
            torch.optim.SGD(perceptron().parameters()), plan_of(), key=KEY, clip_norm=1.0
        )
    frozen = torch.optim.SGD(perceptron().requires_grad_(False).parameters())
    with pytest.raises(InvalidInput, match="has no trainable"):
        DPFTRLOptimizer(frozen, plan_of(), key=KEY, clip_norm=1.0)


def test_parameters_that_change_or_get_no_gradient_are_refused():
    run = Training()
    batch = next(iter(run.optimizer.loader(data_of())))
    run.model.get_submodule("_module.0").weight.requires_grad_(False)
    with pytest.raises(InvalidInput, match="trainable parameters changed"):
        run.step(batch)

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.used(x)

    for mode in MODES:
        run = Training(mode, model=Unused())
        with pytest.raises(InvalidInput, match="freeze them"):
            run.step(next(iter(run.optimizer.loader(data_of()))))


# --- State ----------------------------------------------------------------------------------


def saved(run):
    """The state of a run, written and read as files of PyTorch."""
    file = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(state, mode="hooks", **kw):
    run = Training(mode, **kw)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    return run


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_ends_with_the_same_model(mode):
    whole = Training(mode)
    states = []
    for batch in whole.optimizer.loader(data_of()):
        whole.step(batch)
        states.append(saved(whole))
    run = resumed(states[4], mode)
    assert run.optimizer.steps == 5
    for batch in run.optimizer.loader(data_of()):
        run.step(batch)
    assert run.optimizer.steps == 8
    assert torch.equal(run.weights(), whole.weights())


def released_after(state, data):
    """The gradient that the next step releases, and its noise."""
    run = resumed(state)
    batch = next(iter(run.optimizer.loader(data)))
    run.backward(batch)
    run.optimizer.clip_and_accumulate()
    before = run.sum_so_far()
    run.optimizer.step()
    return run.gradient(), run.gradient().double().numpy() * BATCH - before


def test_an_older_state_gets_fresh_noise_for_other_gradients_only():
    run = Training()
    for _, batch in zip(range(2), run.optimizer.loader(data_of()), strict=False):
        run.step(batch)
    state = saved(run)
    first, noise = released_after(state, data_of())
    again, _ = released_after(state, data_of())
    _, other_noise = released_after(state, data_of(seed=1))
    assert torch.equal(first, again)
    scale = plan_of().noise_multiplier * CLIP
    assert np.abs(noise - other_noise).max() > scale / 2
    assert abs(np.corrcoef(noise, other_noise)[0, 1]) < 0.9  # earlier rows of Z are in both


def test_states_that_would_repeat_noise_are_refused():
    run = Training()
    iterator = iter(run.optimizer.loader(data_of()))
    run.step(next(iterator))
    state = run.optimizer.state_dict()
    run.step(next(iterator))
    with pytest.raises(UnsafeState, match="cannot be taken back"):
        run.optimizer.load_state_dict(state)
    with pytest.raises(InvalidInput, match="without the state of the noise"):
        run.optimizer.load_state_dict(torch.optim.SGD(run.model.parameters()).state_dict())
    with pytest.raises(InvalidInput):
        Training(key=NoiseKey.insecure_for_tests(8)).optimizer.load_state_dict(state)
    edited = {
        name: value.clone() if name.startswith("dpftrl") else value for name, value in state.items()
    }
    edited["dpftrl_noise_state"][-1] ^= 1
    with pytest.raises(InvalidInput):
        Training().optimizer.load_state_dict(edited)
    with pytest.raises(InvalidInput, match=r"clip norm 0\.5"):
        Training(clip_norm=0.25).optimizer.load_state_dict(state)


def test_there_is_no_state_within_a_batch():
    run = Training()
    x, y = next(iter(run.optimizer.loader(data_of())))
    run.optimizer.signal_skip_step()
    run.step((x[:8], y[:8]))
    with pytest.raises(InvalidInput, match="finish the batch"):
        run.optimizer.state_dict()
    run.step((x[8:], y[8:]))
    run.optimizer.state_dict()


def test_an_optimizer_cannot_be_copied_and_shows_no_secret():
    optimizer = Training().optimizer
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    assert "secret" not in repr(optimizer)
    assert "0 of 8 steps" in repr(optimizer)
