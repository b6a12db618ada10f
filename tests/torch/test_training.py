"""make_private: same bits after any interruption, and clear errors for everything else."""

import ast
import collections
import copy
import difflib
import gc
import inspect
import io
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_private_trainings import (
    COMMIT_EVERY,
    DATASET,
    EXAMPLES,
    INPUTS,
    LABELS,
    PLAN,
    STEPS,
    Augmented,
    adam,
    bits,
    loss_fn,
    plain_data,
    private,
    sgd,
    small_model,
    train,
)
from small_training_runs import Place, fast_places, journal_records, plan_in_order
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpftrl import account, mechanism
from dpftrl.accounting.amplification import believe_sampled
from dpftrl.clipping import Grid
from dpftrl.errors import InvalidInput, RoundsExceeded, RunInUse, UnsafeState
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.plan import Dataset, DatasetPlan, make_dataset_plan
from dpftrl.torch import PrivacyWarning, make_private
from dpftrl.torch.gradients import ClippedSums


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These models are so small that starting threads takes most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def places() -> Iterator[Iterator[Place]]:
    with fast_places() as found:
        yield found


@pytest.fixture
def place(places: Iterator[Place]) -> Place:
    return next(places)


def poisson_plan(batch_size: int, epochs: int) -> DatasetPlan:
    """A plan whose guarantee is claimed, not computed."""
    dataset = Dataset(EXAMPLES, batch_size, epochs)
    believed = believe_sampled(
        mechanism("independent", dataset.in_order),
        dataset.sampling("poisson"),
        3.0,
        7.0,
        1e-6,
        failure=0.0,
    )
    return DatasetPlan("poisson", believed, dataset)


def public_files(place: Place) -> list[Path]:
    return [
        path
        for path in place.folder.rglob("*")
        if path.is_file() and "private" not in path.relative_to(place.folder).parts
    ]


# --- The same bits after an interruption ---------------------------------------------------------

SCHEDULERS: dict[str, Any] = {
    "none": lambda _: None,
    "step": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 7, 7], 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 5), lr_scheduler.ExponentialLR(o, 0.8)], [5]
    ),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "nesterov": lambda m: torch.optim.SGD(
        m.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": adam,
    "adamw amsgrad": lambda m: torch.optim.AdamW(m.parameters(), 0.05, amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.1),
    "two groups": lambda m: torch.optim.Adam(
        [{"params": m[3].parameters(), "lr": 0.2}, {"params": m[0].parameters()}], lr=0.05
    ),
    "tensor lr": lambda m: torch.optim.Adam(m.parameters(), torch.tensor(0.05)),
}


def interrupted(
    place: Place, stops: list[int], optimizer: Any = sgd, scheduler: Any = None, **options: Any
) -> nn.Module:
    """Train with a new process after each stop, as far as one process can do that."""
    model_options = options.pop("model", {"dropout": 0.3})
    data = options.pop("data", Augmented)
    for number, stop in enumerate([*stops, None]):
        torch.manual_seed(number)  # the state of global generators must not matter
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        model = small_model(seed=0, **model_options)
        own = optimizer(model)
        plan = None if scheduler is None else scheduler(own)
        with private(place, model, own, data(), scheduler=plan, **options) as training:
            assert training.steps <= (stop or STEPS)
            train(training, stop)
    return model


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_is_resumed_to_the_same_bits(places, optimizer):
    made = OPTIMIZERS[optimizer]
    wanted = bits(interrupted(next(places), [], made))
    assert bits(interrupted(next(places), [1, 4, 9], made)) == wanted
    assert wanted != bits(small_model(dropout=0.3))


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_every_scheduler_is_resumed_to_the_same_bits(places, scheduler):
    made = SCHEDULERS[scheduler]
    wanted = bits(interrupted(next(places), [], sgd, made))
    assert bits(interrupted(next(places), [2, 7], sgd, made)) == wanted


def test_the_schedule_is_stepped_once_per_step(place):
    model = small_model()
    optimizer = sgd(model)
    scheduler = lr_scheduler.StepLR(optimizer, 4, 0.5)
    with private(place, model, optimizer, scheduler=scheduler) as training:
        rates = []
        for batch in training.loader:
            rates.append(optimizer.param_groups[0]["lr"])
            training.step(loss_fn, batch)
    assert rates == [0.1] * 4 + [0.05] * 4 + [0.025] * 4


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loading_in_other_processes_gives_the_same_bits(places):
    wanted = bits(interrupted(next(places), []))
    assert bits(interrupted(next(places), [5], num_workers=2)) == wanted


def test_a_folder_makes_no_difference(place):
    model = small_model(dropout=0.3)
    with private(None, model, dataset=Augmented()) as training:
        train(training)
    assert bits(model) == bits(interrupted(place, [4]))


def test_users_are_resumed_to_the_same_bits(places):
    owners = [n % 6 for n in range(EXAMPLES)]
    plan = plan_in_order(Dataset(6, 2, 4))
    options = {"units": owners, "examples_per_unit": 3, "plan": plan}
    wanted = bits(interrupted(next(places), [], **options))
    assert bits(interrupted(next(places), [2, 5, 7], **options)) == wanted


