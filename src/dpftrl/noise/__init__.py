"""Correlated noise: keyed, streaming, reproducible to the bit and resumable."""

from dpftrl.clipping import ExactSum, Grid
from dpftrl.noise.key import NoiseKey
from dpftrl.noise.sharding import Shard
from dpftrl.noise.stream import NoiseStream

__all__ = ["ExactSum", "Grid", "NoiseKey", "NoiseStream", "Shard"]
