"""Run by the peer's interpreter: MODEL BATCH STEPS MICRO_BATCH; time steps with jax_privacy.

The models are those of `_central_torch.py`. The step is jitted as a whole, with clipped sums of
gradients and independent noise, as its documentation has it.
"""

import json
import sys
from functools import partial
from itertools import repeat

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _central_jax_models import MODELS, SEQUENCE, VOCABULARY
from jax_privacy import noise_addition
from jax_privacy.clipping import clipped_grad
from timed_steps import timed

rng = np.random.default_rng(0)


def measure(name, batch_size, steps, micro_batch):
    """Seconds of every step and the peak memory, with one micro-batch."""
    params, apply = MODELS[name]()
    if name == "transformer":
        words = jnp.asarray(rng.integers(0, VOCABULARY, (batch_size, SEQUENCE + 1)))
        batch = (words[:, :-1], words[:, 1:])
    else:
        pictures = jnp.asarray(rng.normal(size=(batch_size, 1, 28, 28)), jnp.float32)
        batch = (pictures, jnp.asarray(rng.integers(0, 10, batch_size)))

    def loss_fn(params, batch):
        scores, labels = apply(params, batch[0]), batch[1]
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    gradients = clipped_grad(
        loss_fn, l2_clip_norm=1.0, normalize_by=batch_size, microbatch_size=micro_batch
    )
    privatizer = noise_addition.gaussian_privatizer(
        stddev=gradients.sensitivity() * 1.0, prng_key=jax.random.key(0)
    )
    optimizer = optax.sgd(0.1)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        noise_state, optimizer_state = state
        noisy, noise_state = privatizer.update(gradients(params, batch), noise_state)
        updates, optimizer_state = optimizer.update(noisy, optimizer_state, params)
        return optax.apply_updates(params, updates), (noise_state, optimizer_state)

    state = (privatizer.init(params), optimizer.init(params))

    def one(batch):
        nonlocal params, state
        params, state = step(params, state, batch)
        jax.block_until_ready((params, state))

    return timed(one, repeat(batch), steps)


def main():
    """Measure one model; a micro-batch of 0 is none."""
    name, batch_size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    micro_batch = int(sys.argv[4]) or None
    print(json.dumps(measure(name, batch_size, steps, micro_batch)))


if __name__ == "__main__":
    main()
