"""Private steps of centralised training: ours beside Opacus 1.6 and jax_privacy 2.0.0.

Every engine takes the same model, batch and clip norm, and runs in a fresh process; the engines
take turns. `ratio` is our steps per second over those of the fastest peer, each at its best turn.
The peers are Opacus with hooks, Opacus with ghost clipping, and jax_privacy with the faster of
two micro-batches. An engine takes 100 steps, or as many as fit in 4 seconds. The peers add
independent noise, ours is correlated (a BLT). Memory is what a process needed beyond what it had
before the first step.
"""

import statistics
import sys
from typing import Any

import peer

MODELS = ("mlp", "cnn", "transformer")
BATCHES = (128, 512)
OPACUS = ("opacus-hooks", "opacus-ghost")
OURS = ("dpftrl", "dpftrl-durable")
MICRO_BATCHES = (0, 16)
STEPS = 100
# Models with ten million parameters, and batch sizes.
LARGE = (("mlp-10M", 128), ("mlp-10M", 512), ("transformer-10M", 128))


def torch_engine(engine: str, model: str, batch: int, steps: int) -> dict[str, Any]:
    """One run in PyTorch."""
    return peer.in_fresh_process(sys.executable, "_central_torch.py", engine, model, batch, steps)


def jax_privacy(model: str, batch: int, steps: int, micro_batch: int) -> dict[str, Any]:
    """One run of jax_privacy."""
    return peer.in_fresh_process(peer.python(), "_central_jax.py", model, batch, steps, micro_batch)


def our_jax(model: str, batch: int, steps: int) -> dict[str, Any]:
    """One run of ours in JAX."""
    return peer.in_fresh_process(sys.executable, "_central_our_jax.py", model, batch, steps)


def row(model: str, batch: int, steps: int, turns: int) -> dict[str, Any]:
    """All engines on one model and batch size."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for turn in range(turns):
        for engine in (*OPACUS, *OURS, "plain"):
            runs.setdefault(engine, []).append(torch_engine(engine, model, batch, steps))
        # The micro-batch is chosen in the first turn.
        tried = MICRO_BATCHES if turn == 0 else (runs["jax_privacy"][0]["micro_batch"],)
        found = [{**jax_privacy(model, batch, steps, size), "micro_batch": size} for size in tried]
        runs.setdefault("jax_privacy", []).append(min(found, key=median))
        runs.setdefault("dpftrl-jax", []).append(our_jax(model, batch, steps))
    seconds = {engine: min(map(median, each)) for engine, each in runs.items()}
    memory = {engine: max(run["extra_bytes"] for run in each) for engine, each in runs.items()}
    peers = (*OPACUS, "jax_privacy")
    fastest = min(peers, key=lambda engine: seconds[engine])
    return {
        "model": model,
        "batch": batch,
        **{f"{engine}_ms": 1e3 * value for engine, value in seconds.items()},
        "fastest_peer": fastest,
        "ratio": seconds[fastest] / seconds["dpftrl"],
        "ratio_durable": seconds[fastest] / seconds["dpftrl-durable"],
        "jax_ratio": seconds["jax_privacy"] / seconds["dpftrl-jax"],
        **{f"{engine}_MB": value / 1e6 for engine, value in memory.items()},
    }


def median(run: dict[str, Any]) -> float:
    """The median seconds of a step."""
    return statistics.median(run["seconds"])


def noise_share(model: str, batch: int, steps: int) -> dict[str, Any]:
    """How much of a step is noise, and how much of it only the digest and the keystream."""
    run = torch_engine("dpftrl", model, batch, steps)
    return {
        "model": model,
        "batch": batch,
        "step_s": median(run),
        "noise_share": run["noise_share"],
        "digest_and_keystream_share": run["cipher_s"] / median(run),
    }


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All tables."""
    batches, turns = ((128,), 1) if quick else (BATCHES, 3)
    rows = [
        row(model, batch, 5 if quick else STEPS, turns) for model in MODELS for batch in batches
    ]
    ratios = [one[key] for one in rows for key in ("ratio", "ratio_durable")]
    summary = [
        {
            "median_ratio": statistics.median(ratios),
            "smallest_ratio": min(ratios),
            "median_jax_ratio": statistics.median(one["jax_ratio"] for one in rows),
        }
    ]
    return {
        "private steps": rows,
        "summary": summary,
        "noise at ten million parameters": [noise_share(*large, steps=10) for large in LARGE],
    }


if __name__ == "__main__":
    assert __doc__ is not None
    peer.main(__doc__, "batch 128, one turn", measure)
