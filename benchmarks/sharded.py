"""Time per step and noise state per rank, for several ranks against one process.

`python benchmarks/sharded.py` prints a table and saves `benchmarks/results/sharded.json`. Ranks are
processes of this machine that exchange their 16 bytes per step over pipes; there is no model. With
fewer cores than ranks, the time of a step is that of all ranks, one after another; so the CPU time
of a rank is measured beside it.

`--size` is the number of coordinates that is measured. For a billion coordinates the table is on
paper: bytes per parameter times their number. Buffers of trees and banded matrices fill up during a
run, so a measurement of a few steps shows less than the table.

Noise on a device is timed beside it, on the CPU backends of PyTorch and JAX.
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dpftrl
from dpftrl.noise import Grid, NoiseKey, NoiseStream, Shard
from dpftrl.noise.key import Secret
from dpftrl.plan.device import noise_multiplier_on_device

RESULTS = Path(__file__).parent / "results" / "sharded.json"
GRID = Grid.for_noise(1.0, 1.0)
ROUNDS = 2000
BANDS = 16
BILLION = 10**9
RANKS = (1, 2, 4)
DEVICE_STEPS = 5
NOISE_MULTIPLIER = 7.379
MODELS = ((6_400_000, 2_000), (100_000_000, 2_000), (10**9, 1_000), (100_000_000, 10_000))


def mechanisms() -> dict[str, Any]:
    """BLTs with 1 to 8 buffers, a tree and a banded matrix."""
    decays = np.linspace(0.5, 0.999, 8)
    blts = {f"blt, d = {d}": dpftrl.BLT(decays[-d:], np.full(d, 0.1)) for d in range(1, 9)}
    return {
        **blts,
        "tree (TreeAgg)": dpftrl.BinaryTree(),
        f"banded, {BANDS} bands (BandMF)": dpftrl.Banded.square_root(BANDS, ROUNDS),
    }


def bytes_per_parameter(mechanism: Any) -> int:
    """Bytes of the noise state per parameter, of all ranks together."""
    return 8 * mechanism.memory(ROUNDS)


def work(
    pipe: Connection, name: str, size: int, rank: int, ranks: int, steps: int, mode: Any
) -> None:
    """One rank: do some steps, and answer with times and memory."""
    os.nice(5)
    shard = Shard.even(size, rank, ranks)
    stream = NoiseStream.unchecked(
        mechanisms()[name], size, noise_multiplier=1.0, key=NoiseKey.insecure_for_tests(1),
        clip_norm=1.0, mode=mode, threads=1, shard=shard,
    )  # fmt: skip
    total = np.zeros(shard.count, np.int64)

    def exchange(own: Secret) -> list[Secret]:
        pipe.send_bytes(own.secret_bytes())
        return [Secret(pipe.recv_bytes()) for _ in range(ranks)]

    walls, cpus = list[float](), list[float]()
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        stream.add_to(total, GRID, exchange=exchange)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    pipe.send(
        {
            "seconds_per_step": float(np.median(walls[1:])),
            "cpu_seconds_per_step": float(np.median(cpus[1:])),
            "cpu_seconds_of_last_step": cpus[-1],
            "state_bytes": stream.memory_bytes,
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "last": int(total[-1]) if total.size else 0,
        }
    )


def measure(name: str, size: int, ranks: int, steps: int, mode: str = "buffered") -> Any:
    """Do some steps by several ranks."""
    context = mp.get_context("fork")
    pipes, processes = list[Connection](), list[Any]()
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, name, size, rank, ranks, steps, mode))
        process.start()
        pipes.append(ours)
        processes.append(process)
    for _ in range(steps):
        parts = [pipe.recv_bytes() for pipe in pipes]
        for pipe in pipes:
            for part in parts:
                pipe.send_bytes(part)
    answers = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return answers


class SmallPlan(NamedTuple):
    """A plan of a few steps."""

    mechanism: Any
    noise_multiplier: float = 1.0
    participation: Any = dpftrl.MinSep.once(DEVICE_STEPS + 1)
    buffers: Any = "float64"


def device_times(size: int) -> dict[str, float]:
    """Nanoseconds of CPU time per coordinate and step, with a BLT of 4 buffers."""
    plan, key = SmallPlan(mechanisms()["blt, d = 4"]), NoiseKey.insecure_for_tests(1)
    stream = NoiseStream(plan, size, key=key, clip_norm=1.0, threads=1)
    total = np.zeros(size, np.int64)

    def step_of_stream() -> None:
        total[:] = 0
        stream.add_to(total, GRID, updates=1)

    times = {"NoiseStream": _timed(step_of_stream, size)}
    try:
        import torch

        from dpftrl.torch.device_noise import DeviceNoise
    except ImportError:
        pass
    else:
        torch.set_num_threads(1)
        for arithmetic in ("float64", "split"):
            on_torch = DeviceNoise(plan, size, key=key, clip_norm=1.0, arithmetic=arithmetic)
            given = torch.zeros(size, dtype=torch.int64)

            def step(on_torch: Any = on_torch, given: Any = given) -> None:
                given.zero_()
                on_torch.add_to(given, GRID, updates=1)

            times[f"DeviceNoise (PyTorch), {arithmetic}"] = _timed(step, size)
    try:
        import jax
        import jax.numpy as jnp

        from dpftrl.jax import ExactGradientSum, correlated_noise
    except ImportError:
        return times
    noise = correlated_noise(plan, key, 1.0, 1.0, max_batch_size=1, on_device=True)
    zeros = jnp.zeros(size, jnp.int32)
    update, state = jax.jit(noise.update), [noise.init(jnp.zeros(size))]

    def step_of_jax() -> None:
        mean, state[0] = update(ExactGradientSum(zeros, zeros, jnp.int32(1), GRID), state[0])
        jax.block_until_ready(mean)

    times["correlated_noise (JAX), split"] = _timed(step_of_jax, size)
    return times


def more_noise() -> list[dict[str, Any]]:
    """How much more noise a device needs, for blt-b400 at the noise multiplier of the paper."""
    rows = list[dict[str, Any]]()
    for size, steps in MODELS:
        row: dict[str, Any] = {"size": size, "steps": steps}
        for name in ("blt-b400", "independent"):
            once = dpftrl.MinSep.once(steps)
            plan = SmallPlan(dpftrl.mechanism(name), NOISE_MULTIPLIER, once)
            for arithmetic in ("float64", "split"):
                try:
                    found = noise_multiplier_on_device(plan, size, arithmetic)
                    row[f"{name}, {arithmetic}"] = found / NOISE_MULTIPLIER - 1
                except dpftrl.InvalidInput:
                    row[f"{name}, {arithmetic}"] = "refused"
        rows.append(row)
    return rows


def _timed(step: Callable[[], None], size: int) -> float:
    """The median CPU time of a step per coordinate, in nanoseconds, after one to warm up."""
    step()
    times = list[float]()
    for _ in range(DEVICE_STEPS):
        before = time.process_time()
        step()
        times.append(time.process_time() - before)
    return float(np.median(times)) / size * 1e9


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=100_000_000, help="coordinates to measure")
    parser.add_argument("--steps", type=int, default=3, help="steps per measurement")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", action="append", help="measure this mechanism; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to save the results")
    options = parser.parse_args()
    known = mechanisms()
    NoiseStream.unchecked(  # compiles before the processes are forked
        dpftrl.BLT([0.9], [0.1]), 10, noise_multiplier=1.0, key=NoiseKey.insecure_for_tests(1),
        clip_norm=1.0, shard=Shard.whole(10),
    ).add_to(np.zeros(10, np.int64), GRID, exchange=lambda own: [own])  # fmt: skip
    measured = list[dict[str, Any]]()
    for name in options.only or known:
        rows: dict[int, Any] = {}
        for ranks in RANKS:
            rows[ranks] = measure(name, options.size, ranks, options.steps)
            whole = rows[1][0]["state_bytes"]
            most = max(one["state_bytes"] for one in rows[ranks])
            row = {
                "mechanism": name,
                "ranks": ranks,
                "seconds_per_step": max(one["seconds_per_step"] for one in rows[ranks]),
                "cpu_seconds_per_rank": max(one["cpu_seconds_per_step"] for one in rows[ranks]),
                "state_bytes_per_rank": most,
                "share_of_state": most / whole if whole else 0.0,
                "peak_bytes_per_rank": max(one["peak_bytes"] for one in rows[ranks]),
                "same_last_coordinate": rows[ranks][-1]["last"] == rows[1][0]["last"],
            }
            measured.append(row)
            if not options.json:
                print(
                    f"{name:24} {ranks} ranks: {row['seconds_per_step']:.2f} s per step, "
                    f"{row['cpu_seconds_per_rank']:.2f} s of CPU per rank, state "
                    f"{most / 2**20:,.0f} MiB per rank ({row['share_of_state']:.1%})"
                )
    small = min(options.size, 1_000_000)
    regenerating = [
        {
            "mechanism": "blt, d = 4",
            "steps": steps,
            "size": small,
            "cpu_seconds_of_last_step": measure("blt, d = 4", small, 1, steps, "regenerating")[0][
                "cpu_seconds_of_last_step"
            ],
        }
        for steps in (2, 10, 100)
    ]
    on_device = device_times(small)
    paper = [
        {
            "mechanism": name,
            "bytes_per_parameter": bytes_per_parameter(one),
            "gigabytes_per_rank_for_a_billion": {
                ranks: bytes_per_parameter(one) * BILLION / ranks / 1e9 for ranks in (1, 4, 8, 64)
            },
        }
        for name, one in known.items()
    ]
    result = {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor()},
        "size": options.size,
        "steps": options.steps,
        "rounds": ROUNDS,
        "measured": measured,
        "regenerating": regenerating,
        "on_device": on_device,
        "more_noise_on_device": more_noise(),
        "on_paper": paper,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for row in paper:
            per_rank = row["gigabytes_per_rank_for_a_billion"]
            print(
                f"{row['mechanism']:28} {row['bytes_per_parameter']:4} bytes per parameter; for a "
                f"billion: {per_rank[1]:,.0f} GB on 1 rank, {per_rank[8]:,.0f} GB on each of 8"
            )
        for row in regenerating:
            print(
                f"regenerating, step {row['steps']} of {small:,} coordinates: "
                f"{row['cpu_seconds_of_last_step']:.3f} s of CPU"
            )
        for name, nanoseconds in on_device.items():
            print(f"{name:34} {nanoseconds:6.1f} ns of CPU per coordinate and step")


if __name__ == "__main__":
    main()
