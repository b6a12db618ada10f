"""Run by the peer's interpreter: time the rounds of its BLT privatiser, print them and the memory.

The update is jitted as a whole; with `donated` its arguments are given up, so that nothing is
copied that need not be.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import buffered_toeplitz
from process_memory import memory, memory_from_here

size, repeats = int(sys.argv[1]), int(sys.argv[2])
theta, omega = json.loads(sys.argv[3]), json.loads(sys.argv[4])
given_up = (0, 1) if sys.argv[5] == "donated" else ()
blt = buffered_toeplitz.BufferedToeplitz.build(theta, omega, dtype=jnp.float32)
matrix = blt.inverse_as_streaming_matrix()
privatizer = noise_addition.matrix_factorization_privatizer(
    matrix, stddev=1.0, prng_key=0, dtype=jnp.float32
)


step = jax.jit(lambda update, state: privatizer.update(update, state), donate_argnums=given_up)
update = jnp.zeros(size, jnp.float32)
before = memory_from_here()
state = privatizer.init(update)
times = []
for _ in range(repeats + 2):
    start = time.perf_counter()
    update, state = step(update, state)
    jax.block_until_ready((update, state))
    times.append(time.perf_counter() - start)
print(json.dumps({"seconds": times[2:], "extra_bytes": memory("VmHWM") - before}))
