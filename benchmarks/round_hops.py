"""How many files one round touches, and how often it goes from one file to another.

`python benchmarks/round_hops.py` traces the second round of a small run, from choosing the cohort
to the released model, and counts calls between files of `src/dpftrl`. A reader who follows one
round through the code opens as many files, and goes from one to another as often.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import dpftrl
from dpftrl.federated import Server, Settings
from dpftrl.plan.make_plan import make_plan

SOURCE = str(Path(dpftrl.__file__).parent)
PEOPLE = [f"client-{i}" for i in range(12)]


class Trace:
    """Counts the files that are entered, and the calls that go from one file to another."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.switches: Counter[tuple[str, str]] = Counter()
        self._here = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by the interpreter for every call and return."""
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(SOURCE):
            return
        file = file[len(SOURCE) + 1 :]
        self.files.add(file)
        if file != self._here and self._here:
            self.switches[self._here, file] += 1
        self._here = file


def create(folder: str) -> Server:
    """A run of a tiny model."""
    plan = make_plan(
        population=len(PEOPLE), report_goal=3, rounds=4, noise_multiplier=1.0, delta=1e-6
    )
    settings, model = Settings(clip_norm=1.0), {"weights": np.zeros(3)}
    return Server.create(f"{folder}/run", plan, settings, model, state_folder=f"{folder}/state")


def one_round(server: Server) -> None:
    """The cohort is chosen, everybody reports, the round is committed."""
    current = server.begin(PEOPLE)
    for client in current.clients:
        if current.report(client, np.ones(3, np.float32), current.attempt):
            break
    server.commit(current)


def main() -> None:
    """Print the counts, as text or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder, create(folder) as server:
        one_round(server)  # compile and import first
        sys.setprofile(trace)
        one_round(server)
        sys.setprofile(None)
    counts = {"files": len(trace.files), "switches": sum(trace.switches.values())}
    if as_json:
        print(json.dumps({**counts, "names": sorted(trace.files)}, indent=2))
        return
    print(f"{counts['files']} files, {counts['switches']} switches between files")
    for (one, other), count in trace.switches.most_common():
        print(f"{count:4}  {one} -> {other}")


if __name__ == "__main__":
    main()
