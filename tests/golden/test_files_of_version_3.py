"""Runs with the compact journal and a snapshot open, resume to the same bits and verify."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_files_of_version_2 import PEOPLE, update

from dpftrl import read_status
from dpftrl.federated import Server
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.verify import verify_run

V3 = Path(__file__).parent / "v3"
EXPECTED = json.loads((V3 / "expected.json").read_text())


@pytest.fixture(params=sorted(EXPECTED))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = shutil.copytree(V3 / request.param, tmp_path / request.param)
    for path in (place / "run/private", *(place / "run/private").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return place


def test_a_stopped_run_verifies_and_has_a_status(place: Path):
    verdict = verify_run(place / "run", place / "state")
    assert verdict.passed
    assert (verdict.rounds, verdict.empty_rounds) == (5, 1)
    status = read_status(place / "run", state_folder=place / "state")
    assert status.public.rounds == 5
    assert status.private.attempts is not None
    assert (status.private.attempts.total, status.private.attempts.abandoned) == (7, 1)


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_a_stopped_run_resumes_to_the_same_bits(place: Path, with_snapshot: bool):
    expected = EXPECTED[place.name]
    if not with_snapshot:
        (place / "run/private/snapshot.bin").unlink()
    with Server.resume(place / "run", state_folder=place / "state") as server:
        assert (server.rounds, server.in_flight) == (5, True)
        while server.rounds < 8:
            attempt = server.begin(PEOPLE)
            for client in attempt.clients:
                if not attempt.enough:
                    sent = update(int(client[-2:]), attempt.number)
                    attempt.report(client, sent, attempt.attempt)
            server.commit(attempt)
        model, epsilon, clip_norm = server.model.copy(), server.epsilon, server.clip_norm
    # The exponential function differs in its last bit from one machine to another.
    assert clip_norm == pytest.approx(expected["clip_norm"], rel=1e-12)
    if place.name == "fixed":
        assert (
            hashlib.sha256(np.ascontiguousarray(model).tobytes()).hexdigest()
            == (expected["model_sha256"])
        )
    assert epsilon == pytest.approx(expected["epsilon"], rel=1e-9)
    with ledger_file(place / "run") as ledger:
        assert hashlib.sha256(ledger.read_bytes()).hexdigest() == expected["ledger_sha256"]
    assert verify_run(place / "run", place / "state").passed
