"""Correlated noise as an optax transformation: the noise of NoiseStream, under jit and scan."""

import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpftrl import (
    BLT,
    Banded,
    BinaryTree,
    Independent,
    Mechanism,
    NoiseKey,
    NoiseStream,
    SquareRoot,
)
from dpftrl.errors import InvalidInput
from dpftrl.jax import CorrelatedNoiseState, clipped_sum, correlated_noise
from dpftrl.participation import MinSep
from dpftrl.plan import Dataset, make_dataset_plan

CLIP, BATCH, MOST, STEPS = 0.5, 4, 10, 6
# JAX reports an error of a callback as one or the other.
CALLBACK_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
KEY = NoiseKey.insecure_for_tests(5)
SHAPES = {"b": (7,), "w": [(40, 30), (3,)], "x": ()}
PARAMS = jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda shape: isinstance(shape, tuple))
SIZE = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))


@dataclass(frozen=True)
class SmallPlan:
    """A plan of a few steps for any mechanism."""

    mechanism: Mechanism
    noise_multiplier: float = 2.0
    participation: MinSep = MinSep.once(STEPS)  # noqa: RUF009 - an immutable value
    buffers: str = "float64"


MECHANISMS = {
    "blt": BLT((0.9, 0.5), (0.2, 0.3)),
    "independent": Independent(),
    "banded": Banded.square_root(3, STEPS),
    "tree": BinaryTree(),
    "square-root": SquareRoot(),
}


def sums_of_step(step, scale=0.1):
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * scale / 6, jnp.float32), PARAMS
    )


def transformation(plan, **options):
    return correlated_noise(plan, KEY, CLIP, BATCH, max_batch_size=MOST, **options)


def run(noise, steps, state=None, start=0):
    """All noisy means of some steps, and the last state."""
    update = jax.jit(noise.update)
    state = noise.init(PARAMS) if state is None else state
    means = []
    for step in range(start, start + steps):
        mean, state = update(sums_of_step(step), state)
        means.append(mean)
    return means, state


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def differs(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


def means_of_stream(plan, steps, mode="auto"):
    """The same means from a NoiseStream."""
    stream = NoiseStream(plan, SIZE, key=KEY, clip_norm=CLIP, mode=mode)
    means = []
    for step in range(steps):
        parts = [np.array(leaf) for leaf in jax.tree.leaves(sums_of_step(step))]
        stream.add_to(parts, updates=MOST)
        means.append([part / np.float32(BATCH) for part in parts])
    return means


PLAN = SmallPlan(MECHANISMS["blt"])

# --- The same noise as a NoiseStream -------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "regenerating"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_noise_is_that_of_a_noise_stream_to_the_last_bit(name, mode):
    plan = SmallPlan(MECHANISMS[name])
    means, state = run(transformation(plan, mode=mode), STEPS)
    assert int(state.step) == STEPS
    for mean, expected in zip(means, means_of_stream(plan, STEPS, mode), strict=True):
        assert_same(mean, expected)


def test_a_scan_gives_the_same_noise():
    noise = transformation(PLAN)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(sums_of_step, range(STEPS)))

    def step(state, sums):
        mean, state = noise.update(sums, state)
        return state, mean

    state, means = jax.jit(lambda: jax.lax.scan(step, noise.init(PARAMS), stacked))()
    for i, expected in enumerate(means_of_stream(PLAN, STEPS)):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], means), expected)
    assert_same(state, run(transformation(PLAN), STEPS)[1])


def test_an_exact_sum_gets_the_rounded_noise_of_its_grid():
    noise = transformation(PLAN)
    add = jax.jit(clipped_sum(lambda w, x: jnp.mean(x @ w), CLIP))
    data = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
    params, state = jnp.zeros(3), noise.init(jnp.zeros(3))
    stream = NoiseStream(PLAN, 3, key=KEY, clip_norm=CLIP)
    for _ in range(3):
        total, _ = add(params, data)
        mean, state = jax.jit(noise.update)(total, state)
        steps = total.steps()
        stream.add_to(steps, total.grid, updates=5)
        np.testing.assert_array_equal(mean, total.grid.values(steps, BATCH).astype(np.float32))


def test_private_training_is_a_chain_of_optax():
    plan = make_dataset_plan(Dataset(40, 8, 4), 1e5, 1e-5, sampling="none")
    optimizer = optax.chain(correlated_noise(plan, KEY, 1.0), optax.sgd(0.5))
    add = clipped_sum(lambda w, x: jnp.mean(jnp.sum((w - x) ** 2, -1)), 1.0)
    data = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2)) * 0.1 + 3, jnp.float32)

    @jax.jit
    def train(params, state):
        total, info = add(params, data)
        updates, state = optimizer.update(total, state, params)
        return optax.apply_updates(params, updates), state, info.losses.mean()

    params = jnp.zeros(2)
    state, losses = optimizer.init(params), []
    for _ in range(plan.dataset.steps):
        params, state, loss = train(params, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 10


# --- States: saved, resumed, rolled back, mixed up -----------------------------------------------


def copied(state):
    """The state after a checkpoint: other arrays with the same content."""
    return CorrelatedNoiseState(*(jnp.asarray(np.array(leaf)) for leaf in state))


@pytest.mark.parametrize("name", MECHANISMS)
def test_training_that_resumes_from_a_checkpoint_continues_with_the_same_noise(name):
    plan = SmallPlan(MECHANISMS[name])
    _, state = run(transformation(plan), 3)
    resumed, _ = run(transformation(plan), 3, copied(state), start=3)
    assert_same(resumed, means_of_stream(plan, STEPS)[3:])


def test_the_same_step_twice_gets_the_same_noise():
    noise = transformation(PLAN)
    _, state = run(noise, 3)
    first, _ = noise.update(sums_of_step(3), state)
    second, _ = noise.update(sums_of_step(3), state)
    assert_same(first, second)


def noise_of(mean, sums):
    return jax.tree.map(lambda a, b: np.asarray(a) * BATCH - np.asarray(b), mean, sums)


def test_other_gradients_after_a_rollback_get_other_noise():
    noise = transformation(SmallPlan(Independent()))
    _, state = run(noise, 3)
    later = [noise.update(sums_of_step(step), state) for step in (3, 100)]
    noises = [
        noise_of(mean, sums_of_step(step)) for (mean, _), step in zip(later, (3, 100), strict=True)
    ]
    assert not reused(*noises)
    # Also in later steps with equal gradients, because a digest covers all sums so far.
    after = [noise.update(sums_of_step(4), state)[0] for _, state in later]
    assert differs(*after)
    assert not reused(*(noise_of(mean, sums_of_step(4)) for mean in after))


def reused(one, other):
    """Whether two vectors have the same noise, up to the rounding of float32."""
    flat = [np.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(x)]) for x in (one, other)]
    return np.abs(flat[0] - flat[1]).max() < 1e-5


