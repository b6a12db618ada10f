"""make_private for JAX: same bits after any interruption, sums by hand, and clear errors."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_training_runs import Place, fast_places, journal_records, plan_in_order

from dpftrl import mechanism
from dpftrl.accounting.amplification import believe_sampled
from dpftrl.centralized import TrainingRun
from dpftrl.centralized.owner import PrivacyWarning
from dpftrl.clipping import Grid
from dpftrl.errors import InvalidInput, RoundsExceeded, RunInUse, UnsafeState
from dpftrl.jax import make_private
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.plan import Dataset, DatasetPlan

EXAMPLES = 16
DATASET = Dataset(EXAMPLES, 8, 4)  # 8 steps, with batches of one size: every size is compiled
STEPS = DATASET.steps
PLAN = plan_in_order(DATASET)
CLIP = 0.8
COMMIT_EVERY = 3  # does not divide the number of steps
INPUTS = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
TARGETS = (2 * INPUTS.sum(axis=1)).astype(np.float32)
DATA = (INPUTS, TARGETS)
PARAMS = {"bias": jnp.zeros(()), "weights": jnp.full(3, 0.1)}
SIZE = 4


def loss_fn(params: Any, batch: Any) -> jax.Array:
    inputs, targets = batch
    return jnp.mean((inputs @ params["weights"] + params["bias"] - targets) ** 2)


def sgd() -> optax.GradientTransformation:
    return optax.sgd(0.1)


def momentum() -> optax.GradientTransformation:
    return optax.sgd(0.1, momentum=0.9)


def scheduled_adam() -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(0.1, STEPS))


def private(place: Place | None, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "folder": None if place is None else place.folder,
        "state_folder": None if place is None else place.state,
        "clip_norm": CLIP,
        "plan": PLAN,
        "commit_every": COMMIT_EVERY,
        "insecure_test_key": 3,
        **changes,
    }
    loss, params = options.pop("loss", loss_fn), options.pop("params", PARAMS)
    optimizer, data = options.pop("optimizer", None) or sgd(), options.pop("data", DATA)
    return make_private(loss, params, optimizer, data, **options)


def train(training: Any, until: int | None = None) -> Any:
    for batch in training.loader:
        training.step(batch)
        if training.steps == until:
            break
    return training


def bits(params: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def interrupted(place: Place, stops: list[int], **options: Any) -> list[bytes]:
    """The bits of the parameters of a training that was closed and resumed after some steps."""
    for stop in [*stops, None]:
        with private(place, **options) as training:
            train(training, stop)
    return bits(training.params)


def poisson_plan(batch_size: int, epochs: int) -> DatasetPlan:
    """A plan whose guarantee is claimed, not computed."""
    dataset = Dataset(EXAMPLES, batch_size, epochs)
    independent = mechanism("independent", dataset.in_order)
    sampling = dataset.sampling("poisson")
    assert sampling is not None
    believed = believe_sampled(independent, sampling, 3.0, 7.0, 1e-6, failure=0.0)
    return DatasetPlan("poisson", believed, dataset)


@pytest.fixture(autouse=True, scope="module")
def _compile_once(tmp_path_factory) -> Iterator[None]:
    """Most tests compile the same functions."""
    from jax.experimental.compilation_cache import compilation_cache

    values = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def places() -> Iterator[Iterator[Place]]:
    with fast_places() as found:
        yield found


@pytest.fixture
def place(places: Iterator[Place]) -> Place:
    return next(places)


@pytest.fixture
def exact_sums(monkeypatch) -> list[tuple[np.ndarray, Grid]]:
    """The clipped sums before noise of all steps of this test, in steps of their grid."""
    seen = list[tuple[np.ndarray, Grid]]()
    real = TrainingRun.step

    def spy(self, total, units, apply, grid=None):
        seen.append((total.copy(), grid or self.grid))
        return real(self, total, units, apply, grid)

    monkeypatch.setattr(TrainingRun, "step", spy)
    return seen


class Sums:
    """The sums as floats."""

    def __init__(self, exact: list[tuple[np.ndarray, Grid]]):
        self._exact = exact

    def __getitem__(self, index: int) -> np.ndarray:
        total, grid = self._exact[index]
        return total * grid.step


@pytest.fixture
def sums(exact_sums) -> Sums:
    return Sums(exact_sums)


def clipped_gradient(params: Any, rows: np.ndarray, data: Any = DATA) -> np.ndarray:
    """The clipped gradient of the mean loss of some examples, in float64."""
    gradient = jax.grad(loss_fn)(params, tuple(array[rows] for array in data))
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)]).astype(float)
    if not np.isfinite(flat).all():
        return np.zeros(SIZE)
    return flat * min(1.0, CLIP / np.linalg.norm(flat))


# --- The same bits after an interruption ---------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        momentum,
        pytest.param(
            lambda: optax.adam(0.1),
        ),
        pytest.param(
            scheduled_adam,
        ),
    ],
    ids=["momentum", "adam", "scheduled adam"],
)
def test_every_optimizer_is_resumed_to_the_same_bits(places, optimizer):
    params = {**PARAMS, "bias": jnp.zeros(1)}
    options = {"optimizer": optimizer(), "params": params}
    wanted = interrupted(next(places), [], **options)
    assert interrupted(next(places), [1, 5], **options) == wanted
    assert wanted != bits(params)


def test_a_parameter_without_dimensions_is_saved_and_resumed(places):
    assert interrupted(next(places), [5]) == interrupted(next(places), [])


def test_a_run_without_a_folder_gives_the_same_bits(place):
    params = {**PARAMS, "bias": jnp.zeros(1)}
    with private(None, params=params) as training:
        train(training)
    assert bits(training.params) == interrupted(place, [5], params=params)


def test_poisson_batches_and_users_are_resumed_to_the_same_bits(places):
    params = {**PARAMS, "bias": jnp.zeros(1)}
    owners = [min(n % 7, 4) for n in range(EXAMPLES)]
    users = plan_in_order(Dataset(5, 2, 3))
    for options in (
        {"plan": poisson_plan(8, 2)},
        {"plan": users, "units": owners, "examples_per_unit": 3},
    ):
        wanted = interrupted(next(places), [], params=params, **options)
        assert interrupted(next(places), [2], params=params, **options) == wanted


def test_bfloat16_parameters_are_resumed_to_the_same_bits(places):
    params = {"bias": jnp.zeros(1, jnp.bfloat16), "weights": jnp.full(3, 0.1, jnp.bfloat16)}
    wanted = interrupted(next(places), [], params=params, optimizer=momentum())
    place = next(places)
    assert interrupted(place, [5], params=params, optimizer=momentum()) == wanted
    assert [len(one) for one in wanted] == [2, 6]


def test_a_loop_that_was_left_goes_on_where_it_was():
    training = private(None)
    for stop in (1, 2, 5, STEPS):
        next(iter(training.loader))  # a batch that is never used
        train(training, stop)
    assert bits(training.params) == bits(train(private(None)).params)


# --- Sums and noise, by hand ---------------------------------------------------------------------


def test_sums_are_those_of_a_loop_and_noise_is_that_of_the_key(place, exact_sums):
    """The last batch of an epoch has 4 examples, and is divided by 6 all the same."""
    plan = plan_in_order(Dataset(EXAMPLES, 6, 2))
    params, models = TARGET["params"], list[Any]()
    with private(place, params=params, plan=plan) as training:
        batches = [training.run.batch(step).examples for step in range(6)]
        for batch in training.loader:
            training.step(batch)
            models.append(training.params)
    key = NoiseKey((place.folder / "private" / "noise.key").read_bytes())
    stream = NoiseStream(plan, SIZE, key=key, clip_norm=CLIP, threads=1)
    assert [len(examples) for examples in batches] == [6, 6, 4] * 2
    for examples, (total, grid), model in zip(batches, exact_sums, models, strict=True):
        by_hand = sum(clipped_gradient(params, examples[i : i + 1]) for i in range(len(examples)))
        np.testing.assert_allclose(total * grid.step, by_hand, atol=2e-5)
        stream.add_to(total, grid, updates=len(examples))
        gradient = (total * (grid.step / 6)).astype(np.float32)
        mean = {"bias": gradient[:1], "weights": gradient[1:]}
        params = jax.tree.map(lambda old, new: old + np.float32(-0.1) * new, params, mean)
        assert np.allclose(model["weights"], params["weights"], rtol=0, atol=1e-6)
        assert np.allclose(model["bias"], params["bias"], rtol=0, atol=1e-6)
        params = model


def test_users_with_different_counts_give_the_clipped_gradient_of_their_mean_loss(sums):
    owners = np.array([0] * 1 + [1] * 2 + [2] * 3 + [3] * 5 + [4] * 5)
    plan = plan_in_order(Dataset(5, 2, 2))
    training = private(None, plan=plan, units=owners, examples_per_unit=4)
    seen = set[int]()
    for step, batch in enumerate(training.loader):
        params, drawn = training.params, training.run.batch(step)
        training.step(batch)
        ends = np.cumsum(drawn.counts)
        users = [drawn.examples[end - n : end] for n, end in zip(drawn.counts, ends, strict=True)]
        for rows in users:
            assert len(set(owners[rows])) == 1
            assert len(rows) == min(4, np.sum(owners == owners[rows[0]]))
            seen.add(len(rows))
        by_hand = sum(clipped_gradient(params, rows) for rows in users)
        np.testing.assert_allclose(sums[step], by_hand, atol=2e-5)
    assert seen == {1, 2, 3, 4}


def test_micro_batches_give_the_same_sums(sums):
    train(private(None), 2)
    train(private(None, micro_batch=3), 2)
    for step in range(2):
        np.testing.assert_allclose(sums[step], sums[step + 2], atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e30])
def test_an_example_that_is_not_finite_counts_as_zero_and_others_are_unchanged(sums, value):
    first = private(None).run.batch(0).examples
    inputs = INPUTS.copy()
    inputs[first[2]] = value
    training = private(None, data=(inputs, TARGETS))
    with pytest.warns(PrivacyWarning):
        assert training.step(next(iter(training.loader))).not_finite == 1
    others = [clipped_gradient(PARAMS, first[i : i + 1]) for i in range(8) if i != 2]
    np.testing.assert_allclose(sums[0], sum(others), atol=2e-5)
    train(training)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(training.params))


def test_a_user_with_one_example_that_is_not_finite_counts_as_zero(sums):
    owners = np.arange(EXAMPLES) // 4
    inputs = INPUTS.copy()
    inputs[5] = np.nan
    options = {"units": owners, "examples_per_unit": 4, "plan": plan_in_order(Dataset(4, 4, 1))}
    train(private(None, data=(inputs, TARGETS), **options))
    others = [clipped_gradient(PARAMS, np.arange(4 * n, 4 * n + 4)) for n in (0, 2, 3)]
    np.testing.assert_allclose(sums[0], sum(others), atol=2e-5)


def test_empty_batches_change_the_model_by_noise_alone(sums):
    training = private(None, plan=poisson_plan(1, 1))
    empty = 0
    for batch in training.loader:
        before = bits(training.params)
        metrics = training.step(batch)
        assert bits(training.params) != before
        if not len(batch[0]):
            empty += 1
            assert batch[0].shape == (0, 3)
            assert not sums[-1].any()
            with pytest.warns(PrivacyWarning) if empty == 1 else warnings.catch_warnings():
                assert np.isnan(metrics.loss)
                assert np.isnan(metrics.clipped)
                assert metrics.not_finite == 0
    assert empty > 3
    assert training.steps == EXAMPLES


# --- Parameters and data sets of many kinds ------------------------------------------------------


def test_data_sets_of_all_kinds_give_the_same_bits():
    def named(params: Any, batch: Any) -> jax.Array:
        return loss_fn(params, (batch["inputs"], batch["targets"]))

    pairs = list(zip(INPUTS, TARGETS, strict=True))
    dicts = [{"inputs": x, "targets": y} for x, y in pairs]
    wanted = bits(train(private(None), 3).params)
    for data, loss in (
        (pairs, loss_fn),
        ((jnp.asarray(INPUTS), TARGETS), loss_fn),
        ({"inputs": INPUTS, "targets": TARGETS}, named),
        (dicts, named),
    ):
        assert bits(train(private(None, data=data, loss=loss), 3).params) == wanted


def test_an_empty_batch_of_a_list_of_examples_has_no_rows():
    pairs = list(zip(INPUTS, TARGETS, strict=True))
    training = private(None, data=pairs, plan=poisson_plan(1, 1))
    shapes = list[Any]()
    for batch in training.loader:
        shapes.append(batch[0].shape)
        training.step(batch)
        if (0, 3) in shapes:
            return
    pytest.fail("no batch was empty")


def test_parameters_may_be_tuples_arrays_and_modules(place):
    wanted = bits(train(private(None), 3).params)

    def of_tuple(params: Any, batch: Any) -> jax.Array:
        return loss_fn({"bias": params[0], "weights": params[1]}, batch)

    as_tuple = (PARAMS["bias"], PARAMS["weights"])
    training = train(private(None, params=as_tuple, loss=of_tuple), 3)
    assert isinstance(training.params, tuple)
    assert bits(training.params) == wanted

    model = eqx.nn.Linear(3, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def of_module(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((jax.vmap(eqx.combine(params, static))(batch[0])[:, 0] - batch[1]) ** 2)

    options = {"params": params, "loss": of_module}
    with private(place, **options) as training:
        train(training, 5)
    with private(place, **options) as training:
        assert training.steps == COMMIT_EVERY
        train(training)
    assert isinstance(training.params, eqx.nn.Linear)
    assert eqx.combine(training.params, static)(INPUTS[0]).shape == (1,)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_numpy_parameters_in_float64_are_resumed(place):
    params = {"bias": np.zeros(1), "weights": np.full(3, 0.1)}
    assert interrupted(place, [4], params=params)


def test_parameters_are_independent_of_the_arrays_that_were_given():
    weights = np.full(3, 0.1, np.float32)
    training = private(None, params={**PARAMS, "weights": weights})
    weights += 1
    assert np.all(training.params["weights"] < 1)


def test_an_optimizer_with_a_random_key_is_resumed_or_refused(places):
    optimizer = optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(0)), sgd())
    options = {"params": TARGET["params"], "optimizer": optimizer}
    try:
        wanted = interrupted(next(places), [], **options)
    except InvalidInput:
        return
    assert interrupted(next(places), [4], **options) == wanted


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"weights": jnp.zeros(3), "count": jnp.zeros(1, int)}, "count.*array of floats.*int32"),
        ({"weights": jnp.zeros(3, bool)}, "array of floats"),
        ({"weights": jnp.zeros(3, complex)}, "array of floats"),
        ({"weights": 0.5}, "array of floats, got float"),
        ({"weights": "text"}, "array of floats, got str"),
        ({}, "no array"),
        (None, "no array"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(place, params, message):
    with pytest.raises(InvalidInput, match=message):
        private(place, params=params)
    assert not place.folder.exists()


@pytest.mark.parametrize(
    "data", [(INPUTS, TARGETS[:-1]), (INPUTS, 3.0), (), {}, iter([1, 2]), 5, (INPUTS[:0],)]
)
def test_data_sets_without_rows_are_refused(place, data):
    with pytest.raises(InvalidInput):
        private(place, data=data)
    assert not place.folder.exists()


# --- Every argument that differs on resuming -----------------------------------------------------

TARGET = {
    "plan": None,
    "epsilon": 3.0,
    "delta": 1e-5,
    "epochs": 2,
    "batch_size": 8,
    "sampling": "none",
    "mechanism": "blt-b400",
    "params": {"bias": jnp.zeros(1), "weights": jnp.full(3, 0.1)},
    "optimizer": momentum(),
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "epsilon": {"epsilon": 3.01},
    "delta": {"delta": 1e-6},
    "epochs": {"epochs": 3},
    "batch size": {"batch_size": 7},
    "sampling": {"sampling": "poisson"},
    "mechanism": {"mechanism": "tree"},
    "largest batch": {"max_batch_size": 12},
    "clip norm": {"clip_norm": 0.81},
    "commit every": {"commit_every": 5},
    "plan": {"plan": PLAN},
    "plan with another mechanism": {"plan": "other mechanism"},
    "other names": {"params": {"offset": jnp.zeros(1), "weights": jnp.zeros(3)}},
    "other shapes": {"params": {"bias": jnp.zeros(2), "weights": jnp.zeros(2)}},
    "other size": {"params": {"bias": jnp.zeros(1), "weights": jnp.zeros(4)}},
    "another tree": {"params": (jnp.zeros(1), jnp.zeros(3))},
    "another type": {
        "params": {"bias": jnp.zeros(1), "weights": jnp.zeros(3, jnp.bfloat16)},
    },
    "no momentum": {"optimizer": optax.sgd(0.1)},
    "another optimizer": {"optimizer": optax.adam(0.1)},
    "a chain": {"optimizer": optax.chain(momentum())},
    "fewer examples": {"data": (INPUTS[:-1], TARGETS[:-1])},
    "users": {"units": list(range(EXAMPLES))},
}


@pytest.fixture(scope="module")
def begun() -> Iterator[Place]:
    with fast_places() as found:
        place = next(found)
        with private(place, **TARGET) as training:
            train(training, 2)
        yield place


def test_what_was_planned_and_resumed_is_said_and_auto_is_no_other_argument(place, capsys):
    target = {"epsilon": 4.0, "delta": 1e-3, "epochs": 4, "batch_size": 8, "plan": None}
    with private(place, **target, sampling="none") as training:
        assert capsys.readouterr().err.startswith("dpftrl: planned: blt")
        train(training, 4)
    with private(place, **target, sampling="auto"):
        assert capsys.readouterr().err == (
            "dpftrl: resumed at step 3 of 8; step 3 is repeated, with the same batches and the "
            "same noise\n"
        )
    with pytest.raises(InvalidInput, match="batch_size must be a whole number of at least 1"):
        private(None, **{**target, "batch_size": 0})
    with pytest.warns(UserWarning, match="delta 0.1 is not below 1 / dataset") as caught:
        private(None, **{**target, "delta": 0.1}, sampling="none")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", list(DIFFERENT))
def test_arguments_that_differ_when_resuming_are_refused(begun, name):
    changes = dict(DIFFERENT[name])
    with private(begun, **TARGET) as training:
        plan = training.plan
    if changes.get("plan") == "other mechanism":
        from dpftrl import account

        tree = account(
            mechanism("tree"), plan.dataset.in_order, plan.noise_multiplier, plan.guarantee.delta
        )
        changes = {"plan": DatasetPlan("none", tree, plan.dataset)}
    if "plan" in changes:
        changes.update(dict.fromkeys(("epsilon", "delta", "epochs", "batch_size", "mechanism")))
    files = {path: path.read_bytes() for path in begun.folder.rglob("*") if path.is_file()}
    with pytest.raises(InvalidInput):
        private(begun, **{**TARGET, **changes}).close()
    assert files == {path: path.read_bytes() for path in files}
    private(begun, **TARGET).close()  # the lock is free again


def test_other_users_are_refused(place):
    owners = [n % 5 for n in range(EXAMPLES)]
    options = {
        "plan": plan_in_order(Dataset(5, 2, 3)),
        "examples_per_unit": 2,
        "params": TARGET["params"],
    }
    private(place, units=owners, **options).close()
    with pytest.raises(InvalidInput, match="other users"):
        private(place, units=owners[::-1], **options)
    with pytest.raises(InvalidInput, match="another data set"):
        private(place, **{**options, "examples_per_unit": 1})
    with pytest.raises(InvalidInput, match=r"examples_per_unit|per user"):
        private(place, units=owners, **{**options, "examples_per_unit": 3})
    private(place, units=owners, **options).close()


def test_other_data_is_noticed_when_steps_are_repeated(place):
    params = TARGET["params"]
    with private(place, params=params) as training:
        train(training, 5)
    with private(place, params=params, data=(INPUTS, -TARGETS)) as training:
        assert training.steps == COMMIT_EVERY
        with pytest.raises(UnsafeState, match="other gradients"):
            train(training)
    assert interrupted(place, [], params=params)
    assert len(journal_records(place)) == 1 + STEPS + 3


def test_a_training_that_is_open_or_closed_is_refused(place):
    params = TARGET["params"]
    with private(place, params=params) as training:
        batch = next(iter(training.loader))
        with pytest.raises(RunInUse):
            private(place, params=params)
    with pytest.raises(UnsafeState, match="closed"):
        training.step(batch)


@pytest.mark.parametrize("changes", [{"micro_batch": 0}, {"clip_norm": 2.0**70}])
def test_arguments_that_make_no_sense_create_no_run(place, changes):
    with pytest.raises(InvalidInput):
        private(place, params=TARGET["params"], **changes)
    assert not place.folder.exists()


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_clip_norm_that_makes_no_sense_is_refused(place, value):
    with pytest.raises(InvalidInput, match="clip_norm"):
        private(place, clip_norm=value)
    assert not place.folder.exists()


# --- Batches that are not those of the step ------------------------------------------------------


def test_a_batch_that_is_not_from_the_loader_is_refused():
    training = private(None)
    with pytest.raises(InvalidInput, match="take batches from the loader"):
        training.step((INPUTS[:8], TARGETS[:8]))
    assert training.steps == 0


def test_a_batch_that_is_used_twice_is_refused():
    training = private(None)
    batch = next(iter(training.loader))
    training.step(batch)
    with pytest.raises(InvalidInput, match="once"):
        training.step(batch)
    assert training.steps == 1


@pytest.mark.parametrize("same_loop", [True, False])
def test_a_batch_of_an_earlier_step_is_refused(same_loop):
    """Its examples would take part more often than the guarantee assumes."""
    training = private(None)
    loader = iter(training.loader)
    first = next(loader)
    training.step(first)
    second = next(loader if same_loop else iter(training.loader))
    assert first[0].shape == second[0].shape
    with pytest.raises(InvalidInput):
        training.step(first)


def test_a_batch_that_was_skipped_is_noticed():
    loader = iter(private(None).loader)
    next(loader)
    with pytest.raises(InvalidInput, match="was not done"):
        next(loader)


def test_an_older_loop_is_refused_after_a_newer_one_went_on():
    training = private(None)
    old = iter(training.loader)
    next(old)
    train(training, 2)
    with pytest.raises(InvalidInput, match="was not done"):
        next(old)
    assert len(training.loader) == STEPS - 2


def test_a_batch_with_other_rows_is_refused_and_changes_nothing():
    training = private(None)
    inputs, targets = batch = next(iter(training.loader))
    before = bits(training.params)
    for wrong in (
        (inputs[:-1], targets[:-1]),
        (np.concatenate([inputs] * 2), np.concatenate([targets] * 2)),
        (inputs[:0], targets[:0]),
        (inputs, targets[:-1]),
        (inputs, np.float32(1)),
        (inputs.mean(), targets),
        (),
        {},
        None,
        "text",
    ):
        with pytest.raises(InvalidInput):
            training.step(wrong)
    assert (training.steps, bits(training.params)) == (0, before)
    training.step(batch)


def test_a_batch_may_be_transformed_on_the_way():
    training = private(None)
    inputs, targets = next(iter(training.loader))
    training.step((jnp.asarray(inputs) * 2, jnp.asarray(targets)))
    assert training.steps == 1


def test_a_step_after_the_last_is_refused(place):
    params = TARGET["params"]
    with private(place, params=params) as training:
        batch = None
        for batch in training.loader:
            training.step(batch)
        assert (training.epoch, training.epsilon) == (3, PLAN.guarantee.epsilon)
        with pytest.raises(RoundsExceeded):
            training.step(batch)
        assert list(training.loader) == []
    with private(place, params=params) as training:
        with pytest.raises(RoundsExceeded):
            training.step(batch)
        assert training.guarantee().epsilon == PLAN.guarantee.epsilon


# --- Errors within a step ------------------------------------------------------------------------


def test_an_error_in_the_loss_leaves_the_training_usable():
    broken = [True]

    def loss(params: Any, batch: Any) -> jax.Array:
        if broken[0]:
            raise ValueError("of the loss")
        return loss_fn(params, batch)

    training = private(None, loss=loss)
    batch = next(iter(training.loader))
    with pytest.raises(ValueError, match="of the loss"):
        training.step(batch)
    broken[0] = False
    training.step(batch)
    train(training, 3)
    assert bits(training.params) == bits(train(private(None), 3).params)


class Broken(RuntimeError):
    """Raised by an optimizer."""


def breaking(is_broken: list[bool]) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if is_broken[0]:
            raise Broken
        return sgd().update(updates, state, params)

    return optax.GradientTransformation(sgd().init, update)


def test_an_error_in_the_optimizer_stops_the_training_until_it_is_resumed(places):
    params, is_broken = TARGET["params"], [True]
    place = next(places)
    with private(place, params=params, optimizer=breaking(is_broken)) as training:
        batch = next(iter(training.loader))
        with pytest.raises(Broken):
            training.step(batch)
        is_broken[0] = False
        with pytest.raises(UnsafeState):
            training.step(batch)
    wanted = interrupted(next(places), [], params=params)
    assert interrupted(place, [], params=params) == wanted


def test_an_error_in_the_optimizer_stops_a_training_without_a_folder():
    """Otherwise the same batch is released again, with another row of noise."""
    is_broken = [True]
    training = private(None, optimizer=breaking(is_broken))
    batch = next(iter(training.loader))
    with pytest.raises(Broken):
        training.step(batch)
    is_broken[0] = False
    with pytest.raises(UnsafeState):
        training.step(batch)


# --- What is public ------------------------------------------------------------------------------


def test_metrics_warn_once_and_nothing_leaks(place):
    secrets = list[float]()
    with private(place, params=TARGET["params"]) as training:
        warned = 0
        for batch in training.loader:
            metrics = training.step(batch)
            assert repr(metrics) == "Metrics(private)"
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                secrets += [metrics.loss, metrics.clipped, metrics.not_finite]
            warned += sum(one.category is PrivacyWarning for one in seen)
            assert all(one.filename == __file__ for one in seen)
        first = training.run.batch(0).examples.tolist()
        training.statement(place.folder / "statement")
        shown = repr(training) + repr(training.run) + repr(training.loader)
    assert warned == 1
    assert repr(training) == f"PrivateTraining(TrainingRun({STEPS} of {STEPS} steps))"
    digests = [one["digest"] for one in journal_records(place) if one["kind"] == "step"]
    key = (place.folder / "private" / "noise.key").read_bytes().hex()
    losses = [f"{value:.6g}" for value in secrets[::3]]
    for path in place.folder.iterdir():
        content = shown if path.is_dir() else path.read_text()
        for secret in (*digests, *losses, key, str(first).strip("[]")):
            assert secret not in content


def test_public_files_do_not_depend_on_the_data(places):
    contents = []
    for targets in (TARGETS, -TARGETS):
        place = next(places)
        with private(place, params=TARGET["params"], data=(INPUTS, targets)) as training:
            train(training)
            run = training.run.file.run
        contents.append(
            {
                path.name: path.read_text().replace(run, "")
                for path in place.folder.iterdir()
                if path.is_file()
            }
        )
    assert contents[0] == contents[1]
    assert json.loads(contents[0]["guarantee.json"])["steps"] == STEPS


def test_a_target_meets_its_epsilon_and_an_incomplete_one_is_refused():
    training = private(None, **TARGET)
    assert train(training).epsilon <= 3.0
    assert (training.steps, training.delta) == (4, 1e-5)
    for missing in ("epsilon", "delta", "epochs", "batch_size"):
        with pytest.raises(InvalidInput, match=missing):
            private(None, **{**TARGET, missing: None})
    with pytest.raises(InvalidInput, match="units"):
        private(None, data=(INPUTS[:-1], TARGETS[:-1]))
