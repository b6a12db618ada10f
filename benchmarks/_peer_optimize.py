"""Run by the peer's interpreter: optimise one BLT, print the time of this first call and it."""

import json
import sys
import time

import jax

jax.config.update("jax_enable_x64", True)

from jax_privacy.matrix_factorization import buffered_toeplitz  # noqa: E402

rounds, min_sep, participations, buffers = map(int, sys.argv[1:5])
start = time.perf_counter()
found = buffered_toeplitz.optimize(
    n=rounds,
    min_sep=min_sep,
    max_participations=participations,
    error={"max": "max", "rms": "mean"}[sys.argv[5]],
    min_buffers=buffers,
    max_buffers=buffers,
)
seconds = time.perf_counter() - start
print(
    json.dumps(
        {
            "seconds": seconds,
            "theta": [float(x) for x in found.buf_decay],
            "omega": [float(x) for x in found.output_scale],
        }
    )
)
