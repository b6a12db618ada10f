"""Clipped sums in JAX: equal to a loop over examples, exact, and never above the clip norm."""

from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.jax import clipped_sum, pad_batch

CLIP = 0.37
BATCH = 7


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def labels(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 5, shape))


def mlp():
    params = [(normal(0, 12, 300) / 3, jnp.zeros(300)), (normal(1, 300, 5) / 17, jnp.zeros(5))]

    def loss(params, batch):
        (w, b), (v, c) = params
        return cross_entropy(jax.nn.relu(batch["x"] @ w + b) @ v + c, batch["y"])

    return params, loss, {"x": normal(2, BATCH, 12) * 3, "y": labels(3, BATCH)}


def cnn():
    params = {"conv": normal(0, 4, 1, 3, 3), "bias": jnp.zeros(4), "out": normal(1, 100, 5) / 10}

    def loss(params, batch):
        x = jax.lax.conv_general_dilated(batch[0], params["conv"], (2, 2), "SAME")
        x = jax.nn.relu(x + params["bias"][:, None, None])
        return cross_entropy(x.reshape(len(x), -1) @ params["out"], batch[1])

    return params, loss, (normal(2, BATCH, 1, 10, 10), labels(3, BATCH))


class Lstm(eqx.Module):
    cell: eqx.nn.LSTMCell
    out: eqx.nn.Linear

    def __call__(self, inputs):
        start = (jnp.zeros(6), jnp.zeros(6))
        (hidden, _), _ = jax.lax.scan(lambda c, x: (self.cell(x, c), None), start, inputs)
        return self.out(hidden)


def lstm():
    keys = jax.random.split(jax.random.key(0))
    model = Lstm(eqx.nn.LSTMCell(3, 6, key=keys[0]), eqx.nn.Linear(6, 5, key=keys[1]))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        model = eqx.combine(params, static)
        return cross_entropy(jax.vmap(model)(batch[0]), batch[1])

    return params, loss, (normal(2, BATCH, 4, 3), labels(3, BATCH))


def transformer():
    params = {
        "embedding": normal(0, 5, 8),  # used for the inputs and for the outputs
        "qkv": normal(1, 8, 24) / 3,
        "out": normal(2, 8, 8) / 3,
        "norm": jnp.ones(8),
    }

    def loss(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        scaled = params["norm"] * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        q, k, v = jnp.split(scaled @ params["qkv"], 3, -1)
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), jnp.einsum("bqd,bkd->bqk", q, k), -1e9)
        x = x + jax.nn.softmax(scores) @ v @ params["out"]
        return cross_entropy(x @ params["embedding"].T, tokens[:, 1:])

    return params, loss, labels(3, BATCH, 6)


MODELS = {"mlp": mlp, "cnn": cnn, "lstm": lstm, "transformer": transformer}


def rows(batch, which):
    return jax.tree.map(lambda leaf: leaf[which], batch)


