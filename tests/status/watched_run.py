"""Run as a program: FOLDER [--stuck]; trains a small run until it is killed or ends.

After the first round it waits for a file `go` in FOLDER, and then takes its time, so that others
see the run go on. With --stuck it contacts the clients of round 3 and then waits, for a test that
kills it there.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "federated"))

from small_runs import PEOPLE, create, fill, small_plan

ROUNDS = 40


def main(folder: str, is_stuck: bool) -> None:
    with create(Path(folder), small_plan(ROUNDS), key=None) as server:
        while not server.ended():
            attempt = server.begin(PEOPLE)
            if is_stuck and attempt.number == 3:
                sys.stdout.write("stuck\n")
                sys.stdout.flush()
                time.sleep(600)
            fill(attempt)
            server.commit(attempt)
            if not attempt.number:
                sys.stdout.write("begun\n")
                sys.stdout.flush()
                while not is_stuck and not (Path(folder) / "go").exists():
                    time.sleep(0.01)
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], "--stuck" in sys.argv)