def test_a_sampled_user_adds_one_clip_norm_once_per_epoch_whatever_its_examples():
    """What is drawn and clipped is the user: its 19 examples count as one unit of the plan."""
    owners = [0] * 19 + [1, 2, 3, 4, 5]
    dataset = Dataset(6, 2, 4)
    believed = believe_sampled(
        mechanism("independent", dataset.in_order),
        dataset.sampling("balls-in-bins"),
        *(3.0, 7.0, 1e-6),
        failure=1e-9,
    )
    plan = DatasetPlan("balls-in-bins", believed, dataset)

    def weighted_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels, weights = batch
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        return (weights * losses).mean()

    def sums(weight_of_first_user: float) -> np.ndarray:
        weights = torch.tensor([weight_of_first_user] * 19 + [1.0] * 5)
        model, totals = small_model(), []
        with private(
            None,
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),  # so that later sums can be compared
            TensorDataset(INPUTS, LABELS, weights),
            plan=plan,
            units=owners,
            examples_per_unit=19,
        ) as training:
            step = training.run.step

            def record(total: np.ndarray, *rest: Any, **options: Any) -> None:
                totals.append(total.copy())
                step(total, *rest, **options)

            training.run.step = record
            for batch in training.loader:
                training.step(weighted_loss, batch)
            assert training.run.settings.unit == "user"
        return np.array(totals) * training.run.grid.step

    moved = np.linalg.norm(sums(1e4) - sums(0.0), axis=1)
    assert 0.79 < moved.max() <= 0.8  # the clip norm
    bins = moved.reshape(4, 3) > 0  # epochs and bins
    assert bins.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert (bins == bins[0]).all()


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_micro_batches_are_resumed_to_the_same_bits(places, micro_batch):
    wanted = bits(interrupted(next(places), [], micro_batch=micro_batch))
    assert bits(interrupted(next(places), [4, 8], micro_batch=micro_batch)) == wanted


def test_poisson_batches_are_resumed_to_the_same_bits(places):
    plan = poisson_plan(6, 3)
    wanted = bits(interrupted(next(places), [], plan=plan))
    assert bits(interrupted(next(places), [1, 5, 8], plan=plan)) == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_types_are_resumed_to_the_same_bits(places, dtype):
    def once(place: Place, stops: list[int]) -> dict[str, bytes]:
        for stop in [*stops, None]:
            model = small_model().to(dtype)
            data = TensorDataset(INPUTS.to(dtype), LABELS)
            with private(place, model, dataset=data) as training:
                train(training, stop)
        return {
            name: value.view(torch.uint8).numpy().tobytes()
            for name, value in model.state_dict().items()
        }

    assert once(next(places), []) == once(next(places), [4])


def test_the_state_of_the_global_generators_is_left_alone(place):
    with private(place, small_model(dropout=0.3), dataset=Augmented()) as training:
        loader = iter(training.loader)
        batch = next(loader)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        training.step(loss_fn, batch)
        next(loader)
        drawn = (torch.rand(1).item(), random.random(), float(np.random.rand()))  # noqa: NPY002
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert drawn == (torch.rand(1).item(), random.random(), float(np.random.rand()))  # noqa: NPY002


def test_dropout_differs_from_step_to_step_and_from_example_to_example(place):
    """All examples are the same and the model does not change: only the masks can differ."""
    data = TensorDataset(torch.ones(EXAMPLES, 3), torch.zeros(EXAMPLES, dtype=torch.long))
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 2))
    losses = list[float]()
    with private(place, model, torch.optim.SGD(model.parameters(), 0.0), data) as training:
        for batch in training.loader:
            losses += training.step(loss_fn, batch)._stats.losses.tolist()
    assert len(losses) == 3 * EXAMPLES
    assert len(set(losses)) > 2.8 * EXAMPLES


def noisy_by_python(model, batch):
    return loss_fn(model, (batch[0] + 0.1 * random.random() * model.training, batch[1]))


def noisy_by_numpy(model, batch):
    return loss_fn(model, (batch[0] + 0.1 * np.random.rand() * model.training, batch[1]))  # noqa: NPY002


@pytest.mark.parametrize("loss", [noisy_by_python, noisy_by_numpy])
def test_a_loss_with_random_numbers_is_resumed_to_the_same_bits(places, loss):
    """The first step of a process plans its gradients, and must draw no more than later steps."""
    results = []
    for stops in ([], [4], [5, 8]):
        place = next(places)
        for stop in [*stops, None]:
            model = small_model()
            with private(place, model) as training:
                train(training, stop, loss)
        results.append(bits(model))
    assert len(set(results)) == 1


