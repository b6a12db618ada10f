"""The models of `_central_torch.py` in plain JAX, for ours and for jax_privacy."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

SEQUENCE, VOCABULARY, WIDTH, HEADS = 32, 1000, 128, 4
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
    params = [dense(a, b) for a, b in pairwise(widths)]

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
        x = jax.lax.conv(
            jnp.pad(x, ((0, 0), (0, 0), (3, 3), (3, 3))), params["c1"], (2, 2), "VALID"
        )
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
