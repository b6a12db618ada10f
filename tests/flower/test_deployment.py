"""A real deployment: SuperLink, SuperNodes and `flwr run` as processes, over TLS."""

import contextlib
import csv
import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from deployment import HERE, Deployment, deployed, until

from dpftrl.federated import Round, Server, Settings
from dpftrl.federated.pseudonyms import Pseudonyms
from dpftrl.federated.store.journal import unpacked
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.noise import NoiseKey
from dpftrl.plan import load_plan
from dpftrl.verify import verify_run

sys.path.insert(0, str(HERE / "deployed_app"))
from tinyfed import task


def counted_in(there: Deployment, attempt: Round, key: Callable[[str], int]) -> list[str]:
    """Return the clients of a round that were counted, by the ledger."""
    with ledger_file(there.place / "run") as path, path.open(newline="") as file:
        rows = {(row, who) for row, who, status in csv.reader(file) if status == "counted"}
    return [name for name in attempt.clients if (str(attempt.number), f"c{key(name):016x}") in rows]


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
            if record["kind"] == "empty":
                server.close_empty_round([], record["reason"])
            elif record["kind"] == "cohort":
                keys = unpacked(record["clients"], record["size"])
                attempt = server.begin([by_key[int(one)] for one in keys])
            elif record["kind"] == "abandoned":
                server.abandon(attempt, record["reason"])
            elif record["kind"] == "committed" and record["reports"]:
                model = server.arrays()["w"]
                for name in counted_in(there, attempt, key):
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
    check_result(there, rounds, min_sep, place)


def check_result(there: Deployment, rounds: int, min_sep: int, place: Path) -> None:
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
def test_a_node_that_never_uploads_does_not_delay_the_round(tmp_path: Path) -> None:
    with deployed(tmp_path / "there", silent=(0,)) as there:
        there.run(rounds=2, goal=2, over_selection=1.5, reply_seconds=600)
        until(lambda: there.released() >= 2, "two rounds", 120)
        until(lambda: "finished" in there.status(there.last_run), "the end of the run")
        with ledger_file(there.place / "run") as path, path.open(newline="") as file:
            statuses = [status for _, _, status in list(csv.reader(file))[1:]]
        assert sorted(statuses) == ["contacted"] * 2 + ["counted"] * 4
        log = (there.place / "dpftrl-supernode@0.log").read_text()
        assert "Sent successfully" in log, "or so it says"


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
        assert "counts as another client" in bases["identity"][1]
        assert verify_run(there.place / "run", there.place / "state").passed


def kill_server_app(there: Deployment) -> None:
    os.kill(there.server_app(), signal.SIGKILL)


def kill_all(there: Deployment) -> None:
    """At once: the SuperLink, the SuperNodes, the ServerApp, and the script that submits it."""
    with contextlib.suppress(ProcessLookupError):
        kill_server_app(there)
    for service in there.supervisor.services.values():
        service.kill()


def kill_service(name: str) -> Callable[[Deployment], None]:
    return lambda there: there.supervisor.services[name].kill()


KILLS: dict[str, Callable[[Deployment], None]] = {
    "ServerApp": kill_server_app,
    "SuperLink": kill_service("dpftrl-superlink"),
    **{f"SuperNode {i}": kill_service(f"dpftrl-supernode@{i}") for i in range(4)},
    "the script that submits the ServerApp": kill_service("dpftrl-serverapp"),
    "all at once": kill_all,
}


@pytest.mark.slow
def test_a_supervised_deployment_survives_every_kill(tmp_path: Path) -> None:
    """From its start to its last round nobody does anything but kill."""
    rounds = 2 * len(KILLS) + 2
    there = Deployment(tmp_path / "there", nodes=4)
    try:
        there.supervise(
            rounds=rounds,
            nodes=4,
            goal=2,
            over_selection=1.5,
            min_sep=1,
            reply_seconds=180,  # on a busy machine, to start the process of a client takes a minute
            lock_seconds=120,
            close_empty_rounds=True,
        )
        until(lambda: there.released() >= 1, "the first round", 300)
        for name, kill in KILLS.items():
            before = there.released()
            assert before < rounds, "all rounds were over before the last kill"
            kill(there)
            until(lambda b=before: there.released() > b, f"a round after a kill of {name}", 900)
        service = there.supervisor.services["dpftrl-serverapp"]
        until(service.ended.is_set, "the end of the training", 1800)
    finally:
        there.stop()
    assert service.codes[-1] == 0
    assert there.released() == rounds
    check_result(there, rounds, 1, tmp_path / "here")
    for folder in there.place.glob("device-*"):
        (contact_file,) = folder.glob("*.json")
        assert json.loads(contact_file.read_text())["row"] in range(rounds)
    submitted = (there.place / "dpftrl-serverapp.log").read_text().count("submitted as run")
    log = (there.place / "dpftrl-superlink.log").read_text()
    assert 1 <= log.count("[/v1/fleet/register-node][ApiError") <= submitted, (
        "one probe per start of a ServerApp, not one per attempt"
    )
    nodes = [there.supervisor.services[f"dpftrl-supernode@{i}"] for i in range(4)]
    assert all(node.starts >= 2 for node in nodes)
    # A SuperNode that came back too early was refused, and started again.
    assert {code for node in nodes for code in node.codes} == {-9, 1}
    assert any("Exit Code: 305" in log.read_text() for log in there.place.glob("*supernode@*.log"))
