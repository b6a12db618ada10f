"""Nanoseconds a coordinate, and memory, of one round of noise: ours, jax_privacy's, and the floor.

Our buffers are float64, the peer's float32; the update is float32. The floor is what no stream can
beat: copying the bytes that a BLT's round has to read and write, and the keystream alone. Ours and
the peer run in turns, in fresh processes, on all processors; the peer as its documentation has it,
in a jitted step, and with its state donated, which is better.
"""

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peer
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

SIZE = 6_400_000
BUFFERS = (1, 2, 4, 8)
OTHERS = ({"name": "independent", "rounds": 100}, {"name": "tree", "rounds": 100})
# Its 399 vectors take 20.4 GB at full size; the system and other programs need some more.
BANDS = {"name": "banded:400", "rounds": 1000, "warm": 400}
MEMORY_FOR_BANDS = 28 * 10**9
SIZES = (10**5, 10**6, 10**7, 10**8)


def blt(buffers: int) -> dict[str, Any]:
    """A BLT with so many buffers; what its numbers are makes no difference to its cost."""
    decays = (1 - np.geomspace(0.005, 0.8, buffers)).tolist()
    return {"theta": decays, "omega": [0.5 / buffers] * buffers}


def ours(description: dict[str, Any], size: int, repeats: int) -> dict[str, Any]:
    """One run of ours."""
    return peer.in_fresh_process(
        sys.executable, "_our_noise.py", json.dumps(description), size, repeats
    )


def theirs(description: dict[str, Any], size: int, repeats: int, how: str) -> dict[str, Any]:
    """One run of the peer's."""
    decays, scales = json.dumps(description["theta"]), json.dumps(description["omega"])
    return peer.in_fresh_process(
        peer.python(), "_peer_noise.py", size, repeats, decays, scales, how
    )


def nanoseconds(runs: list[dict[str, Any]], size: int) -> float:
    """The median over all rounds of all runs."""
    return statistics.median(s for run in runs for s in run["seconds"]) / size * 1e9


def copying(buffers: int, size: int, repeats: int) -> float:
    """Reading and writing d buffers in float64 and the update in float32 once, by numpy."""
    source = np.ones((2 * buffers + 1, size), np.float32)
    target = np.zeros_like(source)
    return peer.seconds(lambda: np.copyto(target, source), repeats) / size * 1e9


def keystream(size: int, repeats: int) -> float:
    """The bytes that our sampler takes, 8 a coordinate, in pieces that stay in cache."""
    piece = 2**17
    zeros, out = bytes(piece), bytearray(piece + 16)
    cipher = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def run() -> None:
        for _ in range(8 * size // piece):
            cipher.update_into(zeros, out)

    return peer.seconds(run, repeats) / size * 1e9


def against_peer(size: int, repeats: int, turns: int) -> list[dict[str, Any]]:
    """BLTs of several sizes beside the peer and the floor."""
    rows: list[dict[str, Any]] = []
    for buffers in BUFFERS:
        description = blt(buffers)
        runs: dict[str, list[dict[str, Any]]] = {"ours": [], "jitted": [], "donated": []}
        for _ in range(turns):
            runs["ours"].append(ours(description, size, repeats))
            for how in ("jitted", "donated"):
                runs[how].append(theirs(description, size, repeats, how))
        cost = {who: nanoseconds(each, size) for who, each in runs.items()}
        extra = {who: max(run["extra_bytes"] for run in each) for who, each in runs.items()}
        floor = copying(buffers, size, repeats) + keystream(size, repeats)
        rows.append(
            {
                "buffers": buffers,
                "ours": cost["ours"],
                "theirs_jitted": cost["jitted"],
                "theirs_donated": cost["donated"],
                "times_faster": min(cost["jitted"], cost["donated"]) / cost["ours"],
                "floor": floor,
                "over_floor": cost["ours"] / floor,
                "our_extra_MB": extra["ours"] / 1e6,
                "buffers_MB": buffers * size * 8 / 1e6,
                "their_extra_MB": extra["donated"] / 1e6,
            }
        )
    return rows


def free_memory() -> int:
    """Bytes that a new process can have, as Linux sees it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def other_mechanism(
    description: dict[str, Any], size: int, repeats: int, note: str = ""
) -> dict[str, Any]:
    """What is no BLT."""
    run = ours(description, size, repeats)
    return {
        "mechanism": description["name"] + note,
        "size": size,
        "ns_a_coordinate": nanoseconds([run], size),
        "extra_MB": run["extra_bytes"] / 1e6,
    }


def bands(size: int, repeats: int, quick: bool) -> dict[str, Any]:
    """Many bands, which keep a vector each: at full size if that fits into memory."""
    if quick:
        return other_mechanism(BANDS, size // 16, repeats)
    if free_memory() < MEMORY_FOR_BANDS:
        return other_mechanism(BANDS, size // 16, repeats, " (smaller: 28 GB are not free)")
    return other_mechanism(BANDS, size, repeats)


def against_size(sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Whether the cost is linear in the size of the model, at d = 4."""
    description = blt(4)
    found = {size: nanoseconds([ours(description, size, repeats)], size) for size in sizes}
    least = min(found.values())
    return [
        {"size": size, "ns_a_coordinate": cost, "ratio": cost / least}
        for size, cost in found.items()
    ]


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All tables."""
    size, repeats, turns = (640_000, 5, 1) if quick else (SIZE, 10, 3)
    title = f"BLT against {peer.PEER}, {size:,} coordinates, ns"
    return {
        title: against_peer(size, repeats, turns),
        "other mechanisms": [
            *(other_mechanism(each, size, max(repeats, 16)) for each in OTHERS),
            bands(size, max(repeats, 16), quick),
        ],
        "cost against size (d = 4)": against_size(SIZES[:-1] if quick else SIZES, repeats),
    }


if __name__ == "__main__":
    peer.main(__doc__ or "", "a smaller model, fewer rounds", measure)
