"""A private Equinox model in JAX, on scikit-learn's handwritten digits."""

import sys
import tempfile

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import dpftrl.jax as dj

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def main(folder: str) -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test = np.arange(len(images)) % 5 != 0, np.arange(len(images)) % 5 == 0

    model = eqx.nn.MLP(64, 10, 64, depth=1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params: eqx.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        scores = jax.vmap(eqx.combine(params, static))(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]).mean()

    private = dj.make_private(
        loss_fn,
        params,
        optax.sgd(1.0, momentum=0.9),
        (images[train], labels[train]),
        folder=f"{folder}/run",
        epsilon=8.0,
        delta=1e-5,
        epochs=EPOCHS,
        batch_size=128,
        clip_norm=1.0,
        sampling="none",
    )
    for batch in private.loader:
        private.step(batch)

    trained = eqx.combine(private.params, static)
    accuracy = np.mean(jax.vmap(trained)(images[test]).argmax(1) == labels[test])
    print(f"accuracy on held-out digits {accuracy:.3f}, epsilon {private.epsilon:g}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
