"""Private training with JAX, on one's own data set.

`make_private` owns batches, clipping, noise, checkpoints and guarantee. `clipped_sum` and
`correlated_noise` are its parts, for training loops of your own.
"""

from dpftrl.centralized.owner import Metrics, PrivacyWarning
from dpftrl.jax.gradients import (
    ClippedSum,
    ClippingInfo,
    ExactGradientSum,
    clipped_sum,
    pad_batch,
)
from dpftrl.jax.noise import CorrelatedNoiseState, correlated_noise
from dpftrl.jax.training import PrivateTraining, make_private

__all__ = [
    "ClippedSum",
    "ClippingInfo",
    "CorrelatedNoiseState",
    "ExactGradientSum",
    "Metrics",
    "PrivacyWarning",
    "PrivateTraining",
    "clipped_sum",
    "correlated_noise",
    "make_private",
    "pad_batch",
]
