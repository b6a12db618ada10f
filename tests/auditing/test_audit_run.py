"""Audits of runs: consistent with a true claim, and not with noise that was divided by 4."""

import json

import numpy as np
import pytest
from canary_runs import create, divide_noise, train
from scipy.stats import norm

from dpftrl import InvalidInput
from dpftrl.auditing.one_run import Guesses
from dpftrl.auditing.run import audit_run, independent_mu


def audited(folder, canaries=1000, **options):
    with create(folder, canaries) as server:
        train(server)
    return audit_run(folder, **options)


def test_a_correct_run_is_consistent_with_its_claim(tmp_path):
    found = audited(tmp_path / "run")
    assert not found.exceeds_claim
    assert 0 < found.mu_general < found.mu_independent < found.claim.mu
    assert found.p_value == 1.0 or found.p_value > 0.05
    # The guesses are as good as the claim allows: canaries attain the sensitivity.
    rate = found.guesses.correct / found.guesses.guesses
    assert rate == pytest.approx(norm.cdf(found.claim.mu / 2), abs=0.06)


def test_noise_divided_by_4_is_rejected_by_both_tests(tmp_path, monkeypatch):
    divide_noise(monkeypatch, 4)
    found = audited(tmp_path / "run")
    assert found.exceeds_claim
    assert found.mu_general > found.claim.mu
    assert found.mu_independent > found.claim.mu
    assert found.p_value < 0.05


def test_noise_that_is_a_third_too_small_is_rejected_for_independent_noise(tmp_path, monkeypatch):
    divide_noise(monkeypatch, 1.5)
    found = audited(tmp_path / "run", 2000, confidence=0.99999)
    assert found.mu_independent > found.claim.mu
    assert found.exceeds_claim


def test_scores_have_the_distribution_of_the_likelihood_ratio(tmp_path):
    found = audited(tmp_path / "run")
    mu = found.claim.mu
    for chosen, mean in ((found.included, mu**2 / 2), (~found.included, -(mu**2) / 2)):
        scores = found.scores[chosen]
        assert scores.mean() == pytest.approx(mean, abs=6 * mu / np.sqrt(len(scores)))
        assert scores.std() == pytest.approx(mu, rel=0.25)


def test_the_audit_can_be_written_as_json(tmp_path):
    found = json.loads(json.dumps(audited(tmp_path / "run", 50).as_json()))
    assert {"epsilon", "lower_bound", "confidence", "canaries", "correct"} <= set(found)


def test_runs_that_cannot_be_audited_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="not the folder of a run"):
        audit_run(tmp_path)
    with create(tmp_path / "plain", 0) as server:
        train(server, 1)
    with pytest.raises(InvalidInput, match="no canaries"):
        audit_run(tmp_path / "plain")
    with create(tmp_path / "new", 10):
        pass
    with pytest.raises(InvalidInput, match="released nothing yet"):
        audit_run(tmp_path / "new")


def test_the_binomial_bound_holds():
    """For mu 1, at most binomial: the bound exceeds mu as rarely as stated."""
    random = np.random.default_rng(2)
    correct = random.binomial(500, norm.cdf(0.5), size=400)
    exceeded = sum(independent_mu(Guesses(500, 500, int(one)), 0.05) > 1 for one in correct)
    assert exceeded <= 0.05 * 400 + 4 * np.sqrt(0.05 * 400)
    assert exceeded > 0
    with pytest.raises(InvalidInput, match="every canary"):
        independent_mu(Guesses(10, 5, 5), 0.05)
