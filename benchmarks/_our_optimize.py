"""Run in a fresh process: optimise one BLT, print the time of this first call and the BLT."""

import json
import sys
import time

from dpftrl import MinSep
from dpftrl.optimize import optimize_blt

rounds, min_sep, participations, buffers = map(int, sys.argv[1:5])
participation = MinSep(rounds, min_sep, participations)
start = time.perf_counter()
found = optimize_blt(participation, buffers, "max" if sys.argv[5] == "max" else "rms")
seconds = time.perf_counter() - start
print(
    json.dumps({"seconds": seconds, "theta": found.mechanism.theta, "omega": found.mechanism.omega})
)
