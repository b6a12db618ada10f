"""All people in this process, through the same ServerApp and ClientApp: simulate.py PLAN FOLDER."""

import sys

from nextword import server_app, task
from nextword.client_app import client_app

from dpftrl.errors import DpftrlError
from dpftrl.federated import Settings, Sgd
from dpftrl.flower import InProcessGrid


def simulate(plan: str, folder: str) -> None:
    grid = InProcessGrid(client_app(simulated=True), range(1, len(task.task().train) + 1))
    settings = Settings(clip_norm=0.5, optimizer=Sgd(1.0))
    server_app.train(grid, plan, folder, settings, require_auth=False)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: python simulate.py PLAN FOLDER", file=sys.stderr)
        sys.exit(2)
    try:
        simulate(*sys.argv[1:])
    except DpftrlError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
