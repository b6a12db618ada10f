"""Run in a fresh process: time the rounds of one noise stream, print them and the memory."""

import json
import sys
import time

import numpy as np
from process_memory import memory, memory_from_here

import dpftrl
from dpftrl.noise import NoiseKey, NoiseStream

description, size, repeats = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if "theta" in description:
    mechanism: dpftrl.Mechanism = dpftrl.BLT(description["theta"], description["omega"])
else:
    participation = dpftrl.MinSep(description["rounds"], description["rounds"])
    mechanism = dpftrl.mechanism(description["name"], participation)


def rounds(stream: NoiseStream, update: "np.ndarray", count: int) -> list[float]:
    """Seconds of each."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        stream.add_to(update)
        times.append(time.perf_counter() - start)
    return times


key = NoiseKey.generate()
warm = description.get("warm", 2)
# Compile, and touch the update, before memory is counted.
rounds(
    NoiseStream.unchecked(mechanism, 3, clip_norm=1.0, noise_multiplier=1.0, key=key),
    np.zeros(3, np.float32),
    2,
)
update = np.zeros(size, np.float32) + 1
before = memory_from_here()
stream = NoiseStream.unchecked(
    mechanism, size, clip_norm=1.0, noise_multiplier=1.0, key=key, mode="buffered"
)
rounds(stream, update, warm)
print(
    json.dumps(
        {"seconds": rounds(stream, update, repeats), "extra_bytes": memory("VmHWM") - before}
    )
)
