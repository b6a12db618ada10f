"""Run in a fresh process: POPULATION COHORT AVAILABLE REPEATS; timers of very many clients."""

import json
import sys
import time

import numpy as np
from peer import seconds
from process_memory import memory, memory_from_here

from dpftrl.federated.eligibility import Rules, Timers
from dpftrl.federated.pseudonyms import Pseudonyms
from dpftrl.noise import NoiseKey


def main() -> None:
    """Contact everybody, cohort by cohort, then time one more round."""
    population, cohort, available, repeats = map(int, sys.argv[1:])
    rounds = -(-population // cohort)
    draw = np.random.default_rng(0)
    # Distinct, in no order, as pseudonyms are: odd factors permute the 64-bit numbers.
    everybody = np.arange(population, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    names = [f"client-{i}" for i in range(available)]
    rules = Rules(min_sep=rounds // 2, cap=100, timer_hours=None)
    before = memory_from_here()
    timers, start = Timers(), time.perf_counter()
    for row in range(rounds):
        timers.mark(np.sort(everybody[row * cohort : (row + 1) * cohort]), row)
    filled = time.perf_counter() - start
    extra = memory("VmHWM") - before
    some = np.sort(draw.permutation(everybody)[:available])
    marks: list[float] = []
    for row in range(rounds, rounds + repeats):
        chosen = np.sort(draw.choice(everybody, cohort, replace=False))
        start = time.perf_counter()
        timers.mark(chosen, row)
        marks.append(time.perf_counter() - start)
    print(
        json.dumps(
            {
                "clients": len(timers),
                "extra_bytes": extra,
                "fill_seconds": filled,
                "mark_seconds": sorted(marks)[repeats // 2],
                "eligible_seconds": seconds(
                    lambda: rules.allowed(timers.seen(some), rounds, None), repeats
                ),
                "eligible": int(rules.allowed(timers.seen(some), rounds, None).sum()),
                "names_seconds": seconds(
                    lambda: Pseudonyms(NoiseKey.generate()).keys(names), repeats
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