def test_data_and_model_draw_from_different_seeds(place):
    """Otherwise random changes of examples and dropout masks are the same numbers."""
    seeds: dict[str, list[int]] = {"data": [], "loss": []}

    class Recorded(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return EXAMPLES

        def __getitem__(self, index):
            seeds["data"].append(torch.initial_seed())
            return INPUTS[index], LABELS[index]

    def loss(model, batch):
        seeds["loss"].append(torch.initial_seed())
        return loss_fn(model, batch)

    with private(place, small_model(), dataset=Recorded()) as training:
        train(training, loss=loss)
    assert len(set(seeds["data"])) == len(set(seeds["loss"])) == STEPS
    assert not set(seeds["data"]) & set(seeds["loss"])


class LayerDrop(nn.Module):
    """Leaves out a layer at random while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.head = nn.Linear(3, 2)

    def forward(self, inputs):
        for layer in self.layers:
            if not self.training or random.random() < 0.6:
                inputs = inputs + torch.tanh(layer(inputs))
        return self.head(inputs)


def test_a_model_that_leaves_out_layers_is_resumed_to_the_same_bits(places):
    """Its plan for gradients may change from step to step, but not with the steps before."""
    results = []
    for stops in ([], [4], [5, 8]):
        place = next(places)
        for stop in [*stops, None]:
            model = LayerDrop()
            with private(place, model) as training:
                train(training, stop)
        results.append(bits(model))
    assert len(set(results)) == 1


class ShiftedTensors(TensorDataset):
    """A data set of tensors that has its own way to give an example."""

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + 1.0, 1 - label


def test_examples_come_from_the_data_set_itself(place):
    """Also if it is a kind of TensorDataset."""
    with private(place, small_model(), dataset=ShiftedTensors(INPUTS, LABELS)) as training:
        for batch in training.loader:
            examples = training.run.batch(training.steps).examples
            assert torch.equal(batch[0], INPUTS[examples] + 1.0)
            assert torch.equal(batch[1], 1 - LABELS[examples])
            training.step(loss_fn, batch)


@pytest.mark.parametrize("data", [plain_data(), [(INPUTS[i], LABELS[i]) for i in range(EXAMPLES)]])
def test_batches_are_the_examples_of_the_run(place, data):
    with private(place, small_model(), dataset=data) as training:
        for batch in training.loader:
            examples = training.run.batch(training.steps).examples
            assert torch.equal(batch[0], INPUTS[examples])
            assert torch.equal(batch[1], LABELS[examples])
            training.step(loss_fn, batch)


# --- Noise, divisor, epsilon ---------------------------------------------------------------------


def test_a_step_is_sgd_with_clipped_gradients_and_the_noise_of_the_key(place):
    """An oracle by hand: gradients one by one, clipping, the noise stream, SGD."""
    model = small_model()
    own = torch.optim.SGD(model.parameters(), 0.1)
    with private(place, model, own, micro_batch=4) as training:
        batches = [training.run.batch(step).examples for step in range(STEPS)]
        train(training)
        step = training.run.grid.step
    key = NoiseKey((place.folder / "private" / "noise.key").read_bytes())
    oracle = small_model()
    optimizer = torch.optim.SGD(oracle.parameters(), 0.1)
    size = sum(p.numel() for p in oracle.parameters())
    stream = NoiseStream(PLAN, size, key=key, clip_norm=0.8, threads=1)
    reference = ClippedSums(oracle, Grid(step, 0.8), largest_batch=7, micro_batch=4)
    for examples in batches:
        total = np.zeros(size)
        for index in examples:
            oracle.zero_grad()
            loss_fn(oracle, (INPUTS[index : index + 1], LABELS[index : index + 1])).backward()
            flat = torch.cat([p.grad.reshape(-1) for p in oracle.parameters()]).double().numpy()
            total += flat * min(1.0, 0.8 / np.linalg.norm(flat))
        oracle.zero_grad(set_to_none=True)
        reference.add(loss_fn, (INPUTS[examples], LABELS[examples]))
        np.testing.assert_allclose(reference.steps * step, total, atol=1e-5)
        noisy = reference.steps.copy()
        stream.add_to(noisy, reference.grid, updates=len(examples))
        mean, start = noisy * (step / 7), 0  # always the planned batch size
        for parameter in oracle.parameters():
            part = torch.from_numpy(mean[start : start + parameter.numel()])
            parameter.grad = part.float().view_as(parameter)
            start += parameter.numel()
        optimizer.step()
    assert bits(oracle) == bits(model)


def test_epsilon_and_steps_of_a_training(place):
    with private(place, small_model()) as training:
        assert (training.steps, training.epoch, training.epsilon) == (0, 0, 0.0)
        assert len(training.loader) == STEPS
        seen = []
        for batch in training.loader:
            training.step(loss_fn, batch)
            seen.append(training.epsilon)
        assert len(training.loader) == 0
        assert list(training.loader) == []
        assert (training.steps, training.epoch, training.delta) == (STEPS, 2, 1e-6)
    assert seen == sorted(seen)
    assert seen[-1] == PLAN.guarantee.epsilon == training.guarantee().epsilon
    expected = account(PLAN.mechanism, DATASET.in_order, PLAN.noise_multiplier, 1e-6)
    assert seen[-1] == pytest.approx(expected.epsilon)


def test_a_training_without_a_plan_meets_its_target(place):
    model = small_model()
    target = {"plan": None, "epsilon": 3.0, "delta": 1e-5, "epochs": 2, "batch_size": 7}
    with private(place, model, sampling="none", **target) as training:
        train(training)
        assert training.epsilon <= 3.0
        assert training.steps == 8
    with private(place, model, sampling="none", **target) as training:
        assert training.steps == 8


def test_a_step_after_the_last_is_refused(place):
    with private(place, small_model()) as training:
        batch = None
        for batch in training.loader:
            training.step(loss_fn, batch)
        with pytest.raises(RoundsExceeded):
            training.step(loss_fn, batch)


def test_empty_batches_change_the_model_by_noise_alone(place):
    plan = poisson_plan(1, 1)
    model = small_model()
    empty = 0
    with private(place, model, plan=plan) as training:
        for batch in training.loader:
            before = bits(model)
            metrics = training.step(loss_fn, batch)
            assert bits(model) != before
            if len(batch[0]) == 0:
                assert batch[0].shape == (0, 3)
                empty += 1
                with pytest.warns(PrivacyWarning) if empty == 1 else warnings.catch_warnings():
                    assert np.isnan(metrics.loss)
    assert empty > 3
    assert training.steps == EXAMPLES


# --- Every argument that differs on resuming -----------------------------------------------------

TARGET = {
    "plan": None,
    "epsilon": 3.0,
    "delta": 1e-5,
    "epochs": 2,
    "batch_size": 7,
    "sampling": "none",
}


@pytest.fixture(scope="module")
def begun() -> Iterator[Place]:
    """A run with 4 steps of 8, and a scheduler and frozen weights."""
    with fast_places() as places:
        place = next(places)
        model = small_model(frozen=True)
        optimizer = sgd(model)
        scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
        options = {"scheduler": scheduler, "units": OWNERS, "examples_per_unit": 2}
        with private(place, model, optimizer, **TARGET, **options) as training:
            train(training, 4)
        yield place


OWNERS = [f"user {n // 2}" if n < 4 else f"single {n}" for n in range(EXAMPLES)]


def resume(place: Place, **changes: Any) -> None:
    model = changes.pop("model", None) or small_model(frozen=True)
    optimizer = changes.pop("optimizer", sgd)(model)
    scheduler = changes.pop("scheduler", lambda o: lr_scheduler.StepLR(o, 2, 0.5))(optimizer)
    options = {"scheduler": scheduler, "units": OWNERS, "examples_per_unit": 2, **TARGET}
    private(place, model, optimizer, **{**options, **changes}).close()


def wider_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    return model


def renamed_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def thawed_model() -> nn.Module:
    return small_model()


def double_model() -> nn.Module:
    return small_model(frozen=True).double()


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "epsilon": ({"epsilon": 3.1}, "epsilon 3.1 instead of 3"),
    "delta": ({"delta": 2e-5}, "delta"),
    "epochs": ({"epochs": 3}, "epochs 3 instead of 2"),
    "batch size": ({"batch_size": 8}, "batch_size 8 instead of 7"),
    "sampling": ({"sampling": "poisson"}, "sampling poisson instead of none"),
    "mechanism": ({"mechanism": "tree"}, "mechanism"),
    "max batch size": ({"max_batch_size": 30}, "max_batch_size"),
    "clip norm": ({"clip_norm": 0.9}, "clip_norm 0.9 instead of 0.8"),
    "commit every": ({"commit_every": 4}, "commit_every"),
    "examples per unit": ({"examples_per_unit": 3}, "examples_per_unit"),
    "plan": ({**dict.fromkeys(TARGET), "plan": plan_in_order(Dataset(22, 7, 2))}, "another plan"),
    "users": ({"units": OWNERS[1:] + OWNERS[:1]}, "other users"),
    "no users": ({"units": None, "examples_per_unit": 1}, "other users"),
    "length": ({"dataset": plain_data(23), "units": OWNERS[:23]}, "another data set"),
    "wider model": ({"model": wider_model()}, "size"),
    "renamed model": ({"model": renamed_model()}, "other parameters"),
    "nothing frozen": ({"model": thawed_model()}, "other parameters"),
    "other frozen weights": ({"model": small_model(1, frozen=True)}, "frozen parameters"),
    "double": ({"model": double_model(), "dataset": plain_data()}, "frozen parameters|type"),
    "adam": ({"optimizer": adam}, "optimizer is not that of the run"),
    "rmsprop": (
        {"optimizer": lambda m: torch.optim.RMSprop(m.parameters(), 0.1)},
        "optimizer is not that of the run",
    ),
    "groups": (
        {
            "optimizer": lambda m: torch.optim.SGD(
                [{"params": [p]} for p in m.parameters()], 0.1, momentum=0.9
            )
        },
        "optimizer is not that of the run",
    ),
    "no scheduler": ({"scheduler": lambda _: None}, "began with a scheduler"),
    "another scheduler": (
        {"scheduler": lambda o: lr_scheduler.CosineAnnealingLR(o, 10)},
        "scheduler",
    ),
    "another test key": ({"insecure_test_key": 4}, "key"),
    "no test key": ({"insecure_test_key": None}, "key"),
}


@pytest.mark.parametrize("name", list(DIFFERENCES))
def test_arguments_that_differ_when_resuming_are_refused(begun, name):
    changes, message = DIFFERENCES[name]
    with pytest.raises(InvalidInput, match=message):
        resume(begun, **changes)


def test_the_same_arguments_are_accepted(begun):
    resume(begun)
    resume(begun, **dict.fromkeys(TARGET))  # what is left out is that of the run


def test_a_run_without_scheduler_is_refused_with_one(place):
    with private(place, small_model()):
        pass
    model = small_model()
    optimizer = sgd(model)
    with pytest.raises(InvalidInput, match="began with no scheduler"):
        private(place, model, optimizer, scheduler=lr_scheduler.StepLR(optimizer, 2))


def test_a_plan_with_another_mechanism_or_sampling_is_refused(place):
    """Also if data set and noise multiplier are the same."""
    with private(place, small_model()):
        pass
    tree = mechanism("tree", DATASET.in_order)
    guarantee = account(tree, DATASET.in_order, PLAN.noise_multiplier, 1e-6)
    other = DatasetPlan("none", guarantee, DATASET)
    with pytest.raises(InvalidInput, match="another plan"):
        private(place, small_model(), plan=other).close()
    stricter = account(PLAN.mechanism, DATASET.in_order, PLAN.noise_multiplier, 1e-9)
    with pytest.raises(InvalidInput, match="another plan"):
        private(place, small_model(), plan=DatasetPlan("none", stricter, DATASET)).close()


def test_a_target_that_contradicts_the_plan_is_refused(place):
    """Otherwise somebody who asks for epsilon 0.5 gets the epsilon of the plan."""
    assert PLAN.guarantee.epsilon > 1
    for name, value in (("epsilon", 0.5), ("delta", 1e-9), ("epochs", 5), ("batch_size", 3)):
        with pytest.raises(InvalidInput, match=name):
            private(place, small_model(), **{name: value}).close()


def test_a_plan_for_another_number_of_units_is_refused(place):
    with pytest.raises(InvalidInput, match="the plan is for 24 units"):
        private(place, small_model(), dataset=plain_data(20))


def test_a_failed_resume_changes_neither_files_nor_locks(begun):
    before = {path: path.read_bytes() for path in begun.folder.rglob("*") if path.is_file()}
    for name in ("epsilon", "adam", "other frozen weights", "users"):
        changes, _ = DIFFERENCES[name]
        with pytest.raises(InvalidInput):
            resume(begun, **changes)
    after = {path: path.read_bytes() for path in begun.folder.rglob("*") if path.is_file()}
    assert after == before
    resume(begun)


def test_a_training_that_is_open_is_refused_to_others(place):
    with private(place, small_model()), pytest.raises(RunInUse):
        private(place, small_model())
    private(place, small_model()).close()


def test_a_training_whose_journal_is_gone_does_not_start_again(place):
    with private(place, small_model()) as training:
        train(training, 5)
    place.journal.unlink()
    with pytest.raises(UnsafeState):
        private(place, small_model()).close()


def test_the_learning_rate_of_the_run_is_kept_or_a_new_one_refused(place):
    with private(place, small_model()) as training:
        train(training, 3)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    try:
        private(place, model, optimizer).close()
    except InvalidInput:
        return
    assert optimizer.param_groups[0]["lr"] == 0.1


# --- Batches -------------------------------------------------------------------------------------


def test_a_batch_that_is_not_from_the_loader_is_refused(place):
    with private(place, small_model()) as training:
        with pytest.raises(InvalidInput, match="take batches from the loader"):
            training.step(loss_fn, (INPUTS[:7], LABELS[:7]))
        assert training.steps == 0
        train(training)


def test_a_batch_that_is_used_twice_is_refused(place):
    with private(place, small_model()) as training:
        batch = next(iter(training.loader))
        training.step(loss_fn, batch)
        with pytest.raises(InvalidInput, match="once"):
            training.step(loss_fn, batch)
        assert training.steps == 1


def test_a_batch_of_an_earlier_step_is_refused(place):
    """Its examples would take part more often than the guarantee assumes."""
    with private(place, small_model()) as training:
        loader = iter(training.loader)
        first = next(loader)
        training.step(loss_fn, first)
        second = next(loader)
        assert len(first[0]) == len(second[0])
        with pytest.raises(InvalidInput):
            training.step(loss_fn, first)
        training.step(loss_fn, second)


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs, labels: (inputs[:-1], labels[:-1]),
        lambda inputs, labels: (torch.cat([inputs, inputs]), torch.cat([labels, labels])),
        lambda inputs, labels: (inputs[:0], labels[:0]),
        lambda inputs, labels: (inputs, labels[:-1]),
        lambda inputs, _: (inputs, torch.tensor(1)),
        lambda inputs, labels: (inputs.mean(), labels),
        lambda *_: (),
        lambda *_: {},
        lambda *_: None,
        lambda *_: "text",
    ],
)
def test_a_batch_with_other_rows_is_refused(place, change):
    model = small_model()
    with private(place, model) as training:
        before = bits(model)
        batch = next(iter(training.loader))
        with pytest.raises(InvalidInput):
            training.step(loss_fn, change(*batch))
        assert bits(model) == before
        training.step(loss_fn, batch)


def test_a_batch_that_was_skipped_is_noticed(place):
    with private(place, small_model()) as training:
        loader = iter(training.loader)
        next(loader)
        with pytest.raises(InvalidInput, match="was not done"):
            next(loader)


def test_a_loop_that_was_left_goes_on_where_it_was(places):
    models = [small_model(), small_model()]
    with private(next(places), models[0]) as training:
        train(training)
    with private(next(places), models[1]) as training:
        for stop in (1, 2, 6, STEPS):
            for _ in training.loader:  # a batch that is never used
                break
            train(training, stop)
    assert bits(models[0]) == bits(models[1])


def test_batches_may_be_dicts_and_lists(place):
    class Dicts(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return EXAMPLES

        def __getitem__(self, index):
            return {"x": INPUTS[index], "rest": [LABELS[index], (INPUTS[index],)]}

    def loss(model, batch):
        return loss_fn(model, (batch["x"], batch["rest"][0]))

    models = [small_model(), small_model()]
    with private(place, models[0], dataset=Dicts()) as training:
        train(training, loss=loss)
    with private(None, models[1]) as training:
        train(training)
    assert bits(models[0]) == bits(models[1])


def test_batches_may_be_other_kinds_of_mappings(place):
    """Such as those that collate functions of `transformers` return."""

    def collate(examples):
        inputs, labels = torch.utils.data.default_collate(examples)
        return collections.UserDict({"x": inputs, "y": labels})

    def loss(model, batch):
        return loss_fn(model, (batch["x"], batch["y"]))

    models = [small_model(), small_model()]
    with private(place, models[0], collate_fn=collate) as training:
        train(training, loss=loss)
    with private(None, models[1]) as training:
        train(training)
    assert bits(models[0]) == bits(models[1])


# --- What is refused from the start --------------------------------------------------------------


def test_stray_gradients_are_refused_and_harmless(places):
    wanted = small_model()
    with private(next(places), wanted) as training:
        train(training)
    model = small_model()
    with private(next(places), model) as training:
        for batch in training.loader:
            if training.steps in (0, 5):
                loss_fn(model, batch).backward()
                with pytest.raises(InvalidInput, match="backward"):
                    training.step(loss_fn, batch)
                model.zero_grad(set_to_none=True)
            training.step(loss_fn, batch)
            assert all(parameter.grad is None for parameter in model.parameters())
    assert bits(model) == bits(wanted)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)],
)
def test_layers_that_mix_examples_are_refused(place, layer):
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2))
    with pytest.raises(InvalidInput, match="GroupNorm"):
        private(place, model)
    assert not place.folder.exists()


def test_a_loss_that_mixes_examples_is_refused(place):
    def mixing(model, batch):
        outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs - outputs.mean(dim=0, keepdim=True), batch[1])

    model = small_model()
    with private(place, model) as training:
        before = bits(model)
        with pytest.raises(InvalidInput):
            train(training, 1, mixing)
        assert (training.steps, bits(model)) == (0, before)
    assert len(journal_records(place)) == 1


def test_optimizers_that_do_not_fit_are_refused(place):
    model, other = small_model(), small_model()
    partly = torch.optim.SGD(model[0].parameters(), 0.1)
    more = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    for optimizer, message in (
        (sgd(other), "does not have it"),
        (partly, "does not have it"),
        (more, "not of this model"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS"),
    ):
        with pytest.raises(InvalidInput, match=message):
            private(place, model, optimizer)
    optimizer = sgd(model)
    for scheduler, message in (
        (lr_scheduler.ReduceLROnPlateau(optimizer), "ReduceLROnPlateau"),
        (lr_scheduler.StepLR(sgd(model), 2), "another optimizer"),
        ("no scheduler", "another optimizer"),
    ):
        with pytest.raises(InvalidInput, match=message):
            private(place, model, optimizer, scheduler=scheduler)
    assert not place.folder.exists()


def test_data_sets_without_numbers_are_refused(place):
    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return iter(())

    for data in (Stream(), DataLoader(plain_data()), iter([1, 2])):
        with pytest.raises(InvalidInput):
            private(place, small_model(), dataset=data)


def test_a_model_without_trainable_parameters_is_refused(place):
    model = small_model().requires_grad_(False)
    with pytest.raises(InvalidInput, match="no trainable parameter"):
        private(place, model)


@pytest.mark.parametrize("missing", ["epsilon", "delta", "epochs", "batch_size"])
def test_a_target_that_is_not_complete_is_refused(place, missing):
    with pytest.raises(InvalidInput, match=f"give {missing}"):
        private(place, small_model(), **{**TARGET, missing: None})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_norm_that_makes_no_sense_is_refused(place, value):
    with pytest.raises(InvalidInput, match="clip_norm"):
        private(place, small_model(), clip_norm=value)
    private(place, small_model()).close()  # and nothing is left in the way


# --- Errors of users -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 4])
def test_an_error_in_the_loss_leaves_the_training_usable(places, error, at):
    wanted = small_model(dropout=0.3)
    with private(next(places), wanted) as training:
        train(training)
    model = small_model(dropout=0.3)
    with private(next(places), model) as training:

        def failing(*_):
            raise error("of the user")

        for batch in training.loader:
            if training.steps == at:
                before = bits(model)
                # In a later step, torch.func may be suspected first, with a warning.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with pytest.raises(error, match="of the user"):
                        training.step(failing, batch)
                assert bits(model) == before
                assert training.steps == at
            training.step(loss_fn, batch)
    assert bits(model) == bits(wanted)


@pytest.mark.parametrize("calls", range(1, 5))
def test_an_error_in_one_call_of_the_loss_does_not_stop_a_later_resume(places, calls):
    """A loss that fails once, such as for lack of memory, must not change how later steps sum."""
    wanted = small_model()
    with private(next(places), wanted) as training:
        train(training)
    place, model, left = next(places), small_model(), [calls]

    def fails_once(model, batch):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("once")
        return loss_fn(model, batch)

    with private(place, model) as training, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in training.loader:
            if training.steps == 4:
                try:
                    training.step(fails_once, batch)
                except RuntimeError:
                    training.step(loss_fn, batch)
            else:
                training.step(loss_fn, batch)
            if training.steps == 5:
                break
    model = small_model()
    with private(place, model) as training:
        train(training)
    assert bits(model) == bits(wanted)


def test_an_error_in_the_data_set_leaves_the_training_usable(place):
    class Failing(torch.utils.data.Dataset[Any]):
        broken = False

        def __len__(self) -> int:
            return EXAMPLES

        def __getitem__(self, index):
            if self.broken:
                raise OSError("the disk of the examples is gone")
            return INPUTS[index], LABELS[index]

    data, model, wanted = Failing(), small_model(), small_model()
    with private(place, model, dataset=data) as training:
        train(training, 4)
        data.broken = True
        with pytest.raises(OSError, match="is gone"):
            train(training)
        data.broken = False
        train(training)
    with private(None, wanted) as training:
        train(training)
    assert bits(model) == bits(wanted)


def test_an_error_in_the_optimizer_stops_the_training_until_it_is_resumed(places):
    wanted = small_model()
    with private(next(places), wanted) as training:
        train(training)
    place, model = next(places), small_model()

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            if training.steps == 4:
                raise RuntimeError("of the optimizer")
            return super().step(closure)

    optimizer = Broken(model.parameters(), 0.1, momentum=0.9)
    with private(place, model, optimizer) as training:
        with pytest.raises(RuntimeError, match="of the optimizer"):
            train(training)
        with pytest.raises(UnsafeState):
            train(training)
    model = small_model()
    with private(place, model) as training:
        train(training)
    assert bits(model) == bits(wanted)


def test_an_error_in_the_optimizer_stops_a_training_without_a_folder():
    """Otherwise the same batch is released again, with another row of noise."""
    model = small_model()

    class Broken(torch.optim.SGD):
        is_broken = True

        def step(self, closure=None):
            done = super().step(closure)
            if self.is_broken:
                raise RuntimeError("of the optimizer")
            return done

    optimizer = Broken(model.parameters(), 0.1)
    training = private(None, model, optimizer)
    batch = next(iter(training.loader))
    with pytest.raises(RuntimeError):
        training.step(loss_fn, batch)
    optimizer.is_broken = False
    model.zero_grad(set_to_none=True)
    with pytest.raises(UnsafeState):
        training.step(loss_fn, batch)


@pytest.mark.parametrize("row", [0, 1, 5])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_an_example_that_is_not_finite_counts_as_zero_and_raises_nothing(place, row, value):
    """An error would reveal the example, and as batches are fixed, training could never start."""
    first = private(None, small_model()).run.batch(0).examples
    inputs = INPUTS.clone()
    inputs[first[row]] = value
    model = small_model()
    with private(place, model, dataset=TensorDataset(inputs, LABELS)) as training:
        train(training)
    assert all(torch.isfinite(one).all() for one in model.state_dict().values())


def test_two_equal_examples_at_the_start_raise_nothing(place):
    """The check of the first step compares two rows, which may be the same."""
    data = TensorDataset(torch.ones(EXAMPLES, 3), torch.ones(EXAMPLES, dtype=torch.long))
    with private(place, small_model(), dataset=data) as training:
        train(training)


def test_examples_without_a_gradient_raise_nothing(place):
    """A saturated loss has the gradient zero."""

    def saturated(model, batch):
        return loss_fn(model, batch).clamp(min=100.0)

    with private(place, small_model()) as training:
        train(training, loss=saturated)


# --- Metrics and public files --------------------------------------------------------------------


def test_metrics_warn_once_and_are_in_no_public_file(place):
    secrets = list[float]()
    with private(place, small_model()) as training:
        warned = 0
        for batch in training.loader:
            metrics = training.step(loss_fn, batch)
            assert repr(metrics) == "Metrics(private)"
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                secrets += [metrics.loss, metrics.clipped, metrics.not_finite]
            warned += sum(one.category is PrivacyWarning for one in seen)
            assert all(one.filename == __file__ for one in seen)
        training.statement(place.folder / "statement")
    assert warned == 1
    assert len(set(secrets)) > STEPS
    files = public_files(place)
    assert {path.name for path in files} >= {"guarantee.json", "plan.json", "run.json"}
    for path in files:
        content = path.read_text()
        for value in secrets[::3]:
            assert f"{value:.6g}" not in content
            assert repr(value)[:9] not in content
        assert "loss" not in content or path.suffix in {".md", ".html"} or "losses" in content


def test_public_files_do_not_depend_on_the_data(places):
    """Two runs with other data and the same test key: nothing but the identity differs."""
    contents = []
    for labels in (LABELS, 1 - LABELS):
        place = next(places)
        with private(place, small_model(), dataset=TensorDataset(INPUTS, labels)) as training:
            train(training)
            run = training.run.file.run
        contents.append(
            {path.name: path.read_text().replace(run, "") for path in public_files(place)}
        )
    assert contents[0] == contents[1]


def test_no_batch_and_no_noise_is_in_a_public_file(place):
    with private(place, small_model()) as training:
        train(training)
        batch = training.run.batch(0).examples.tolist()
    key = (place.folder / "private" / "noise.key").read_bytes()
    for path in public_files(place):
        content = path.read_bytes()
        assert key not in content
        assert key.hex().encode() not in content
        assert str(batch).strip("[]").encode() not in content


# --- The model -----------------------------------------------------------------------------------


def test_frozen_parameters_get_no_noise(places):
    model = small_model(frozen=True)
    frozen = {name: value.clone() for name, value in model[0].state_dict().items()}
    trainable = model[3].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    with private(next(places), model, optimizer) as training:
        assert training.run.settings.size == sum(p.numel() for p in model[3].parameters())
        for batch in training.loader:
            training.step(loss_fn, batch)
            for name, value in model[0].state_dict().items():
                assert torch.equal(value, frozen[name])
    assert not torch.equal(model[3].weight, trainable)


def test_the_model_is_left_as_it_is(place):
    model = small_model(dropout=0.3)
    modules, keys = list(model.modules()), list(model.state_dict())
    parameters = list(model.parameters())
    with private(place, model) as training:
        train(training)
        model.eval()
        assert not model.training
    assert list(model.modules()) == modules
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for module in modules:
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert not module._forward_pre_hooks
    assert all(type(one) is nn.Parameter and one.requires_grad for one in model.parameters())


def test_the_mode_of_the_model_is_kept(place):
    model = small_model(dropout=0.3)
    model[2].eval()
    with private(place, model) as training:
        train(training, 2)
        assert model.training
        assert not model[2].training


def test_saving_the_model_works_during_and_after_training(place):
    model = small_model()
    with private(place, model) as training:
        for batch in training.loader:
            training.step(loss_fn, batch)
            if training.steps in (1, COMMIT_EVERY, STEPS):
                file = io.BytesIO()
                torch.save(model.state_dict(), file)
                file.seek(0)
                loaded = small_model(seed=9)
                loaded.load_state_dict(torch.load(file, weights_only=True))
                assert bits(loaded) == bits(model)
                whole = io.BytesIO()
                torch.save(model, whole)  # no hooks and no wrappers that cannot be pickled
    file = io.BytesIO()
    torch.save(training._optimizer.state_dict(), file)


def test_shared_parameters_are_resumed_to_the_same_bits(places):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
                self.register_buffer("scale", torch.tensor(2.0))
            self.second.weight = self.first.weight

        def forward(self, inputs):
            return self.second(torch.tanh(self.first(inputs))) * self.scale

    results = []
    for stops in ([], [4, 7]):
        place = next(places)
        for stop in [*stops, None]:
            model = Tied()
            with private(place, model) as training:
                assert training.run.settings.size == 9 + 3 + 3
                train(training, stop)
        results.append(bits(model))
        assert model.second.weight is model.first.weight
    assert results[0] == results[1]


def test_a_training_that_nobody_holds_any_more_releases_its_lock(place):
    """In a notebook, a cell that is run again forgets the first training, and does not close it."""
    training = private(place, small_model())
    train(training, 4)
    del training
    gc.collect()
    private(place, small_model()).close()


def test_a_deep_copy_of_the_model_is_independent(place):
    model = small_model()
    with private(place, model) as training:
        train(training, 4)
        average = copy.deepcopy(model)
        kept = bits(average)
        train(training)
    assert bits(average) == kept != bits(model)


# --- Few lines of change -------------------------------------------------------------------------


def ordinary_training(model, dataset):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset, batch_size=7, shuffle=True)
    for _ in range(3):
        for batch in loader:
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), io.BytesIO())


def private_training(model, dataset, place):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = make_private(
        model,
        optimizer,
        dataset,
        folder=place.folder,
        state_folder=place.state,
        epsilon=4.0,
        delta=1e-5,
        epochs=3,
        batch_size=7,
        clip_norm=1.0,
        sampling="none",
    )
    for batch in training.loader:
        training.step(loss_fn, batch)
    training.close()
    torch.save(model.state_dict(), io.BytesIO())


def test_five_statements_are_enough_and_the_model_needs_none(place):
    """With the import of make_private."""
    ordinary_training(small_model(), plain_data())
    private_training(small_model(), plain_data(), place)
    texts = [
        ast.unparse(ast.parse(inspect.getsource(one))).splitlines()[1:]
        for one in (ordinary_training, private_training)
    ]
    added = [
        line[2:].strip()
        for line in difflib.ndiff(*([one.strip() for one in text] for text in texts))
        if line.startswith("+ ")
    ]
    assert len(added) + 1 <= 5, added


@pytest.mark.slow
def test_every_sampling_trains_and_resumes(places):
    """Plans with a certificate take seconds."""
    dataset = Dataset(EXAMPLES, 6, 3)
    for name in ("poisson", "cyclic-poisson", "balls-in-bins"):
        plan = make_dataset_plan(dataset, 4.0, 1e-5, sampling=name)
        wanted = bits(interrupted(next(places), [], plan=plan))
        assert bits(interrupted(next(places), [1, 5, 8], plan=plan)) == wanted
