"""Run as a program: FOLDER; trains a small run, one round per line of standard input."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "federated"))

from small_runs import PEOPLE, create, fill, small_plan

from dpftrl.federated.metrics import MetricsFile, Point

ROUNDS = 8

if __name__ == "__main__":
    place = Path(sys.argv[1])
    with create(place, small_plan(ROUNDS), budget=40.0) as server:
        metrics = MetricsFile(place / "run", 0)
        print("ready", flush=True)  # noqa: T201
        for number in range(ROUNDS):
            sys.stdin.readline()
            attempt = server.begin(PEOPLE)
            fill(attempt)
            released = server.commit(attempt)
            metrics.add(Point(number + 1, released.epsilon, accuracy=0.05 * (number + 1)))
            print(number, flush=True)  # noqa: T201