def leaves64(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def reference(loss, params, batches, clip=CLIP, clips=True):
    """The sum of clipped gradients by a loop, and the norms; float64 after the gradient."""
    gradient = jax.jit(jax.grad(loss))
    total, norms = [np.zeros(np.shape(leaf)) for leaf in jax.tree.leaves(params)], []
    for batch in batches:
        parts = leaves64(gradient(params, batch))
        norms.append(np.sqrt(sum((part**2).sum() for part in parts)))
        factor = min(1.0, clip / norms[-1]) if clips else 1.0
        total = [one + factor * part for one, part in zip(total, parts, strict=True)]
    return total, np.array(norms)


def values(total):
    """The exact value of a sum in float64."""
    return [steps * total.grid.step for steps in jax.tree.leaves(total.steps())]


def distance(one, other):
    difference = sum(((a - b) ** 2).sum() for a, b in zip(one, other, strict=True))
    return np.sqrt(difference / sum((b**2).sum() for b in other))


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


# --- The same as a loop over examples ------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_clipped_sum_is_the_sum_of_a_loop_over_examples(name):
    params, loss, batch = MODELS[name]()
    singles = [rows(batch, slice(i, i + 1)) for i in range(BATCH)]
    expected, norms = reference(loss, params, singles)
    assert norms.max() > CLIP  # something is clipped
    total, info = jax.jit(clipped_sum(loss, CLIP))(params, batch)
    # The margin for rounding makes clipped gradients shorter by up to 3e-5.
    assert distance(values(total), expected) < 5e-5
    np.testing.assert_allclose(info.norms, norms, rtol=1e-5)
    np.testing.assert_allclose(info.losses, [loss(params, one) for one in singles], rtol=1e-5)
    assert (int(total.count), int(info.non_finite)) == (BATCH, 0)
    assert distance(leaves64(total.to_float32()), values(total)) < 1e-6
    assert jax.tree.structure(total.to_float32()) == jax.tree.structure(params)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_gradients_that_need_no_clipping_are_only_cut_off_to_the_grid(name):
    params, loss, batch = MODELS[name]()
    singles = [rows(batch, slice(i, i + 1)) for i in range(BATCH)]
    expected, norms = reference(loss, params, singles, clip=128.0)
    assert norms.max() < 128
    total, _ = jax.jit(clipped_sum(loss, 128.0))(params, batch)
    for one, other in zip(values(total), expected, strict=True):
        assert np.abs(one - other).max() <= BATCH * total.grid.step + 1e-6 * norms.sum()


def test_the_comparison_detects_a_sum_without_clipping():
    params, loss, batch = mlp()
    singles = [rows(batch, slice(i, i + 1)) for i in range(BATCH)]
    unclipped, _ = reference(loss, params, singles, clips=False)
    total, _ = clipped_sum(loss, CLIP)(params, batch)
    assert distance(values(total), unclipped) > 0.1


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_all_micro_batch_sizes_give_the_same_sum(name):
    params, loss, batch = MODELS[name]()
    totals = [
        jax.jit(clipped_sum(loss, CLIP, micro_batch=size))(params, batch)[0] for size in (1, 3)
    ]
    for total in totals[1:]:
        # The gradients themselves differ in the last bits, because matrix products do.
        assert distance(values(total), values(totals[0])) < 1e-6
        assert int(total.count) == BATCH


def linear_loss(params, batch):
    """The gradient of an example is the example, exactly."""
    return jnp.mean(sum(jnp.sum(w * x) for w, x in zip(params, batch, strict=True)))


def test_the_same_clipped_gradients_have_the_same_sum_to_the_last_bit_in_any_order():
    count = 150  # more than fit into one word, so that micro-batches are split
    batch = [normal(0, count, 3, 300) / 100, normal(1, count, 5) / 100]
    params = [jnp.zeros((3, 300)), jnp.zeros(5)]
    order = np.random.default_rng(2).permutation(count)
    first, info = jax.jit(clipped_sum(linear_loss, CLIP, micro_batch=150))(params, batch)
    assert 0.2 < info.norms.min() < info.norms.max() < CLIP  # no rounding except that to the grid
    for size in (1, 65):
        add = jax.jit(clipped_sum(linear_loss, CLIP, micro_batch=size))
        assert_same(add(params, batch)[0], first)
        assert_same(add(params, rows(batch, order))[0], first)
    expected = [np.trunc(np.asarray(x) / first.grid.step).astype(int).sum(0) for x in batch]
    assert_same(first.steps(), expected)


def test_leaving_out_one_example_changes_the_sum_by_exactly_its_contribution():
    batch, params = [normal(0, 9, 40) * 5], [jnp.zeros(40)]
    add = jax.jit(clipped_sum(linear_loss, CLIP, micro_batch=4))
    with_all = add(params, batch, jnp.ones(9, bool))[0].steps()[0]
    without = add(params, batch, jnp.arange(9) != 3)[0].steps()[0]
    alone = add(params, batch, jnp.arange(9) == 3)[0].steps()[0]
    np.testing.assert_array_equal(with_all - without, alone)


# --- No contribution is above the clip norm, by exact arithmetic ---------------------------------


def exact_excess(total):
    """The squared norm of a sum minus the squared clip norm, without any rounding."""
    steps = [int(step) for leaf in jax.tree.leaves(total.steps()) for step in leaf.reshape(-1)]
    squares = sum(step * step for step in steps)
    return Fraction(squares) * Fraction(total.grid.step) ** 2 - Fraction(total.grid.clip_norm) ** 2


SCALES = [1e-45, 1e-38, 1e-30, 1e-20, 1e-10, 1e-3, 0.999, 1.0, 1.001, 1e3, 1e10, 1e19, 1e30, 3e38]
CLIPS = [2.0**-60, 1e-9, 0.37, 1.0, 1.9999999, 1e6, 2.0**60]
ADDERS = {clip: jax.jit(clipped_sum(linear_loss, clip)) for clip in CLIPS}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CLIPS), st.sampled_from(SCALES), st.booleans(), st.integers(0, 2**32 - 1))
def test_no_single_contribution_is_above_the_clip_norm(clip, scale, relative, seed):
    rng = np.random.default_rng(seed)
    unit = rng.normal(size=700) * 2.0 ** rng.integers(-30, 2, 700)
    wide = unit / np.linalg.norm(unit) * scale * (clip if relative else 1.0)
    gradient = jnp.asarray(wide.clip(-3e38, 3e38), jnp.float32)
    total, info = ADDERS[clip]([jnp.zeros(700)], [gradient[None]])
    assert exact_excess(total) <= 0
    assert int(total.count) + int(info.non_finite) == 1
    if relative and 1e-3 <= scale <= 1e10 and np.abs(wide).max() < 1e38:
        length = np.linalg.norm(values(total)[0])
        cut_off = total.grid.step * np.sqrt(700)
        assert length == pytest.approx(min(scale, 1.0) * clip, rel=1e-4, abs=cut_off)


