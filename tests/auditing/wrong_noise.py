"""Streams whose noise is wrong, for tests that an audit notices it."""

from dpftrl.auditing.mechanism import CLIP_NORM, MakeStream
from dpftrl.mechanisms import Mechanism
from dpftrl.noise import NoiseKey, NoiseStream


def scaled_noise(mechanism: Mechanism, noise_multiplier: float, factor: float) -> MakeStream:
    """Streams whose noise is `factor` times what was planned."""

    def make(size: int, key: NoiseKey) -> NoiseStream:
        return NoiseStream.unchecked(
            mechanism,
            size,
            noise_multiplier=factor * noise_multiplier,
            key=key,
            clip_norm=CLIP_NORM,
            mode="buffered",
        )

    return make
