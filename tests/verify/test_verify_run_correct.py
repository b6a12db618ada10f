"""The files of a correct server pass verification, whenever it stops."""

import json
import shutil

import numpy as np
import pytest
from recorded_runs import (
    CLIENTS,
    PLAN,
    RunFolders,
    create_run,
    failed,
    keep_a_ledger,
    record_run,
    run_attempt,
    warned,
)

from dpftrl import MinSep, account, mechanism
from dpftrl.errors import InvalidInput
from dpftrl.journal import Journal
from dpftrl.plan import Fleet, Plan
from dpftrl.verify import verify_run


def test_a_run_passes_after_every_round_with_the_epsilon_of_the_server(tmp_path):
    run = create_run(tmp_path)
    verdict = run.verify()
    assert (failed(verdict), verdict.rounds, verdict.epsilon) == ({}, 0, 0.0)
    with run.open() as server:
        for rounds in range(1, 9):
            run_attempt(server)
            verdict = run.verify()
            assert (failed(verdict), warned(verdict), verdict.rounds) == ({}, {}, rounds)
            assert verdict.epsilon == pytest.approx(server.epsilon, rel=1e-7)
            assert verdict.passed


@pytest.mark.parametrize("keeps_ledger", [False, True])
def test_runs_with_abandoned_attempts_and_one_in_flight_pass(tmp_path, keeps_ledger):
    run = create_run(tmp_path, plan=PLAN, budget=100.0)
    if keeps_ledger:
        keep_a_ledger(run)
    with run.open() as server:
        run_attempt(server)
        run_attempt(server, abandon=True)
        run_attempt(server)
        run_attempt(server, abandon=True)
        assert failed(run.verify()) == {}
        server.begin(CLIENTS)
    assert failed(run.verify()) == {}
    if keeps_ledger:
        with run.ledger.open("a") as ledger:
            ledger.write("2,c00")  # a server killed while it wrote the rows of the round in flight
    checkpoints = run.folder / "private" / "checkpoints"
    shutil.copy(checkpoints / "00000002.safetensors", checkpoints / "00000003.safetensors")
    verdict = run.verify()
    assert failed(verdict) == {}
    assert keeps_ledger == ("in flight" in warned(verdict).get("ledger", ""))
    with run.open() as server:
        run_attempt(server)
    assert (failed(run.verify()), warned(run.verify())) == ({}, {})


def test_a_run_with_a_timer_in_hours_passes(tmp_path):
    run = create_run(tmp_path, timer_hours=2.0)
    with run.open() as server:
        for number in range(7):
            run_attempt(server, abandon=number == 4, now=0.7 * number)
            assert failed(run.verify()) == {}
        server.begin(CLIENTS, 5.0)
    assert failed(run.verify()) == {}
    with run.open():
        pass  # rewrites the guarantee with the contacts of the round in flight
    verdict = run.verify()
    assert failed(verdict) == {}
    assert "hours apart" in next(check.text for check in verdict.checks if check.name == "timers")


def test_a_run_with_client_names_that_are_not_hashed_passes(tmp_path):
    assert failed(record_run(tmp_path, 5, hash_clients=False).verify()) == {}


def test_a_test_key_is_a_warning(tmp_path):
    verdict = record_run(tmp_path, 1, test_key=1).verify()
    assert "NOT PRIVATE" in warned(verdict)["noise key"]
    assert verdict.passed


@pytest.mark.parametrize("name", ["tree", "banded:3", "toeplitz:1,0.2,0.6", "smooth-tree", "sqrt"])
def test_runs_of_other_mechanisms_pass_without_warnings(tmp_path, name):
    clients = MinSep(6, 2)
    plan = Plan(
        Fleet(population=24, report_goal=3), account(mechanism(name, clients), clients, 2.0, 1e-6)
    )
    verdict = record_run(tmp_path, 6, plan).verify()
    assert (failed(verdict), warned(verdict)) == ({}, {})


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_server_killed_between_guarantee_and_commit_passes(tmp_path, monkeypatch, rounds):
    run = record_run(tmp_path, rounds)

    def killed(*_):
        raise KeyboardInterrupt

    with run.open() as server:
        attempt = server.begin(CLIENTS)
        for client in attempt.clients[:3]:
            attempt.report(client, np.ones(5), attempt.attempt)
        monkeypatch.setattr(Journal, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            server.commit(attempt)
        monkeypatch.undo()
    verdict = run.verify()
    assert failed(verdict) == {}
    assert verdict.rounds == rounds
    (text,) = (check.text for check in verdict.checks if check.name == "guarantee.json")
    assert "includes the round in flight" in text
    edited = json.loads((run.folder / "guarantee.json").read_text())
    edited["epsilon"] *= 0.99
    kept = (run.folder / "guarantee.json").read_bytes()
    (run.folder / "guarantee.json").write_text(json.dumps(edited))
    assert "guarantee.json" in failed(run.verify())
    (run.folder / "guarantee.json").write_bytes(kept)
    run.open().close()
    assert failed(run.verify()) == {}


def test_a_guarantee_ahead_of_no_round_in_flight_fails(tmp_path):
    run = record_run(tmp_path, 3)
    ahead = (run.folder / "guarantee.json").read_bytes()
    shutil.rmtree(tmp_path)
    run = record_run(tmp_path, 2)
    (run.folder / "guarantee.json").write_bytes(ahead)
    assert "covers 3 rounds, but 2" in failed(run.verify())["guarantee.json"]


def test_an_incomplete_last_line_is_a_warning_with_a_witness_and_fails_without(tmp_path):
    run = record_run(tmp_path, 2)
    with run.journal.open("a") as journal:
        journal.write('{"mac":"12')
    verdict = run.verify()
    assert failed(verdict) == {}
    assert "half a line" in warned(verdict)["journal's end"]
    assert "journal's end" in failed(run.verify(witness=False))


def test_a_witness_may_be_one_line_behind_but_not_more(tmp_path):
    run = record_run(tmp_path, 2)
    before = run.witness.read_bytes()
    with run.open() as server:
        server.begin(CLIENTS)
    run.witness.write_bytes(before)
    assert failed(run.verify()) == {}
    with run.open() as server:
        run_attempt(server)
    run.witness.write_bytes(before)
    assert "one line ahead" in failed(run.verify())["witness"]


def test_the_verdict_shows_no_secrets(tmp_path):
    run = record_run(tmp_path, 2)
    lines = [json.loads(line) for line in run.journal.read_text().splitlines()]
    secrets = [(run.folder / "private" / "noise.key").read_bytes().hex()]
    for line in lines:
        secrets += [line["mac"], line["record"].get("digest", "?" * 32)]
    (run.folder / "private" / "checkpoints" / "00000002.safetensors").write_bytes(b"")
    shown = repr(run.verify())
    assert not any(secret in shown for secret in secrets)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="holds no run"):
        verify_run(tmp_path)


def test_a_run_without_its_journal_fails(tmp_path):
    run: RunFolders = record_run(tmp_path, 1)
    run.journal.unlink()
    assert "journal" in failed(run.verify())
