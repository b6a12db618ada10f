"""Flower's own simulation and ours: the same strategy and ClientApp, the same model."""

import json
import os
import subprocess
import sys
from pathlib import Path

from simulated_run import ENVIRONMENT
from tiny_apps import client_app, plan, start_arrays, strategy

from dpftrl.federated import Server
from dpftrl.flower import InProcessGrid
from dpftrl.verify import verify_run

NODES = 8


def model(place: Path) -> list[float]:
    with Server.resume(place / "run", state_folder=place / "state") as server:
        return server.model.tolist()


def test_ray_and_the_in_process_grid_give_the_same_model(tmp_path: Path) -> None:
    script = Path(__file__).parent / "simulated_run.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "ray", str(NODES)],
        env={**os.environ, **ENVIRONMENT, "DPFTRL_STATE": str(tmp_path / "devices")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "devices").exists(), "simulated nodes leave no folders"
    ids = json.loads(done.stdout.splitlines()[-1])
    in_process = InProcessGrid(client_app(), ids)
    strategy(tmp_path / "here", plan(rounds=4, population=NODES)).start(in_process, start_arrays())
    assert model(tmp_path / "ray") == model(tmp_path / "here")
    hypotheses = json.loads((tmp_path / "ray/run/guarantee.json").read_text())["hypotheses"]
    basis = {one["name"]: one["basis"] for one in hypotheses}
    assert basis["identity"] == basis["participation"] == "assumed"
    assert verify_run(tmp_path / "ray/run", tmp_path / "ray/state").passed
