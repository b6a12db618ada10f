"""Time the steps of a training, and the memory that they need."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from process_memory import memory, memory_from_here

WARM_UP = 3
# A slow engine takes fewer steps than asked: it stops after so many seconds.
LONGEST, FEWEST = 4.0, 4


def timed(step: Callable[[Any], object], batches: Iterator[Any], steps: int) -> dict[str, Any]:
    """Seconds of every step after some that are not counted, and the peak memory.

    Loading the batches is not counted.
    """
    before = memory_from_here()
    seconds: list[float] = []
    while len(seconds) < WARM_UP + steps:
        batch = next(batches)
        start = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - start)
        if len(seconds) >= WARM_UP + FEWEST and sum(seconds[WARM_UP:]) > LONGEST:
            break
    return {"seconds": seconds[WARM_UP:], "extra_bytes": memory("VmHWM") - before}
