"""`dpftrl audit`: what it prints, and its exit codes."""

import json

import pytest
from command_line import answer, refused_in_one_line, run

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


def test_bad_input_is_one_line():
    assert "--noise-multiplier" in refused_in_one_line(
        "audit", "mechanism", "blt-b400", "--rounds", 8, "--min-sep", 4
    )
    assert "confidence" in refused_in_one_line(
        "audit", "mechanism", "blt-b400", *FEW, "--confidence", 1.5
    )
    assert "no mechanism" in refused_in_one_line("audit", "mechanism", "bltt", *FEW)