def test_the_check_for_reused_noise_detects_it():
    row = jax.tree.map(lambda leaf: np.random.default_rng(0).normal(size=leaf.shape), PARAMS)
    means = [
        jax.tree.map(lambda z, x: np.float32((z + np.asarray(x)) / BATCH), row, sums_of_step(step))
        for step in (3, 100)
    ]
    noises = [noise_of(m, sums_of_step(s)) for m, s in zip(means, (3, 100), strict=True)]
    assert reused(*noises)


@pytest.mark.parametrize("change", ["step", "digests", "key", "plan"])
def test_a_state_that_does_not_fit_is_refused(change):
    noise = transformation(PLAN)
    _, state = run(noise, 2)
    if change == "step":
        state = state._replace(step=state.step - 1)
    if change == "digests":
        state = state._replace(digests=state.digests.at[0, 0].add(1))
    if change == "key":
        other = NoiseKey.insecure_for_tests(6)
        noise = correlated_noise(PLAN, other, CLIP, BATCH, max_batch_size=MOST)
    if change == "plan":
        noise = transformation(SmallPlan(MECHANISMS["blt"], noise_multiplier=2.5))
    with pytest.raises(CALLBACK_ERRORS, match="another key, plan, clip norm"):
        jax.block_until_ready(jax.jit(noise.update)(sums_of_step(2), state))


# --- Errors --------------------------------------------------------------------------------------


def test_the_step_after_the_last_is_an_error_that_says_so():
    noise = transformation(PLAN)
    _, state = run(noise, STEPS)
    with pytest.raises(CALLBACK_ERRORS, match="all 6 rounds of the plan are done"):
        jax.block_until_ready(jax.jit(noise.update)(sums_of_step(0), state))


@pytest.mark.parametrize(
    ("scale", "message"), [(np.nan, "NaN or an infinity"), (1e3, "clip each update before summing")]
)
def test_sums_that_are_nan_or_not_clipped_are_errors_and_training_can_continue(scale, message):
    noise = transformation(PLAN)
    _, state = run(noise, 2)
    with pytest.raises(CALLBACK_ERRORS, match=message):
        jax.block_until_ready(jax.jit(noise.update)(sums_of_step(2, scale), state))
    means, _ = run(noise, 1, state, start=2)
    assert_same(means, means_of_stream(PLAN, 3)[2:])


def test_arguments_that_are_not_valid_are_refused_at_once():
    with pytest.raises(InvalidInput, match="batch_size and max_batch_size are needed"):
        correlated_noise(PLAN, KEY, CLIP)
    with pytest.raises(InvalidInput, match="key must be a NoiseKey, got bytes"):
        correlated_noise(PLAN, b"secret", CLIP, BATCH, max_batch_size=MOST)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="clip_norm"):
        correlated_noise(PLAN, KEY, -1.0, BATCH, max_batch_size=MOST)
    noise = transformation(PLAN)
    with pytest.raises(InvalidInput, match="must be float32, got bfloat16"):
        noise.update(jnp.zeros(3, jnp.bfloat16), noise.init(jnp.zeros(3)))
    total, _ = clipped_sum(lambda w, x: jnp.mean(x @ w), 2 * CLIP)(jnp.zeros(3), jnp.ones((2, 3)))
    with pytest.raises(InvalidInput, match=r"were clipped to 1\.0, the noise is for 0\.5"):
        noise.update(total, noise.init(jnp.zeros(3)))


def test_importing_dpftrl_does_not_import_jax():
    program = "import dpftrl, sys; dpftrl.NoiseStream; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- Secrets -------------------------------------------------------------------------------------


def test_no_repr_jaxpr_or_log_shows_the_key_or_a_digest(caplog):
    noise = transformation(PLAN)
    _, state = run(noise, 2)
    with pytest.raises(CALLBACK_ERRORS) as caught:
        jax.block_until_ready(jax.jit(noise.update)(sums_of_step(2, np.nan), state))
    jaxpr = jax.make_jaxpr(noise.update)(sums_of_step(0), state)
    compiled = jax.jit(noise.update).lower(sums_of_step(0), state).as_text()
    texts = [repr(noise), str(jaxpr), compiled, repr(state), str(caught.value), caplog.text]
    assert "pure_callback" in str(jaxpr)
    secrets = [KEY.secret_bytes(), *map(bytes, np.asarray(state.digests[:2]))]
    for secret in secrets:
        numbers = str(np.frombuffer(secret, np.uint32)[0])
        for text in texts:
            assert secret.hex() not in text
            assert str(secret)[2:-1] not in text
            assert numbers not in text
