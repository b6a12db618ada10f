"""Adaptive clipping of JAX gradients: sums by hand, norms, and the same bits after a stop."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_training_runs import Place, failed_checks, fast_places, plan_in_order

from dpftrl import AdaptiveClipping
from dpftrl.centralized.settings import JAX_STEP
from dpftrl.clipping import JointClip
from dpftrl.errors import InvalidInput
from dpftrl.jax import make_private
from dpftrl.jax.gradients import STEP_BITS, joint_bits, joint_sum, scale_of
from dpftrl.plan import Dataset
from dpftrl.verify import centralized as verify_centralized

ROWS = 12
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
BETA = 0.4
ONE = 2**STEP_BITS


def linear(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch @ params)


SUM = jax.jit(joint_sum(linear, BETA))


def joint_steps(rows: np.ndarray, clip_norm: float, beta: float = BETA, sum_of: Any = SUM) -> list:
    """The joint sum of rows whose gradients are the rows themselves."""
    total, info = sum_of(jnp.zeros(3), rows, None, scale_of(clip_norm))
    bits = joint_bits(info, len(rows), JointClip(clip_norm, beta))
    return [*np.asarray(total.steps()).tolist(), bits]


def test_the_step_of_the_grid_is_the_same_everywhere():
    assert JAX_STEP == verify_centralized.JAX_STEP == 2.0**-STEP_BITS


@pytest.mark.parametrize("clip_norm", [1e-5, 0.5, 1.7, 1.0, 4.0, 1e5])
def test_the_joint_sum_is_that_of_a_plain_loop(clip_norm):
    norms = np.linalg.norm(INPUTS.astype(np.float64), axis=1)
    scaled = INPUTS / np.maximum(norms, clip_norm)[:, None] * math.sqrt(1 - BETA**2)
    signs = np.where(norms <= clip_norm, 1, -1).sum()
    *steps, bits = joint_steps(INPUTS, clip_norm)
    assert np.array(steps) / ONE == pytest.approx(scaled.sum(axis=0), abs=1e-5)
    assert bits == signs * math.floor(BETA * ONE)


@pytest.mark.parametrize("beta", [0.01, 0.9])
def test_no_row_moves_the_joint_sum_by_more_than_1(beta):
    sum_of = jax.jit(joint_sum(linear, beta))
    for scale in (1e-38, 1e-20, 1e-3, 1.0, 1e3, 1e18, 3e37):
        for clip_norm in (2.0**-60, 1e-6, 0.7, 1.0, 1e6, 2.0**60):
            for row in INPUTS[:3]:
                own = (row * np.float32(scale))[None]
                steps = joint_steps(own, clip_norm, beta, sum_of)
                assert sum(step * step for step in steps) <= ONE**2


def test_rows_that_are_not_finite_add_nothing():
    rows = np.array([[math.nan, 0, 0], [math.inf, 0, 0]], np.float32)
    assert joint_steps(rows, 1.0) == [0, 0, 0, 0]


def test_clip_norms_that_float32_cannot_hold_are_refused():
    for wrong in (1e-30, 1e30, math.nan):
        with pytest.raises(InvalidInput, match="clip_norm"):
            scale_of(wrong)


@pytest.fixture
def place() -> Iterator[Place]:
    with fast_places() as places:
        yield next(places)


def private(place: Place | None, **changes: Any) -> Any:
    options: dict[str, Any] = {"clip_norm": "adaptive", "commit_every": 3, "insecure_test_key": 3}
    return make_private(
        lambda params, batch: jnp.mean((batch @ params - 1) ** 2),
        jnp.full(3, 0.1),
        optax.sgd(0.1, momentum=0.9),
        INPUTS,
        folder=None if place is None else place.folder,
        state_folder=None if place is None else place.state,
        plan=plan_in_order(Dataset(ROWS, 6, 4)),
        **(options | changes),
    )


def trained(training: Any, until: int | None = None) -> np.ndarray:
    with training:
        for batch in training.loader:
            training.step(batch)
            if training.steps == until:
                break
    return np.asarray(training.params)


def test_a_training_resumes_to_the_same_bits_and_verifies(place):
    wanted = trained(private(None))
    for stop in (1, 4):
        trained(private(place), stop)
    training = private(place)
    assert (trained(training) == wanted).all()
    assert failed_checks(place) == {}
    assert training.run.moving.state.clip_norm != 0.1


def test_bounds_that_float32_cannot_hold_are_refused():
    with pytest.raises(InvalidInput, match="clip_norm"):
        private(None, clip_norm=AdaptiveClipping(minimum=1e-30))
