"""The command `dpftrl ledger`, and commands that take the folder of a run as a log."""

import json

import numpy as np
import pytest
from command_line import answer, refused_in_one_line, run

from dpftrl import MinSep, account, mechanism
from dpftrl.federated import Server, Settings
from dpftrl.plan import Fleet, Plan

PLAN = Plan(
    Fleet(population=24, report_goal=3, over_selection=1.3),
    account(mechanism("blt-b400"), MinSep(8, 4), noise_multiplier=3.0, delta=1e-6),
)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "run"
    model = {"w": np.zeros(5)}
    with Server.create(
        place, PLAN, Settings(clip_norm=1.0), model, state_folder=tmp_path / "state"
    ) as server:
        for _ in range(6):
            attempt = server.begin([f"client {i}" for i in range(24)])
            for client in attempt.clients[:3]:
                attempt.report(client, np.ones(5), attempt.attempt)
            server.commit(attempt)
    return place


def test_a_run_and_its_ledger_say_the_same(folder, tmp_path):
    ledger = tmp_path / "ledger.csv"
    code, out, err = run("ledger", folder, "--out", ledger, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"ledger": str(ledger), "bytes": ledger.stat().st_size}
    assert ledger.read_text().count("counted") == 18
    observed = answer("observe", folder, "--min-sep", 4)
    assert observed == answer("observe", ledger, "--min-sep", 4)
    assert (observed["participations"], observed["contacts"]) == (18, 24)
    account_of = [answer("account", folder / "plan.json", "--log", log) for log in (folder, ledger)]
    assert account_of[0] == account_of[1]
    assert not (folder / "ledger.csv").exists()


def test_files_of_others_are_not_replaced(folder, tmp_path):
    own = tmp_path / "own.csv"
    own.write_text("precious\n")
    assert "not a ledger that dpftrl wrote" in refused_in_one_line("ledger", folder, "--out", own)
    assert own.read_text() == "precious\n"
    assert run("ledger", folder, "--out", own, "--force")[0] == 0
    assert run("ledger", folder, "--out", own)[0] == 0


def test_what_is_no_run_is_refused(folder, tmp_path):
    assert "holds no run" in refused_in_one_line("ledger", tmp_path, "--out", tmp_path / "a.csv")
    assert "holds no run" in refused_in_one_line("observe", tmp_path)
    (folder / "private" / "noise.key").unlink()
    assert "noise.key is missing" in refused_in_one_line("observe", folder)
