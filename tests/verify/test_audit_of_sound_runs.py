"""What an honest server leaves behind passes, whenever it stops."""

import json
import shutil

import numpy as np
import pytest
from audited_runs import PEOPLE, PLAN, Place, begin, failed, made, play, warned

from dpftrl import MinSep, account, mechanism
from dpftrl.errors import InvalidInput
from dpftrl.federated.store.journal import Journal
from dpftrl.plan import Fleet, Plan
from dpftrl.verify import verify_run


def test_every_round_of_a_run_passes_and_states_its_epsilon(tmp_path):
    place = begin(tmp_path)
    found = place.audit()
    assert (failed(found), found.rounds, found.epsilon) == ({}, 0, 0.0)
    with place.open() as server:
        for rounds in range(1, 9):
            play(server)
            found = place.audit()
            assert (failed(found), warned(found), found.rounds) == ({}, {}, rounds)
            assert found.epsilon == pytest.approx(server.epsilon, rel=1e-7)
            assert found.passed


def test_abandoned_attempts_and_one_in_flight_pass(tmp_path):
    place = begin(tmp_path, plan=PLAN, budget=100.0)
    with place.open() as server:
        play(server)
        play(server, abandon=True)
        play(server)
        play(server, abandon=True)
        assert failed(place.audit()) == {}
        server.begin(PEOPLE)
    assert failed(place.audit()) == {}
    with place.ledger.open("a") as ledger:
        ledger.write("2,c00")  # a server killed while it wrote the rows of the round in flight
    checkpoints = place.folder / "private" / "checkpoints"
    shutil.copy(checkpoints / "00000002.safetensors", checkpoints / "00000003.safetensors")
    found = place.audit()
    assert failed(found) == {}
    assert "in flight" in warned(found)["ledger"]
    with place.open() as server:
        play(server)
    assert (failed(place.audit()), warned(place.audit())) == ({}, {})


def test_timers_by_time_are_observed(tmp_path):
    place = begin(tmp_path, timer_hours=2.0)
    with place.open() as server:
        for number in range(7):
            play(server, abandon=number == 4, now=0.7 * number)
            assert failed(place.audit()) == {}
        server.begin(PEOPLE, 5.0)
    assert failed(place.audit()) == {}
    with place.open():
        pass  # rewrites the guarantee with the contacts of the round in flight
    found = place.audit()
    assert failed(found) == {}
    assert "hours apart" in next(one.text for one in found.checks if one.name == "timers")


def test_names_that_are_not_hashed(tmp_path):
    assert failed(made(tmp_path, 5, hash_clients=False).audit()) == {}


def test_a_test_key_is_called_out(tmp_path):
    found = made(tmp_path, 1, test_key=1).audit()
    assert "NOT PRIVATE" in warned(found)["noise key"]
    assert found.passed


@pytest.mark.parametrize("name", ["tree", "banded:3", "toeplitz:1,0.2,0.6", "smooth-tree", "sqrt"])
def test_other_mechanisms(tmp_path, name):
    clients = MinSep(6, 2)
    plan = Plan(
        Fleet(population=24, report_goal=3), account(mechanism(name, clients), clients, 2.0, 1e-6)
    )
    found = made(tmp_path, 6, plan).audit()
    assert (failed(found), warned(found)) == ({}, {})


def test_a_server_killed_between_the_guarantee_and_the_commit(tmp_path, monkeypatch):
    place = made(tmp_path, 3)

    def killed(*_):
        raise KeyboardInterrupt

    with place.open() as server:
        attempt = server.begin(PEOPLE)
        for client in attempt.clients[:3]:
            attempt.report(client, np.ones(5), attempt.attempt)
        monkeypatch.setattr(Journal, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            server.commit(attempt)
        monkeypatch.undo()
    (why,) = failed(place.audit()).values()
    assert "one round ahead" in why
    place.open().close()
    assert failed(place.audit()) == {}


def test_half_a_line_that_the_witness_never_saw(tmp_path):
    place = made(tmp_path, 2)
    with place.journal.open("a") as journal:
        journal.write('{"mac":"12')
    found = place.audit()
    assert failed(found) == {}
    assert "half a line" in warned(found)["journal's end"]
    assert "journal's end" in failed(place.audit(witness=False))


def test_a_witness_one_line_behind(tmp_path):
    place = made(tmp_path, 2)
    before = place.witness.read_bytes()
    with place.open() as server:
        server.begin(PEOPLE)
    place.witness.write_bytes(before)
    assert failed(place.audit()) == {}
    with place.open() as server:
        play(server)
    place.witness.write_bytes(before)
    assert "one line ahead" in failed(place.audit())["witness"]


def test_nothing_secret_is_shown(tmp_path):
    place = made(tmp_path, 2)
    lines = [json.loads(line) for line in place.journal.read_text().splitlines()]
    secrets = [(place.folder / "private" / "noise.key").read_bytes().hex()]
    for line in lines:
        secrets += [line["mac"], line["record"].get("digest", "?" * 32)]
    (place.folder / "private" / "checkpoints" / "00000002.safetensors").write_bytes(b"")
    shown = repr(place.audit())
    assert not any(secret in shown for secret in secrets)


def test_no_run_at_all(tmp_path):
    with pytest.raises(InvalidInput, match="holds no run"):
        verify_run(tmp_path)


def test_a_run_without_its_journal_fails(tmp_path):
    place: Place = made(tmp_path, 1)
    place.journal.unlink()
    assert "journal" in failed(place.audit())
