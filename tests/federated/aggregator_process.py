"""An aggregator in a process of its own: reads an assignment, writes its partial sum.

Usage: aggregator_process.py ROW, with the assignment on standard input. After each report it writes
a line to standard error; with "hang" as second argument it then waits, to be killed in the middle.
"""

import sys
import time

import numpy as np

from dpftrl.federated import Aggregator

SIZE = 5


def update_of(client: str, row: int) -> np.ndarray:
    generator = np.random.default_rng([int(client.split()[1]), row])
    return generator.normal(size=SIZE).astype(np.float32)


def main() -> None:
    row, hang = int(sys.argv[1]), "hang" in sys.argv
    aggregator = Aggregator.of(sys.stdin.buffer.read())
    for client in aggregator.assignment.clients:
        aggregator.report(client, update_of(client, row), aggregator.assignment.attempt)
        sys.stderr.write("reported\n")
        sys.stderr.flush()
        if hang:
            time.sleep(600)
    sys.stdout.buffer.write(aggregator.partial_sum().encoded())


if __name__ == "__main__":
    main()
