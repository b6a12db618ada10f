"""Run in a fresh process: MODEL BATCH STEPS; time private steps of ours in JAX.

The models are those of `_central_jax.py`; the step is that of `dpftrl.jax.make_private`.
"""

import json
import sys
import warnings

import jax
import numpy as np
import optax
from _central_jax_models import MODELS, SEQUENCE, VOCABULARY
from timed_steps import WARM_UP, timed

import dpftrl.jax as dj
from dpftrl import account, mechanism
from dpftrl.plan import Dataset, DatasetPlan


def main() -> None:
    """Measure one model."""
    name, batch_size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    params, apply = MODELS[name]()
    if name == "transformer":
        words = rng.integers(0, VOCABULARY, (batch_size, SEQUENCE + 1))
        data = (words[:, :-1], words[:, 1:])
    else:
        pictures = rng.normal(size=(batch_size, 1, 28, 28)).astype(np.float32)
        data = (pictures, rng.integers(0, 10, batch_size))

    def loss_fn(params, batch):
        scores, labels = apply(params, batch[0]), batch[1]
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    dataset = Dataset(batch_size, batch_size, steps + WARM_UP)
    chosen = mechanism("blt", dataset.in_order)
    plan = DatasetPlan("none", account(chosen, dataset.in_order, 1.0, 1e-5), dataset)
    private = dj.make_private(
        loss_fn, params, optax.sgd(0.1), data, folder=None, clip_norm=1.0, plan=plan
    )

    def step(batch) -> None:
        private.step(batch)
        jax.block_until_ready(private.params)

    print(json.dumps(timed(step, iter(private.loader), steps)))


if __name__ == "__main__":
    main()
