"""Correlated noise on the device with JAX: on one device, and sharded over 4 virtual ones."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_pieces import (
    ROUNDS,
    SUPPORTED,
    DevicePlan,
    check_keystream,
    check_many_normals,
    check_normals,
    float64_normals,
    keystream,
    noise_of,
    random_words,
    sampled_plan,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from noise_pieces import KEY, OTHER_KEY

import dpftrl
from dpftrl.accounting.gaussian import FARTHEST_NORMAL
from dpftrl.errors import InvalidInput
from dpftrl.jax import ExactGradientSum, correlated_noise
from dpftrl.jax.device_noise import JaxOps, _Layout, _Noise, _rounded
from dpftrl.noise import Grid
from dpftrl.noise.device import SPLIT, Split, chacha20, split_normals
from dpftrl.noise.key import Secret, row_key
from dpftrl.plan.device import noise_multiplier_on_device

HERE = Path(__file__).parent
CLIP, BATCH = 0.5, 4
# JAX reports an error of a callback as one or the other.
CALLBACK_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
GRID = Grid.for_noise(2.0, CLIP)
SHAPES = {"b": (7,), "one": (), "w": (5, 12)}
SIZE = 7 + 1 + 60
PLAN = DevicePlan(SUPPORTED["blt-2"])
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
STEP_OF_MEAN = GRID.step / BATCH


def make(plan=PLAN, **options):
    known = {"max_batch_size": 100, "on_device": True}
    return correlated_noise(plan, options.pop("key", KEY), CLIP, BATCH, **{**known, **options})


def sums(step, shapes=None, change=0):
    rng = np.random.default_rng(step)
    shapes = shapes or SHAPES
    high = {name: rng.integers(-9, 9, shape, np.int32) for name, shape in shapes.items()}
    low = {name: rng.integers(0, 2**16, shape, np.int32) for name, shape in shapes.items()}
    low[max(shapes)].reshape(-1)[-1] ^= change
    return ExactGradientSum(high, low, jnp.int32(100), GRID)


@pytest.fixture(scope="module")
def update():
    """One compiled transformation, for all tests of the plan."""
    return jax.jit(make().update)


def run(update, state, steps, change_in=None):
    means, states = [], []
    for step in steps:
        mean, state = update(sums(step, change=int(step == change_in)), state)
        means.append(mean)
        states.append(state)
    return means, states


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in tree.values()])


def rows_of(states, plan=PLAN):
    """The rows of Z, by the ChaCha20 of `cryptography` and NumPy: blocks along the last axis."""
    noise = _Noise(plan, KEY, CLIP, BATCH, _Layout.of(tuple(SHAPES.values()), None))
    rows = []
    for row, state in enumerate(states):
        digest = Secret(np.asarray(state.digests)[row].tobytes())
        key = row_key(noise._row_keys, row, digest).secret_bytes()
        parts = []
        for leaf, shape in enumerate(SHAPES.values()):
            lines = int(np.prod(shape[:-1], dtype=int))
            width = shape[-1] if shape else 1
            blocks = np.arange(lines * -(-width // 8))
            nonce = leaf.to_bytes(4, "little") + bytes(8)
            z = float64_normals(keystream(key, blocks, nonce)).T.reshape(lines, -1)
            parts.append(z[:, :width].reshape(-1))
        rows.append(np.concatenate(parts))
    return rows


def scale_of(plan=PLAN):
    return noise_multiplier_on_device(plan, SIZE) * CLIP / GRID.step


# --- Parts ----------------------------------------------------------------------------------------


def test_the_keystream_is_chacha20():
    @jax.jit
    def blocks_of(key, counters, nonce):
        ops = JaxOps(jnp.int32(0))
        return jnp.stack(chacha20(ops, list(key), counters, list(nonce)))

    check_keystream(blocks_of)


def test_normals_are_within_the_claimed_bound_and_look_like_normals():
    @jax.jit
    def compiled(words, never):
        return split_normals(JaxOps(never), list(words))

    def normals_of(words):
        padded = np.zeros((16, 25_000), np.uint32)  # compiled once
        padded[:, : words.shape[1]] = words
        parts = compiled(padded, jnp.int32(0))
        return Split(*(np.asarray(part)[:, : words.shape[1]] for part in parts))

    check_normals(normals_of, SPLIT)
    words = random_words(25_000, seed=3)
    check_many_normals(normals_of(words), words, SPLIT)


# --- The transformation on one device -------------------------------------------------------------


def check_means(means, rows, plan, scale):
    """Whether noisy means are sums plus noise, up to the 24 bits of float32."""
    for step, (mean, noise) in enumerate(zip(means, noise_of(plan.mechanism, rows), strict=True)):
        total = np.concatenate([leaf.reshape(-1) for leaf in sums(step).steps().values()])
        wanted = total + np.rint(scale * noise)
        np.testing.assert_allclose(flat(mean) / STEP_OF_MEAN, wanted, rtol=2.0**-23, atol=1.0)


def test_means_are_sums_plus_the_noise_of_the_mechanism(update):
    means, states = run(update, make().init(PARAMS), range(ROUNDS))
    rows = rows_of(states)
    check_means(means, rows, PLAN, scale_of())
    assert int(states[-1].step) == ROUNDS
    for wrong in (scale_of() / 2, scale_of() * 1.001):
        with pytest.raises(AssertionError):
            check_means(means, rows, PLAN, wrong)
    other = replace(PLAN, mechanism=dpftrl.BLT([0.9, 0.98], [0.3, 0.1]))
    with pytest.raises(AssertionError):
        check_means(means, rows, other, scale_of())
    with pytest.raises(AssertionError):
        check_means(means, [np.roll(row, 8) for row in rows], PLAN, scale_of())


def test_buffers_are_those_of_the_mechanism_up_to_the_claimed_errors(update):
    """Buffers are a running sum of the noise before it is rounded to steps or float32."""
    _, states = run(update, make().init(PARAMS), range(ROUNDS))
    check_buffers(states, rows_of(states), PLAN.mechanism)
    wrong = dpftrl.BLT([0.9, 0.99 + 1e-8], [0.3, 0.1])
    with pytest.raises(AssertionError):
        check_buffers(states, rows_of(states), wrong)


def check_buffers(states, rows, mechanism):
    """All buffers of all steps, in float64. A noise error is counted once per step."""
    error = SPLIT.noise_error(mechanism, ROUNDS, FARTHEST_NORMAL)
    error += SPLIT.rounding * FARTHEST_NORMAL * ROUNDS
    known = mechanism.init(SIZE)
    for state, row in zip(states, rows, strict=True):
        _, known = mechanism.step(known, lambda _, row=row: row)
        for (high, low), wanted in zip(state.buffers, known.buffers, strict=True):
            np.testing.assert_allclose(flat(high) + flat(low), wanted, rtol=0, atol=ROUNDS * error)


@pytest.mark.parametrize("bits", [0, 1, 8, 15, 16, 17, 20])
def test_low_bits_of_fine_grids_are_rounded_away(bits):
    rng = np.random.default_rng(bits)
    whole = rng.integers(-(2**40), 2**40, 1000)
    high, low = _rounded(bits, (whole >> 16).astype(np.int32), (whole & 0xFFFF).astype(np.int32))
    found = np.asarray(high, np.int64) * 2**16 + np.asarray(low)
    assert (found % 2**bits == 0).all()
    assert np.abs(found - whole).max() <= 2**bits // 2
    assert (found != whole).any() == (bits > 0)


def test_the_same_sums_get_the_same_bits_and_another_sum_gets_other_noise(update):
    first, states = run(update, make().init(PARAMS), range(4))
    again, _ = run(update, make().init(PARAMS), range(4))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(flat(one), flat(other))
    changed, _ = run(update, make().init(PARAMS), range(4), change_in=2)
    for step, (one, other) in enumerate(zip(first, changed, strict=True)):
        equal = (flat(one) == flat(other)).mean()
        assert equal == 1.0 if step < 2 else equal < 0.1
    # Going back to an earlier state with the same sums gives the same noise, with another it does
    # not.
    back, _ = run(update, states[1], range(2, 4))
    np.testing.assert_array_equal(flat(back[-1]), flat(first[-1]))
    other, _ = run(update, states[1], range(2, 4), change_in=2)
    assert (flat(other[-1]) == flat(first[-1])).mean() < 0.1


def test_models_of_other_shapes_share_no_noise():
    """The same flat sum, key and plan: the rows of Z must differ, since their places do."""
    layouts = [
        _Layout.of(shapes, None) for shapes in (((4, 8),), ((8, 4),), ((32,),), ((16,),) * 2)
    ]
    keys = {_Noise(PLAN, KEY, CLIP, BATCH, layout)._row_keys for layout in layouts}
    assert len(keys) == len(layouts)


# --- Refusals -------------------------------------------------------------------------------------


def refused(match):
    return pytest.raises(InvalidInput, match=match)


@pytest.mark.parametrize(
    "mechanism", [dpftrl.BinaryTree(), dpftrl.SquareRoot(), dpftrl.Banded.square_root(3, ROUNDS)]
)
def test_other_mechanisms_are_refused_by_name(mechanism):
    with refused(f"BLTs and independent noise, not {mechanism.name}"):
        make(DevicePlan(mechanism))


def test_a_plan_for_sampled_batches_is_refused():
    with refused("does not cover the rounding of noise on a device"):
        correlated_noise(sampled_plan(), KEY, CLIP, on_device=True)


def test_wrong_sums_are_refused(update):
    noise = make()
    state = noise.init(PARAMS)
    with refused("exact sum"):
        noise.update(PARAMS, state)
    with refused("clipped to 0.6"):
        noise.update(replace(sums(0), grid=Grid.for_noise(2.0, 0.6)), state)
    with refused("at most 2\\^36"):
        noise.update(replace(sums(0), grid=replace(GRID, step=GRID.step * 2.0**-20)), state)
    with pytest.raises(CALLBACK_ERRORS, match="too large for 0 gradients"):
        jax.block_until_ready(update(replace(sums(0), count=jnp.int32(0)), state))


def test_states_of_another_key_or_step_are_refused(update):
    other = make(key=OTHER_KEY).init(PARAMS)
    with pytest.raises(CALLBACK_ERRORS, match="another key, plan, clip norm or model"):
        jax.block_until_ready(update(sums(0), other))
    _, states = run(update, make().init(PARAMS), range(2))
    moved = states[1]._replace(step=jnp.int32(1))
    with pytest.raises(CALLBACK_ERRORS, match="or it was changed"):
        jax.block_until_ready(update(sums(1), moved))


def test_a_step_after_the_last_is_refused(update):
    _, states = run(update, make().init(PARAMS), range(ROUNDS))
    with pytest.raises(CALLBACK_ERRORS, match="all 6 steps of the plan are done"):
        jax.block_until_ready(update(sums(9), states[-1]))


def test_wrong_shardings_are_refused():
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    spec = NamedSharding(mesh, PartitionSpec("a"))
    with refused("give on_device=True too"):
        correlated_noise(PLAN, KEY, CLIP, BATCH, max_batch_size=9, sharding=spec)
    with refused("one jax.sharding.NamedSharding for each parameter"):
        make(sharding=[spec]).init(PARAMS)
    with refused("one jax.sharding.NamedSharding for each parameter"):
        make(sharding=jax.devices()[0]).init(jnp.zeros(3))


def test_arrays_that_need_too_many_blocks_or_cannot_be_divided_are_refused():
    with refused("counts up to 2\\^32"):  # one block for each row
        _Layout([(2**33, 1)], [PartitionSpec()], None)
    _Layout([(2**32, 8)], [PartitionSpec()], None)

    class FourDevices:
        shape = {"a": 4}  # noqa: RUF012 - a stand-in for a mesh of other hardware

    with refused("6 is not a multiple of 4"):
        _Layout([(6, 4)], [PartitionSpec("a")], FourDevices())


def test_the_state_and_the_noise_are_secret():
    noise = make()
    assert repr(noise.init(PARAMS)) == "DeviceNoiseState(secret)"
    inner = _Noise(PLAN, KEY, CLIP, BATCH, _Layout.of(((3,),), None))
    assert repr(inner) == "Noise(blt, size=3, secret)"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(inner)


# --- Sharded over 4 virtual devices ---------------------------------------------------------------


def sharded(*layouts, flags=""):
    paths = [HERE, HERE.parent / "noise", os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {flags}",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    program = str(HERE / "sharded_device_noise.py")
    done = subprocess.run(
        [sys.executable, program, *layouts], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check_layouts(answers, layouts):
    reference = answers["reference"]
    for name in layouts:
        for key in ("means", "buffers", "digests"):
            assert answers[name][key] == reference[key], (name, key)
        # Digests are all that devices give one another: 4 words each.
        assert set(answers[name]["gathered"]) <= {"u32[4,4]", "u32[2,2,4]", "u32[1,4,4]"}, name


def test_sharded_noise_has_the_bits_of_one_device_and_no_device_holds_the_whole():
    name = "rows and columns over 2x2"
    # Without optimization, it compiles in half the time; the slow test has it.
    answers = sharded(name, flags="--xla_backend_optimization_level=0")
    check_layouts(answers, [name])
    assert answers[name]["largest_share"] <= 0.26  # a quarter, and the one scalar parameter
    # One coordinate of the last device changes in step 1: the noise changes from there on.
    reference, changed = answers["reference"], answers[name]["changed"]
    assert changed["means"][0] == reference["means"][0]
    assert not set(changed["means"][1:]) & set(reference["means"][1:])
    assert changed["digests"] != reference["digests"]


@pytest.mark.slow
def test_every_layout_has_the_bits_of_one_device():
    answers = sharded()
    layouts = [name for name in answers if name != "reference"]
    assert len(layouts) == 5
    check_layouts(answers, layouts)