def test_the_norm_of_many_equal_coordinates_is_not_underestimated():
    """Added up one after another in float32, these squares would give 5 % less."""
    size = 6_000_000
    value = np.float32(0.13)
    assert np.cumsum(np.full(size, value * value))[-1] < 0.98 * size * float(value) ** 2
    total, info = jax.jit(clipped_sum(linear_loss, 1.0))(
        [jnp.zeros(size)], [jnp.full((1, size), value)]
    )
    steps = total.steps()[0]
    assert (steps == steps[0]).all()
    assert int(steps[0]) ** 2 * size <= 2**48
    assert float(info.norms[0]) == pytest.approx(np.sqrt(size) * value, rel=1e-4)


def test_the_check_of_norms_detects_a_contribution_that_is_rounded_up():
    total, _ = ADDERS[1.0]([jnp.zeros(700)], [jnp.zeros((1, 700)).at[0, 0].set(1.0)])
    assert exact_excess(total) <= 0
    larger = jax.tree.map(lambda low: low.at[0].add(1), total.low)
    high = jax.tree.map(lambda high: high.at[0].set(2**8), total.high)
    assert exact_excess(type(total)(high, larger, total.count, total.grid)) > 0


def test_gradients_are_read_from_memory_for_their_norm_and_their_sum():
    """Without a condition, XLA would compute gradients twice, with different roundings."""
    params, loss, batch = mlp()
    compiled = jax.jit(clipped_sum(loss, CLIP, micro_batch=2)).lower(params, batch).compile()
    assert " conditional(" in compiled.as_text()


# --- Rows that do not count ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("size", [1, 4])
def test_an_example_that_is_not_finite_contributes_zero_and_is_counted(bad, size):
    batch, params = [normal(0, 9, 40)], [jnp.zeros(40)]
    add = jax.jit(clipped_sum(linear_loss, CLIP, micro_batch=size))
    expected, _ = add(params, batch, jnp.arange(9) != 4)
    spoiled = [batch[0].at[4, 7].set(bad)]
    total, info = add(params, spoiled, jnp.ones(9, bool))
    assert_same((total.high, total.low, total.count), (expected.high, expected.low, expected.count))
    assert int(info.non_finite) == 1
    assert not np.isfinite(info.norms[4])


def test_masked_rows_contribute_nothing_even_if_they_are_nan():
    params, loss, batch = mlp()
    mask = jnp.array([True, False, True, True, False, False, False])
    spoiled = {"x": batch["x"].at[1].set(jnp.nan), "y": batch["y"]}
    total, info = jax.jit(clipped_sum(loss, CLIP, micro_batch=2))(params, spoiled, mask)
    expected, _ = reference(loss, params, [rows(batch, slice(i, i + 1)) for i in (0, 2, 3)])
    assert distance(values(total), expected) < 5e-5
    assert (int(total.count), int(info.non_finite)) == (3, 0)
    assert np.array_equal(info.norms > 0, mask)
    assert np.array_equal(info.losses > 0, mask)


