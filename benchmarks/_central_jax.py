"""Run by the peer's interpreter: MODEL BATCH STEPS; time private steps with jax_privacy.

The models are those of `_central_torch.py`. The step is jitted as a whole, with clipped sums of
gradients and independent noise, as its documentation has it; the micro-batch is the fastest of some.
"""

import json
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import noise_addition
from jax_privacy.clipping import clipped_grad
from process_memory import memory, memory_from_here

SEQUENCE, VOCABULARY, WIDTH, HEADS = 32, 1000, 128, 4
WARM_UP = 3
MICRO_BATCHES = (None, 16, 64)
rng = np.random.default_rng(0)


def dense(before, after):
    """Weight and bias of a linear layer."""
    scale = 1 / np.sqrt(before)
    return {
        "w": jnp.asarray(rng.normal(0, scale, (before, after)), jnp.float32),
        "b": jnp.zeros(after),
    }


def linear(p, x):
    """A linear layer."""
    return x @ p["w"] + p["b"]


def mlp(*widths):
    """A perceptron for pictures of 28 x 28."""
    params = [dense(a, b) for a, b in zip(widths, widths[1:], strict=False)]

    def apply(params, x):
        x = x.reshape(x.shape[0], -1)
        for p in params[:-1]:
            x = jax.nn.relu(linear(p, x))
        return linear(params[-1], x)

    return params, apply


def cnn():
    """Two convolutions and two linear layers."""
    params = {
        "c1": jnp.asarray(rng.normal(0, 0.1, (16, 1, 8, 8)), jnp.float32),
        "b1": jnp.zeros((16, 1, 1)),
        "c2": jnp.asarray(rng.normal(0, 0.05, (32, 16, 4, 4)), jnp.float32),
        "b2": jnp.zeros((32, 1, 1)),
        "d1": dense(512, 32),
        "d2": dense(32, 10),
    }

    def pool(x):
        window = (1, 1, 2, 2)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1, 1, 1, 1), "VALID")

    def apply(params, x):
        x = jax.lax.conv(jnp.pad(x, ((0, 0), (0, 0), (3, 3), (3, 3))), params["c1"], (2, 2), "VALID")
        x = pool(jax.nn.relu(x + params["b1"]))
        x = jax.lax.conv(x, params["c2"], (2, 2), "VALID")
        x = pool(jax.nn.relu(x + params["b2"])).reshape(x.shape[0], -1)
        return linear(params["d2"], jax.nn.relu(linear(params["d1"], x)))

    return params, apply


def transformer():
    """Two layers, for sequences of words."""

    def norm_params():
        return {"g": jnp.ones(WIDTH), "b": jnp.zeros(WIDTH)}

    def block():
        return {
            "before": norm_params(),
            "between": norm_params(),
            "project": dense(WIDTH, 3 * WIDTH),
            "merge": dense(WIDTH, WIDTH),
            "wide": dense(WIDTH, 4 * WIDTH),
            "narrow": dense(4 * WIDTH, WIDTH),
        }

    params = {
        "words": jnp.asarray(rng.normal(0, 1, (VOCABULARY, WIDTH)), jnp.float32),
        "places": jnp.asarray(rng.normal(0, 1, (SEQUENCE, WIDTH)), jnp.float32),
        "blocks": [block(), block()],
        "norm": norm_params(),
        "out": dense(WIDTH, VOCABULARY),
    }

    def norm(p, x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]

    def apply_block(p, x):
        batch, length, _ = x.shape
        parts = linear(p["project"], norm(p["before"], x))
        q, k, v = parts.reshape(batch, length, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(WIDTH // HEADS)
        mask = jnp.tril(jnp.ones((length, length), bool))
        mixed = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1) @ v
        x = x + linear(p["merge"], mixed.transpose(0, 2, 1, 3).reshape(batch, length, WIDTH))
        return x + linear(p["narrow"], jax.nn.gelu(linear(p["wide"], norm(p["between"], x))))

    def apply(params, x):
        x = params["words"][x] + params["places"]
        for p in params["blocks"]:
            x = apply_block(p, x)
        return linear(params["out"], norm(params["norm"], x))

    return params, apply


MODELS = {
    "mlp": lambda: mlp(784, 256, 256, 10),
    "mlp-10M": lambda: mlp(784, 2800, 2700, 10),
    "cnn": cnn,
    "transformer": transformer,
}


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

    before = memory_from_here()
    state = (privatizer.init(params), optimizer.init(params))
    seconds = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        params, state = step(params, state, batch)
        jax.block_until_ready((params, state))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[WARM_UP:], "extra_bytes": memory("VmHWM") - before}


def main():
    """Measure one model; the micro-batch comes from the command line, or 0 for none."""
    name, batch_size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    micro_batch = int(sys.argv[4]) or None
    print(json.dumps(measure(name, batch_size, steps, micro_batch)))


if __name__ == "__main__":
    main()
