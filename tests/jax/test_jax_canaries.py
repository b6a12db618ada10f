"""Canaries in private trainings with JAX."""

import jax.numpy as jnp
import numpy as np
import optax

from dpftrl import verify_run
from dpftrl.auditing.run import audit_run
from dpftrl.jax import make_private

INPUTS = np.random.default_rng(0).normal(size=(40, 1000)).astype(np.float32)
DATA = (INPUTS, INPUTS[:, 0])


def loss_fn(params, batch):
    inputs, targets = batch
    return jnp.mean((inputs @ params["weights"] - targets) ** 2)


def test_a_training_with_canaries_is_consistent_with_its_claim(tmp_path):
    folder, state = tmp_path / "run", tmp_path / "state"
    with make_private(
        loss_fn,
        {"weights": jnp.zeros(1000)},
        optax.sgd(0.1),
        DATA,
        folder=folder,
        state_folder=state,
        clip_norm=1.0,
        epsilon=8.0,
        delta=1e-4,
        epochs=3,
        batch_size=20,
        sampling="none",
        mechanism="blt-b400",
        canaries=400,
    ) as training:
        for batch in training.loader:
            training.step(batch)
    assert verify_run(folder, state).passed
    found = audit_run(folder)
    assert not found.exceeds_claim
    assert found.rounds == 6
    assert found.mu_independent > 0.5 * found.claim.mu
