"""Run as a program on 4 virtual CPU devices: noise that is sharded like the parameters.

Prints one JSON object per layout. `reference` is the same training on one device.
"""

import hashlib
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_pieces import SUPPORTED, DevicePlan
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from noise_pieces import KEY

from dpftrl.jax import ExactGradientSum, correlated_noise
from dpftrl.noise import Grid

P = PartitionSpec
CLIP, BATCH, STEPS = 0.5, 4, 3
GRID = Grid.for_noise(2.0, CLIP)
SHAPES = {"b": (8,), "one": (), "w": (16, 24), "x": (4, 3, 20)}
PLAN = DevicePlan(SUPPORTED["blt-1"])
MESHES = {"4": ((4,), ("a",)), "2x2": ((2, 2), ("a", "b")), "1x4": ((1, 4), ("a", "b"))}
LAYOUTS = {
    "rows over 4": ("4", {"b": P("a"), "w": P("a"), "x": P("a")}),
    "columns over 4": ("4", {"b": P("a"), "w": P(None, "a"), "x": P(None, None, "a")}),
    "rows and columns over 2x2": (
        "2x2",
        {"b": P(("a", "b")), "w": P("a", "b"), "x": P("b", None, "a")},
    ),
    "both axes on rows of 2x2": (
        "2x2",
        {"b": P(("b", "a")), "w": P(("b", "a")), "x": P(None, None, ("a", "b"))},
    ),
    "some replicated over 1x4": ("1x4", {"b": P(), "w": P(None, "b"), "x": P("b")}),
}


def sums(step: int, change: int = 0) -> ExactGradientSum:
    rng = np.random.default_rng(step)
    high = {name: rng.integers(-9, 9, shape, np.int32) for name, shape in SHAPES.items()}
    low = {name: rng.integers(0, 2**16, shape, np.int32) for name, shape in SHAPES.items()}
    low["w"][-1, -1] ^= change
    return ExactGradientSum(high, low, jnp.int32(100), GRID)


def digest(tree: Any) -> str:
    hasher = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        hasher.update(np.asarray(leaf).tobytes())
    return hasher.hexdigest()


def train(sharding: Any) -> dict[str, Any]:
    """Some steps, compiled; bits of means and states, and what each device holds."""
    noise = correlated_noise(
        PLAN, KEY, CLIP, BATCH, max_batch_size=100, on_device=True, sharding=sharding
    )
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    if sharding is not None:
        params = jax.device_put(params, sharding)
    start = noise.init(params)
    update = jax.jit(noise.update).lower(placed(sums(0), sharding), start).compile()
    answer = steps(update, start, sharding, change=0)
    answer["gathered"] = gathered(update.as_text())
    if sharding is not None:
        answer["changed"] = steps(update, start, sharding, change=1)
    return answer


def placed(total: ExactGradientSum, sharding: Any) -> ExactGradientSum:
    if sharding is None:
        return total
    parts = (jax.device_put(part, sharding) for part in (total.high, total.low))
    return ExactGradientSum(*parts, total.count, GRID)


def steps(update: Any, state: Any, sharding: Any, change: int) -> dict[str, Any]:
    """Some steps; in step 1 the last coordinate may change."""
    means = []
    for step in range(STEPS):
        total = placed(sums(step, change if step == 1 else 0), sharding)
        mean, state = update(total, state)
        means.append(digest(mean))
        if sharding is not None:
            check_sharded(mean, sharding)
            for part in jax.tree.leaves(state.buffers, is_leaf=lambda one: isinstance(one, dict)):
                check_sharded(part, sharding)
    return {
        "means": means,
        "buffers": digest(state.buffers),
        "digests": digest(state.digests),
        "largest_share": largest_share(state.buffers),
    }


def check_sharded(tree: Any, sharding: Any) -> None:
    for name, array in tree.items():
        assert array.sharding.is_equivalent_to(sharding[name], array.ndim), name


def largest_share(buffers: Any) -> float:
    """The largest share of all coordinates of the buffers that one device holds."""
    held = dict[Any, int]()
    total = 0
    for leaf in jax.tree.leaves(buffers):
        total += leaf.size
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.size
    return max(held.values()) / total


def gathered(text: str) -> list[str]:
    """The results of all communication between devices in a compiled program."""
    pattern = r"= \(?([a-z0-9]+\[[0-9,]*\]).* (?:all-gather|all-reduce|all-to-all|collective-\w+)"
    return sorted(set(re.findall(pattern, text)))


def main() -> None:
    assert len(jax.devices()) == 4
    answers = {"reference": train(None)}
    for name, (mesh_name, specs) in LAYOUTS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        lengths, axes = MESHES[mesh_name]
        devices = np.array(jax.devices()).reshape(lengths)
        mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
        sharding = {key: NamedSharding(mesh, specs.get(key, P())) for key in SHAPES}
        answers[name] = train(sharding)
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
