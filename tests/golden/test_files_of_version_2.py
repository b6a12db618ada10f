"""Runs of version 2 that keep a ledger still open, resume to the same bits and verify."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpftrl.federated import Server
from dpftrl.federated.store import run_store
from dpftrl.verify import verify_run

V2 = Path(__file__).parent / "v2"
EXPECTED = json.loads((V2 / "expected.json").read_text())
SIZE = 64
PEOPLE = [f"client-{i:02d}" for i in range(30)]


def update(client: int, row: int) -> np.ndarray[Any, Any]:
    """The update that the files were made with: exact in float32."""
    i = np.arange(SIZE, dtype=np.int64)
    steps = ((i * 7 + client * 13 + row * 29 + i * client) % 33) - 16
    return steps.astype(np.float32) / 64


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = shutil.copytree(V2 / "stopped", tmp_path / "run")
    shutil.copytree(V2 / "stopped-witness", tmp_path / "state")
    for path in (run / "private", *(run / "private").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return run


def test_a_stopped_run_verifies(run: Path, tmp_path: Path):
    assert verify_run(run, tmp_path / "state").passed


@pytest.mark.parametrize("with_snapshots", [False, True])
def test_a_stopped_run_resumes_to_the_same_bits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_snapshots: bool
):
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 1 if with_snapshots else 10**9)
    for rounds in range(5, 9):
        with Server.resume(run, state_folder=tmp_path / "state") as server:
            assert server.rounds == rounds
            if rounds == 8:
                break
            attempt = server.begin(PEOPLE)
            for client in attempt.clients:
                if not attempt.enough:
                    number = int(client[-2:])
                    attempt.report(client, update(number, attempt.number), attempt.attempt)
            server.commit(attempt)
        assert (run / "private" / "snapshot.bin").exists() == with_snapshots
    digest = hashlib.sha256(np.ascontiguousarray(server.model).tobytes()).hexdigest()
    assert digest == EXPECTED["model_sha256"]
    assert server.epsilon == pytest.approx(EXPECTED["epsilon"], rel=1e-9)
    ledger = hashlib.sha256((run / "ledger.csv").read_bytes()).hexdigest()
    assert ledger == EXPECTED["ledger_sha256"]
    assert verify_run(run, tmp_path / "state").passed