def test_a_batch_without_rows_has_a_sum_of_zero():
    params, loss, batch = mlp()
    total, info = jax.jit(clipped_sum(loss, CLIP))(params, rows(batch, slice(0, 0)))
    assert all((steps == 0).all() for steps in jax.tree.leaves(total.steps()))
    assert (int(total.count), int(info.non_finite), info.losses.shape) == (0, 0, (0,))
    same, _ = jax.jit(clipped_sum(loss, CLIP))(params, batch, jnp.zeros(BATCH, bool))
    assert_same(same, total)


@pytest.mark.parametrize("count", [0, 3, 7])
def test_a_padded_batch_has_the_same_sum(count):
    data, params = np.asarray(normal(0, count, 40)), [jnp.zeros(40)]
    padded, mask = pad_batch([data], 4)
    assert padded[0].shape == (8 if count == 7 else 4, 40)
    total, _ = clipped_sum(linear_loss, 128.0)(params, padded, mask)
    assert_same(total.steps()[0], np.trunc(data / total.grid.step).astype(int).sum(0))
    assert int(total.count) == count


def test_an_array_without_elements_is_no_problem():
    batch, params = [normal(0, 3, 4), jnp.zeros((3, 0))], [jnp.zeros(4), jnp.zeros(0)]
    total, _ = clipped_sum(linear_loss, CLIP)(params, batch)
    assert [leaf.shape for leaf in total.steps()] == [(4,), (0,)]


# --- Users ---------------------------------------------------------------------------------------


def test_the_gradient_of_a_user_is_that_of_the_mean_loss_of_the_user():
    params, loss, _ = mlp()
    counts = [3, 1, 0, 2]
    batch = {"x": normal(5, 4, 3, 12) * 3, "y": labels(6, 4, 3)}
    mask = jnp.arange(3) < jnp.array(counts)[:, None]
    spoiled = {"x": jnp.where(mask[..., None], batch["x"], jnp.nan), "y": batch["y"]}
    users = [rows(batch, (u, slice(0, count))) for u, count in enumerate(counts) if count]
    expected, norms = reference(loss, params, users)
    add = jax.jit(clipped_sum(loss, CLIP, unit="user", micro_batch=3))
    total, info = add(params, spoiled, mask)
    assert distance(values(total), expected) < 5e-5
    assert (int(total.count), int(info.non_finite)) == (3, 0)
    np.testing.assert_allclose(info.norms, np.insert(norms, 2, 0.0), rtol=1e-5)
    single, _ = add(params, spoiled, mask & (jnp.arange(4) == 0)[:, None])
    assert exact_excess(single) <= 0
    assert_same(single.count, 1)


def test_users_without_any_examples_have_a_sum_of_zero():
    params, loss, _ = mlp()
    add = clipped_sum(loss, CLIP, unit="user")
    total, info = add(params, {"x": jnp.zeros((2, 0, 12)), "y": jnp.zeros((2, 0), int)})
    assert (int(total.count), info.losses.tolist()) == (0, [0.0, 0.0])


# --- Refused input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"clip_norm": 2.0**61}, "between 2"),
        ({"clip_norm": 1.0, "unit": "person"}, "unit must be example or user"),
        ({"clip_norm": 1.0, "micro_batch": 0}, "micro_batch"),
    ],
)
def test_options_that_are_not_valid_are_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        clipped_sum(linear_loss, **options)


def test_a_batch_that_does_not_fit_is_refused():
    add, params = clipped_sum(linear_loss, 1.0), [jnp.zeros(2)]
    with pytest.raises(InvalidInput, match="must have the shape"):
        add(params, [jnp.zeros((3, 2)), jnp.zeros((4, 2))])
    with pytest.raises(InvalidInput, match="must have the shape"):
        add(params, [jnp.zeros(())])
    with pytest.raises(InvalidInput, match="mask must be an array of bool"):
        add(params, [jnp.zeros((3, 2))], jnp.ones(4, bool))
    with pytest.raises(InvalidInput, match="mask must be an array of bool"):
        add(params, [jnp.zeros((3, 2))], jnp.ones(3))
    with pytest.raises(TooLarge, match="at most 2,097,152 rows"):
        add([jnp.zeros(())], [jnp.zeros(2**21 + 1)])
