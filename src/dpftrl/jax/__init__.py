"""Private training with JAX: exact sums of clipped gradients, and correlated noise for optax."""

from dpftrl.jax.gradients import ClippedSum, ClippingInfo, ExactGradientSum, clipped_sum
from dpftrl.jax.noise import CorrelatedNoiseState, correlated_noise

__all__ = [
    "ClippedSum",
    "ClippingInfo",
    "CorrelatedNoiseState",
    "ExactGradientSum",
    "clipped_sum",
    "correlated_noise",
]
