"""A real deployment: SuperLink, SuperNodes and `flwr run` as processes, over TLS."""

import csv
import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from deployment import HERE, Deployment, deployed, until

from dpftrl.federated import Server, Settings
from dpftrl.federated.pseudonyms import Pseudonyms
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.noise import NoiseKey
from dpftrl.plan import load_plan
from dpftrl.verify import verify_run

sys.path.insert(0, str(HERE / "deployed_app"))
from tinyfed import task


def replayed(there: Deployment, place: Path) -> np.ndarray:
    """Return the model of an uninterrupted run in this process, with the same replies."""
    names = there.names()
    key = Pseudonyms(NoiseKey.insecure_for_tests(1)).key
    by_key = {key(name): name for name in names}
    settings = Settings(clip_norm=2.0, identity="registered")
    start = {"w": task.start()}
    with Server.create(
        place / "run",
        load_plan(there.place / "run/plan.json"),
        settings,
        start,
        state_folder=place / "state",
        insecure_test_key=1,
    ) as server:
        for record in there.journal():
            if record["kind"] == "cohort":
                keys = np.frombuffer(bytes.fromhex(record["clients"]), ">u8")
                attempt = server.begin([by_key[int(one)] for one in keys])
            elif record["kind"] == "abandoned":
                server.abandon(attempt, record["reason"])
            elif record["kind"] == "committed":
                model = server.arrays()["w"]
                for name in attempt.clients:
                    update = (task.train(model, names[name]) - model.astype(np.float64)) * 1.0
                    attempt.report(name, update.astype(np.float32), attempt.attempt)
                server.commit(attempt)
        return server.model.copy()


def model_of(there: Deployment) -> np.ndarray:
    with Server.resume(there.place / "run", state_folder=there.place / "state") as server:
        return server.model.copy()


def contacts(there: Deployment) -> dict[str, list[int]]:
    rows_by_client: dict[str, list[int]] = {}
    with ledger_file(there.place / "run") as path, path.open(newline="") as file:
        for row, who, _ in list(csv.reader(file))[1:]:
            rows_by_client.setdefault(who, []).append(int(row))
    return rows_by_client


def check_run(there: Deployment, rounds: int, min_sep: int, place: Path) -> None:
    until(lambda: there.released() >= rounds, "the last round", 400)
    until(lambda: "finished" in there.status(there.last_run), "the end of the run")
    assert verify_run(there.place / "run", there.place / "state").passed
    guarantee = json.loads((there.place / "run/guarantee.json").read_text())
    assert guarantee["runs"][0]["participation"]["rounds"] == rounds
    basis = {fact["name"]: fact["basis"] for fact in guarantee["hypotheses"]}
    assert (basis["identity"], basis["participation"]) == ("assumed", "enforced")
    for rows in contacts(there).values():
        assert all(b - a >= min_sep for a, b in pairwise(rows))
    losses = [loss for _, loss in there.losses()]
    assert losses[-1] < 0.5 * losses[0]
    digests = [one["digest"] for one in there.journal() if one["kind"] == "committed"]
    assert len(digests) == len(set(digests)) == rounds
    assert (replayed(there, place) == model_of(there)).all()


def test_a_deployment_with_tls_and_authentication(tmp_path: Path) -> None:
    with deployed(tmp_path / "there") as there:
        there.run(rounds=2)
        check_run(there, 2, 1, tmp_path / "here")


@pytest.mark.slow
def test_ten_rounds(tmp_path: Path) -> None:
    with deployed(tmp_path / "there") as there:
        there.run(rounds=10)
        check_run(there, 10, 1, tmp_path / "here")


@pytest.mark.slow
def test_a_run_resumes_after_each_process_is_killed(tmp_path: Path) -> None:
    options = {"rounds": 10, "goal": 1, "min_sep": 2, "reply_seconds": 90, "lock_seconds": 120}
    with deployed(tmp_path / "there") as there:
        there.run(**options)
        until(lambda: there.released() >= 2, "two rounds")
        os.kill(there.server_app(), signal.SIGKILL)

        there.run(**options)
        until(lambda: there.released() >= 4, "four rounds")
        there.kill("superlink")
        there.start_superlink()

        there.run(**options)
        until(lambda: there.released() >= 6, "six rounds", 300)
        there.kill("node-1")
        there.restart_node(1)
        check_run(there, 10, 2, tmp_path / "here")
        for folder in (there.place / "devices/devices").iterdir():
            (contact_file,) = folder.glob("*.json")
            assert json.loads(contact_file.read_text())["row"] in range(10)


@pytest.mark.slow
def test_a_node_that_never_uploads_does_not_delay_the_round(tmp_path: Path) -> None:
    with deployed(tmp_path / "there", silent=(0,)) as there:
        there.run(rounds=2, goal=2, over_selection=1.5, reply_seconds=600)
        until(lambda: there.released() >= 2, "two rounds", 120)
        until(lambda: "finished" in there.status(there.last_run), "the end of the run")
        with ledger_file(there.place / "run") as path, path.open(newline="") as file:
            statuses = [status for _, _, status in list(csv.reader(file))[1:]]
        assert sorted(statuses) == ["contacted"] * 2 + ["counted"] * 4
        assert "Sent successfully" in (there.place / "node-0.log").read_text(), "or so it says"


@pytest.mark.slow
def test_without_authentication(tmp_path: Path) -> None:
    with deployed(tmp_path / "there", authenticated=False, nodes=2) as there:
        there.run(rounds=2)
        until(lambda: "finished" in there.status(there.last_run), "the end of the run")
        assert not (there.place / "run").exists(), "authentication was required"

        there.run(rounds=2, nodes=2, require_auth=False)
        until(lambda: there.released() >= 2, "two rounds")
        until(lambda: "finished" in there.status(there.last_run), "the end of the run")
        hypotheses = json.loads((there.place / "run/guarantee.json").read_text())["hypotheses"]
        bases = {fact["name"]: (fact["basis"], fact["text"]) for fact in hypotheses}
        assert bases["participation"][0] == bases["identity"][0] == "assumed"
        assert "counts as another device" in bases["identity"][1]
        assert verify_run(there.place / "run", there.place / "state").passed
