"""All devices in this process, through the same ServerApp: simulate.py PLAN FOLDER."""

import sys

from blobs.client_app import simulated
from blobs.server_app import main
from flwr.app import Context, RecordDict

from dpftrl.errors import DpftrlError
from dpftrl.flower import InProcessGrid, load_plan


def simulate(plan: str, folder: str) -> None:
    nodes = load_plan(plan).fleet.population
    told = {"plan": plan, "folder": folder, "lr": 0.1, "clip-norm": 1.0, "require-auth": False}
    main(InProcessGrid(simulated, range(1, nodes + 1)), Context(1, 1, {}, RecordDict(), told))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: python simulate.py PLAN FOLDER", file=sys.stderr)
        sys.exit(2)
    try:
        simulate(*sys.argv[1:])
    except DpftrlError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
