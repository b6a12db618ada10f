"""`dpftrl audit`: what it prints, and its exit codes."""

import json

import pytest
from canary_runs import create, divide_noise, train
from command_line import answer, refused_in_one_line, run
from sentence_runs import config

FEW = ("--rounds", 8, "--min-sep", 4, "--noise-multiplier", 2, "--trials", 20_000)


def test_a_mechanism_audit_as_json():
    found = answer("audit", "mechanism", "blt-b400", *FEW)
    assert 0.5 * found["epsilon"] < found["lower_bound"] < found["epsilon"]
    assert found["confidence"] == pytest.approx(1 - 1e-5)
    assert (found["delta"], found["trials"], found["attained"]) == (0.01, 20_000, True)
    assert found["pattern"] == [0, 4]


def test_a_mechanism_audit_as_a_table():
    code, out, _ = run("audit", "mechanism", "tree", *FEW)
    assert code == 0
    for text in ("claimed epsilon", "lower bound", "confidence", "not attained", "consistent"):
        assert text in out


def test_sampled_batches():
    data = ("--dataset", 500, "--batch-size", 50, "--epochs", 1, "--noise-multiplier", 1)
    found = answer(
        "audit", "mechanism", "independent", *data, "--sampling", "poisson", "--trials", 10_000
    )
    assert found["sampling"] == "poisson"
    assert 0 < found["lower_bound"] < found["epsilon"]
    in_order = answer("audit", "mechanism", "blt-b400", *data, "--trials", 10_000)
    assert in_order["max_participations"] == 1


def test_a_claim_that_is_exceeded_has_exit_code_1(monkeypatch):
    import dpftrl.auditing.mechanism as audited
    from dpftrl import account

    def claims_too_little(mechanism, participation, noise_multiplier, delta):
        return account(mechanism, participation, 1.25 * noise_multiplier, delta)

    monkeypatch.setattr(audited, "account", claims_too_little)
    code, out, _ = run("audit", "mechanism", "blt-b400", *FEW, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["exceeds_claim"]
    assert found["mu_lower_bound"] > found["mu"]
    code, out, _ = run("audit", "mechanism", "blt-b400", *FEW)
    assert (code, "EXCEEDED" in out) == (1, True)


def run_with_canaries(folder, canaries=300):
    with create(folder, canaries) as server:
        train(server)
    return folder


def test_a_run_audit(tmp_path):
    folder, picture = run_with_canaries(tmp_path / "run"), tmp_path / "scores.png"
    code, out, _ = run("audit", "run", folder, "--plot", picture)
    assert code == 0
    for text in ("claimed", "lower bound, general", "independent noise", "coins", "consistent"):
        assert text in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = answer("audit", "run", folder, "--confidence", 0.9)
    assert found["lower_bound"] < found["epsilon"] == pytest.approx(8, rel=1e-3)
    assert (found["canaries"], found["confidence"], found["rounds"]) == (300, 0.9, 6)


def test_a_run_with_a_quarter_of_its_noise_has_exit_code_1(tmp_path, monkeypatch):
    divide_noise(monkeypatch, 4)
    code, out, _ = run("audit", "run", run_with_canaries(tmp_path / "run", 1000))
    assert (code, "EXCEEDED" in out) == (1, True)


def test_canary_sentences_from_training_to_audit(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    config(tmp_path, epsilon=8.0, rounds=2)
    folder, picture = tmp_path / "run", tmp_path / "scores.png"
    options = ("--canaries", 40, "--canary-kind", "sentences")
    answer("train", tmp_path / "small.toml", "--out", folder, *options)
    code, out, _ = run("audit", "run", folder, "--plot", picture)
    assert code == 0
    assert "40 canary sentences, 2 rounds" in out
    assert "independent noise" not in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = answer("audit", "run", folder)
    assert (found["canary_kind"], found["guesses"], found["confidence"]) == ("sentences", 20, 0.95)
    assert found["lower_bound"] <= found["epsilon"]
    assert not found["exceeds_claim"]
    again = refused_in_one_line("train", "--resume", "--out", folder, *options[2:])
    assert "--canary-kind" in again
    alone = refused_in_one_line("train", "--out", tmp_path / "new", *options[2:])
    assert "needs --canaries" in alone


def test_a_run_without_canaries_is_refused(tmp_path):
    folder = run_with_canaries(tmp_path / "run", canaries=0)
    assert "no canaries" in refused_in_one_line("audit", "run", folder)
    assert "not the folder of a run" in refused_in_one_line("audit", "run", tmp_path / "none")


def test_bad_input_is_one_line():
    assert "--noise-multiplier" in refused_in_one_line(
        "audit", "mechanism", "blt-b400", "--rounds", 8, "--min-sep", 4
    )
    assert "confidence" in refused_in_one_line(
        "audit", "mechanism", "blt-b400", *FEW, "--confidence", 1.5
    )
    assert "no mechanism" in refused_in_one_line("audit", "mechanism", "bltt", *FEW)
